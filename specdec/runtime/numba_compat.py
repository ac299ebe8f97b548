"""Everything that touches the inside of numba. `plain_numba` has the same functions without that.

numba optimizes every function twice, the second time in each caller, and compiles all of them to machine code, although only
those at the top are ever called by address. Here a function that is only called stays unoptimized, and a function without
reference counts is optimized once: the first pass is for those. `KernelCompiler` leaves out numba's passes for features of Python
that kernels do not use. Late linking took a first run of the included pair from 46.9 to 28.6 CPU seconds, and what followed from
10.6 to 6.3 in one process: see docs/experiments/first-run.md. Machine code is kept by `code_cache`.
"""

import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import njit, types
from numba.core import codegen, untyped_passes
from numba.core.base import BaseContext
from numba.core.ccallback import CFunc
from numba.core.compiler import CompilerBase, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps
from numba.core.typed_passes import IRLegalization, NativeLowering, NoPythonBackend, NopythonTypeInference, PreLowerStripPhis
from numba.core.typing import Signature, templates
from numba.np.numpy_support import from_dtype, map_layout

from specdec.runtime.garbage_collection import pause_garbage_collection

SERIALIZED_KIND = "specdec"  # numba's own kinds are "object" and "bitcode"
NRT_PREFIX = "NRT_"  # of names in numba's runtime

PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.RewriteSemanticConstants,
    untyped_passes.DeadBranchPrune,
    untyped_passes.GenericRewrites,
    untyped_passes.InlineInlinables,
    untyped_passes.DeadBranchPrune,
    untyped_passes.ReconstructSSA,
    untyped_passes.DeadBranchPrune,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)


class LateLinkedLibrary(codegen.JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """A numba code library, a function and those that it calls, that becomes machine code only when its address is needed."""

    _is_linked = False
    _own_names: set[str]
    _shared_module: llvmlite.binding.ModuleRef

    def add_linking_library(self, library):
        """Add a library with functions that this library calls."""
        self._linking_libraries.append(library)

    def _link(self) -> None:
        if not self._is_linked:
            self._is_linked = True
            self._own_names = {function.name for function in self._final_module.functions if not function.is_declaration}
            for library in dict.fromkeys(self._linking_libraries):
                self._reload_init.update(library._reload_init)
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)

    def _get_module_for_linking(self) -> llvmlite.binding.ModuleRef:
        if not self._finalized:
            self._link()
        if self._shared_module is None:
            shared = self._final_module.clone()
            for function in shared.functions:
                if not function.is_declaration and function.linkage == codegen.ll.Linkage.external:
                    function.linkage = "linkonce_odr"  # one copy for all callers, and none if it is inlined
            self._shared_module = shared
        return self._shared_module

    def serialize(self) -> tuple[object, ...]:
        """Return the library as a tuple to pickle, which `_unserialize` takes: machine code, its symbols, and the LLVM code."""
        self._ensure_finalized()
        symbols = [name for name in self._own_names if self._final_module.get_function(name)]
        return self.name, SERIALIZED_KIND, (self._get_compiled_object(), symbols, self._final_module.as_bitcode())

    def find_undefined(self, prefix: str) -> set[str]:
        """Return the names, limited to those with a prefix, of functions that the library calls but does not define."""
        names = (function.name for function in self._final_module.functions if function.is_declaration)
        return {name for name in names if name.startswith(prefix)}

    @classmethod
    def _unserialize(cls, compiler, state):
        name, kind, data = state
        if kind != SERIALIZED_KIND:  # from numba's own cache
            return super()._unserialize(compiler, state)
        code, symbols, _ = data
        library = compiler.create_library(name)
        library.enable_object_caching()
        library._set_compiled_object(code)
        library._finalize_final_module()
        compiler._engine._defined_symbols.update(symbols)
        return library

    def finalize(self) -> None:
        """Link the libraries that this one calls into it, optimize it, and add it to the compiler's engine."""
        self._link()
        self._optimize_final_module()
        self._hide_linked_functions()
        self._final_module.verify()
        self._finalize_final_module()

    def _hide_linked_functions(self) -> None:
        """Keep the functions of other libraries from the engine's symbols.

        Their names end in numbers that numba counts anew in each process, so code from the cache may define other functions by
        the same names. The engine would call the one that it loaded first. LLVM has optimized them by now: it would inline a tile
        that is internal, and one token of Q8_0 would take 1.35 times as long.
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.name not in self._own_names:
                function.linkage = "internal"

    def _optimize_functions(self, module):
        if _uses_references(module):
            super()._optimize_functions(module)
        else:
            module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        if _uses_references(self._final_module):
            super()._optimize_final_module()
        else:
            manager, builder = self._codegen._module_pass_manager()
            manager.run(self._final_module, builder)

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function's machine code, or 0 if the library has no such function."""
        if not self._finalized and all(function.name != name for function in self._final_module.functions):
            return 0  # the Python wrapper, which was not compiled
        return int(super().get_pointer_to_function(name))


