"""ahead.py: what passes will run is found without the weights' numbers."""

from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

from specdec.draft import precompile
from specdec.loaders import load_checkpoint
from specdec.loaders.loader import Loader
from specdec.runtime.program import Operation
from tests.tools.hf_folders import FIXTURES

MODELS = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
HUGE = np.float32(3e38)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_programs_are_written_without_a_number_that_memory_happens_to_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever new memory holds, nothing overflows; the operations are those of the model that is loaded afterwards."""
    found, empty = list[Operation](), np.empty

    def full_of_others(*arguments: Any, **named: Any) -> Any:
        array = empty(*arguments, **named)
        if array.dtype.kind == "f":
            array[...] = HUGE if array.dtype == np.float32 else 6e4
        return array

    def collect(operations: list[Operation], names: list[str]) -> list[Popen[bytes]]:
        found.extend(operations)
        return []

    monkeypatch.setattr(precompile, "compile_ahead", collect)
    monkeypatch.setattr(np, "empty", full_of_others)
    checkpoint = load_checkpoint(path)
    with np.errstate(all="raise"):
        precompile.compile_passes(checkpoint.config, checkpoint.tensors, [None], "auto")
    monkeypatch.setattr(np, "empty", empty)
    model = Loader(1).load(checkpoint, None)
    program = model._architecture.program(checkpoint.config, model.weights, model._buffers).program({})
    assert {row.operation for phase in program for row in phase} <= {*found}
