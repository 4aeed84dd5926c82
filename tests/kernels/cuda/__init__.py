"""The CUDA kernels, checked without a GPU: compiled by NVRTC, and run on this CPU from the same source text."""
