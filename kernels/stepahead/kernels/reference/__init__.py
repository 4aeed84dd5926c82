"""The definition of each operation of a decoder step, in NumPy: what `cpu` and `cuda` must match."""
