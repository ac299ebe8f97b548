"""Parse what families with recurrent layers have in common, and name the tensors of Mamba-2 layers in their files.

The keys in GGUF files, names and shapes are llama.cpp's (`llm_build_mamba_base::build_mamba2_layer`, conversion/mamba.py).
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.families import gguf_common as gguf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_SIZE, ConfigValues
from specdec.families.family import GGUFMetadata
from specdec.layers.recurrent_ops import fill_decay_rates
from specdec.mixer_config import Mamba2Config

MAMBA_IN = ("mamba_z", "mamba_xbc", "mamba_dt")  # stored in one tensor
TIME_STEP_LIMIT = "time_step_limit"
INFINITIES = (math.inf, {"__float__": "Infinity"})  # in JSON, and as transformers 5 writes it


def compute_decay_rates(logarithms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the decay rates of recurrent layers, which folders store as logarithms."""
    rates = np.empty(logarithms.shape, logarithms.dtype)
    fill_decay_rates(rates, logarithms)
    return rates


def keep(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a stored tensor unchanged, for transforms that change only its shape."""
    return stored


DECAY_RATES = specs.TensorTransform(compute_decay_rates)
COLUMN = specs.TensorTransform(keep, lambda shape: (*shape, 1))  # stored as a matrix with one column
FLAT = specs.TensorTransform(keep, lambda shape: (math.prod(shape),))  # groups stored as one vector


def make_mamba_specs(template: str) -> dict[str, specs.TensorSpec]:
    """Return the specs of a Mamba-2 layer's tensors in a folder, with names such as `layers.{}.mamba.%s`."""
    return {
        **specs.fuse(MAMBA_IN, template % "in_proj.weight"),
        **specs.make(template, mamba_out="out_proj.weight", conv_bias="conv1d.bias", dt="dt_bias", skip="D"),
        "conv": specs.TensorSpec(template % "conv1d.weight", transform=specs.CONV_TAPS),
        "rate": specs.TensorSpec(template % "A_log", transform=DECAY_RATES),
        "mamba_norm": specs.TensorSpec(template % "norm.weight", transform=FLAT),
    }


GGUF_MAMBA_TENSORS = {
    **specs.fuse(MAMBA_IN, gguf.LAYER_WEIGHT % "ssm_in"),
    **specs.make("blk.{}.%s", mamba_out="ssm_out.weight", conv_bias="ssm_conv1d.bias", dt="ssm_dt.bias"),
    "conv": specs.TensorSpec("blk.{}.ssm_conv1d.weight", transform=specs.TRANSPOSED_CONV_TAPS),
    "rate": specs.TensorSpec("blk.{}.ssm_a", transform=COLUMN),
    "skip": specs.TensorSpec("blk.{}.ssm_d", transform=COLUMN),
    "mamba_norm": specs.TensorSpec("blk.{}.ssm_norm.weight"),
}


def require_no_time_step_limit(values: ConfigValues) -> None:
    """Raise CheckpointError if a config.json limits the time steps of Mamba-2 layers to other numbers than 0 to infinity."""
    values.require(TIME_STEP_LIMIT, *([0, infinity] for infinity in INFINITIES), None)


def parse_hf_mamba(values: ConfigValues, inner_dim: int, inner_name: str, **more: Any) -> Mamba2Config:
    """Return the `Mamba2Config` of a config.json with Granite's names of the keys, which Falcon-H1 has too.

    Args:
        values: The keys of config.json.
        inner_dim: Number of rows of all heads together.
        inner_name: What gives it, for errors.
        more: Other fields of `Mamba2Config`.

    Raises:
        CheckpointError: A value is not valid.
    """
    require_no_time_step_limit(values)
    values.require("mamba_proj_bias", False)
    n_heads = values.get_int("mamba_n_heads")
    if inner_dim > MAX_SIZE or inner_dim % n_heads:
        raise values.make_error("mamba_n_heads", f"a divisor of {inner_name}, {inner_dim}")
    values.require("mamba_d_head", inner_dim // n_heads, "auto")
    return Mamba2Config(
        n_heads,
        inner_dim // n_heads,
        n_groups=values.get_int("mamba_n_groups"),
        state_dim=values.get_int("mamba_d_state"),
        kernel_size=values.get_int("mamba_d_conv"),
        conv_bias=values.get_bool("mamba_conv_bias"),
        **more,
    )


def parse_gguf_mamba(metadata: GGUFMetadata, layer: int, **more: Any) -> Mamba2Config:
    """Return the `Mamba2Config` of a GGUF file.

    Args:
        metadata: The file's metadata.
        layer: Index of one of the Mamba-2 layers.
        more: Other fields of `Mamba2Config`.

    Raises:
        CheckpointError: A value is not valid.
    """
    inner_dim, n_heads = metadata.get_int("ssm.inner_size"), metadata.get_int("ssm.time_step_rank")
    if inner_dim % n_heads:
        raise metadata.make_error("ssm.inner_size", f"a multiple of {n_heads}, the heads")
    return Mamba2Config(
        n_heads=n_heads,
        head_dim=inner_dim // n_heads,
        n_groups=metadata.get_int("ssm.group_count"),
        state_dim=metadata.get_int("ssm.state_size"),
        kernel_size=metadata.get_int("ssm.conv_kernel"),
        conv_bias=GGUF_MAMBA_TENSORS["conv_bias"].name.format(layer) in metadata.tensors,
        **more,
    )
