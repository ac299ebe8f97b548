"""A campaign of tests/tools/fuzz.py over the files of draft heads: damaged configs, ids, tensors, headers and keys."""

from contextlib import nullcontext

import numpy as np

import specdec.heads  # noqa: F401  (registers the architectures of heads)
from specdec.head_config import HeadConfig
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.head_checkpoint import find_incompatibility
from specdec.model import get_architecture
from specdec.model_config import Llama3RopeScaling, ModelConfig
from tests.tools import gguf_files
from tests.tools.checkpoint_files import limit_memory
from tests.tools.configs import make_config, replace_config
from tests.tools.fuzz_common import EDGE_INTS, FINE, FOLDER, check_one_line, check_tensors, damage_folder, damage_gguf
from tests.tools.head_files import DIALECTS, make_gguf_parts, write_folder

KEYS = (
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type", "transformer_layer_config", "model_type",
    "target_hidden_size", "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qkv_bias",
    "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "quantization_config",
    "sliding_window", "layer_types", "tie_word_embeddings", "use_aux_hidden_state", "speculators_config", "architectures",
)  # fmt: skip
VALUES = ([2, 4, 7], [1, 1, 2], [0, 1], [-1, 2, 3], [10**30, 1, 2], "eagle", "eagle3", "qwen3", 20, 72, 31, {"verifier": 3})


def random_head(rng):
    """Return the config, the tensors by our names and the target ids of a random head."""
    dim, vocab = 8 * rng.randint(1, 4), rng.choice([16, 33, 72])
    has_own_embedding = rng.random() < 0.5
    n_rows = rng.randint(3, vocab) if rng.random() < 0.7 else vocab
    head = HeadConfig(
        rng.choice([dim, 24]) if has_own_embedding else dim,
        tuple(rng.sample(range(1, 9), rng.choice([3, 3, 3, 1, 4]))),
        n_rows,
        has_own_embedding,
        has_own_embedding or n_rows < vocab or rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice(["", "each", "whole"]),
        rng.random() < 0.5,
    )
    config = make_config(
        dim, rng.choice([8, 40]), 1, 2, rng.choice([1, 2]), vocab, 64, False, "eagle3", head_dim=rng.choice([4, 6, 8]), head=head,
        rope_scaling=rng.choice([None, None, Llama3RopeScaling(8, 1, 4, 32)]), qk_norm=rng.random() < 0.3,
        wo_bias=rng.random() < 0.1,
    )  # fmt: skip
    config = replace_config(config, qkv_bias=config.attention.wo_bias)
    numbers_rng = np.random.default_rng(rng.getrandbits(32))
    tensors = {
        name: numbers_rng.standard_normal(shape, np.float32) for name, shape in get_architecture(config).shapes(config).items()
    }
    ids = None if n_rows == vocab and rng.random() < 0.7 else numbers_rng.permutation(vocab)[:n_rows]
    return config, tensors, ids


def corrupt_ids(rng, ids, vocab):
    """Return target ids, some of them possibly replaced, and whether they are still valid."""
    ids = ids.copy()
    for _ in range(rng.choice([0, 1, 1, 2])):
        ids[rng.randrange(len(ids))] = rng.choice([*EDGE_INTS, vocab, vocab - 1, rng.randrange(vocab), 2**63 - 1, -(2**63)])
    return ids, len({*ids.tolist()}) == len(ids) and 0 <= ids.min() <= ids.max() < vocab


def fuzz_head(rng):
    """Damage the files of a head: they are refused in one line that names them, or are a head with distinct target ids."""
    config, tensors, ids = random_head(rng)
    has_valid_ids = None  # unknown if anything may be damaged
    if ids is not None and rng.random() < 0.3:
        ids, has_valid_ids = corrupt_ids(rng, ids, config.vocab_size)
    write = write_head_gguf if rng.random() < 0.4 else write_head_folder
    path = write(rng, config, tensors, ids, is_damaged=has_valid_ids is None)
    is_traced = rng.random() < 0.1  # tracing is slow
    try:
        with limit_memory(2**25) if is_traced else nullcontext():
            check_head(rng, load_checkpoint(path), is_traced)
        outcome = FINE
    except CheckpointError as error:
        outcome = check_one_line(error, str(path))
    assert has_valid_ids in (None, outcome == FINE), f"{'valid' if has_valid_ids else 'invalid'} target ids: {outcome}"
    return outcome


def check_head(rng, checkpoint, is_read):
    """Check a loaded head, or the model that a damaged config describes; is_read also reads the tensors."""
    config, target_ids = checkpoint.config, checkpoint.target_ids
    check_tensors(checkpoint, is_read)
    assert not config.find_error()
    if not config.head:
        return
    for target in (ModelConfig(config.dim, 8, rng.randint(1, 9), 1, 1, config.vocab_size, 8), config):
        assert "\n" not in find_incompatibility(config, target)
    if target_ids is None:
        assert config.head.draft_vocab_size == config.vocab_size
    else:
        assert target_ids.shape == (config.head.draft_vocab_size,) == (len({*target_ids.tolist()}),)
        assert 0 <= target_ids.min() <= target_ids.max() < config.vocab_size


def write_head_folder(rng, config, tensors, ids, is_damaged):
    folder = FOLDER / f"head{rng.randrange(3)}"
    write_folder(folder, config, tensors, ids, rng.choice(DIALECTS))
    if is_damaged:
        damage_folder(rng, folder, KEYS, VALUES)
    return folder


def write_head_gguf(rng, config, tensors, ids, is_damaged):
    config = replace_config(config, qk_norm=False, qkv_bias=False, wo_bias=False)
    assert config.head
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("q_norm", "k_norm", "bq", "bk", "bv", "bo")}
    if config.head.fc_norm == "each":
        tensors["fc_norm"] = tensors["fc_norm"].reshape(1, -1)
    keys, stored = make_gguf_parts(config, tensors, ids)
    more_keys = ["eagle3.extract_layers", "eagle3.norm_before_fc", "tokenizer.ggml.tokens"]
    data = damage_gguf(rng, keys, stored, more_keys) if is_damaged else gguf_files.gguf_bytes(keys, stored)
    path = FOLDER / f"head{rng.randrange(3)}.gguf"
    path.write_bytes(data)
    return path
