"""Tests of the scheduler's text processing."""
