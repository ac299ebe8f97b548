"""Random cases against what the project promises: `python -m tests.tools.fuzz --minutes 5`, of one campaign with `--only NAME`.

A case is a function of its campaign and its number. It ends fine, refused in the promised way, or failed; a number that failed
fails again with `--only NAME --case NUMBER`, but for what hangs on how threads meet.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import struct
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np

from specdec.config import Config
from specdec.decoder import SpeculativeDecoder
from specdec.draft.acceptance import MARGIN_RATES, ODDS_RATES, Acceptance
from specdec.draft.costs import CostCurve
from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.staged import StagedDrafter
from specdec.draft.tree import TreeDrafter
from specdec.engine.decoding import Proposal, Step, decode
from specdec.families.gguf_common import PAIRS_PLACES
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.registry import architecture_of
from specdec.model.transformer import KV, Transformer
from specdec.quant import FP32, INT4, INT8
from specdec.quant.int8 import NATIVE_INT8, PORTABLE_INT8
from specdec.quant.matrix import pack
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, round_up
from specdec.runtime.threads import available_threads
from specdec.sampling import Sampler, Sampling, draw, keep_or_redraw, weigh_prefix
from specdec.text.gguf_tokenizer import gguf_tokenizer
from specdec.tokenizer import BOS, EOS, TextStream, Tokenizer, TokenizerError
from specdec.verification import VERIFIERS
from tests.tools import checkpoint_files as made
from tests.tools import gguf_files as made_gguf
from tests.tools import hf_folders as huggingface
from tests.tools import reference
from tests.tools.fuzz_common import FINE, FOLDER, REFUSED, damaged, one_line, random_json
from tests.tools.fuzz_heads import heads
from tests.tools.random_models import END_MARKS

PATIENCE = 120  # seconds after which a case hangs
SHOWN = 5  # failures of a campaign that are told
KEYS = (
    "attention_bias", "rope_scaling", "rope_theta", "head_dim", "quantization_config", "sliding_window", "layer_types",
    "sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar",
)  # fmt: skip
GGUF_VALUES = (
    0, 1, 2, 3, 5, 2**31, 0.0, 1.0, math.nan, math.inf, 1e-5, True, False, "", "llama", "gpt2", "yarn", "linear", "\udcff",
    made_gguf.Typed(10, 2**60), made_gguf.Typed(5, -1), made_gguf.Typed(11, -(2**60)), [1, 2], ["a", "b"], [0.5, math.nan],
    [True],
)  # fmt: skip
GGUF_ITEMS = {
    str: ("", "a", "the", "\u2581", "a b", "\0", "<0x41>", "<|im_end|>", "\udcff", "\u0120", "\u0120 t", "é", "x" * 999),
    int: (0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1),
    float: (0.0, -1.0, math.inf, -math.inf, math.nan, 3e38, -1e-40),
}
GGUF_SHAPES = ((0, 32), (2**40, 0), (2**62, 2**62), (0,), (72, 0, 32), (2**63,))


def random_config(rng, vocab=0, **fixed):
    head_dim = 2 * rng.randint(1, 12)
    heads = rng.randint(1, max(1, min(9, 100 // head_dim)))
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    vocab = vocab or rng.choice([3, 4, 6, 31, 32, 33, 64, rng.randint(3, 200)])
    seq_len = rng.choice([3, 16, 17, rng.randint(3, 200)])
    config = Config(heads * head_dim, rng.randint(1, 150), rng.randint(1, 3), heads, groups, vocab, seq_len, rng.random() < 0.5)
    return Config(**(vars(config) | fixed))


def same_bits(a, b):
    """Equal bit for bit, but for what kind of NaN a NaN is."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.where(np.isnan(a), 0, a).view(np.int32), np.where(np.isnan(b), 0, b).view(np.int32))


# Damaged files


def folders(rng):
    """A Hugging Face folder with some harm done is refused in one line that names it, or is a model."""
    folder = FOLDER / f"folder{rng.randrange(3)}"
    shutil.rmtree(folder, ignore_errors=True)
    huggingface.copy(folder, rng.choice(huggingface.NAMES))
    files = sorted(folder.iterdir(), key=lambda file: (file.name == "config.json", file.name))
    for path in rng.sample(files[-4:], rng.choice([0, 1, 1, 1, 2])):
        data = path.read_bytes()
        if path.suffix == ".safetensors" and rng.random() < 0.5:
            header, rest = huggingface.split(data)
            name, keys = rng.choice(list(header)), ["dtype", "shape", "data_offsets"]
            place, key = rng.choice([(header, name), (header[name], rng.choice(keys)), (header, "x")])
            another = dict(rng.choice(list(header.values())))
            place[key] = rng.choice([random_json(rng), another, "F16", [0, 64], [8, 4], [2**70, 2]])
            path.write_bytes(huggingface.joined(header, rest))
        elif path.suffix == ".json" and rng.random() < 0.7:
            values = json.loads(data)
            place = rng.choice([values, *(value for value in values.values() if isinstance(value, dict))])
            known = [*place, *KEYS]
            for _ in range(rng.choice([1, 1, 2])):
                place[rng.choice(known)] = random_json(rng)
            path.write_text(json.dumps(values))
        else:
            start = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
            path.write_bytes(damaged(rng, data, rng.choice(files).read_bytes(), start, [0, 4, 8, start]))
    try:
        checkpoint = load_checkpoint(folder)
        shapes = architecture_of(checkpoint.config).shapes(checkpoint.config)
        for name, tensor in checkpoint.tensors.items():
            each = [t[:] for t in tensor] if isinstance(tensor, list) else [tensor[:]]
            assert {array.shape for array in each} == {shapes[name][1:] if isinstance(tensor, list) else shapes[name]}, name
            assert not isinstance(tensor, list) or len(each) == shapes[name][0], name
    except CheckpointError as error:
        return one_line(error, str(folder))
    assert set(checkpoint.tensors) == set(shapes)
    assert all(0 <= i < checkpoint.config.vocab_size for i in [*checkpoint.end_marks, checkpoint.bos or 0])
    return FINE


