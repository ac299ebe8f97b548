"""Precompilation: the operations of passes are found without the values of weights."""

from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

from specdec.draft import precompile_models
from specdec.loaders import load_checkpoint
from specdec.loaders.model_loader import Loader
from specdec.runtime.op_program import Kernel
from tests.tools.cache_contents import get_buffers
from tests.tools.hf_folders import FIXTURES

MODELS = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
HUGE = np.float32(3e38)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_operations_are_found_without_reading_uninitialized_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing overflows, whatever new memory holds, and the operations include those of the model that is loaded afterwards."""
    found, empty = list[Kernel](), np.empty

    def empty_with_huge_values(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        if array.dtype.kind == "f":
            array[...] = HUGE if array.dtype == np.float32 else 6e4
        return array

    def collect(operations: list[Kernel], names: list[str]) -> list[Popen[bytes]]:
        found.extend(operations)
        return []

    monkeypatch.setattr(precompile_models, "compile_ahead", collect)
    monkeypatch.setattr(np, "empty", empty_with_huge_values)
    checkpoint = load_checkpoint(path)
    with np.errstate(all="raise"):
        precompile_models.compile_passes(checkpoint.config, checkpoint.tensors, [None], "auto")
    monkeypatch.setattr(np, "empty", empty)
    model = Loader(1).load(checkpoint, None)
    program = model.architecture.program(model.config, model.weights, get_buffers(model.new_cache()))
    assert {op.kernel for phase in program for op in phase} <= {*found}
