"""mypy over the package, and over user code."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.tools.documentation import documented_examples
from tests.tools.package import ROOT, modules


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.3.0", reason="older numpy versions, as on Python 3.10, have fewer types"
)
def test_mypy_accepts_package_and_finds_misspelled_setting_in_user_code(tmp_path):
    (tmp_path / "user.py").write_text(f"{documented_examples()}\ndecoder.generate('x', temprature=1)\n")
    cache = ROOT / ".mypy_cache" if os.access(ROOT, os.W_OK) else os.devnull  # speeds up repeated runs
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", cache]
    command = [sys.executable, "-m", "mypy", *options, "-p", "specdec", "-m", "user"]
    environment = os.environ | {"MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    *found, last = done.stdout.splitlines()
    wrong = '.*user.py:.* error: Unexpected keyword argument "temprature" for "generate" of "SpeculativeDecoder"; did you mean .*'
    assert len(found) >= 1 and all(re.fullmatch(f"{wrong}|.*: note: .*", line) for line in found), done.stdout + done.stderr
    assert last == f"Found 1 error in 1 file (checked {len(modules()) + 1} source files)"