def random_checkpoint(rng):
    """A small whole file, version 0 to 2."""
    version, config = rng.randrange(3), random_config(rng)
    tensors = made.random_tensors(config, rng.randrange(1000))
    if version < 2:
        return version, made.checkpoint_bytes(config, tensors, version)
    group = math.gcd(config.dim, rng.choice([config.dim * config.hidden_dim, 1, 2, 4, 64]))
    return version, made.int8_checkpoint_bytes(config, made.quantized_tensors(config, tensors, group), group)


@functools.cache
def compile_what_checkpoints_need():
    """Which takes memory of its own, where nothing is kept yet."""
    path, config = FOLDER / "sound.bin", Config(32, 40, 2, 4, 2, 300, 40)
    tensors = made.random_tensors(config, 0)
    quantized = made.int8_checkpoint_bytes(config, made.quantized_tensors(config, tensors, 8), 8)
    for data in (made.checkpoint_bytes(config, tensors, 1), quantized):
        path.write_bytes(data)
        for int8 in (False, True):
            load_model(path, int8, n_threads=1).forward([1, 2, 3], 3)


def checkpoints(rng):
    """A damaged checkpoint is refused in one line that names it, or is a model; memory follows the file's size."""
    version, data = random_checkpoint(rng)
    first = 0 if version == 0 else 8
    fields = [first + 4 * i for i in range(len(made.FIELDS))] + ([] if version == 0 else [4, 36, 37])
    path = FOLDER / f"model{rng.randrange(3)}.bin"
    if rng.random() < 0.1 and version:  # a seq_len that nobody can fill is no damage to a file without tables
        data = data[: first + 24] + struct.pack("<i", rng.choice([2**31 - 1, 10**6, 4096])) + data[first + 28 :]
    else:
        data = damaged(rng, data, random_checkpoint(rng)[1], made.V1_HEADER if version else 28, fields)
    path.write_bytes(data)
    int8, n = rng.random() < 0.5, rng.choice([1, 2, 20, 64])
    compile_what_checkpoints_need()
    tracemalloc.start()
    try:
        model = load_model(path, int8, n_threads=1)
        tokens = [rng.randrange(model.config.vocab_size) for _ in range(min(n, model.n_positions))]
        assert model.forward(tokens, len(tokens)).shape == (len(tokens), model.config.vocab_size)
        mapped = model._buffers.keys.nbytes + model._buffers.values.nbytes
        outcome = FINE
    except CheckpointError as error:
        outcome, mapped = one_line(error, str(path)), 0
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # rows padded to strips of 32, room for 256 positions and for 64 tokens of activations: 64 times a file of rows of 2
    assert peak + mapped < 64 * len(data) + 2**24, f"{peak} and {mapped} bytes for a file of {len(data)}"
    return outcome


def ggufs(rng):
    """A GGUF file with some harm done is refused in one line that names it, or is a model with its tokenizer."""
    name = rng.choice([*made_gguf.NAMES, *made_gguf.CONVERTED])
    is_written = name in made_gguf.NAMES
    keys, tensors = (made_gguf.model_keys(name), made_gguf.model_tensors(name)) if is_written else made_gguf.converted(name)
    if is_written and rng.random() < 0.5:
        keys |= made_gguf.tokenizer_keys(rng.choice(["gpt2", "llama2", "llama3"]))
        keys.pop(f"{keys['general.architecture']}.vocab_size", None)
        rows = len(keys["tokenizer.ggml.tokens"]) + rng.choice([0, 0, 0, 1])
        numbers = np.random.default_rng(rng.getrandbits(32))
        for table in {"token_embd.weight", "output.weight"} & set(tensors):
            tensors[table] = numbers.standard_normal((rows, tensors[table].shape[1])).astype(np.float32)
    if rng.random() < 0.5:
        for _ in range(rng.choice([1, 1, 2])):
            keys[rng.choice([*keys, "split.count", "general.alignment", "llama.rope.scaling.type"])] = rng.choice(GGUF_VALUES)
    lists = [key for key, value in keys.items() if isinstance(value, list)]
    for key in rng.sample(lists, min(len(lists), rng.choice([0, 0, 1, 2]))):
        items = keys[key] = list(keys[key])
        for _ in range(rng.choice([1, 1, len(items)])):
            items[rng.randrange(len(items))] = rng.choice(GGUF_ITEMS.get(type(items[0]), items))
    if rng.random() < 0.1:
        tensors[rng.choice(["output.weight", "token_embd.weight", "x"])] = made_gguf.Raw("F32", rng.choice(GGUF_SHAPES), b"")
    data, header = made_gguf.gguf_bytes(keys, tensors), len(made_gguf.header_bytes(keys, tensors))
    if rng.random() < 0.7:
        marks = [match.start() for match in re.finditer(b"blk|token|general|split|rope", data[:header])]
        fields = [at + rng.choice([-8, 20, 24, 28, 32, 36]) for at in rng.choices(marks, k=5)]
        data = damaged(rng, data, made_gguf.gguf_bytes(keys, {}), header, [4, 8, 12, 16, 20, *fields])
    path = FOLDER / f"model{rng.randrange(3)}.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        shapes = architecture_of(checkpoint.config).shapes(checkpoint.config)
        for key, tensor in checkpoint.tensors.items():
            each = [t[:] for t in tensor] if isinstance(tensor, list) else [tensor[:]]
            assert {array.shape for array in each} == {shapes[key][1:] if isinstance(tensor, list) else shapes[key]}, key
        if checkpoint.vocabulary:
            tokenizer = gguf_tokenizer(path, checkpoint.vocabulary)
            tokens = tokenizer.encode("the river été")
            assert tokens and all(0 <= token < checkpoint.config.vocab_size for token in [*tokens, *tokenizer.end_marks])
            tokenizer.decode(tokens)
    except (CheckpointError, TokenizerError) as error:
        return one_line(error, str(path))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**26, f"{peak} bytes for a file of {len(data)}"
    return FINE


