"""Features of 64-bit ARM CPUs that LLVM does not report: byte products (`sdot`) on Linux, and any on macOS.

Without them numba compiles for less than the CPU can do, and `dot4.choose_dot4` finds slower products.
"""

import ctypes
import sys

import numba
from numba.core.codegen import get_host_cpu_features

AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20  # of getauxval, by Linux's asm/hwcap.h


def has_dot_product() -> bool:
    """Return whether this ARM CPU has `sdot`, as every Mac with Apple's CPUs does."""
    if sys.platform != "linux":
        return sys.platform == "darwin"
    get_auxiliary_value = ctypes.CDLL(None).getauxval
    get_auxiliary_value.restype, get_auxiliary_value.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return bool(get_auxiliary_value(AT_HWCAP) & HWCAP_ASIMDDP)


def complete_features(reported: str, has_sdot: bool) -> str:
    """Return LLVM's list of features with NEON, which every 64-bit ARM CPU has, and `sdot` if the CPU has it."""
    names = [name for name in reported.split(",") if name]
    return ",".join(dict.fromkeys([*names, "+neon", *["+dotprod"][:has_sdot]]))


def set_numba_features() -> None:
    """Let numba compile for all features of this ARM CPU, unless NUMBA_CPU_FEATURES is set."""
    if numba.config.CPU_FEATURES is None:
        numba.config.CPU_FEATURES = complete_features(get_host_cpu_features(), has_dot_product())
