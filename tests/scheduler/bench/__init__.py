"""Tests of the measurements: that they measure what they say, never how long it took."""