# Kinds of weights


def random_matrix(rng, kind, rows, n):
    """Of a type of blocks, or of floats, as a GGUF file holds it; weights of up to about 0.3."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    if kind in made_gguf.BLOCK_SIZES:
        return made_gguf.random_blocks(
            numbers, kind, rows, n, rng.choice([0.1, 1.0]) * {"Q8": 2e-3, "Q6": 1e-3}.get(kind[:2], 0.01)
        )
    floats = numbers.standard_normal((rows, n)).astype(np.float32) * np.float32(0.1)
    return {"F32": floats, "F16": floats.astype(np.float16), "BF16": (floats.view(np.uint32) >> 16).astype(np.uint16)}[kind]


def kinds(rng):
    """Matrices of any types, mixed as they come, in a GGUF file: logits of a float oracle that reads the file's numbers, the same
    bits whatever the passes, the threads and the instructions."""
    types = rng.sample([*made_gguf.BLOCK_SIZES, "F32", "F16", "BF16"], rng.choice([1, 1, 2, 3]))
    unit = max([made_gguf.BLOCK_SIZES.get(kind, (8,))[0] for kind in types])
    dim, hidden = unit * rng.randint(1, 3 if unit < 256 else 1), unit * rng.randint(1, 4 if unit < 256 else 2)
    heads = rng.choice([h for h in (1, 2, 3, 4, 8) if dim % (2 * h) == 0])
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    vocab, layers = rng.choice([5, 31, 32, 33, rng.randint(3, 150)]), rng.randint(1, 2)
    config = Config(dim, hidden, layers, heads, groups, vocab, 80, rng.random() < 0.5)
    stored = {}
    for name, shape in LLAMA.shapes(config).items():
        place = PAIRS_PLACES[name].name
        for i in range(shape[0] if "{}" in place else 1):
            inner = shape[1:] if "{}" in place else shape
            ones = np.ones(inner, np.float32)
            stored[place.format(i)] = ones if len(inner) == 1 else random_matrix(rng, rng.choice(types), *inner)
    numbers = {
        "block_count": layers, "context_length": 80, "embedding_length": dim, "feed_forward_length": hidden,
        "attention.head_count": heads, "attention.head_count_kv": groups, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    path = FOLDER / "kinds.gguf"
    keys = {"general.architecture": "llama"} | {f"llama.{key}": number for key, number in numbers.items()}
    path.write_bytes(made_gguf.gguf_bytes(keys, stored))
    checkpoint = load_checkpoint(path)
    kind = rng.choice([None, INT8, INT4])
    weights = LLAMA.pack(checkpoint.config, checkpoint.tensors, kind)
    first = Transformer(checkpoint.config, weights, 1, kv="f32")  # of half precision a logit says less about products
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
    expected = np.concatenate([first.forward(tokens[: i + 1]).copy() for i in range(len(tokens))])
    oracle = reference.forward(checkpoint.config, numbers_of(checkpoint, weights, kind), tokens)
    off = np.abs(expected - oracle).max() / np.abs(oracle).max()
    # 1e-7 where the same activations are rounded up; one that is not, as float64 has it nearer to the other side, makes 0.02
    assert off < 0.05, f"logits are off by {off:.4f} of the largest"
    for _ in range(3):
        other = twin(rng, first)
        end = rng.randint(1, len(tokens))
        other.forward(tokens[: rng.randint(0, end)], 0)
        n_logits = rng.randint(0, end)
        same_bits(other.forward(tokens[:end], n_logits), expected[end - n_logits : end])
    return FINE


def numbers_of(checkpoint, weights, kind):
    """What the oracle takes: the file's numbers, or those that floats become, and in which groups activations are seen."""
    tensors = {
        name: [t[:] for t in tensor] if isinstance(tensor, list) else tensor[:] for name, tensor in checkpoint.tensors.items()
    }
    for name, piece in LLAMA.pieces(checkpoint.config, checkpoint.tensors, kind).items():
        matrix = weights.matrices[name]
        for key, layer in piece.part.tensors:
            tensor = checkpoint.tensors[key] if layer is None else checkpoint.tensors[key][layer]
            array = tensor[:]
            if not hasattr(tensor, "type"):
                alone = pack([tensor], matrix.kind)
                array = alone.kind.rows(alone.strips, alone.n, alone.group)[: len(array)]
            array = reference.Seen(array, matrix.group) if matrix.group else array
            if layer is None:
                tensors[key] = array
            else:
                tensors[key][layer] = array
    return tensors


# Tokenizers


def random_text(rng):
    kinds = [made.CHARACTERS, "  then lower", "é日🙂ñΩ漢\u200d\u0301\x00\x1b", "<0x41>\n<s></s>", "\ud800\udfff"]
    pool = "".join(rng.choices(kinds, [9, 9, 5, 3, 0.3], k=2))
    text = rng.choices(pool, k=rng.choice([0, 1, rng.randint(2, 60)]))
    return "".join(chr(rng.randrange(0x110000)) if rng.random() < 0.02 else character for character in text)


