"""mypy over the package as it is installed: specdec.py is its __init__, the other files its submodules; and over who uses it."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.test_house import ROOT, modules


def documented_examples() -> str:
    """What the documents show of the library."""
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/library.md"))
    blocks = re.findall(r"^```python\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    return "\n".join(blocks)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.3.0", reason="an older numpy, as Python 3.10 has, tells fewer types")
def test_mypy_finds_nothing_in_any_module_and_a_misspelt_setting_in_who_uses_them(tmp_path):
    package = tmp_path / "specdec"
    package.mkdir()
    for name, path in modules().items():
        place = package / ("__init__.py" if name == "specdec" else path.relative_to(ROOT))
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(path)
    (package / "py.typed").touch()
    (tmp_path / "user.py").write_text(f"{documented_examples()}\ndecoder.generate('x', temprature=1)\n")
    cache = ROOT / ".mypy_cache" if os.access(ROOT, os.W_OK) else os.devnull  # what has not changed is not read again
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", cache]
    command = [sys.executable, "-m", "mypy", *options, "-p", "specdec", "-m", "user"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    *found, last = done.stdout.splitlines()
    wrong = 'user.py:.* error: Unexpected keyword argument "temprature" for "generate" of "SpeculativeDecoder"; did you mean .*'
    assert len(found) >= 1 and all(re.fullmatch(f"{wrong}|.*: note: .*", line) for line in found), done.stdout + done.stderr
    assert last == f"Found 1 error in 1 file (checked {len(modules()) + 1} source files)"
