"""Tests; environment variables that Rich, Typer and the kernels read are unset."""

import os

for name in (
    "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "TYPER_USE_RICH", "SPECDEC_PORTABLE",
):  # fmt: skip
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm-256color"
