"""The functions of `numba_compat` by numba's public interface alone, for versions of numba that were not tested.

The outputs are the same. Every process compiles its functions, since nothing is kept on disk.
"""

from collections.abc import Callable

import llvmlite.binding
from numba import cfunc, config, njit
from numba.core.typing import Signature
from numba.extending import register_jitable

_OPTIONS: dict[str, object] = {"error_model": "numpy"}
_live_code: list[object] = []  # callbacks, since their addresses may be used
inlined = njit(inline="always", **_OPTIONS)
jitable = register_jitable(**_OPTIONS)


def describe_target() -> tuple[str, ...]:
    """Return the names of the instruction set, of the CPU and of its features; see `numba_compat`."""
    features = config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    return llvmlite.binding.get_process_triple(), name, features


def make_dispatcher(function, is_inlined=False):
    """Return a dispatcher that compiles a function for compiled callers; see `numba_compat`."""
    return njit(forceinline=is_inlined, **_OPTIONS)(function)


def make_cached_dispatcher(function, cache, is_parallel=False):
    """Return a dispatcher that compiles a function when it is first called; see `numba_compat`. The cache is not used."""
    return njit(nogil=True, parallel=is_parallel, **_OPTIONS)(function)


def compile_callback(signature: Signature, function: Callable[..., object], cache: object) -> int:
    """Compile a Python function that machine code calls, and return its address; see `numba_compat`. The cache is not used."""
    code = cfunc(signature, nopython=True, nogil=True, **_OPTIONS)(function)
    _live_code.append(code)
    return int(code.address)
