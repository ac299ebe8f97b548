"""Ministral 3: YaRN (Peng et al. 2023, arXiv:2309.00071), and queries that are scaled by their positions."""

from dataclasses import replace

import numpy as np

from specdec.config import Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf
from specdec.families.llama import gguf_config

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    said = hf.rope_values(values, ROPE)
    scale = float(np.float32(said.real("llama_4_scaling_beta", 0, 1e6)))
    rope = replace(hf.rope(values, said), query_scale=scale, query_span=hf.original_positions(values, said))
    hf.no_biases(values)
    return Config(**hf.numbers(values), attention=hf.attention(values, rope, window=hf.window(values)))


FAMILY = (
    InFolder("ministral3", DEFAULTS, config, hf.PLACES, beside={"mistral3": True}),
    InGguf("mistral3", gguf_config, gguf.PAIRS_PLACES, does=(gguf.QUERY_SCALE,)),
)