def tokenizers(rng):
    """A damaged tokenizer is refused by name, or encodes and decodes whatever comes."""
    pieces = made.small_pieces()
    if rng.random() < 0.5:
        more = [bytes(rng.choices(b"aeht <0x>\xc3\xa9", k=rng.randint(0, 4))) for _ in range(rng.randint(0, 80))]
        pieces = made.base_pieces() + [(piece, rng.choice([0.0, -1.0, rng.gauss(0, 1)])) for piece in more]
    data = made.tokenizer_bytes(pieces)
    if rng.random() < 0.8:
        lengths = [0, *itertools.accumulate((8 + len(piece) for piece, _ in pieces), initial=4)][:-1]
        data = damaged(rng, data, made.tokenizer_bytes(made.small_pieces()), 4, [*lengths, *(at + 4 for at in lengths[1:])])
    path = FOLDER / f"tokenizer{rng.randrange(3)}.bin"
    path.write_bytes(data)
    try:
        tokenizer = Tokenizer(path)
    except TokenizerError as error:
        return one_line(error, str(path))
    names = [piece for piece, _ in made.base_pieces()]
    is_byte = re.compile(rb"<0x[0-9A-Fa-f]{2}>").fullmatch
    others = [*tokenizer.pieces[:3], *tokenizer.pieces[made.FIRST_PIECE :]]
    whole = tokenizer.pieces[3 : made.FIRST_PIECE] == names[3:] and b" " in others and not any(map(is_byte, others))
    for _ in range(5):
        text = random_text(rng)
        try:
            tokens = tokenizer.encode(text)
        except ValueError as error:
            assert any("\ud800" <= character <= "\udfff" for character in text), text
            one_line(error, "half a character")
            continue
        assert tokens[0] == BOS and all(0 <= token < tokenizer.vocab_size for token in tokens)
        told = tokenizer.decode(tokens)
        if whole and not {BOS, EOS} & set(tokens[1:]):
            assert told == text, f"{text!r} becomes {told!r}"
        tokens = rng.choices(range(tokenizer.vocab_size), k=rng.randint(0, 40))
        stream = TextStream(tokenizer)
        pushed = [(stream.peek([token])[0], stream.push(token)) for token in tokens]
        assert all(peeked == told for peeked, told in pushed)
        assert "".join(told for _, told in pushed) + stream.end() == tokenizer.decode(tokens)
    return FINE


# Texts


def random_model(rng, config, int8=None, loud=False, n_positions=None):
    """Small random weights; loud: some so large that sums, squares or products may overflow, and some that nearly vanish."""
    tensors = made.random_tensors(config, rng.randrange(10**6), rng.choice([0.05, 0.3, 1.0]))
    if loud:
        for name in rng.sample(sorted(tensors), rng.randint(1, 2)):
            part = tensors[name].reshape(-1)[slice(0, None, rng.choice([1, 3, 101]))]
            with np.errstate(over="ignore", under="ignore"):
                part[:] = np.clip(part * np.float32(10 ** rng.uniform(-44, 38)), -3e38, 3e38)
    int8 = rng.random() < 0.5 if int8 is None else int8
    kv = rng.choice(get_args(KV))
    return Transformer(config, LLAMA.pack(config, tensors, INT8 if int8 else FP32), 1, n_positions, kv)


def twin(rng, model, n_positions=None):
    """Another model of the same weights, whose threads and instructions are its own affair."""
    most, weights = rng.choice([1, 1, available_threads()]), model.weights
    if weights.kind == INT8.name:
        kind = rng.choice([NATIVE_INT8, PORTABLE_INT8])
        weights = replace(weights, matrices={name: replace(m, kind=kind) for name, m in weights.matrices.items()})
    other = Transformer(model.config, weights, most, n_positions or model.n_positions, model.kv)
    other.n_threads = rng.randint(1, most)
    return other


def random_sampling(rng):
    temperature = rng.choice([0, 0.0, 1e-30, 1e-3, 0.8, 1.0, 1.0, 2.5, 1e6, 1e300])
    top_p = rng.choice([0, 1, 1.0, 0.9, 0.5, 1e-3, 1e-9, 5e-324, rng.random()])
    seed = rng.choice([0, 1, 2**63 - 1, rng.randrange(10**9)])
    return Sampling(temperature, rng.choice([0, 0, 1, 2, 5, 300, 2**70]), top_p, seed)


def random_length(rng):
    return FixedLength(rng.choice([1, 2, 3, 4, 7, 9, 63]))


def written(target, draft, sampling, verify, prompt, n, policy, branches=False):
    """The tokens of a text up to its end or its error, and the error's words. branches: whether proposals are trees."""
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    drafter = NgramDrafter(END_MARKS) if draft == "ngram" else None
    if draft and not drafter:
        args = draft, Sampler(target.config.vocab_size, sampling, draft.config.vocab_size), verifier.draft_noise, END_MARKS
        drafter = (TreeDrafter if branches else ModelDrafter)(*args)
    tokens = []
    try:
        for event in decode(target, drafter, verifier, prompt, n, policy, END_MARKS):
            tokens += event.tokens if isinstance(event, Step) else []
    except ValueError as error:
        one_line(error, "not finite")
        return tokens, str(error)
    return tokens, ""


