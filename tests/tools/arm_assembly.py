"""Assembly of tiles for ARM, made on any machine: `python -m tests.tools.arm_assembly +neon,+dotprod int8 Q4_K`.

Prints for each weight format how often each instruction occurs in its largest tile, as JSON. numba reads the variables that
`main` sets when it is imported, so all modules that need it are imported later.
"""

import json
import os
import platform
import re
import sys
from collections import Counter
from typing import Any

import llvmlite.binding as llvm

TRIPLE, CPU = "aarch64-linux-gnu", "neoverse-n1"


def get_tile(name: str) -> Any:
    """Return the `Tile` of a weight format."""
    from specdec.layers import latent_ops
    from specdec.quant import bf16_12bit, fp32, gguf_repacking, groupwise, int8

    if name in gguf_repacking.BLOCK_TYPES:
        return groupwise.make_tile(gguf_repacking.BLOCK_TYPES[name].layout, int8.DOT4_NAME)[0]
    tiles = {"fp32": fp32.panel_tile, "12-bit": bf16_12bit.packed_tile, "latent attention": latent_ops.dot_tile}
    return tiles[name] if name in tiles else int8.make_tile(int8.DOT4_NAME)[0]


def make_args_type(name: str) -> Any:
    """Return numba's type of the arguments of a weight format's tile."""
    from numba import types

    from specdec.layers.latent_ops import DotArgs
    from specdec.quant.matmul import Rows, TileArgs
    from specdec.runtime.simd import BYTE_STORAGE, FP32_STORAGE, LANES, REGISTER_LANES
    from specdec.runtime.tile_simd import PointerType

    floats, data = (PointerType(storage, LANES, REGISTER_LANES) for storage in (FP32_STORAGE, BYTE_STORAGE))
    rows, number = types.NamedTuple((floats, types.int64), Rows), types.int64
    if name == "latent attention":
        return types.NamedTuple((rows, floats, number, rows, number), DotArgs)
    return types.NamedTuple((rows, floats, data, number, rows, number, number, types.boolean), TileArgs)


def assemble(name: str, features: str) -> str:
    """Return the ARM assembly of a weight format's tile for the maximum number of tokens."""
    from numba import types

    from specdec.runtime.code_cache import make_dispatcher

    tile = get_tile(name)
    dispatcher = make_dispatcher(tile.make(tile.get_shapes()[-1]))
    dispatcher.compile((types.int64, make_args_type(name)))
    module = next(iter(dispatcher.overloads.values())).library._get_module_for_linking()
    code = re.sub(r'target (triple|datalayout) = .*|"target-(cpu|features)"="[^"]*"|linkonce_odr', "", str(module))
    arm_module = llvm.parse_assembly(code)
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, features=features, opt=3)
    arm_module.triple, arm_module.data_layout = TRIPLE, str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(arm_module, builder)
    return machine.emit_assembly(arm_module)


def main() -> None:
    """Count the instructions of the tiles named in the arguments, which follow the features of the CPU."""
    features, *names = sys.argv[1:]
    # numba itself compiles for x86, where it ignores these features with a warning.
    os.environ |= {"NUMBA_CPU_NAME": "x86-64" if platform.machine() in ("x86_64", "AMD64") else "generic"}
    os.environ |= {"NUMBA_CPU_FEATURES": features}
    platform.machine = lambda: "aarch64"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    counts = {name: Counter(re.findall(r"^\t([a-z]\w*)", assemble(name, features), re.MULTILINE)) for name in names}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
