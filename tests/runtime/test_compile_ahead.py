"""Compiling ahead: what other processes compile is found, and they leave nothing behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.checkpoint_files import ROOT

BEGIN = """
from specdec.layers.activations import swiglu
from specdec.kernels import add_bias, rms_norm
from specdec.runtime import code_cache, compile_ahead
compile_ahead.available_threads = lambda: 2
compile_ahead.LEAST_MISSING = 3
operations = [add_bias, rms_norm, swiglu]
processes = compile_ahead.compile_ahead(operations, [])
"""
COMPILED = (
    BEGIN
    + """
print([process.wait() for process in processes], [operation.is_compiled for operation in operations])
compile_ahead.end(processes)
told = []
code_cache.on_compiling.append(told.append)
print([operation.address != 0 for operation in operations], told, len(compile_ahead.compile_ahead(operations, [])))
"""
)
OF_BLOCKS = COMPILED.replace("[add_bias, rms_norm, swiglu]", "[add_bias, rms_norm, KINDS['Q4_0'].embed]").replace(
    "from specdec.runtime", "from specdec.quant.gguf_blocks import KINDS\nfrom specdec.runtime"
)
LEFT = (
    BEGIN
    + """
import os
print(processes[0].pid, flush=True)
os._exit(0)
"""
)


def run(code: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def has_ended(pid: int) -> bool:
    """Whether a process ends within a minute; one that nobody has waited for has."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("code", [COMPILED, OF_BLOCKS], ids=["operations of files", "operations that a kind of blocks made"])
def test_what_another_process_compiles_is_not_compiled_here(code: str, tmp_path: Path) -> None:
    output, _ = run(code, tmp_path).communicate()
    assert output.splitlines() == ["[0] [True, True, True]", "[True, True, True] [] 0"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_process_ends_with_the_one_that_began_it(tmp_path: Path) -> None:
    with run(LEFT, tmp_path) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.wait()
        assert has_ended(pid)


def test_what_cannot_be_kept_is_not_compiled_ahead(tmp_path: Path) -> None:
    nowhere = (
        BEGIN.replace("compile_ahead.available", "code_cache._folder.append('')\ncompile_ahead.available")
        + "print(json.dumps(len(processes)))"
    )
    output, _ = run("import json" + nowhere, tmp_path).communicate()
    assert json.loads(output) == 0