def texts(rng):
    """Whatever the shapes, the draft, the settings and the threads: the plain text, of logits that only its tokens decide."""
    config, loud = random_config(rng), rng.random() < 0.4
    n_positions = rng.choice([None, None, config.seq_len + rng.randint(0, 60)])
    first = random_model(rng, config, None, loud, n_positions)
    n_prompt = 1 + rng.randint(0, first.n_positions - 1) // rng.choice([1, 9])
    prompt = [BOS, *rng.choices(range(config.vocab_size), k=n_prompt - 1)]
    sampling, n = random_sampling(rng), rng.choice([0, 1, 2, 40])
    plain, flaw = written(first, None, sampling, "coupled", prompt, n, FixedLength(1))
    target = twin(rng, first)
    draft = twin(rng, first)
    if rng.random() < 0.6:
        draft_config = random_config(rng, config.vocab_size)
        draft = twin(rng, random_model(rng, draft_config, None, loud and rng.random() < 0.5), first.n_positions)
    chain = FixedLength(rng.choice([1, 2, 3, 4, 7, 8, 9, 63]))
    for proposer, *policy in (
        (draft, chain),
        (draft, random_length(rng), True),
        (draft, random_length(rng), True),
        ("ngram", chain),
    ):
        tokens, error = written(target, proposer, sampling, "coupled", prompt, n, *policy)
        assert error == flaw, f"{error!r} where the plain text has {flaw!r}"
        assert tokens == (plain[: len(tokens)] if error else plain), f"{tokens} where the plain text is {plain}"
    for verify, *policy in (("rejection", FixedLength(4)), ("rejection", random_length(rng), True), ("block", FixedLength(4))):
        kept, _ = written(twin(rng, first), rng.choice([draft, "ngram"]), sampling, verify, prompt, n, *policy)
        assert all(0 <= token < config.vocab_size for token in kept)
        assert sampling.temperature or kept == plain[: len(kept)]
    # the logits, one token a pass, by a model that ran nothing else
    text = (prompt + plain)[: first.n_positions]
    alone = twin(rng, first)
    expected = np.concatenate([alone.forward(text[: i + 1]).copy() for i in range(len(text))])
    if not loud and config.seq_len >= len(text) and first.weights.kind == FP32.name:
        assert np.isfinite(expected).all()
    for token, row in zip([*plain, None], expected[len(prompt) - 1 :], strict=False):
        sound = not np.isnan(row).any() and np.isfinite(row.max())
        assert token is None or sound, "a text of logits that are not finite"
        assert not (token is None and flaw and sound), "no text of logits that are finite"
        assert token is None or sampling.temperature or token == row.argmax()
    for _ in range(6):
        other = [rng.randrange(config.vocab_size) for _ in range(rng.randint(0, 70))]
        stranger = (text[: rng.randint(0, len(text))] + other)[: first.n_positions]
        target.forward(stranger, rng.randint(0, min(64, len(stranger))))
        end = rng.randint(1, len(text))
        n_logits = rng.randint(0, min(end, 64))
        same_bits(target.forward(text[:end], n_logits), expected[end - n_logits : end])
    return REFUSED if flaw else FINE


def stages(rng):
    """Whatever guesses for a draft, and whatever the clock says: its proposals are those that it makes alone."""
    config = random_config(rng)
    first = random_model(rng, config, None, rng.random() < 0.2)
    draft, smaller = (
        twin(rng, random_model(rng, random_config(rng, rng.choice([config.vocab_size, rng.randint(3, config.vocab_size)]))), n)
        for n in (first.n_positions, rng.randint(1, 200))
    )
    prompt = [BOS, *rng.choices(range(config.vocab_size), k=rng.randint(0, first.n_positions - 1))]
    if rng.random() < 0.5:
        prompt = (prompt[: rng.randint(1, 5)] * first.n_positions)[: len(prompt)]
    sampling, gamma = random_sampling(rng), rng.choice([1, 2, 4, 9, 63])
    for verify in VERIFIERS:
        said = []
        for guesser in (None, NgramDrafter(END_MARKS), smaller):
            verifier = VERIFIERS[verify](config.vocab_size, sampling)
            of = (config.vocab_size, sampling)
            drawing = (Sampler(*of, draft.config.vocab_size), verifier.draft_noise, END_MARKS)
            drafter, models = ModelDrafter(draft, *drawing), [draft]
            if guesser:
                passes, token = {1: 10.0 ** rng.uniform(-7, 0), 8: 10.0 ** rng.uniform(-7, 0)}, 0.0
                if guesser is smaller:
                    models.append(smaller)
                    token = 10.0 ** rng.uniform(-7, -1)
                    guesser = ModelDrafter(smaller, Sampler(*of, smaller.config.vocab_size), *drawing[1:])
                acceptance = Acceptance(MARGIN_RATES if token else ODDS_RATES)
                guesses = DraftLengthPolicy(CostModel(CostCurve(passes, token)), acceptance, not token)
                drafter = StagedDrafter(models, guesser, guesses, *drawing)
            target, steps = twin(rng, first), []
            try:
                for event in decode(target, drafter, verifier, list(prompt), 30, FixedLength(gamma), END_MARKS):
                    if isinstance(event, Step):
                        steps.append((event.tokens, event.draft_tokens, event.n_accepted, event.stop_reason))
            except ValueError as error:
                one_line(error, "not finite")
                steps.append(str(error))
            said.append(steps)
        assert said[1:] == said[:1] * 2, f"{verify}: {said[1:]} where it is {said[0]}"
    return FINE


def random_tree(rng, vocab, n):
    """n nodes or so of few tokens, so that siblings may be alike, and their parents."""
    few = rng.choices(range(vocab), k=rng.choice([1, 2, 5, 60]))
    nearest = rng.choice([1, 2, 64])  # 1: a chain
    parents = [-1 if rng.random() < 0.1 else rng.randrange(max(node - nearest, -1), node) for node in range(n)]
    return rng.choices(few, k=n), parents


