"""Equal outputs on every machine: golden hashes, and no arithmetic of a C library or of numpy's own order before a token."""

import ast
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest

import specdec
from specdec import kernels, sampling
from specdec.layers import latent_ops, moe, recurrent_ops
from specdec.quant import bf16_12bit, fp16_bf16, fp32, int8
from specdec.runtime import elementary
from specdec.runtime.code_cache import MachineCodeCache, get_cache_dir, get_store
from specdec.runtime.op_program import Kernel
from tests.tools.golden import (
    CASES,
    SETTINGS,
    TABLE,
    Case,
    compute_function_hashes,
    compute_row,
    find_changed_rows,
    main,
    pack_weights,
)
from tests.tools.package import MODULES, get_folder

GOLDEN = json.loads(TABLE.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_equals_the_golden_output_bit_for_bit(case: Case) -> None:
    assert compute_row(case) == GOLDEN["texts"][case.name]


def test_functions_have_golden_bits() -> None:
    assert compute_function_hashes() == GOLDEN["functions"]


def test_native_and_portable_int8_give_the_same_logits() -> None:
    case = next(case for case in CASES if case.weight_format == "int8")
    for weight_format in ("native int8", "portable int8"):
        assert compute_row(case._replace(weight_format=weight_format))["logits"] == GOLDEN["texts"][case.name]["logits"]


@pytest.mark.parametrize("case", [case for case in CASES if case.weight_format == "bf16"], ids=lambda case: case.name)
def test_packed_bf16_gives_the_same_output(case: Case) -> None:
    assert compute_row(case._replace(weight_format="packed bf16")) == GOLDEN["texts"][case.name]


def test_packed_bf16_is_used_in_several_cases() -> None:
    assert (
        sum(
            "12 bits" in pack_weights(case.model, "packed bf16")[1].format_names for case in CASES if case.weight_format == "bf16"
        )
        > 5
    )


def test_table_has_the_current_revision_and_enough_tokens_to_show_a_changed_bit() -> None:
    assert GOLDEN["arithmetic"] == specdec.__arithmetic__
    assert set(GOLDEN["texts"]) == {case.name for case in CASES}
    assert sum(case.n_tokens for case in CASES) >= 2000
    for field in ("model", "weight_format"):
        assert len({(getattr(case, field), case.setting) for case in CASES}) > len({getattr(case, field) for case in CASES})


def test_golden_outputs_change_only_with_a_new_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows may be added and removed."""
    path = tmp_path / "golden.json"
    monkeypatch.setattr("tests.tools.golden.TABLE", path)
    new: dict[str, Any] = {"arithmetic": 1, "functions": {"f": "a"}, "texts": {"one": {"text": "b"}}}
    monkeypatch.setattr("tests.tools.golden.make_table", lambda: new)
    assert main() == 0 and json.loads(path.read_text()) == new
    path.write_text(json.dumps(new | {"texts": {"one": {"text": "c"}, "two": {"text": "d"}}}))
    assert [*find_changed_rows(json.loads(path.read_text()), new)] == ["one"]
    assert main() == 1 and "raise __arithmetic__" in capsys.readouterr().err
    new["arithmetic"] = 2
    assert main() == 0 and json.loads(path.read_text()) == new


# Compiled code

ALLOWED_CALLS = re.compile(  # functions that machine code may call: of numba, Python, memory, and specdec
    r"NRT_|_?Py|numba_|specdec_|mem(cpy|move|set)$|printf$|(get|set)_num_threads$|(get|set)_parallel_chunksize$"
    r"|(allocate|deallocate)_sched$|get_sched_size$|do_scheduling_|__cxa|__gxx|_Unwind|\.numba"
)
INEXACT = re.compile(  # LLVM functions whose rounding no standard defines, or that may round once or twice
    r"llvm\.(a?(sin|cos|tan)h?|sincos(pi)?|atan2|exp(2|10)?|ldexp|log(2|10)?|powi?|fmuladd)\."
)
FAST_MATH = re.compile(r"= [a-z ]*\b(fast|reassoc|contract|arcp|afn)\b")  # arithmetic that LLVM may change or reorder


def test_machine_code_calls_no_c_library_functions_for_arithmetic() -> None:
    """Checks the LLVM code of everything that golden outputs compile; numba stores it next to the machine code."""
    if not (store := get_store()):
        pytest.skip("there is no cache folder")
    compute_function_hashes()
    for case in CASES[: len(SETTINGS)]:
        compute_row(case)
    for kernel in list_kernels():
        assert kernel.address
    assert not {*list_compiled_functions()} - {*list_cached_files()}
    for path in itertools.chain(*list_cached_files().values()):
        modules = [llvm.parse_bitcode(code) for code in extract_bitcode(pickle.loads(store.read(path.name) or b""))]
        assert modules
        for module in modules:
            called = {function.name for function in module.functions if function.is_declaration}
            assert not [name for name in called if not name.startswith("llvm.") and not ALLOWED_CALLS.match(name)], path.name
            assert not [name for name in called if INEXACT.match(name)], path.name
            assert not FAST_MATH.search(str(module)), path.name


def list_cached_files() -> dict[str, list[Path]]:
    """Return the cache files by the name of the compiled function."""
    files: dict[str, list[Path]] = {}
    for path in Path(get_cache_dir()).glob("*.code"):
        files.setdefault(path.name.split("-")[0], []).append(path)
    return files


def extract_bitcode(data: Any) -> list[bytes]:
    """Return the modules of LLVM code in numba's pickled data."""
    if isinstance(data, bytes):
        return [data] if data.startswith(b"BC\xc0\xde") else []
    return [code for item in data for code in extract_bitcode(item)] if isinstance(data, tuple | list) else []


TOKEN_MODULES = (kernels, recurrent_ops, latent_ops, moe, sampling, elementary, fp32, fp16_bf16, int8, bf16_12bit)


def list_kernels() -> list[Kernel]:
    """Return the kernels in modules that compute tokens."""
    return [value for module in TOKEN_MODULES for value in vars(module).values() if isinstance(value, Kernel)]


def list_compiled_functions() -> list[str]:
    """Return the names of the compiled functions in modules that compute tokens, as in the cache files' names.

    Functions that only compiled functions call are part of these.
    """
    names = []
    for module in TOKEN_MODULES:
        for name, value in vars(module).items():
            function = getattr(value, "py_func", getattr(value, "function", None))
            is_own = function is not None and function.__module__ == module.__name__
            is_compiled = getattr(value, "signatures", None) and isinstance(value._cache, MachineCodeCache)
            if is_own and (isinstance(value, Kernel) or is_compiled):
                names.append(f"{module.__name__.removeprefix('specdec.')}.{name}")
    return names


# Python code

EXACT_NUMPY = {  # numpy functions with equal results everywhere: copying, integers, and what IEEE 754 rounds
    "add", "append", "arange", "argmax", "array", "array_equal", "ascontiguousarray", "bitwise_or", "bool_",
    "broadcast_to", "clip", "concatenate", "copyto", "count_nonzero", "diff", "dtype", "empty", "errstate", "finfo",
    "flatnonzero", "float16", "float32", "float64", "frombuffer", "full", "iinfo", "inf", "int16", "int32", "int64",
    "int8", "integer", "isfinite", "isnan", "lexsort", "maximum", "minimum", "nan", "ndarray", "ones", "pad", "repeat",
    "rint", "searchsorted", "signedinteger", "sqrt", "stack", "uint16", "uint32", "uint64", "uint8", "unique", "unpackbits",
    "where", "zeros",
}  # fmt: skip
EXACT_MATH = {"gcd", "inf", "isfinite", "isnan", "nan", "pi", "prod", "isqrt", "ceil", "floor"}
EXACT_MODULES = (
    "kernels", "sampling", "quant", "runtime", "layers", "model", "heads.eagle3", "heads.mtp", "heads.gemma4_assistant",
    "families", "loaders", "model_config", "mixer_config", "head_config", "speculative", "engine.model_runner",
    "engine.scheduler", "engine.sequence", "verification", "tokenizer", "text", "speculative_decoder", "draft.model_drafters",
    "draft.lookup", "draft.staged",
)  # fmt: skip
SUM_METHODS = {"sum", "mean", "std", "var", "dot", "cumsum", "cumprod", "trace"}  # array methods that sum in numpy's own order


@pytest.mark.parametrize("module", [module for module in MODULES if {get_folder(module), module} & {*EXACT_MODULES}])
def test_modules_that_compute_tokens_use_only_exact_arithmetic(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        location = f"{module}, line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
            assert node.attr in (EXACT_NUMPY if node.value.id == "np" else EXACT_MATH) | {"typing", "random"}, location
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in SUM_METHODS, location
        if isinstance(node, ast.BinOp):
            assert not isinstance(node.op, ast.MatMult), location
            if isinstance(node.op, ast.Pow) and not isinstance(node.left, ast.Constant):
                assert module in ("layers.rope", "families.hunyuan_v1_dense"), location  # their powers are decimals
