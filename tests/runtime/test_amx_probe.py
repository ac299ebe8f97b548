"""The AMX probe: it finishes on any machine and reports its result."""

import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).parents[1] / "tools" / "amx_probe.py"
RESULTS = (
    "not checked on ",
    "the CPU has no AMX",
    "the system does not save tiles",
    "the system denied permission",
    "AMX works",
)


def test_probe_reports_whether_this_machine_multiplies_tiles():
    process = subprocess.run([sys.executable, PROBE], capture_output=True, text=True, timeout=120)
    assert (
        process.stderr.startswith("the probe process ended with")
        if process.returncode
        else process.stdout.splitlines()[-1].startswith(RESULTS)
    )
    assert "False" not in process.stdout
