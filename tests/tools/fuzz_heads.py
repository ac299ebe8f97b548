"""A campaign of tests/tools/fuzz.py over the files of draft heads: damaged configs, ids, tensors, headers and keys."""

import json
import math
import tracemalloc

import numpy as np

import specdec.heads  # noqa: F401  (registers the architectures of heads)
from specdec.head_config import HeadConfig
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.head_checkpoint import find_incompatibility
from specdec.model import get_architecture
from specdec.model_config import Llama3RopeScaling, ModelConfig
from tests.tools import gguf_files, hf_folders
from tests.tools.configs import make_config, replace_config
from tests.tools.fuzz_common import EDGE_INTS, FINE, FOLDER, check_one_line, corrupt, random_json
from tests.tools.gguf_files import RawTensor, TypedValue
from tests.tools.head_files import DIALECTS, make_folder_tensors, make_gguf_parts, write_folder

KEYS = (
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type", "transformer_layer_config", "model_type",
    "target_hidden_size", "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qkv_bias",
    "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "quantization_config",
    "sliding_window", "layer_types", "tie_word_embeddings", "use_aux_hidden_state", "speculators_config", "architectures",
)  # fmt: skip
VALUES = ([2, 4, 7], [1, 1, 2], [0, 1], [-1, 2, 3], [10**30, 1, 2], "eagle", "eagle3", "qwen3", 20, 72, 31, {"verifier": 3})
GGUF_VALUES = (
    0, 1, 2, 31, 2**31, 0.0, math.nan, math.inf, True, False, "", "eagle3", "llama", "yarn", TypedValue(10, 2**60),
    TypedValue(5, -1),
    [1, 2], [1, 1, 2], [-1, 2, 3], ["a"], [0.5], [True],
)  # fmt: skip
SHAPES = ((0,), (1,), (20,), (32, 96), (96, 32), (1, 32), (32, 1), (2**40, 0), (2**62, 4))


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
    if is_traced:
        tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        check_head(rng, checkpoint, is_traced)
    except CheckpointError as error:
        outcome = check_one_line(error, str(path))
    else:
        outcome = FINE
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**25, f"{peak} bytes"
    assert has_valid_ids in (None, outcome == FINE), f"{'valid' if has_valid_ids else 'invalid'} target ids: {outcome}"
    return outcome


def check_head(rng, checkpoint, is_read):
    """Check a loaded head, or the model that a damaged config describes; is_read also reads the tensors."""
    config, target_ids = checkpoint.config, checkpoint.target_ids
    shapes = get_architecture(config).shapes(config)
    for name, tensor in checkpoint.tensors.items():
        shape = (len(tensor), *tensor[0].shape) if isinstance(tensor, list) else tensor.shape
        assert shape == shapes.pop(name), name
        for array in tensor if isinstance(tensor, list) and is_read else [tensor] if is_read else []:
            assert array[:].shape == array.shape, name
    assert not shapes and not config.find_error()
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
    dialect = rng.choice(DIALECTS)
    write_folder(folder, config, tensors, ids, dialect)
    if not is_damaged:
        return folder
    weights, file = folder / hf_folders.WEIGHTS, folder / "config.json"
    match rng.randrange(4):
        case 0:
            values = json.loads(file.read_text())
            for _ in range(rng.choice([1, 1, 2])):
                target = rng.choice([values, *(value for value in values.values() if isinstance(value, dict))])
                key = rng.choice([*target, *KEYS])
                target[key] = rng.choice([random_json(rng), rng.choice(VALUES)])
                if rng.random() < 0.2:
                    del target[key]
            file.write_text(json.dumps(values))
        case 1:
            stored = make_folder_tensors(config, tensors, ids, dialect)
            name = rng.choice(list(stored))
            dtype, array = stored.pop(name)
            match rng.randrange(4):
                case 0:
                    stored[name + rng.choice([".weight", "x", "\n"])] = dtype, array
                case 1:
                    stored[name] = rng.choice(["F16", "I64", "I32", "BOOL", "F64", "X"]), array
                case 2:
                    stored[name] = dtype, array[: rng.randrange(len(array))]
            weights.write_bytes(hf_folders.safetensors_bytes(stored))
        case 2:
            header, rest = hf_folders.split_safetensors(weights.read_bytes())
            entry = header[rng.choice(list(header))]
            entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(
                [random_json(rng), "I64", [2**70], [0, 64], [8, 4]]
            )
            weights.write_bytes(hf_folders.join_safetensors(header, rest))
        case 3:
            path = rng.choice([weights, weights, file])
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little") if path == weights else len(data)
            path.write_bytes(corrupt(rng, data, file.read_bytes(), start, [0, 4, 8, start]))
    return folder


def write_head_gguf(rng, config, tensors, ids, is_damaged):
    config = replace_config(config, qk_norm=False, qkv_bias=False, wo_bias=False)
    assert config.head
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("q_norm", "k_norm", "bq", "bk", "bv", "bo")}
    if config.head.fc_norm == "each":
        tensors["fc_norm"] = tensors["fc_norm"].reshape(1, -1)
    keys, stored = make_gguf_parts(config, tensors, ids)
    damage = rng.randrange(3) if is_damaged else -1
    if damage == 0:
        for _ in range(rng.choice([1, 1, 2])):
            keys[rng.choice([*keys, "eagle3.extract_layers", "eagle3.norm_before_fc", "tokenizer.ggml.tokens"])] = rng.choice(
                GGUF_VALUES
            )
        if rng.random() < 0.2:
            del keys[rng.choice(list(keys))]
    if damage == 1:
        name = rng.choice(list(stored))
        tensor = gguf_files.to_raw_tensor(stored.pop(name))
        match rng.randrange(4):
            case 0:
                stored[name + rng.choice(["x", "\n"])] = tensor
            case 1:
                stored[name] = tensor._replace(type=rng.choice(["I64", "I32", "F16", "Q8_0"]))
            case 2:
                stored[name] = RawTensor(tensor.type, rng.choice(SHAPES), tensor.data)
    data = gguf_files.gguf_bytes(keys, stored)
    if damage == 2:
        header = len(gguf_files.header_bytes(keys, stored))
        data = corrupt(rng, data, gguf_files.gguf_bytes(keys, {}), header, [4, 8, 12, 16, 20, rng.randrange(header - 4)])
    path = FOLDER / f"head{rng.randrange(3)}.gguf"
    path.write_bytes(data)
    return path
