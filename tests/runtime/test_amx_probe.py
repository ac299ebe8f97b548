"""The probe for tiles of int8: it comes to an end on any machine, and says what it came to."""

import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).parents[1] / "tools" / "amx_probe.py"
ENDS = (
    "not looked for on ",
    "this CPU has none",
    "the system keeps no tiles",
    "the system gives no permission",
    "it multiplies tiles",
)


def test_the_probe_says_whether_this_machine_multiplies_tiles():
    run = subprocess.run([sys.executable, PROBE], capture_output=True, text=True, timeout=120)
    assert (
        run.stderr.startswith("the process that tried ended with")
        if run.returncode
        else run.stdout.splitlines()[-1].startswith(ENDS)
    )
    assert "False" not in run.stdout