def path_to(node, parents):
    """The nodes from one that follows the text down to that one; none for -1."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def trees(rng):
    """Whatever is run, grown, kept and asked for in between: each node's logits are those of the chain of its ancestors."""
    config = random_config(rng)
    first = random_model(rng, config, None, rng.random() < 0.2, rng.choice([None, config.seq_len + rng.randint(0, 400)]))
    model, chains, most = twin(rng, first), twin(rng, first), first.n_positions
    text = rng.choices(range(config.vocab_size), k=rng.randint(1, most) if rng.random() < 0.5 else min(most, rng.randint(1, 20)))
    nodes, parents, refused = [], [], False

    def expected(ends):
        return np.concatenate([chains.forward(text + [nodes[i] for i in path_to(end, parents)]).copy() for end in ends])

    for _ in range(rng.randint(3, 12)):
        match rng.randrange(6):
            case 0:
                nodes, parents = random_tree(rng, config.vocab_size, rng.choice([0, 1, 7, 63, rng.randint(0, 63)]))
            case 1:  # as a draft grows it
                more, links = random_tree(rng, config.vocab_size, rng.randint(0, 63 - len(nodes)))
                parents += [link + len(nodes) if link >= 0 else rng.randrange(-1, len(nodes)) for link in links]
                nodes += more
            case 2 | 3 if nodes:  # a path is text from now on, whether it is kept, found or run again
                path = path_to(rng.randrange(len(nodes)), parents)
                if model._nodes == [*zip(nodes, parents, strict=True)] and rng.random() < 0.6:
                    model.keep(path)
                text, nodes, parents = text + [nodes[node] for node in path], [], []
                text += rng.choices(range(config.vocab_size), k=rng.choice([0, 1, 1, 3]))
                text = text[:most]
            case 4:
                n_logits = rng.randint(0, min(len(text), 64))
                same_bits(model.forward(text, n_logits), chains.forward(text, n_logits))
            case 5:
                text, nodes, parents = text[: rng.randint(1, len(text))], [], []
        ends = rng.sample(range(-1, len(nodes)), 1 + len(nodes))
        n_logits = rng.choice([len(nodes) + 1, rng.randint(0, len(nodes) + 1)])
        depth = max((len(path_to(end, parents)) for end in ends), default=0)
        try:
            logits = model.forward_tree(text, nodes, parents, n_logits).copy()
            assert len(text) + depth <= most
        except ValueError as error:
            assert len(text) + depth > most
            refused, nodes, parents = one_line(error, "do not fit"), [], []
            continue
        for end in ends[:6]:
            if len(nodes) - end <= n_logits:
                same_bits(logits[end - len(nodes)][None], expected([end]))
    return REFUSED if refused else FINE


# Sampling


def random_logits(rng, n):
    numbers = np.random.default_rng(rng.getrandbits(32))
    logits = (numbers.standard_normal(n) * rng.choice([0, 1e-6, 0.1, 1, 8, 100])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.2:
        logits[numbers.random(n) < rng.random()] = -np.inf
    for odd in (np.nan, np.inf, 1e38, -1e38, -0.0, 1e-45):
        if rng.random() < 0.05:
            logits[numbers.integers(n)] = odd
    return logits


def sampling(rng):
    """Probabilities are the oracle's; the sum is 1, the likeliest token has its share, and only what has one is drawn."""
    n = rng.choice([1, 2, 3, 15, 16, 17, 105, rng.randint(1, 2000)])
    logits, s = random_logits(rng, n), random_sampling(rng)
    temperature, top_k, top_p = float(s.temperature), min(s.top_k, n), float(s.top_p)
    probs, keys = zeros(1, round_up(n, LANES)), np.empty(n, np.uint64)
    position = rng.randrange(1000)
    best = np.empty(2, np.int64)
    n_drawn, _ = draw(probs, logits, temperature, top_k, top_p, s.seed, 0, position, keys, best, np.empty(2))
    token = int(best[0]) if n_drawn else -1
    p = probs[0, :n].astype(np.float64)
    proposal, q = rng.randrange(n), zeros(*probs.shape)
    q[0, :n] = p if rng.random() < 0.3 else np.random.default_rng(s.seed).dirichlet(np.full(n, 0.3))
    q[0, proposal] = max(q[0, proposal], 1e-6)
    judged = probs.copy()
    redrawn = keep_or_redraw(judged, q, n, proposal, s.seed, 2, 0, position)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        assert token == redrawn == -1
        return REFUSED
    assert p[token] > 0 and p[redrawn] > 0, f"drawn: {token} of {p[token]}, {redrawn} of {p[redrawn]}"
    odds, weight = weigh_prefix(probs, q, n, proposal, rng.choice([1.0, 0.5, 1e-30]))
    assert 0 <= odds <= 1 and 0 <= weight <= 1 and (weight > 0) == (p[proposal] > 0), f"{odds}, {weight}"
    assert abs(p.sum() - 1) < 1e-4 and p.min() >= 0 and not probs[0, n:].any()
    with np.errstate(over="ignore"):  # 1 / temperature of what is no normal number
        whole = reference.probabilities(logits, temperature, 0, 0)
    assert p[whole.argmax()] > 0 or whole.max() - whole[p > 0].max() < 1e-6 * whole.max()
    # the set is one of the first k in rank; a float32 mass may end it one place of equal weight sooner or later
    kept = np.flatnonzero(p)
    assert top_k == 0 or len(kept) <= top_k
    left = whole[p == 0].max(initial=0.0)
    assert whole[kept].min() >= left * (1 - 1e-4) - 1e-37
    if temperature and 0 < top_p < 1:
        assert whole[kept].sum() > top_p - 1e-4 or len(kept) == top_k, "too few"
        assert whole[kept].sum() - whole[kept].min() <= top_p + 1e-4, "too many"
    elif temperature:
        assert len(kept) == top_k or left < 1e-36, "a token is missing that nothing leaves out"
    np.testing.assert_allclose(p[kept], whole[kept] / whole[kept].sum(), rtol=1e-3, atol=1e-6)
    return FINE


# Streams


@functools.cache
def small_tokenizer():
    path = FOLDER / "tok300.bin"
    path.write_bytes(made.tokenizer_bytes(made.small_pieces()))
    return Tokenizer(path)


def random_jobs(rng):
    """A few requests to three decoders that share two models, and the models."""
    models = [random_model(rng, random_config(rng, 300, seq_len=rng.choice([64, 64, 300]))) for _ in range(2)]
    target, draft = (twin(rng, model, max(model.n_positions for model in models)) for model in models)
    verify, gamma, tree = rng.choice(list(VERIFIERS)), rng.randint(1, 9), rng.choice(["on", "off"])
    tree = "off" if verify == "block" else tree
    pairs = [(target, draft), (draft, target), (target, rng.choice([None, "ngram"]))]
    ways = {"gamma": gamma, "verify": verify, "tree": tree}
    decoders = [SpeculativeDecoder(*pair, small_tokenizer(), **ways) for pair in pairs]
    jobs = []
    for _ in range(rng.randint(2, 5)):
        s, prompt = random_sampling(rng), "".join(rng.choices(made.CHARACTERS, k=rng.randint(0, 10)))
        jobs.append((rng.choice(decoders), (prompt, rng.choice([0, 5, 30]), s)))
    return (target, draft), jobs


def streamed(decoder, request, on_proposal=lambda: None):
    tokens = []
    for event in decoder.stream(*request):
        tokens += event.tokens if isinstance(event, Step) else []
        if isinstance(event, Proposal):
            on_proposal()
    return tokens


def generated(decoder, request):
    prompt, n, s = request
    text, statistics = decoder.generate(prompt, n, s)
    return text, statistics.n_generated


def streams(rng):
    """Texts that take turns, nest and run in several threads each say what they say alone."""
    models, jobs = random_jobs(rng)
    alone = [(streamed(*job), generated(*job)) for job in jobs]
    inner = rng.randrange(len(jobs))

    def nest():
        assert generated(*jobs[inner]) == alone[inner][1], "nested"

    running = [(i, decoder.stream(*request), []) for i, (decoder, request) in enumerate(jobs)]
    while running:
        i, events, tokens = turn = rng.choice(running)
        if event := next(events, None):
            tokens += event.tokens if isinstance(event, Step) else []
        else:
            assert tokens == alone[i][0], f"{tokens} taking turns, alone {alone[i][0]}"
            running.remove(turn)
        if rng.random() < 0.05:
            nest()

    def thread(plan):
        for i, way, n_threads in plan:
            model = models[i % 2]
            model.n_threads = min(n_threads, model._most_threads)
            got = generated(*jobs[i]) if way else streamed(*jobs[i], nest) if n_threads > 1 else streamed(*jobs[i])
            assert got == alone[i][way], f"{got} in a thread, alone {alone[i][way]}"

    plans = [[(rng.randrange(len(jobs)), rng.randrange(2), rng.randint(1, 2)) for _ in range(3)] for _ in range(3)]
    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(thread, plans))
    return FINE


