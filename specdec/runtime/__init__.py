"""The machine below the arithmetic: numba, LLVM's vectors, threads, memory, and compiled code that outlives the process."""
