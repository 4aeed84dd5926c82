"""CUDA kernels: C++ sources, their compilation by NVRTC, and one back-end interface to run them.

Importing this package needs neither CuPy nor a driver; docs/kernels.md says how the sources are checked without a
GPU.
"""
