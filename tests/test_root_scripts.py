"""The scripts at the root: kernels.py checks the kernels, tokenizer.py prints ids and pieces."""

import subprocess
import sys

import numpy as np
import pytest

import kernels
from tests.tools.checkpoint_files import ROOT

SMALL = ["--dim", "256", "--hidden-dim", "160", "--heads", "2", "--kv-heads", "1", "-t", "3", "-s", "40", "-j", "1"]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_kernel_equals_numpy() -> None:
    done = run("kernels.py", *SMALL)
    assert done.returncode == 0, done.stdout
    for name in ("rms_norm", "rope", "attention_q8", "matmul fp32", "matmul int8", "matmul Q4_0", "matmul Q4_K", "embed NVFP4"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fp32", "load_vector(w"),
        ("int8", "prepare(tile_simd.load_vector(words"),
        ("Q4_K", "sums = dot4(sums, bit_and(shift_right(load_vector(words, 96), 4), 0x0f0f0f0f), advance(xs, at + 10))"),
        ("MXFP4", "look_up("),
    ],
)
def test_the_source_of_a_tile_is_printed(name: str, line: str) -> None:
    source = kernels.get_source(name)
    assert "def multiply_reference(out, w, x):" in source and "def tile(n_tokens, p):" in source and line in source


def test_a_wrong_result_is_found() -> None:
    sizes = kernels.Sizes(2, 16, 32, 64, 2, 1, 1)
    for case in kernels.head_cases(sizes):
        assert kernels.measure(case, sizes)[0] <= case.tolerance
        wrong = case._replace(expected=np.asarray(case.expected) * 1.01)
        assert kernels.measure(wrong, sizes)[0] > case.tolerance


def test_sizes_that_do_not_fit_are_rejected() -> None:
    done = run("kernels.py", "--dim", "100", "--heads", "3")
    assert done.returncode == 2 and "dim must be divisible by heads" in " ".join(done.stderr.split())


def test_tokenizer_prints_ids_and_pieces() -> None:
    done = run("tokenizer.py", "stories6M", "Once upon a time")
    assert done.returncode == 0, done.stderr
    *table, ids = done.stdout.splitlines()
    assert ids.split()[0] == "1" and "' upon'" in "\n".join(table)


@pytest.mark.parametrize("name", ["missing", "pyproject.toml"])
def test_tokenizer_names_what_is_not_a_model(name: str) -> None:
    done = run("tokenizer.py", name, "text")
    assert done.returncode == 1 and done.stderr.startswith("tokenizer.py: ") and "Traceback" not in done.stderr
