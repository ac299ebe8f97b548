"""A campaign of tests/tools/fuzz.py over the files of heads that draft: damaged configs, ids, tensors, headers and keys."""

import json
import math
import tracemalloc

import numpy as np

from specdec.config import Config, HeadConfig, RopeScaling
from specdec.families.head_compatibility import misfit
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.model.registry import architecture_of
from tests.tools import gguf_files, hf_folders
from tests.tools.configs import changed, made
from tests.tools.fuzz_common import EXTREMES, FINE, FOLDER, damaged, one_line, random_json
from tests.tools.gguf_files import Raw, Typed
from tests.tools.head_files import DIALECTS, folder_tensors, gguf_parts, write_folder

KEYS = (
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type", "transformer_layer_config", "model_type",
    "target_hidden_size", "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qkv_bias",
    "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "quantization_config",
    "sliding_window", "layer_types", "tie_word_embeddings", "use_aux_hidden_state", "speculators_config", "architectures",
)  # fmt: skip
VALUES = ([2, 4, 7], [1, 1, 2], [0, 1], [-1, 2, 3], [10**30, 1, 2], "eagle", "eagle3", "qwen3", 20, 72, 31, {"verifier": 3})
GGUF_VALUES = (
    0, 1, 2, 31, 2**31, 0.0, math.nan, math.inf, True, False, "", "eagle3", "llama", "yarn", Typed(10, 2**60), Typed(5, -1),
    [1, 2], [1, 1, 2], [-1, 2, 3], ["a"], [0.5], [True],
)  # fmt: skip
SHAPES = ((0,), (1,), (20,), (32, 96), (96, 32), (1, 32), (32, 1), (2**40, 0), (2**62, 4))


def random_head(rng):
    """Its config, tensors by our names, and ids."""
    dim, vocab = 8 * rng.randint(1, 4), rng.choice([16, 33, 72])
    is_own = rng.random() < 0.5
    n_rows = rng.randint(3, vocab) if rng.random() < 0.7 else vocab
    head = HeadConfig(
        rng.choice([dim, 24]) if is_own else dim,
        tuple(rng.sample(range(1, 9), rng.choice([3, 3, 3, 1, 4]))),
        n_rows,
        is_own,
        is_own or n_rows < vocab or rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice(["", "each", "whole"]),
        rng.random() < 0.5,
    )
    config = made(
        dim, rng.choice([8, 40]), 1, 2, rng.choice([1, 2]), vocab, 64, False, "eagle3", head_dim=rng.choice([4, 6, 8]), head=head,
        rope_scaling=rng.choice([None, None, RopeScaling(8, 1, 4, 32)]), qk_norm=rng.random() < 0.3, wo_bias=rng.random() < 0.1,
    )  # fmt: skip
    config = changed(config, qkv_bias=config.attention.wo_bias)
    numbers = np.random.default_rng(rng.getrandbits(32))
    tensors = {name: numbers.standard_normal(shape, np.float32) for name, shape in architecture_of(config).shapes(config).items()}
    ids = None if n_rows == vocab and rng.random() < 0.7 else numbers.permutation(vocab)[:n_rows]
    return config, tensors, ids


def with_harm(rng, ids, vocab):
    """Ids of which some may be others, and whether they are those of a head still."""
    ids = ids.copy()
    for _ in range(rng.choice([0, 1, 1, 2])):
        ids[rng.randrange(len(ids))] = rng.choice([*EXTREMES, vocab, vocab - 1, rng.randrange(vocab), 2**63 - 1, -(2**63)])
    return ids, len({*ids.tolist()}) == len(ids) and 0 <= ids.min() <= ids.max() < vocab


def heads(rng):
    """A head's files with some harm done are refused in one line that names them, or are a head whose rows say ids, each once."""
    config, tensors, ids = random_head(rng)
    is_sound = None  # as far as one can tell
    if ids is not None and rng.random() < 0.3:
        ids, is_sound = with_harm(rng, ids, config.vocab_size)
    path = gguf_head if rng.random() < 0.4 else folder_of_head
    path = path(rng, config, tensors, ids, is_harmed=is_sound is None)
    is_watched = rng.random() < 0.1  # which takes its time
    if is_watched:
        tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        check(rng, checkpoint, is_watched)
    except CheckpointError as error:
        told = one_line(error, str(path))
    else:
        told = FINE
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**25, f"{peak} bytes"
    assert is_sound in (None, told == FINE), f"ids that are {'' if is_sound else 'no '}a head's: {told}"
    return told


