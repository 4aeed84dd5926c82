"""Tests of the scheduler service."""