def _uses_references(module: llvmlite.binding.ModuleRef) -> bool:
    """Return whether an LLVM module counts references, for which numba has passes of its own."""
    return any(function.name.startswith(NRT_PREFIX) for function in module.functions)


class KernelCompiler(CompilerBase):  # type: ignore[misc, unused-ignore]
    """A numba compiler without the passes for Python features that kernels do not use.

    A function that uses one of these does not compile.
    """

    def define_pipelines(self) -> list[PassManager]:
        """Return the passes, in order."""
        manager = PassManager("specdec")
        for compiler_pass in PASSES:
            manager.add_pass(compiler_pass, compiler_pass.__name__)
        manager.finalize()
        return [manager]


def _enable_late_linking() -> None:
    """Make numba create a `LateLinkedLibrary` for all code that this process compiles from now on."""
    compiler = cpu_target.target_context.codegen()
    compiler._library_class = LateLinkedLibrary
    set_environment = compiler.set_env

    def set_env(name: str, environment: object) -> None:
        if compiler._engine.get_global_value_address(name):  # otherwise no machine code reads it
            set_environment(name, environment)

    compiler.set_env = set_env


_enable_late_linking()


# Machine code as bytes


def describe_target() -> tuple[str, ...]:
    """Return what machine code depends on: the names of the instruction set, of the CPU and of its features, and versions."""
    versions = str(sys.version_info[:2]), numba.__version__, llvmlite.__version__
    return (*cpu_target.target_context.codegen().magic_tuple(), *versions)


def serialize(compiled: CompileResult) -> bytes | None:
    """Return the bytes from which `deserialize` makes a compiled function in another process; None if it cannot be kept.

    Dynamic globals are addresses of this process. Symbols of numba's runtime that are not registered would end the other process.
    """
    library = compiled.library
    if library.has_dynamic_globals or not library.find_undefined(NRT_PREFIX) <= _get_runtime_symbols().keys():
        return None
    data: bytes = dumps((library.serialize(), *compiled._reduce()[1:]))
    return data


def deserialize(data: bytes | memoryview, target_context: BaseContext) -> CompileResult:
    """Return the compiled function that `serialize` got."""
    _register_runtime_symbols()
    return CompileResult._rebuild(target_context, *pickle.loads(data))


def _get_runtime_symbols() -> dict[str, int]:
    """Return the addresses, by name, of the C helpers in numba's runtime that cached machine code may call."""
    return {name if name.startswith("_") else NRT_PREFIX + name: address for name, address in _nrt_python.c_helpers.items()}


@functools.cache
def _register_runtime_symbols() -> None:
    """Register the C helpers of numba's runtime with LLVM, so that cached machine code can call them.

    It replaces `rtsys.initialize`, which compiles the rest in 0.02 s, and `refresh`, which loads all of numba in 0.15 s.
    """
    for name, address in _get_runtime_symbols().items():
        llvmlite.binding.add_symbol(name, address)


# Functions that numba compiles


