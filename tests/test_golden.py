"""One text on every machine: golden sums, and that nothing on the way to a token is a C library's, or numpy's own way of it."""

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
from specdec.layers import moe_ops, recurrent
from specdec.quant import bf16_packed, fp32, half, int8
from specdec.runtime import elementary
from specdec.runtime.code_cache import CHECKSUM_BYTES, folder
from specdec.runtime.program import Operation
from tests.test_package import MODULES, folder_of
from tests.tools.golden import CASES, TABLE, Case, changed, functions, main, measure, weights_of

GOLDEN = json.loads(TABLE.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_golden_text_is_written_bit_for_bit(case: Case) -> None:
    assert measure(case) == GOLDEN["texts"][case.name]


def test_what_texts_are_made_of_has_golden_bits() -> None:
    assert functions() == GOLDEN["functions"]


def test_any_way_to_multiply_bytes_writes_the_same_text() -> None:
    case = next(case for case in CASES if case.kind == "int8")
    for kind in ("native int8", "portable int8"):
        assert measure(case._replace(kind=kind))["logits"] == GOLDEN["texts"][case.name]["logits"]


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "bf16"], ids=lambda case: case.name)
def test_bf16_in_12_bits_writes_the_same_text(case: Case) -> None:
    assert measure(case._replace(kind="packed bf16")) == GOLDEN["texts"][case.name]


def test_some_of_these_are_packed() -> None:
    assert sum("12 bits" in weights_of(case.model, "packed bf16")[1].kind for case in CASES if case.kind == "bf16") > 5


def test_the_table_is_that_of_this_arithmetic_and_long_enough_that_a_last_bit_would_show() -> None:
    assert GOLDEN["arithmetic"] == specdec.__arithmetic__
    assert set(GOLDEN["texts"]) == {case.name for case in CASES}
    assert sum(case.n_tokens for case in CASES) >= 2000
    for field in ("model", "kind"):
        assert len({(getattr(case, field), case.setting) for case in CASES}) > len({getattr(case, field) for case in CASES})


