"""Tests of the worker's parts, one at a time."""