def _shield_from_signals(work: Callable[..., object]) -> Callable[..., object]:
    """Return a wrapper of a function that runs the function to its end even if a signal handler raises an exception.

    An exception of a handler, like Ctrl-C, reaches the caller at once, and the work runs to its end. Handlers run in the main
    thread, so there another thread does the work while the main thread waits. If a handler interrupted it, numba would never find
    again what it had started to register, and LLVM's callbacks and numba's cleanup would swallow the exception.
    """

    def run_shielded(*args):
        if threading.current_thread() is not threading.main_thread() or global_compiler_lock.is_locked():
            return work(*args)
        results, errors = list[object](), list[BaseException]()

        def run() -> None:
            try:
                with pause_garbage_collection():
                    results.append(work(*args))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="specdec-compiling")
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    return run_shielded


_live_code: list[object] = []  # callbacks, since their addresses may be used, and dispatchers, which numba refers to weakly
_OPTIONS: dict[str, object] = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
_njit = functools.partial(njit, pipeline_class=KernelCompiler, **_OPTIONS)
inlined = _njit(inline="always")


def make_cached_dispatcher(function, cache, is_parallel=False):
    """Return a dispatcher that compiles a function when it is first called, or loads its code from a cache; it releases the GIL.

    Args:
        function: A Python function.
        cache: A `code_cache.MachineCodeCache`.
        is_parallel: Whether `prange` loops run on several threads.
    """
    dispatcher = njit(parallel=True, nogil=True)(function) if is_parallel else _njit(nogil=True)(function)
    callee = make_dispatcher(function)  # compiled callers include its code, instead of waiting for a cached one
    dispatcher.get_call_template, dispatcher.get_overload = callee.get_call_template, callee.get_overload
    type_of = dispatcher.typeof_pyval
    dispatcher._cache = cache
    dispatcher.compile = _shield_from_signals(dispatcher.compile)
    # Skip what numba does before it looks for code, which takes 0.03 s: it searches all installed packages for extensions, and
    # imports numpy.ma for arrays.
    dispatcher._compilation_chain_init_hook = tuple
    dispatcher.typeof_pyval = lambda value: _get_array_type(value) if type(value) is np.ndarray else type_of(value)
    return dispatcher


def _get_array_type(value):
    return _make_array_type(value.dtype, value.ndim, map_layout(value), not value.flags.writeable)


@functools.cache
def _make_array_type(dtype, n_dimensions, layout, is_readonly):
    return types.Array(from_dtype(dtype), n_dimensions, layout, readonly=is_readonly)


def jitable(function):
    """Return a function unchanged, after making it callable from compiled functions.

    Compiled callers include its code, so it has no cache file. Called from Python, it runs as Python code.
    """
    dispatcher = make_dispatcher(function)
    _live_code.append(dispatcher)
    templates.builtin_registry.register_global(function, types.Dispatcher(dispatcher))
    return function


def make_dispatcher(function, is_inlined=False):
    """Return a dispatcher that compiles a function for compiled callers only, without a cache file.

    It compiles once for all arguments of the same types; numba itself compiles again for each literal argument.

    Args:
        function: The function.
        is_inlined: Whether LLVM must include its code in every caller, however long it is.
    """
    dispatcher = _njit(no_cpython_wrapper=True, forceinline=is_inlined)(function)
    get_template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: get_template(
        [types.unliteral(arg) for arg in args], {name: types.unliteral(arg) for name, arg in kws.items()}
    )
    return dispatcher


def compile_callback(signature: Signature, function: Callable[..., object], cache: object) -> int:
    """Compile a Python function that machine code calls, or load it from a cache, and return the address of its machine code.

    Args:
        signature: numba signature.
        function: Function to compile.
        cache: A `code_cache.MachineCodeCache`, or None.
    """
    code: Any = CFunc(function, (signature.args, signature.return_type), {}, {"nogil": True, **_OPTIONS}, KernelCompiler)
    if cache:
        code._cache = cache
    _shield_from_signals(code.compile)()
    _live_code.append(code)
    return int(code.address)
