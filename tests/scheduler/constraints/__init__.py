"""Structured output."""