def check(rng, checkpoint, is_read):
    """What was taken is a head, or a model where a damaged config says one."""
    found, ids = checkpoint.config, checkpoint.target_ids
    shapes = architecture_of(found).shapes(found)
    for name, tensor in checkpoint.tensors.items():
        shape = (len(tensor), *tensor[0].shape) if isinstance(tensor, list) else tensor.shape
        assert shape == shapes.pop(name), name
        for each in tensor if isinstance(tensor, list) and is_read else [tensor] if is_read else []:
            assert each[:].shape == each.shape, name
    assert not shapes and not found.flaw()
    if not found.head:
        return
    for target in (Config(found.dim, 8, rng.randint(1, 9), 1, 1, found.vocab_size, 8), found):
        assert "\n" not in misfit(found, target)
    if ids is None:
        assert found.head.n_rows == found.vocab_size
    else:
        assert ids.shape == (found.head.n_rows,) == (len({*ids.tolist()}),) and 0 <= ids.min() <= ids.max() < found.vocab_size


def folder_of_head(rng, config, tensors, ids, is_harmed):
    folder = FOLDER / f"head{rng.randrange(3)}"
    dialect = rng.choice(DIALECTS)
    write_folder(folder, config, tensors, ids, dialect)
    if not is_harmed:
        return folder
    weights, file = folder / hf_folders.WEIGHTS, folder / "config.json"
    match rng.randrange(4):
        case 0:
            values = json.loads(file.read_text())
            for _ in range(rng.choice([1, 1, 2])):
                place = rng.choice([values, *(value for value in values.values() if isinstance(value, dict))])
                key = rng.choice([*place, *KEYS])
                place[key] = rng.choice([random_json(rng), rng.choice(VALUES)])
                if rng.random() < 0.2:
                    del place[key]
            file.write_text(json.dumps(values))
        case 1:
            stored = folder_tensors(config, tensors, ids, dialect)
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
            header, rest = hf_folders.split(weights.read_bytes())
            entry = header[rng.choice(list(header))]
            entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(
                [random_json(rng), "I64", [2**70], [0, 64], [8, 4]]
            )
            weights.write_bytes(hf_folders.joined(header, rest))
        case 3:
            path = rng.choice([weights, weights, file])
            data = path.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little") if path == weights else len(data)
            path.write_bytes(damaged(rng, data, file.read_bytes(), start, [0, 4, 8, start]))
    return folder


def gguf_head(rng, config, tensors, ids, is_harmed):
    config = changed(config, qk_norm=False, qkv_bias=False, wo_bias=False)
    assert config.head
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("q_norm", "k_norm", "bq", "bk", "bv", "bo")}
    if config.head.fc_norm == "each":
        tensors["fc_norm"] = tensors["fc_norm"].reshape(1, -1)
    keys, stored = gguf_parts(config, tensors, ids)
    harm = rng.randrange(3) if is_harmed else -1
    if harm == 0:
        for _ in range(rng.choice([1, 1, 2])):
            keys[rng.choice([*keys, "eagle3.extract_layers", "eagle3.norm_before_fc", "tokenizer.ggml.tokens"])] = rng.choice(
                GGUF_VALUES
            )
        if rng.random() < 0.2:
            del keys[rng.choice(list(keys))]
    if harm == 1:
        name = rng.choice(list(stored))
        tensor = gguf_files.raw(stored.pop(name))
        match rng.randrange(4):
            case 0:
                stored[name + rng.choice(["x", "\n"])] = tensor
            case 1:
                stored[name] = tensor._replace(type=rng.choice(["I64", "I32", "F16", "Q8_0"]))
            case 2:
                stored[name] = Raw(tensor.type, rng.choice(SHAPES), tensor.data)
    data = gguf_files.gguf_bytes(keys, stored)
    if harm == 2:
        header = len(gguf_files.header_bytes(keys, stored))
        data = damaged(rng, data, gguf_files.gguf_bytes(keys, {}), header, [4, 8, 12, 16, 20, rng.randrange(header - 4)])
    path = FOLDER / f"head{rng.randrange(3)}.gguf"
    path.write_bytes(data)
    return path
