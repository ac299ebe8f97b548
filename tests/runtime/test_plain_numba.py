"""The fallback to numba's public interface: the same outputs as with numba's inside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec.runtime import numba_compat, plain_numba
from specdec.runtime.memory import checksum
from tests.tools.checkpoint_files import ROOT
from tests.tools.golden import CASES, TABLE


def run_plain(program: str, folder: Path) -> str:
    environment = os.environ | {"SPECDEC_PLAIN_NUMBA": "1", "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert not [*folder.rglob("*.code")]
    return done.stdout.strip()


def test_functions_and_kernels_run_with_plain_numba(tmp_path: Path) -> None:
    program = """
import numpy as np
from specdec.runtime.memory import all_finite, checksum
array = np.arange(1000, dtype=np.float32)
print(checksum([array]).hex(), all_finite(array), all_finite(array / array))
"""
    assert run_plain(program, tmp_path) == f"{checksum([np.arange(1000, dtype=np.float32)]).hex()} True False"


def test_the_target_has_the_same_cpu_features_with_plain_numba() -> None:
    assert plain_numba.describe_target()[1:3] == numba_compat.describe_target()[1:3]


@pytest.mark.campaign
def test_plain_numba_computes_a_golden_output(tmp_path: Path) -> None:
    program = "import json; from tests.tools.golden import CASES, compute_row; print(json.dumps(compute_row(CASES[0])))"
    assert json.loads(run_plain(program, tmp_path)) == json.loads(TABLE.read_text())["texts"][CASES[0].name]
