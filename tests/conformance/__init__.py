"""Tests of the worker protocol over a real connection."""
