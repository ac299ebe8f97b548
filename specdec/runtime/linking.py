"""What LLVM makes of a function: it is linked into those that call it, and optimized and turned into machine code only there.

numba optimizes every function twice, a second time in each caller, and makes machine code of all of them, though only those at
the top are ever reached by their address: two fifths of the time of a first run. Here a function that is merely called
stays what it was written as, and one that counts no references is optimized once: the pass before is for those.
"""

from typing import Any

from numba.core import codegen
from numba.core.registry import cpu_target

KEPT = "specdec"  # numba's own kinds of a serialized library are "object" and "bitcode"


class Library(codegen.JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """A function, those that it calls and, once somebody asks where it lies, their machine code."""

    _is_linked = False
    _bitcode = b""  # of one that was kept: `_shared_module`, once somebody links it
    _shared_module: Any

    def add_linking_library(self, library: Any) -> None:
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
        if self._shared_module is None and self._bitcode:
            self._shared_module = codegen.ll.parse_bitcode(self._bitcode)
        if self._shared_module is None:
            shared = self._final_module.clone()
            for function in shared.functions:
                if not function.is_declaration and function.linkage == codegen.ll.Linkage.external:
                    function.linkage = "linkonce_odr"  # one for all callers, and none where it is inlined
            self._shared_module = shared
        return self._shared_module

    def to_keep(self) -> Any:
        """What `_unserialize` makes a library of, with the names of all that it defines."""
        name, _, (code, bitcode) = self.serialize_using_object_code()
        shared = self._get_module_for_linking()
        symbols = [
            symbol.name for kind in (shared.functions, shared.global_variables) for symbol in kind if not symbol.is_declaration
        ]
        return name, KEPT, (code, bitcode, symbols)

    def asks_for(self, beginning: str) -> set[str]:
        """The functions of such names that it calls and does not have."""
        names = (function.name for function in self._final_module.functions if function.is_declaration)
        return {name for name in names if name.startswith(beginning)}

    @classmethod
    def _unserialize(cls, compiler: Any, state: Any) -> Any:
        name, kind, data = state
        if kind != KEPT:  # of numba's own cache
            return super()._unserialize(compiler, state)
        code, bitcode, symbols = data
        library = compiler.create_library(name)
        library.enable_object_caching()
        library._set_compiled_object(code)
        library._bitcode = bitcode
        library._finalize_final_module()
        compiler._engine._defined_symbols.update(symbols)
        return library

    def finalize(self) -> None:
        self._link()
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()

    def _optimize_final_module(self) -> None:
        if any(function.name.startswith("NRT_") for function in self._final_module.functions):
            super()._optimize_final_module()
        else:
            manager, builder = self._codegen._module_pass_manager()
            manager.run(self._final_module, builder)

    def get_pointer_to_function(self, name: str) -> int:
        if not self._finalized and all(function.name != name for function in self._final_module.functions):
            return 0  # a wrapper for Python that was not asked for
        return int(super().get_pointer_to_function(name))


def link_late() -> None:
    """Have numba make a `Library` of what this process compiles from now on."""
    compiler = cpu_target.target_context.codegen()
    compiler._library_class = Library
    set_environment = compiler.set_env

    def set_env(name: str, environment: Any) -> None:
        if compiler._engine.get_global_value_address(name):  # else no machine code reads it
            set_environment(name, environment)

    compiler.set_env = set_env
