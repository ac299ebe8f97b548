"""The commands on a simulated system without POSIX features (tests/tools/non_posix.py); no test has run on Windows or macOS."""

import os
import shutil
import subprocess
import sys

import pytest

from specdec.runtime import code_cache
from tests.tools.checkpoint_files import ROOT
from tests.tools.command_runs import Run, assert_rejected, run  # noqa: F401

TEXT = "Once upon a time, there was a little girl named Lily."
RUNS = {
    "text": (["-t", "0", "-n", "20", "--plain"], TEXT),
    "json": (["-t", "0", "-n", "20", "--json"], TEXT),
    "chat": (["chat", "-m", "models/stories6M.bin", "--template", "llama2", "--max-tokens", "5", "-s", "1"], "5 tokens"),
    "race": (["race", "-n", "20"], "same output, letter for letter"),
    "models": (["models"], "stories650K.bin"),
    "bench": (["bench", "-m", "models/stories6M.bin", "-p", "8", "-n", "2"], "pp8"),
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a copy of the code cache, without the code of sampling, which is then compiled there."""
    subprocess.run([sys.executable, "specdec.py", *RUNS["text"][0]], cwd=ROOT, check=True, capture_output=True)
    place = tmp_path_factory.mktemp("code")
    shutil.copytree(
        code_cache.get_cache_dir(),
        place / "specdec" / code_cache.SOURCE_HASH,
        ignore=shutil.ignore_patterns("sampling.*", "claims"),
    )
    return str(place)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("encoding", ["cp1252", pytest.param("utf-8", marks=pytest.mark.campaign)])
def test_commands_run_without_posix_features(code: str, name: str, encoding: str) -> None:
    """No modules, functions, signals, /proc, /sys; files that cannot be replaced; other encodings; one threading layer."""
    arguments, word = RUNS[name]
    environment = {"NUMBA_CACHE_DIR": code, "PYTHONIOENCODING": encoding, "NUMBA_THREADING_LAYER": "workqueue"}
    done = subprocess.run(
        [sys.executable, "tests/tools/non_posix.py", "specdec.py", *arguments],
        env=os.environ | environment, cwd=ROOT, input="hello\n" * (name == "chat"), capture_output=True, encoding=encoding,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["C:\\models\\x.gguf", "C:/models/x.gguf", "D:x", "\\\\server\\share\\x.bin"])
def test_windows_paths_are_printed_unchanged(run: Run, name: str) -> None:
    """They are not taken for names on the hub."""
    assert assert_rejected(run("-m", name, "-i", "x")).startswith(f"specdec: {name!r} not found here, in")
