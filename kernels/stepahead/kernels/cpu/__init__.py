"""CPU kernels: the reference operations, made fast with torch and vectorised NumPy."""
