"""`specdec compile`: compiles ahead what the other commands run, into a folder that must be writable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli import compile as compile_command
from specdec.runtime import code_cache
from tests.conftest import Pair
from tests.tools.checkpoint_files import ROOT
from tests.tools.command_runs import Run, run  # noqa: F401  (a fixture)

LIST_COMPILED = """
from specdec.cli.bootstrap import main
from specdec.runtime import code_cache as cache
compiled = []
save = cache.MachineCodeCache.save_overload
cache.MachineCodeCache.save_overload = lambda cache, *args: [compiled.append(cache._name), save(cache, *args)]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(compiled)
"""


def test_later_run_compiles_nothing() -> None:
    subprocess.run([sys.executable, "specdec.py", "compile"], cwd=ROOT, check=True)
    command = [sys.executable, "-c", LIST_COMPILED, "Once", "-n", "60", "--plain"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.endswith("[]\n")


def test_models_folder_and_new_functions_are_printed(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter([{"a"}, {"a", "b", "c"}, {"a"}, {"a"}])  # the real ones depend on other processes
    monkeypatch.setattr(compile_command, "list_cached_names", lambda: next(known))
    code, out, _ = run("compile", str(pair.target), str(pair.draft), "-z", str(pair.tokenizer), "-d", "lookup")
    first, second, last = out.splitlines()
    assert code == 0 and first.startswith(f"{pair.target.stem} + lookup: compiled 2 functions (")
    assert second.startswith(f"{pair.draft.stem} + lookup: nothing to compile (")
    assert last == f"compiled code for this machine's CPU is in {code_cache.get_cache_dir()}"


def test_code_that_could_not_be_written_is_an_error(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "write_errors", [OSError(28, "No space left on device")])
    code, _, error = run("compile", str(pair.target), "-z", str(pair.tokenizer), "-d", "lookup")
    expected = f"compiled code cannot be kept in {code_cache.get_cache_dir()}: No space left on device"
    assert code == 2 and expected in " ".join(error.split())


def test_missing_model_is_an_error(run: Run) -> None:
    code, out, error = run("compile", "no-such-model.gguf")
    assert code == 2 and not out and "no-such-model.gguf" in error


def test_cache_folder_that_is_not_writable_is_an_error_before_anything_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(code_cache, "_cache_dir", [])
    monkeypatch.setattr(compile_command, "load_models", None)
    code, out, error = run("compile")
    folder = os.path.join(tmp_path, "file", "specdec")
    assert code == 2 and not out
    expected = f"compiled code cannot be kept: {folder} is not writable; set NUMBA_CACHE_DIR to a folder that is"
    assert expected in " ".join(error.split())
