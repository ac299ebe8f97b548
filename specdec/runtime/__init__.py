"""The layer below the kernels: numba, LLVM vectors, threads, memory, and the cache of compiled code."""
