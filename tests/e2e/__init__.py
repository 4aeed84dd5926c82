"""Tests that start the real services over loopback."""
