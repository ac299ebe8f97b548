"""A shorter way through numba: fewer passes, and functions that become machine code only inside their callers.

numba optimizes every function twice, the second time in each caller, and compiles all of them to machine code, although only
those at the top are ever called by address. Here a function that is only called stays unoptimized, and a function without
reference counts is optimized once: the first pass is for those. `KernelCompiler` leaves out numba's passes for features of Python
that kernels do not use. See docs/experiments/first-run.md.
"""

from typing import Any

from numba.core import codegen
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.typed_passes import IRLegalization, NativeLowering, NoPythonBackend, NopythonTypeInference, PreLowerStripPhis
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    InlineInlinables,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

SERIALIZED_KIND = "specdec"  # numba's own kinds are "object" and "bitcode"

PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    RewriteSemanticConstants,
    DeadBranchPrune,
    GenericRewrites,
    InlineInlinables,
    DeadBranchPrune,
    ReconstructSSA,
    DeadBranchPrune,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)


class LateLinkedLibrary(codegen.JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """A numba code library, a function and those that it calls, that becomes machine code only when its address is needed."""

    _is_linked = False
    _shared_module: Any

    def add_linking_library(self, library: Any) -> None:
        """Add a library with functions that this library calls."""
        self._linking_libraries.append(library)

    def _link(self) -> None:
        if not self._is_linked:
            self._is_linked = True
            for library in dict.fromkeys(self._linking_libraries):
                self._reload_init.update(library._reload_init)
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)

    def _get_module_for_linking(self) -> Any:
        if not self._finalized:
            self._link()
        if self._shared_module is None:
            shared = self._final_module.clone()
            for function in shared.functions:
                if not function.is_declaration and function.linkage == codegen.ll.Linkage.external:
                    function.linkage = "linkonce_odr"  # one copy for all callers, and none if it is inlined
            self._shared_module = shared
        return self._shared_module

    def serialize(self) -> Any:
        """Return the library as a tuple to pickle, which `_unserialize` takes: machine code, its symbols, and the LLVM code."""
        self._ensure_finalized()
        symbols = [function.name for function in self._final_module.functions if not function.is_declaration]
        return self.name, SERIALIZED_KIND, (self._get_compiled_object(), symbols, self._final_module.as_bitcode())

    def find_undefined(self, prefix: str) -> set[str]:
        """Return the names, limited to those with a prefix, of functions that the library calls but does not define."""
        names = (function.name for function in self._final_module.functions if function.is_declaration)
        return {name for name in names if name.startswith(prefix)}

    @classmethod
    def _unserialize(cls, compiler: Any, state: Any) -> Any:
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
        self._final_module.verify()
        self._finalize_final_module()

    def _optimize_functions(self, module: Any) -> None:
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


def _uses_references(module: Any) -> bool:
    """Return whether an LLVM module counts references, for which numba has passes of its own."""
    return any(function.name.startswith("NRT_") for function in module.functions)


def enable_late_linking() -> None:
    """Make numba create a `LateLinkedLibrary` for all code that this process compiles from now on."""
    compiler = cpu_target.target_context.codegen()
    compiler._library_class = LateLinkedLibrary
    set_environment = compiler.set_env

    def set_env(name: str, environment: Any) -> None:
        if compiler._engine.get_global_value_address(name):  # otherwise no machine code reads it
            set_environment(name, environment)

    compiler.set_env = set_env


class KernelCompiler(CompilerBase):  # type: ignore[misc, unused-ignore]
    """A numba compiler without the passes for Python features that kernels do not use.

    A function that uses one of these does not compile.
    """

    def define_pipelines(self) -> list[Any]:
        """Return the passes, in order."""
        manager = PassManager("specdec")
        for compiler_pass in PASSES:
            manager.add_pass(compiler_pass, compiler_pass.__name__)
        manager.finalize()
        return [manager]
