"""Runs the kernels' source text on this CPU, for tests: a back end, and the C++ that stands in for a GPU."""
