"""The functions of `numba_compat` by numba's public interface alone, for versions of numba that were not tested.

The outputs are the same. Every process compiles its functions, since nothing is kept on disk.
"""

from collections.abc import Callable
from typing import Any

from numba import cfunc, njit
from numba.extending import register_jitable

_OPTIONS: dict[str, Any] = {"error_model": "numpy"}
_live_code: list[Any] = []  # callbacks, since their addresses may be used
inlined = njit(inline="always", **_OPTIONS)
jitable = register_jitable(**_OPTIONS)


def make_dispatcher(function: Callable[..., Any], is_inlined: bool = False) -> Any:
    """Return a dispatcher that compiles a function for compiled callers; see `numba_compat`."""
    return njit(forceinline=is_inlined, **_OPTIONS)(function)


def make_cached_dispatcher(function: Callable[..., Any], cache: Any, is_parallel: bool = False) -> Any:
    """Return a dispatcher that compiles a function when it is first called; see `numba_compat`. The cache is not used."""
    return njit(nogil=True, parallel=is_parallel, **_OPTIONS)(function)


def compile_callback(signature: Any, function: Callable[..., Any], cache: Any) -> int:
    """Compile a Python function that machine code calls, and return its address; see `numba_compat`. The cache is not used."""
    code = cfunc(signature, nopython=True, nogil=True, **_OPTIONS)(function)
    _live_code.append(code)
    return int(code.address)
