"""Runs of the command line in this process, and assertions about their results."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import bootstrap
from specdec.loaders import model_paths
from specdec.ui import signals

Run = Callable[..., tuple[int, str, str]]


# Notes that appear on slow machines, and for models so small that an int8 target has fewer bytes than its draft.
A_NOTE = re.compile(r"specdec: ((loading|reading|timing|writing)\b.*\d+%|the (draft|stage) is not smaller than )")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs the command line in this process with an empty models/: exit code, stdout, stderr.

    Signal handlers stay pytest's. Stderr is without lines about compiling, which depend on the machine's speed.
    """
    monkeypatch.setattr(signals.SignalHandler, "install", lambda _: None)
    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setattr(model_paths, "BUNDLED_MODELS_DIR", models)
    monkeypatch.setattr(model_paths, "DEFAULT_TARGET", models / "target.bin")
    monkeypatch.setattr(model_paths, "DEFAULT_DRAFT", models / "draft.bin")
    monkeypatch.setattr(model_paths, "DEFAULT_TOKENIZER", models / "tok300.bin")

    def once(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["specdec", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            bootstrap.main()
        out, err = capsys.readouterr()
        assert isinstance(done.value.code, int)
        lines = [line for line in err.splitlines(keepends=True) if not line.startswith("specdec: compiling kernels: ")]
        return done.value.code, out, "".join(lines)

    return once


def assert_rejected(result: tuple[int, str, str], *words: object) -> str:
    """Assert exit code 2, empty stdout, and one line on stderr with all of these words and no traceback; return the line.

    Lines of progress, which appear while a slow machine loads a model, do not count.
    """
    code, out, err = result
    err = "".join(line for line in err.splitlines(keepends=True) if not re.fullmatch(r"specdec: .*: *\d+%.*\n", line))
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "Error" not in err
    for word in words:
        assert str(word) in err
    return err


def from_json(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert code == 0 and [line for line in err.splitlines() if not A_NOTE.match(line)] == []
    value = json.loads(out)
    assert isinstance(value, dict)
    return value