# Values


class Index:
    """A whole number of another kind."""

    def __index__(self):
        return 5


def some_value(rng):
    """Anything that Python may hand over."""
    return rng.choice([
        None, True, False, 0, 1, 3, 5, 64, -1, 10**9, 2**63, 2**64, -(2**63), 10**400, 10**5000, 0.0, -0.0, 0.5, 1.0, 2.5,
        5e-324, -1e-9, 1e308, math.nan, math.inf, -math.inf, 1j, Fraction(1, 3), Fraction(10**400), "", "ab", "1", "é日🙂",
        "a\0b", "\ud800", "coupled", "rejection", "block", "self", "both", "on", "x y", "x" * 5000,
        b"", b"ab", bytearray(b"ab"), [],
        [1, 2, 3], [1.0], ["1"], [[1]], [None], [-1], [300], [10**30], [1] * 500, [np.int64(1)], [Index()], (1, 2), {}, {1},
        {"a": 1}, range(3), iter([1, 2]), object(), bool, Index(), len, lambda *_: None, slice(3), NotImplemented, ...,
        np.int8(5), np.uint8(250), np.int64(7), np.uint64(2**63), np.float16(0.5), np.float32(0.5), np.float64(math.nan),
        np.bool_(True), np.array(5), np.array([1, 2]), np.zeros((3, 3)), np.array([]), np.array(["a"]), np.arange(5),
        Path("nowhere"), Path("."), np.str_("ab"),
    ])  # fmt: skip


@functools.cache
def small_decoder():
    for i, seq_len in enumerate((90, 40)):
        config = Config(32, 40, 2, 4, 2, 300, seq_len)
        (FOLDER / f"{i}.bin").write_bytes(made.checkpoint_bytes(config, made.random_tensors(config, i), 1))
    decoder = SpeculativeDecoder(FOLDER / "0.bin", FOLDER / "1.bin", small_tokenizer(), n_threads=1)
    decoder.warm_up()
    return decoder


REQUEST = ("prompt", "max_tokens", "temperature", "top_k", "top_p", "seed")
FILES = ("target", "draft", "tokenizer")
CALLS = (
    (REQUEST, lambda d, given: d.generate(**({"max_tokens": 5} | given))),
    ((*REQUEST[:2], "sampling"), lambda d, given: list(d.stream(**({"max_tokens": 5} | given)))),
    (REQUEST[2:], lambda d, given: Sampling(**given)),
    (
        (*FILES, "gamma", "verify", "tree", "n_threads", "quantize", "kv"),
        lambda d, given: SpeculativeDecoder(**({"target": FOLDER / "0.bin", "tokenizer": d.tokenizer} | given)).generate("ab", 2),
    ),
    (("n_threads", "n_positions", "kv"), lambda d, given: Transformer(d.target.config, d.target.weights, **given).forward([1])),
    (("tokens", "n_logits"), lambda d, given: d.target.forward(**({"tokens": [1, 2, 3]} | given))),
    (
        ("nodes", "parents", "n_logits"),
        lambda d, given: d.target.forward_tree(**({"tokens": [1, 2, 3], "nodes": [5, 6, 7], "parents": [-1, 0, 0]} | given)),
    ),
    (("path",), lambda d, given: (d.target.forward_tree([1], [5, 6], [-1, 0]), d.target.keep(**given))),
    (("gamma", "verify", "tree"), lambda d, given: [setattr(d, name, value) for name, value in given.items()]),
    (("n_threads",), lambda d, given: setattr(d.target, *given.popitem())),
)


