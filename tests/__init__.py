"""Claims about the project, tested as on a machine where nobody has set what Rich, Typer and the kernels read."""

import os

for name in (
    "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "TYPER_USE_RICH", "SPECDEC_PORTABLE",
):  # fmt: skip
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm-256color"
