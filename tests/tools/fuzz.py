"""Search for inputs that break a promise: `python -m tests.tools.fuzz --minutes 5`, or one campaign with `--only NAME`.

A case is a function of its campaign and its number. It ends fine, refused as promised, or failed. A failure is repeated with
`--only NAME --case NUMBER`, unless it depends on thread timing.
"""

import argparse
import functools
import importlib.util
import itertools
import math
import multiprocessing
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

import numpy as np

from specdec.draft.acceptance import LOOKUP_ACCEPTANCE, MARGIN_ACCEPTANCE, Acceptance
from specdec.draft.draft_length import CostCurve, CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.staged import StagedDrafter
from specdec.draft.tree import TreeDrafter
from specdec.events import Proposal, Step
from specdec.families.gguf_common import INTERLEAVED_ROPE_TENSORS
from specdec.loaders import CheckpointError, load_checkpoint
from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.model import KVFormatName, Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, INT3, INT4, INT8
from specdec.quant.gguf_repacking import GGUFFormat
from specdec.quant.int8 import NATIVE_INT8, PORTABLE_INT8
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.memory import zeros
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import LANES, round_up
from specdec.sampling import Sampler, Sampling, accept_or_resample, compute_block_acceptance, draw
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text.gguf_tokenizer import load_gguf_tokenizer
from specdec.tokenizer import BOS, EOS, StreamingDetokenizer, Tokenizer, TokenizerError
from specdec.verification import VERIFIERS
from tests.tools import checkpoint_files as made
from tests.tools import gguf_files as made_gguf
from tests.tools import hf_folders as huggingface
from tests.tools import reference
from tests.tools.cache_contents import get_buffers
from tests.tools.decode import END_MARKS, decode, get_cache
from tests.tools.fuzz_common import FINE, FOLDER, REFUSED, check_one_line, check_tensors, corrupt, damage_folder, damage_gguf
from tests.tools.fuzz_heads import fuzz_head
from tests.tools.half_precision import to_half
from tests.tools.random_models import get_path

HANG_TIMEOUT_S = 120  # a case that takes longer hangs
MAX_SHOWN_FAILURES = 5  # per campaign
KEYS = (
    "attention_bias", "rope_scaling", "rope_theta", "head_dim", "quantization_config", "sliding_window", "layer_types",
    "sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar",
)  # fmt: skip


