"""Checks of the tree itself: size, layering, generated code, style of the protocol."""