def values(rng):
    """Whatever comes as a parameter works, or is a TypeError or ValueError of one line that names it."""
    names, call = rng.choice(CALLS)
    given = {name: some_value(rng) for name in rng.sample(names, rng.randint(1, min(2, len(names))))}
    # how many logits there may be hangs on the tokens; a file that is none is told by its name
    words = [name.removesuffix("s") for name in given] + ["n_logits"] * ("tokens" in given)
    files = [str(given[name]) for name in FILES if isinstance(given.get(name), str | Path)]
    try:
        call(small_decoder(), given)
    except (TypeError, ValueError) as error:
        return one_line(error, *words, *files, *["no letters"] * bool(files))
    return FINE


# Caches

SMALL = """
from .runtime.code_cache import compiled
{line}
@compiled
def {name}(x):
    return {value}
"""


def ask_package():
    """What a process that has just begun gets from the package."""
    for name in [name for name in sys.modules if name.split(".")[0] == "fuzzed"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    with mock.patch.dict(os.environ, NUMBA_CACHE_DIR=str(FOLDER / "code")):
        return [importlib.import_module(f"fuzzed.{name}").f(1) for name in ("high", "low")]


@functools.cache
def cache_package():
    """A package of two compiled functions, which keeps its machine code as ours does, and its whole code files."""
    folder = FOLDER / "fuzzed"
    (folder / "runtime").mkdir(parents=True)
    files = {
        f"runtime/{name}.py": (made.ROOT / "specdec/runtime" / f"{name}.py")
        .read_text(encoding="utf-8")
        .replace("specdec.", "fuzzed.")
        for name in ("code_cache", "compile_locks", "linking")
    }
    source = files["runtime/code_cache.py"]
    ours = re.sub(r"(?ms)^SOURCES = .*?^STAMP", 'SOURCES = ("runtime/code_cache.py", "low.py", "high.py")\nSTAMP', source)
    low = SMALL.format(line="", name="f", value="x + 3")
    high = SMALL.format(line="from .low import f as low", name="f", value="10 * low(x)")
    files |= {"runtime/code_cache.py": ours, "low.py": low, "high.py": high}
    for name in ("__init__.py", "runtime/__init__.py", *files):
        (folder / name).write_text(files.get(name, ""), encoding="utf-8")
    sys.path.insert(0, str(FOLDER))
    assert ask_package() == [40, 4]
    code = [*(FOLDER / "code").rglob("*.code")]
    return code[0].parent, {path.name: path.read_bytes() for path in code}


def caches(rng):
    """Machine code in any state is as good as none."""
    folder, whole = cache_package()
    for name, data in whole.items():
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        match rng.randrange(8):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(rng.choice([path, folder, FOLDER / "nowhere", "/dev/null", Path(__file__)]))
            case 2:  # another function's code
                path.write_bytes(rng.choice(list(whole.values())))
            case 3:
                path.write_bytes(data)
            case 4 | 5 | 6:
                path.write_bytes(damaged(rng, data, rng.randbytes(900), 32, [0, 28, 32, len(data) - 4]))
    got = ask_package()
    assert got == [40, 4], f"{got}"
    return FINE


CAMPAIGNS = {
    campaign.__name__: campaign
    for campaign in (
        checkpoints,
        folders,
        ggufs,
        heads,
        kinds,
        tokenizers,
        texts,
        stages,
        trees,
        sampling,
        streams,
        values,
        caches,
    )
}
if all(importlib.util.find_spec(package) for package in ("jinja2", "tokenizers")):
    from tests.tools.fuzz_chat import chats, harm

    CAMPAIGNS |= {"chats": chats, "harm": harm}


def run_case(name, case):
    """How that case ends: fine or refused; or whatever it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return CAMPAIGNS[name](random.Random(f"{name} {case}"))


def run(name, seconds, first, progress=None, at_least=1):
    """How the cases from number `first` on end in so many seconds, at least so many of them; and the failures, told."""
    ends, failures, begin = Counter(), [], time.monotonic()
    case = first
    while case < first + at_least or time.monotonic() - begin < seconds:
        if progress:
            progress.value = case
        try:
            ends[run_case(name, case)] += 1
        except Exception as error:
            ends["failed"] += 1
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failures.append(f"{told}\n    python -m tests.tools.fuzz --only {name} --case {case}")
        case += 1
    return ends, failures[:SHOWN]


def run_apart(name, seconds, first):
    """The same in a process of its own, so that one that dies or hangs is told with its case."""
    context = multiprocessing.get_context("spawn")
    progress, (here, there) = context.Value("q", first), context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(there, name, seconds, first, progress))
    process.start()
    there.close()
    last, since = first, time.monotonic()
    while not here.poll(1):
        if progress.value != last:
            last, since = progress.value, time.monotonic()
        if time.monotonic() - since > PATIENCE:
            process.kill()
            break
    try:
        result = here.recv()
    except EOFError:
        repeat = f"python -m tests.tools.fuzz --only {name} --case {progress.value}"
        result = Counter(fine=progress.value - first, failed=1), [f"hangs, or ends its process\n    {repeat}"]
    process.join()
    return result


def _report(pipe, *args):
    try:
        pipe.send(run(*args))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="in all (5)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="where the cases begin (the time)")
    parser.add_argument("--only", choices=CAMPAIGNS, action="append", help="this campaign")
    parser.add_argument("--case", type=int, help="this case of it alone")
    given = parser.parse_args()
    names = given.only or list(CAMPAIGNS)
    if given.case is not None:
        print(f"{names[0]} {given.case}: {run_case(names[0], given.case)}")
        return 0
    failed = False
    for name in names:
        ends, failures = run_apart(name, 60 * given.minutes / len(names), 1_000_000 * given.seed)
        told = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
        print(f"{name}: {sum(ends.values())} cases, {told}", *failures, sep="\n  ", flush=True)
        failed |= bool(ends["failed"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
