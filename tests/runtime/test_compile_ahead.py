"""Ahead-of-time compilation: code that other processes compile is found, and no process is left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.checkpoint_files import ROOT

START = """
from specdec.layers.activations import swiglu
from specdec.kernels import add_bias, rms_norm
from specdec.runtime import code_cache, compile_ahead
compile_ahead.get_available_threads = lambda: 2
compile_ahead.MIN_MISSING_KERNELS = 3
kernels = [add_bias, rms_norm, swiglu]
processes = compile_ahead.compile_ahead(kernels, [])
"""
COMPILED = (
    START
    + """
print([process.wait() for process in processes], [kernel.is_compiled for kernel in kernels])
compile_ahead.stop_processes(processes)
reported = []
code_cache.compile_reporters.append(reported.append)
print([kernel.address != 0 for kernel in kernels], reported, len(compile_ahead.compile_ahead(kernels, [])))
"""
)
BLOCK_KERNELS = COMPILED.replace("[add_bias, rms_norm, swiglu]", "[add_bias, rms_norm, WEIGHT_FORMATS['Q4_0'].embed]").replace(
    "from specdec.runtime", "from specdec.quant.gguf_repacking import WEIGHT_FORMATS\nfrom specdec.runtime"
)
EXIT = (
    START
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
    """Return whether a process ends within a minute; a zombie has ended."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("code", [COMPILED, BLOCK_KERNELS], ids=["module kernels", "generated kernels"])
def test_kernels_compiled_by_another_process_are_not_compiled_again(code: str, tmp_path: Path) -> None:
    output, _ = run(code, tmp_path).communicate()
    assert output.splitlines() == ["[0] [True, True, True]", "[True, True, True] [] 0"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    with run(EXIT, tmp_path) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.wait()
        assert has_ended(pid)


def test_nothing_is_compiled_ahead_without_a_cache_folder(tmp_path: Path) -> None:
    program = (
        START.replace("compile_ahead.get_available", "code_cache._cache_dir.append('')\ncompile_ahead.get_available")
        + "print(json.dumps(len(processes)))"
    )
    output, _ = run("import json" + program, tmp_path).communicate()
    assert json.loads(output) == 0