def test_a_golden_text_changes_with_the_revision_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows may come and go."""
    path = tmp_path / "golden.json"
    monkeypatch.setattr("tests.tools.golden.TABLE", path)
    new: dict[str, Any] = {"arithmetic": 1, "functions": {"f": "a"}, "texts": {"one": {"text": "b"}}}
    monkeypatch.setattr("tests.tools.golden.table", lambda: new)
    assert main() == 0 and json.loads(path.read_text()) == new
    path.write_text(json.dumps(new | {"texts": {"one": {"text": "c"}, "two": {"text": "d"}}}))
    assert [*changed(json.loads(path.read_text()), new)] == ["one"]
    assert main() == 1 and "raise __arithmetic__" in capsys.readouterr().err
    new["arithmetic"] = 2
    assert main() == 0 and json.loads(path.read_text()) == new


# What is compiled

CALLED = re.compile(  # what machine code may call: numba, Python, memory, and our own
    r"NRT_|_?Py|numba_|specdec_|mem(cpy|move|set)$|printf$|(get|set)_num_threads$|(get|set)_parallel_chunksize$"
    r"|(allocate|deallocate)_sched$|get_sched_size$|do_scheduling_|__cxa|__gxx|_Unwind|\.numba"
)
INEXACT = re.compile(  # LLVM's own functions that no standard rounds, or that may round once or twice
    r"llvm\.(a?(sin|cos|tan)h?|sincos(pi)?|atan2|exp(2|10)?|ldexp|log(2|10)?|powi?|fmuladd)\."
)
LOOSE = re.compile(r"= [a-z ]*\b(fast|reassoc|contract|arcp|afn)\b")  # arithmetic that LLVM may do in another way or order


def test_machine_code_calls_no_c_library_for_a_number() -> None:
    """In the LLVM code of all that golden texts compile; numba keeps it beside the machine code."""
    if not folder():
        pytest.skip("machine code is kept nowhere")
    functions()
    if {*compiled_functions()} - {*kept()}:  # this test runs alone
        of_each = CASES[0], next(case for case in CASES if case.model == "mixtral")
        for case in [*CASES, *(case._replace(kind=kind) for case in of_each for kind in ("native int8", "portable int8"))]:
            measure(case)
    assert not {*compiled_functions()} - {*kept()}
    for path in itertools.chain(*kept().values()):
        modules = [llvm.parse_bitcode(code) for code in bitcode(pickle.loads(path.read_bytes()[CHECKSUM_BYTES:]))]
        assert modules
        for module in modules:
            called = {function.name for function in module.functions if function.is_declaration}
            assert not [name for name in called if not name.startswith("llvm.") and not CALLED.match(name)], path.name
            assert not [name for name in called if INEXACT.match(name)], path.name
            assert not LOOSE.search(str(module)), path.name


def kept() -> dict[str, list[Path]]:
    """The files of machine code, by the name of what is compiled."""
    files: dict[str, list[Path]] = {}
    for path in Path(folder()).glob("*.code"):
        files.setdefault(path.name.split("-")[0], []).append(path)
    return files


def bitcode(kept: Any) -> list[bytes]:
    """The modules of LLVM code in what numba has pickled."""
    if isinstance(kept, bytes):
        return [kept] if kept.startswith(b"BC\xc0\xde") else []
    return [code for part in kept for code in bitcode(part)] if isinstance(kept, tuple | list) else []


def compiled_functions() -> list[str]:
    """The names of what is compiled in the rooms that tokens come through, as their files have them."""
    names = []
    for module in (kernels, recurrent, moe_ops, sampling, elementary, fp32, half, int8, bf16_packed):
        for name, value in vars(module).items():
            function = getattr(value, "py_func", getattr(value, "function", None))
            is_inlined = getattr(value, "targetoptions", {}).get("inline") == "always"
            is_own = function is not None and function.__module__ == module.__name__
            if is_own and not is_inlined and (isinstance(value, Operation) or hasattr(value, "py_func")):
                names.append(f"{module.__name__.removeprefix('specdec.')}.{name}")
    return names


# What is not

EXACT_NUMPY = {  # what numpy does the same everywhere: moving numbers, whole numbers, and what IEEE 754 rounds
    "add", "arange", "array", "array_equal", "ascontiguousarray", "clip", "concatenate", "copyto", "dtype", "empty", "finfo",
    "flatnonzero", "float16", "float32", "float64", "frombuffer", "full", "iinfo", "inf", "int16", "int32", "int64", "int8",
    "integer", "isfinite", "isnan", "lexsort", "maximum", "minimum", "nan", "ndarray", "ones", "pad", "repeat", "signedinteger",
    "sqrt", "stack", "uint16", "uint32", "uint64", "uint8", "unique", "unpackbits", "where", "zeros",
}  # fmt: skip
EXACT_MATH = {"gcd", "inf", "isfinite", "isnan", "nan", "pi", "prod", "isqrt", "ceil", "floor"}
ON_THE_WAY_TO_A_TOKEN = (
    "kernels", "sampling", "quant", "runtime", "layers", "model", "heads.eagle3", "heads.mtp", "heads.gemma4_assistant",
    "families", "loaders", "config", "engine.decoding", "verification", "tokenizer", "text", "decoder", "draft.model",
    "draft.ngram", "draft.staged",
)  # fmt: skip
SUMS = {"sum", "mean", "std", "var", "dot", "cumsum", "cumprod", "trace", "matmul"}  # of arrays, in numpy's own order


@pytest.mark.parametrize("module", [module for module in MODULES if {folder_of(module), module} & {*ON_THE_WAY_TO_A_TOKEN}])
def test_modules_on_the_way_to_a_token_use_exact_arithmetic_alone(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        where = f"{module}, line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
            assert node.attr in (EXACT_NUMPY if node.value.id == "np" else EXACT_MATH) | {"typing", "random"}, where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in SUMS, where
        if isinstance(node, ast.BinOp):
            assert not isinstance(node.op, ast.MatMult), where
            if isinstance(node.op, ast.Pow) and not isinstance(node.left, ast.Constant):
                assert module == "layers.rope", where  # of decimals
