"""mypy over the package as it is installed: specdec.py is its __init__, the other files its submodules."""

import subprocess
import sys

from tests.test_house import ROOT, modules


def test_mypy_finds_nothing_in_any_module(tmp_path):
    package = tmp_path / "specdec"
    package.mkdir()
    for name, path in modules().items():
        place = package / ("__init__.py" if name == "specdec" else path.relative_to(ROOT))
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(path)
    (package / "py.typed").touch()
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "-p", "specdec"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"Success: no issues found in {len(modules())} source files\n", done.stdout + done.stderr
