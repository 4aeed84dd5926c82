"""Toy models: the arithmetic of a lesson or a test in place of a transformer, over the same paged cache."""