def random_config(rng, vocab=0, **fixed):
    head_dim = 2 * rng.randint(1, 12)
    heads = rng.randint(1, max(1, min(9, 100 // head_dim)))
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    vocab = vocab or rng.choice([3, 4, 6, 31, 32, 33, 64, rng.randint(3, 200)])
    seq_len = rng.choice([3, 16, 17, rng.randint(3, 200)])
    config = ModelConfig(
        heads * head_dim, rng.randint(1, 150), rng.randint(1, 3), heads, groups, vocab, seq_len, rng.random() < 0.5
    )
    return ModelConfig(**(vars(config) | fixed))


def assert_same_bits(a, b):
    """Raise AssertionError unless two arrays are equal bit for bit; any NaN equals any other."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.where(np.isnan(a), 0, a).view(np.int32), np.where(np.isnan(b), 0, b).view(np.int32))


# Damaged files


def fuzz_folder(rng):
    """Damage a Hugging Face folder: it is refused in one line that names it, or is a model."""
    folder = FOLDER / f"folder{rng.randrange(3)}"
    shutil.rmtree(folder, ignore_errors=True)
    huggingface.copy_fixture(folder, rng.choice(huggingface.NAMES))
    damage_folder(rng, folder, KEYS)
    try:
        checkpoint = load_checkpoint(folder)
        check_tensors(checkpoint)
    except CheckpointError as error:
        return check_one_line(error, str(folder))
    assert all(0 <= i < checkpoint.config.vocab_size for i in [*checkpoint.eos_tokens, checkpoint.bos_token_id or 0])
    return FINE


def random_checkpoint(rng):
    """Return the version (0 to 2) and the bytes of a small valid checkpoint."""
    version, config = rng.randrange(3), random_config(rng)
    tensors = made.random_tensors(config, rng.randrange(1000))
    if version < 2:
        return version, made.checkpoint_bytes(config, tensors, version)
    group = math.gcd(config.dim, rng.choice([config.dim * config.hidden_dim, 1, 2, 4, 64]))
    return version, made.int8_checkpoint_bytes(config, made.quantized_tensors(config, tensors, group), group)


@functools.cache
def compile_checkpoint_kernels():
    """Run each checkpoint format once: compiling takes memory if nothing is cached yet."""
    path, config = FOLDER / "valid.bin", ModelConfig(32, 40, 2, 4, 2, 300, 40)
    tensors = made.random_tensors(config, 0)
    quantized = made.int8_checkpoint_bytes(config, made.quantized_tensors(config, tensors, 8), 8)
    for data in (made.checkpoint_bytes(config, tensors, 1), quantized):
        path.write_bytes(data)
        for int8 in (False, True):
            load_model(path, int8, n_threads=1).new_cache().forward([1, 2, 3], 3)


def fuzz_checkpoint(rng):
    """Damage a checkpoint: it is refused in one line that names it, or is a model; memory is bounded by the file's size."""
    version, data = random_checkpoint(rng)
    first = 0 if version == 0 else 8
    fields = [first + 4 * i for i in range(len(made.FIELDS))] + ([] if version == 0 else [4, 36, 37])
    path = FOLDER / f"model{rng.randrange(3)}.bin"
    if rng.random() < 0.1 and version:  # a huge seq_len is valid in a file without RoPE tables
        data = data[: first + 24] + struct.pack("<i", rng.choice([2**31 - 1, 10**6, 4096])) + data[first + 28 :]
    else:
        data = corrupt(rng, data, random_checkpoint(rng)[1], made.V1_HEADER if version else 28, fields)
    path.write_bytes(data)
    int8, n = rng.random() < 0.5, rng.choice([1, 2, 20, 64])
    compile_checkpoint_kernels()
    tracemalloc.start()
    try:
        model = load_model(path, int8, n_threads=1)
        tokens, cache = [rng.randrange(model.vocab_size) for _ in range(min(n, model.n_positions))], model.new_cache()
        assert cache.forward(tokens, len(tokens)).shape == (len(tokens), model.vocab_size)
        mapped = sum(each.array.nbytes for each in get_buffers(cache).new.own)
        outcome = FINE
    except CheckpointError as error:
        outcome, mapped = check_one_line(error, str(path)), 0
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # rows padded to panels of 32, 256 cached positions and activations of 64 tokens: 64 times the size of a file of rows of 2
    assert peak + mapped < 64 * len(data) + 2**24, f"{peak} and {mapped} bytes for a file of {len(data)}"
    return outcome


def fuzz_gguf(rng):
    """Damage a GGUF file: it is refused in one line that names it, or is a model with its tokenizer."""
    name = rng.choice([*made_gguf.NAMES, *made_gguf.CONVERTED])
    is_written = name in made_gguf.NAMES
    keys, tensors = (
        (made_gguf.make_model_keys(name), made_gguf.make_model_tensors(name)) if is_written else made_gguf.read_converted(name)
    )
    if is_written and rng.random() < 0.5:
        keys |= made_gguf.make_tokenizer_keys(rng.choice(["gpt2", "llama2", "llama3"]))
        keys.pop(f"{keys['general.architecture']}.vocab_size", None)
        rows = len(keys["tokenizer.ggml.tokens"]) + rng.choice([0, 0, 0, 1])
        numbers_rng = np.random.default_rng(rng.getrandbits(32))
        for table in {"token_embd.weight", "output.weight"} & set(tensors):
            tensors[table] = numbers_rng.standard_normal((rows, tensors[table].shape[1])).astype(np.float32)
    path = FOLDER / f"model{rng.randrange(3)}.gguf"
    data = damage_gguf(rng, keys, tensors, ["split.count", "general.alignment", "llama.rope.scaling.type"])
    path.write_bytes(data)
    try:
        with made.limit_memory(2**26):
            checkpoint = load_checkpoint(path)
            check_tensors(checkpoint)
            if checkpoint.vocabulary:
                tokenizer = load_gguf_tokenizer(path, checkpoint.vocabulary)
                tokens = tokenizer.encode("the river été")
                assert tokens and all(0 <= token < checkpoint.config.vocab_size for token in [*tokens, *tokenizer.eos_tokens])
                tokenizer.decode(tokens)
    except (CheckpointError, TokenizerError) as error:
        return check_one_line(error, str(path))
    return FINE


# Weight formats


def random_matrix(rng, dtype, rows, n):
    """Return a matrix of a GGUF type, blocks or floats, with weights of up to about 0.3."""
    numbers_rng = np.random.default_rng(rng.getrandbits(32))
    if dtype in made_gguf.BLOCK_SIZES:
        return made_gguf.random_blocks(
            numbers_rng, dtype, rows, n, rng.choice([0.1, 1.0]) * {"Q8": 2e-3, "Q6": 1e-3}.get(dtype[:2], 0.01)
        )
    floats = numbers_rng.standard_normal((rows, n)).astype(np.float32) * np.float32(0.1)
    return {"F32": floats, "F16": floats.astype(np.float16), "BF16": to_half(floats, "bf16")}[dtype]


def fuzz_weight_formats(rng):
    """Compare a GGUF file of mixed weight formats with a float oracle that reads the file's numbers.

    Logits have the same bits for any division into passes, any number of threads and any instruction set.
    """
    types = rng.sample([*made_gguf.BLOCK_SIZES, "F32", "F16", "BF16"], rng.choice([1, 1, 2, 3]))
    unit = max([made_gguf.BLOCK_SIZES.get(kind, (8,))[0] for kind in types])
    dim, hidden = unit * rng.randint(1, 3 if unit < 256 else 1), unit * rng.randint(1, 4 if unit < 256 else 2)
    heads = rng.choice([h for h in (1, 2, 3, 4, 8) if dim % (2 * h) == 0])
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    vocab, layers = rng.choice([5, 31, 32, 33, rng.randint(3, 150)]), rng.randint(1, 2)
    config = ModelConfig(dim, hidden, layers, heads, groups, vocab, 80, rng.random() < 0.5)
    stored = {}
    for name, shape in LLAMA.shapes(config).items():
        stored_name = INTERLEAVED_ROPE_TENSORS[name].name
        for i in range(shape[0] if "{}" in stored_name else 1):
            matrix_shape = shape[1:] if "{}" in stored_name else shape
            ones = np.ones(matrix_shape, np.float32)
            stored[stored_name.format(i)] = (
                ones if len(matrix_shape) == 1 else random_matrix(rng, rng.choice(types), *matrix_shape)
            )
    numbers = {
        "block_count": layers, "context_length": 80, "embedding_length": dim, "feed_forward_length": hidden,
        "attention.head_count": heads, "attention.head_count_kv": groups, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    path = FOLDER / "formats.gguf"
    keys = {"general.architecture": "llama"} | {f"llama.{key}": number for key, number in numbers.items()}
    path.write_bytes(made_gguf.gguf_bytes(keys, stored))
    checkpoint = load_checkpoint(path)
    kind = rng.choice([None, INT8, INT4, INT3])
    weights = LLAMA.plan_weights(checkpoint.config, checkpoint.tensors, kind).pack()
    model = Model(checkpoint.config, weights, 1, kv="f32")  # half precision would hide errors of products
    tokens, cache = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))], model.new_cache()
    expected = np.concatenate([cache.forward(tokens[: i + 1]).copy() for i in range(len(tokens))])
    oracle = reference.forward(checkpoint.config, get_oracle_tensors(checkpoint, weights, kind), tokens)
    error = np.abs(expected - oracle).max() / np.abs(oracle).max()
    # 1e-7 if all activations are rounded alike; one that float64 has on the other side of a rounding boundary makes 0.02
    assert error < 0.05, f"logits are off by {error:.4f} of the largest"
    for _ in range(3):
        other = clone_model(rng, model).new_cache()
        end = rng.randint(1, len(tokens))
        other.forward(tokens[: rng.randint(0, end)], 0)
        n_logits = rng.randint(0, end)
        assert_same_bits(other.forward(tokens[:end], n_logits), expected[end - n_logits : end])
    return FINE


def get_oracle_tensors(checkpoint, weights, kind):
    """Return the tensors of the oracle: blocks as the file has them, floats as packing rounds them.

    A matrix with quantized activations becomes an `Int8ActivationMatrix` with its group size.
    """
    tensors = {
        name: [t[:] for t in tensor] if isinstance(tensor, list) else tensor[:] for name, tensor in checkpoint.tensors.items()
    }
    plan = LLAMA.plan_weights(checkpoint.config, checkpoint.tensors, kind)
    shards = [pair for name in plan.shards for pair in zip(plan.shards[name], weights.shards[name], strict=True)]
    for shard, matrix in shards:
        for key, layer in shard.plan.tensors:
            tensor = checkpoint.tensors[key] if layer is None else checkpoint.tensors[key][layer]
            array = tensor[:]
            if not isinstance(matrix.weight_format, GGUFFormat):
                array = pack_matrix([tensor], matrix.weight_format)[: len(array)]
            array = reference.Int8ActivationMatrix(array, matrix.group_size) if matrix.group_size else array
            if layer is None:
                tensors[key] = array
            else:
                tensors[key][layer] = array
    return tensors


# Tokenizers


def random_text(rng):
    alphabets = [made.CHARACTERS, "  then lower", "é日🙂ñΩ漢\u200d\u0301\x00\x1b", "<0x41>\n<s></s>", "\ud800\udfff"]
    pool = "".join(rng.choices(alphabets, [9, 9, 5, 3, 0.3], k=2))
    text = rng.choices(pool, k=rng.choice([0, 1, rng.randint(2, 60)]))
    return "".join(chr(rng.randrange(0x110000)) if rng.random() < 0.02 else character for character in text)


def fuzz_tokenizer(rng):
    """Damage a tokenizer: it is refused by name, or encodes and decodes any text."""
    pieces = made.small_pieces()
    if rng.random() < 0.5:
        more = [bytes(rng.choices(b"aeht <0x>\xc3\xa9", k=rng.randint(0, 4))) for _ in range(rng.randint(0, 80))]
        pieces = made.base_pieces() + [(piece, rng.choice([0.0, -1.0, rng.gauss(0, 1)])) for piece in more]
    data = made.tokenizer_bytes(pieces)
    if rng.random() < 0.8:
        lengths = [0, *itertools.accumulate((8 + len(piece) for piece, _ in pieces), initial=4)][:-1]
        data = corrupt(rng, data, made.tokenizer_bytes(made.small_pieces()), 4, [*lengths, *(at + 4 for at in lengths[1:])])
    path = FOLDER / f"tokenizer{rng.randrange(3)}.bin"
    path.write_bytes(data)
    try:
        tokenizer = Tokenizer(path)
    except TokenizerError as error:
        return check_one_line(error, str(path))
    names = [piece for piece, _ in made.base_pieces()]
    is_byte = re.compile(rb"<0x[0-9A-Fa-f]{2}>").fullmatch
    others = [*tokenizer.pieces[:3], *tokenizer.pieces[made.FIRST_TEXT_TOKEN :]]
    is_lossless = tokenizer.pieces[3 : made.FIRST_TEXT_TOKEN] == names[3:] and b" " in others and not any(map(is_byte, others))
    for _ in range(5):
        text = random_text(rng)
        try:
            tokens = tokenizer.encode(text)
        except ValueError as error:
            assert any("\ud800" <= character <= "\udfff" for character in text), text
            check_one_line(error, "half a character")
            continue
        assert tokens[0] == BOS and all(0 <= token < tokenizer.vocab_size for token in tokens)
        decoded = tokenizer.decode(tokens)
        if is_lossless and not {BOS, EOS} & set(tokens[1:]):
            assert decoded == text, f"{text!r} becomes {decoded!r}"
        tokens = rng.choices(range(tokenizer.vocab_size), k=rng.randint(0, 40))
        stream = StreamingDetokenizer(tokenizer)
        pushed = [(stream.peek([token])[0], stream.push(token)) for token in tokens]
        assert all(peeked == text for peeked, text in pushed)
        assert "".join(text for _, text in pushed) + stream.flush() == tokenizer.decode(tokens)
    return FINE


# Decoding


def random_model(rng, config, int8=None, loud=False, n_positions=None):
    """Return a model of small random weights.

    Args:
        rng: Source of randomness.
        config: Sizes of the model.
        int8: Whether weights are quantized; random if None.
        loud: Make some weights so large that sums, squares or products may overflow, or so small that they nearly vanish.
        n_positions: Capacity of the KV cache; the model's own if None.
    """
    tensors = made.random_tensors(config, rng.randrange(10**6), rng.choice([0.05, 0.3, 1.0]))
    if loud:
        for name in rng.sample(sorted(tensors), rng.randint(1, 2)):
            part = tensors[name].reshape(-1)[slice(0, None, rng.choice([1, 3, 101]))]
            with np.errstate(over="ignore", under="ignore"):
                part[:] = np.clip(part * np.float32(10 ** rng.uniform(-44, 38)), -3e38, 3e38)
    int8 = rng.random() < 0.5 if int8 is None else int8
    kv = rng.choice(get_args(KVFormatName))
    return Model(config, LLAMA.plan_weights(config, tensors, INT8 if int8 else FP32).pack(), 1, n_positions, kv)


def clone_model(rng, model, n_positions=None):
    """Return a model of the same weights with its own number of threads and instruction set."""
    max_threads, weights = rng.choice([1, 1, get_available_threads()]), model.weights
    if weights.format_names == INT8.name:
        kind = rng.choice([NATIVE_INT8, PORTABLE_INT8])
        weights = replace(weights, shards={name: (replace(m, weight_format=kind),) for name, m in weights.matrices.items()})
    other = Model(model.config, weights, max_threads, n_positions or model.n_positions, model.kv)
    other.n_threads = rng.randint(1, max_threads)
    return other


def random_sampling(rng):
    temperature = rng.choice([0, 0.0, 1e-30, 1e-3, 0.8, 1.0, 1.0, 2.5, 1e6, 1e300])
    top_p = rng.choice([0, 1, 1.0, 0.9, 0.5, 1e-3, 1e-9, 5e-324, rng.random()])
    seed = rng.choice([0, 1, 2**63 - 1, rng.randrange(10**9)])
    return Sampling(temperature, rng.choice([0, 0, 1, 2, 5, 300, 2**70]), top_p, seed)


def random_policy(rng):
    return FixedLength(rng.choice([1, 2, 3, 4, 7, 9, 63]))


def generate_tokens(target, draft, sampling, verify, prompt, n, policy, use_tree=False):
    """Return the tokens up to the end or an error, and the error's message; use_tree makes proposals trees."""
    target = get_cache(target)
    n_ids = target.model.vocab_size
    verifier = VERIFIERS[verify](n_ids, sampling)
    drafter = LookupDrafter(END_MARKS) if draft == "lookup" else None
    if draft and not drafter:
        args = draft, Sampler(n_ids, sampling, draft.model.vocab_size), verifier.get_draft_stream, END_MARKS
        drafter = (TreeDrafter if use_tree else ModelDrafter)(*args)
    tokens = []
    try:
        for event in decode(target, drafter, verifier, prompt, n, policy):
            tokens += event.tokens if isinstance(event, Step) else []
    except ValueError as error:
        check_one_line(error, "not finite")
        return tokens, str(error)
    return tokens, ""


def fuzz_decoding(rng):
    """Compare the output of random drafts, settings and thread counts with plain decoding, and its logits with other passes."""
    config, loud = random_config(rng), rng.random() < 0.4
    n_positions = rng.choice([None, None, config.seq_len + rng.randint(0, 60)])
    first = random_model(rng, config, None, loud, n_positions)
    n_prompt = 1 + rng.randint(0, first.n_positions - 1) // rng.choice([1, 9])
    prompt = [BOS, *rng.choices(range(config.vocab_size), k=n_prompt - 1)]
    sampling, n = random_sampling(rng), rng.choice([0, 1, 2, 40])
    plain, plain_error = generate_tokens(first, None, sampling, "coupled", prompt, n, FixedLength(1))
    target, draft = clone_model(rng, first).new_cache(), clone_model(rng, first).new_cache()
    if rng.random() < 0.6:
        draft_config = random_config(rng, config.vocab_size)
        other = random_model(rng, draft_config, None, loud and rng.random() < 0.5)
        draft = clone_model(rng, other, first.n_positions).new_cache()
    chain = FixedLength(rng.choice([1, 2, 3, 4, 7, 8, 9, 63]))
    for drafter, *policy in (
        (draft, chain),
        (draft, random_policy(rng), True),
        (draft, random_policy(rng), True),
        ("lookup", chain),
    ):
        tokens, error = generate_tokens(target, drafter, sampling, "coupled", prompt, n, *policy)
        assert error == plain_error, f"error {error!r}, without a draft {plain_error!r}"
        assert tokens == (plain[: len(tokens)] if error else plain), f"{tokens}, without a draft {plain}"
    for verify, *policy in (("rejection", FixedLength(4)), ("rejection", random_policy(rng), True), ("block", FixedLength(4))):
        tokens, _ = generate_tokens(clone_model(rng, first), rng.choice([draft, "lookup"]), sampling, verify, prompt, n, *policy)
        assert all(0 <= token < config.vocab_size for token in tokens)
        assert sampling.temperature or tokens == plain[: len(tokens)]
    # the logits of one token per pass, by a model that ran nothing else
    sequence = (prompt + plain)[: first.n_positions]
    fresh = clone_model(rng, first).new_cache()
    expected = np.concatenate([fresh.forward(sequence[: i + 1]).copy() for i in range(len(sequence))])
    if not loud and config.seq_len >= len(sequence) and first.weights.format_names == FP32.name:
        assert np.isfinite(expected).all()
    for token, row in zip([*plain, None], expected[len(prompt) - 1 :], strict=False):
        is_finite = not np.isnan(row).any() and np.isfinite(row.max())
        assert token is None or is_finite, "a token was drawn from logits that are not finite"
        assert not (token is None and plain_error and is_finite), "an error was raised for finite logits"
        assert token is None or sampling.temperature or token == row.argmax()
    for _ in range(6):
        suffix = [rng.randrange(config.vocab_size) for _ in range(rng.randint(0, 70))]
        other = (sequence[: rng.randint(0, len(sequence))] + suffix)[: first.n_positions]
        target.forward(other, rng.randint(0, min(64, len(other))))
        end = rng.randint(1, len(sequence))
        n_logits = rng.randint(0, min(end, 64))
        assert_same_bits(target.forward(sequence[:end], n_logits), expected[end - n_logits : end])
    return REFUSED if plain_error else FINE


def fuzz_staged_drafts(rng):
    """Compare the proposals of a draft that has a draft of its own, at any costs, with those that it makes alone."""
    config = random_config(rng)
    first = random_model(rng, config, None, rng.random() < 0.2)
    vocab_sizes = [rng.choice([config.vocab_size, rng.randint(3, config.vocab_size)]) for _ in range(2)]
    draft, smaller = (
        clone_model(rng, random_model(rng, random_config(rng, vocab_size)), n).new_cache()
        for vocab_size, n in zip(vocab_sizes, (first.n_positions, rng.randint(1, 200)), strict=True)
    )
    prompt = [BOS, *rng.choices(range(config.vocab_size), k=rng.randint(0, first.n_positions - 1))]
    if rng.random() < 0.5:
        prompt = (prompt[: rng.randint(1, 5)] * first.n_positions)[: len(prompt)]
    sampling, gamma = random_sampling(rng), rng.choice([1, 2, 4, 9, 63])
    for verify in VERIFIERS:
        results = []
        for second in (None, LookupDrafter(END_MARKS), smaller):
            verifier = VERIFIERS[verify](config.vocab_size, sampling)
            sampler = Sampler(config.vocab_size, sampling, draft.model.vocab_size)
            arguments = (verifier.get_draft_stream, END_MARKS)
            drafter, caches = ModelDrafter(draft, sampler, *arguments), [draft]
            if second:
                passes, token = {1: 10.0 ** rng.uniform(-7, 0), 8: 10.0 ** rng.uniform(-7, 0)}, 0.0
                if second is smaller:
                    caches.append(smaller)
                    token = 10.0 ** rng.uniform(-7, -1)
                    second = ModelDrafter(smaller, Sampler(config.vocab_size, sampling, smaller.model.vocab_size), *arguments)
                acceptance = Acceptance(MARGIN_ACCEPTANCE if token else LOOKUP_ACCEPTANCE)
                costs = CostModel(CostCurve(passes, token))
                policy = DraftLengthPolicy(costs, acceptance, not token)
                drafter = StagedDrafter(caches, second, costs, policy, sampler, *arguments)
            target, steps = clone_model(rng, first).new_cache(), []
            try:
                for event in decode(target, drafter, verifier, prompt, 30, FixedLength(gamma)):
                    if isinstance(event, Step):
                        steps.append((event.tokens, event.draft_tokens, event.n_accepted, event.stop_reason))
            except ValueError as error:
                check_one_line(error, "not finite")
                steps.append(str(error))
            results.append(steps)
        assert results[1:] == results[:1] * 2, f"{verify}: {results[1:]}, alone {results[0]}"
    return FINE


def random_tree(rng, vocab, n):
    """Return the tokens of n nodes, few different ones so that siblings may be equal, and their parents."""
    few = rng.choices(range(vocab), k=rng.choice([1, 2, 5, 60]))
    nearest = rng.choice([1, 2, 64])  # 1 makes a chain
    parents = [-1 if rng.random() < 0.1 else rng.randrange(max(node - nearest, -1), node) for node in range(n)]
    return rng.choices(few, k=n), parents


def fuzz_tree(rng):
    """Run, grow and commit token trees: each node's logits are those of the chain of its ancestors."""
    config = random_config(rng)
    first = random_model(rng, config, None, rng.random() < 0.2, rng.choice([None, config.seq_len + rng.randint(0, 400)]))
    cache, chain = (clone_model(rng, first).new_cache() for _ in range(2))
    n_positions = first.n_positions
    sequence = rng.choices(
        range(config.vocab_size), k=rng.randint(1, n_positions) if rng.random() < 0.5 else min(n_positions, rng.randint(1, 20))
    )
    nodes, parents, refused = [], [], False

    def expected(ends):
        return np.concatenate([chain.forward(sequence + [nodes[i] for i in get_path(end, parents)]).copy() for end in ends])

    for _ in range(rng.randint(3, 12)):
        match rng.randrange(6):
            case 0:
                nodes, parents = random_tree(rng, config.vocab_size, rng.choice([0, 1, 7, 63, rng.randint(0, 63)]))
            case 1:  # more nodes, as a draft adds them
                new_nodes, new_parents = random_tree(rng, config.vocab_size, rng.randint(0, 63 - len(nodes)))
                parents += [parent + len(nodes) if parent >= 0 else rng.randrange(-1, len(nodes)) for parent in new_parents]
                nodes += new_nodes
            case 2 | 3 if nodes:  # a path joins the sequence, whether it is committed, found or run again
                path = get_path(rng.randrange(len(nodes)), parents)
                if cache._tree_nodes == [*zip(nodes, parents, strict=True)] and rng.random() < 0.6:
                    cache.commit_path(path)
                sequence, nodes, parents = sequence + [nodes[node] for node in path], [], []
                sequence += rng.choices(range(config.vocab_size), k=rng.choice([0, 1, 1, 3]))
                sequence = sequence[:n_positions]
            case 4:
                n_logits = rng.randint(0, min(len(sequence), 64))
                assert_same_bits(cache.forward(sequence, n_logits), chain.forward(sequence, n_logits))
            case 5:
                sequence, nodes, parents = sequence[: rng.randint(1, len(sequence))], [], []
        ends = rng.sample(range(-1, len(nodes)), 1 + len(nodes))
        n_logits = rng.choice([len(nodes) + 1, rng.randint(0, len(nodes) + 1)])
        depth = max((len(get_path(end, parents)) for end in ends), default=0)
        try:
            logits = cache.forward_tree(sequence, nodes, parents, n_logits).copy()
            assert len(sequence) + depth <= n_positions
        except ValueError as error:
            assert len(sequence) + depth > n_positions
            refused, nodes, parents = check_one_line(error, "do not fit"), [], []
            continue
        for end in ends[:6]:
            if len(nodes) - end <= n_logits:
                assert_same_bits(logits[end - len(nodes)][None], expected([end]))
    return REFUSED if refused else FINE


# Sampling


def random_logits(rng, n):
    numbers = np.random.default_rng(rng.getrandbits(32))
    logits = (numbers.standard_normal(n) * rng.choice([0, 1e-6, 0.1, 1, 8, 100])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.2:
        logits[numbers.random(n) < rng.random()] = -np.inf
    for value in (np.nan, np.inf, 1e38, -1e38, -0.0, 1e-45):
        if rng.random() < 0.05:
            logits[numbers.integers(n)] = value
    return logits


def fuzz_sampling(rng):
    """Compare probabilities with the oracle: the sum is 1, the likeliest token is kept, and only kept tokens are drawn."""
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
    residual = probs.copy()  # overwritten
    redrawn = accept_or_resample(residual, q, n, proposal, s.seed, (2, 0), position, (np.empty(1, np.int64), np.empty(1)))
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        assert token == redrawn == -1
        return REFUSED
    assert p[token] > 0 and p[redrawn] > 0, f"drawn: {token} of {p[token]}, {redrawn} of {p[redrawn]}"
    acceptance, weight = compute_block_acceptance(probs, q, n, proposal, rng.choice([1.0, 0.5, 1e-30]))
    assert 0 <= acceptance <= 1 and 0 <= weight <= 1 and (weight > 0) == (p[proposal] > 0), f"{acceptance}, {weight}"
    assert abs(p.sum() - 1) < 1e-4 and p.min() >= 0 and not probs[0, n:].any()
    with np.errstate(over="ignore"):  # 1 / temperature overflows for a subnormal one
        expected = reference.probabilities(logits, temperature, 0, 0)
    assert p[expected.argmax()] > 0 or expected.max() - expected[p > 0].max() < 1e-6 * expected.max()
    # the kept tokens are the first k in rank; float32 sums may end top_p one token of equal weight sooner or later
    kept = np.flatnonzero(p)
    assert top_k == 0 or len(kept) <= top_k
    dropped = expected[p == 0].max(initial=0.0)
    assert expected[kept].min() >= dropped * (1 - 1e-4) - 1e-37
    if temperature and 0 < top_p < 1:
        assert expected[kept].sum() > top_p - 1e-4 or len(kept) == top_k, "too few tokens are kept"
        assert expected[kept].sum() - expected[kept].min() <= top_p + 1e-4, "too many tokens are kept"
    elif temperature:
        assert len(kept) == top_k or dropped < 1e-36, "a token is missing that neither top_k nor top_p excludes"
    np.testing.assert_allclose(p[kept], expected[kept] / expected[kept].sum(), rtol=1e-3, atol=1e-6)
    return FINE


# Streams


@functools.cache
def make_small_tokenizer():
    path = FOLDER / "tok300.bin"
    path.write_bytes(made.tokenizer_bytes(made.small_pieces()))
    return Tokenizer(path)


def random_requests(rng):
    """Return two models and a few requests to three decoders that share them."""
    models = [random_model(rng, random_config(rng, 300, seq_len=rng.choice([64, 64, 300]))) for _ in range(2)]
    target, draft = (clone_model(rng, model, max(model.n_positions for model in models)) for model in models)
    verify, gamma, tree = rng.choice(list(VERIFIERS)), rng.randint(1, 9), rng.choice(["on", "off"])
    tree = "off" if verify == "block" else tree
    pairs = [(target, draft), (draft, target), (target, rng.choice([None, "lookup"]))]
    options = {"gamma": gamma, "verify": verify, "tree": tree}
    decoders = [SpeculativeDecoder(*pair, make_small_tokenizer(), **options) for pair in pairs]
    jobs = []
    for _ in range(rng.randint(2, 5)):
        s, prompt = random_sampling(rng), "".join(rng.choices(made.CHARACTERS, k=rng.randint(0, 10)))
        jobs.append((rng.choice(decoders), (prompt, rng.choice([0, 5, 30]), s)))
    return (target, draft), jobs


def run_stream(decoder, request, on_proposal=lambda: None):
    tokens = []
    for event in decoder.stream(*request):
        tokens += event.tokens if isinstance(event, Step) else []
        if isinstance(event, Proposal):
            on_proposal()
    return tokens


def run_generate(decoder, request):
    prompt, n, s = request
    text, statistics = decoder.generate(prompt, n, s)
    return text, statistics.n_generated


def fuzz_streams(rng):
    """Interleave, nest and run sequences in several threads: each output equals that of the sequence alone."""
    models, jobs = random_requests(rng)
    alone = [(run_stream(*job), run_generate(*job)) for job in jobs]
    inner = rng.randrange(len(jobs))

    def nest():
        assert run_generate(*jobs[inner]) == alone[inner][1], "nested"

    running = [(i, decoder.stream(*request), []) for i, (decoder, request) in enumerate(jobs)]
    while running:
        i, events, tokens = stream = rng.choice(running)
        if event := next(events, None):
            tokens += event.tokens if isinstance(event, Step) else []
        else:
            assert tokens == alone[i][0], f"{tokens} interleaved, alone {alone[i][0]}"
            running.remove(stream)
        if rng.random() < 0.05:
            nest()

    def run_plan(plan):
        for i, is_generate, n_threads in plan:
            model = models[i % 2]
            model.n_threads = min(n_threads, model.max_threads)
            got = run_generate(*jobs[i]) if is_generate else run_stream(*jobs[i], nest) if n_threads > 1 else run_stream(*jobs[i])
            assert got == alone[i][is_generate], f"{got} in a thread, alone {alone[i][is_generate]}"

    plans = [[(rng.randrange(len(jobs)), rng.randrange(2), rng.randint(1, 2)) for _ in range(3)] for _ in range(3)]
    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(run_plan, plans))
    return FINE


# Arguments


class Index:
    """An integer that is no int."""

    def __index__(self):
        return 5


def random_value(rng):
    """Return any Python value that a caller might pass."""
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
def make_small_decoder():
    for i, seq_len in enumerate((90, 40)):
        config = ModelConfig(32, 40, 2, 4, 2, 300, seq_len)
        (FOLDER / f"{i}.bin").write_bytes(made.checkpoint_bytes(config, made.random_tensors(config, i), 1))
    decoder = SpeculativeDecoder(FOLDER / "0.bin", FOLDER / "1.bin", make_small_tokenizer(), n_threads=1)
    decoder.warm_up()
    return decoder


def commit_path(cache, path):
    """Commit a path of a tree of two nodes."""
    cache.forward_tree([1], [5, 6], [-1, 0])
    cache.commit_path(path)


REQUEST = ("prompt", "max_tokens", "temperature", "top_k", "top_p", "seed")
FILES = ("target", "draft", "tokenizer")
CALLS = (
    (REQUEST, lambda d, args: d.generate(**({"max_tokens": 5} | args))),
    ((*REQUEST[:2], "sampling"), lambda d, args: list(d.stream(**({"max_tokens": 5} | args)))),
    (REQUEST[2:], lambda d, args: Sampling(**args)),
    (
        (*FILES, "gamma", "verify", "tree", "n_threads", "quantize", "kv"),
        lambda d, args: SpeculativeDecoder(**({"target": FOLDER / "0.bin", "tokenizer": d.tokenizer} | args)).generate("ab", 2),
    ),
    (
        ("n_threads", "n_positions", "kv"),
        lambda d, args: Model(d.target.config, d.target.weights, **args).new_cache().forward([1]),
    ),
    (("tokens", "n_logits"), lambda d, args: d.target.new_cache().forward(**({"tokens": [1, 2, 3]} | args))),
    (
        ("nodes", "parents", "n_logits"),
        lambda d, args: d.target.new_cache().forward_tree(
            **({"tokens": [1, 2, 3], "nodes": [5, 6, 7], "parents": [-1, 0, 0]} | args)
        ),
    ),
    (("path",), lambda d, args: commit_path(d.target.new_cache(), **args)),
    (("gamma", "verify", "tree"), lambda d, args: [setattr(d, name, value) for name, value in args.items()]),
    (("n_threads",), lambda d, args: setattr(d.target, *args.popitem())),
)


def fuzz_arguments(rng):
    """Pass any value as a parameter: it works, or raises a TypeError or ValueError of one line that names the parameter."""
    names, call = rng.choice(CALLS)
    arguments = {name: random_value(rng) for name in rng.sample(names, rng.randint(1, min(2, len(names))))}
    # the tokens limit n_logits; an error about a missing file names the file, unprintable characters escaped
    words = [name.removesuffix("s") for name in arguments] + ["n_logits"] * ("tokens" in arguments)
    files = [str(arguments[name]) for name in FILES if isinstance(arguments.get(name), str | Path)]
    files += [repr(file)[1:-1] for file in files]
    try:
        call(make_small_decoder(), arguments)
    except (TypeError, ValueError) as error:
        return check_one_line(error, *words, *files, *["the model name is empty"] * bool(files))
    return FINE


CAMPAIGNS = {
    "checkpoints": fuzz_checkpoint,
    "folders": fuzz_folder,
    "ggufs": fuzz_gguf,
    "heads": fuzz_head,
    "weight-formats": fuzz_weight_formats,
    "tokenizers": fuzz_tokenizer,
    "decoding": fuzz_decoding,
    "staged-drafts": fuzz_staged_drafts,
    "trees": fuzz_tree,
    "sampling": fuzz_sampling,
    "streams": fuzz_streams,
    "arguments": fuzz_arguments,
}
if all(importlib.util.find_spec(package) for package in ("jinja2", "tokenizers")):
    from tests.tools.fuzz_chat import fuzz_conversation, fuzz_template

    CAMPAIGNS |= {"conversations": fuzz_conversation, "templates": fuzz_template}


def run_case(name, case):
    """Return how a case ends, FINE or REFUSED; a failure raises an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return CAMPAIGNS[name](random.Random(f"{name} {case}"))


def run(name, seconds, first, progress=None, min_cases=1):
    """Run the cases of a campaign from number `first` on, for some seconds and at least `min_cases` of them.

    Returns:
        A Counter of outcomes, and the messages of the first failures with the commands that repeat them.
    """
    ends, failures, begin = Counter(), [], time.monotonic()
    case = first
    while case < first + min_cases or time.monotonic() - begin < seconds:
        if progress:
            progress.value = case
        try:
            ends[run_case(name, case)] += 1
        except Exception as error:
            ends["failed"] += 1
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failures.append(f"{message}\n    python -m tests.tools.fuzz --only {name} --case {case}")
        case += 1
    return ends, failures[:MAX_SHOWN_FAILURES]


def run_in_subprocess(name, seconds, first):
    """Call `run` in a process of its own, so that a case that hangs or ends the process is reported."""
    context = multiprocessing.get_context("spawn")
    progress, (receiver, sender) = context.Value("q", first), context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, name, seconds, first, progress))
    process.start()
    sender.close()
    last, begin = first, time.monotonic()
    while not receiver.poll(1):
        if progress.value != last:
            last, begin = progress.value, time.monotonic()
        if time.monotonic() - begin > HANG_TIMEOUT_S:
            process.kill()
            break
    try:
        result = receiver.recv()
    except EOFError:
        command = f"python -m tests.tools.fuzz --only {name} --case {progress.value}"
        result = Counter(fine=progress.value - first, failed=1), [f"hangs, or ends its process\n    {command}"]
    process.join()
    return result


def _send_result(pipe, *args):
    try:
        pipe.send(run(*args))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="time for all campaigns (default: 5)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) % 100_000, help="selects the first case (default: from the time)"
    )
    parser.add_argument("--only", choices=CAMPAIGNS, action="append", help="run this campaign only; may be repeated")
    parser.add_argument("--case", type=int, help="run only this case of the campaign")
    args = parser.parse_args()
    names = args.only or list(CAMPAIGNS)
    if args.case is not None:
        print(f"{names[0]} {args.case}: {run_case(names[0], args.case)}")
        return 0
    failed = False
    for name in names:
        ends, failures = run_in_subprocess(name, 60 * args.minutes / len(names), 1_000_000 * args.seed)
        counts = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
        print(f"{name}: {sum(ends.values())} cases, {counts}", *failures, sep="\n  ", flush=True)
        failed |= bool(ends["failed"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
