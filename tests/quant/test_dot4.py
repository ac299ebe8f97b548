"""Tiles for CPUs that are not here: they compile to the instructions that those CPUs have."""

import json
import subprocess
import sys

import pytest

from specdec.quant.gguf_repacking import BLOCK_TYPES
from tests.tools.checkpoint_files import ROOT


def count_arm_instructions(features: str, *names: str) -> dict[str, dict[str, int]]:
    command = [sys.executable, "-m", "tests.tools.arm_assembly", features, *names]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("features", "product"), [("+neon,+dotprod", "sdot"), ("+neon", "smull")])
def test_arm_multiplies_bytes_by_its_own_instruction(features: str, product: str) -> None:
    counts = count_arm_instructions(features, "int8", "Q4_K")
    assert all(own[product] > 0 and own["fmla"] > 0 for own in counts.values())
    other = {"sdot": "smull", "smull": "sdot"}[product]
    assert not any(other in own for own in counts.values())


@pytest.mark.campaign
@pytest.mark.parametrize("features", ["+neon,+dotprod", "+neon"])
def test_every_tile_compiles_for_arm(features: str) -> None:
    names = ["fp32", "12-bit", "int8", "latent attention", *BLOCK_TYPES]
    assert all(own["fmla"] > 0 for own in count_arm_instructions(features, *names).values())
