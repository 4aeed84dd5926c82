"""Kernels against their definitions, and the definitions against published values."""
