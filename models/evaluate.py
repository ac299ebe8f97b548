"""Evaluation of a target and its draft with the library's own passes: `train.py evaluate`.

Shapes: T tokens, V vocab_size, N rows. p is the target's probability and q the draft's (Leviathan et al. 2023).
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from models.stories import Stories, encode_stories, pack_rows
from specdec.bench.sweep import Setting, SweepCase, measure
from specdec.draft.draft_length import FixedLength
from specdec.draft.model_drafters import ModelDrafter
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.runtime.simd import Float32, Int64
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.speculative import DecodingState
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.tokenizer import FIRST_BYTE, Tokenizer
from specdec.verification import CoupledVerifier

Pair = tuple[Model, Model]  # target and draft
GAMMA = 4  # affects the speed alone: coupled verification gives the same output with any


def compute_logits(model: Model, tokens: list[int]) -> Float32:
    """Return the logits (T, V) after every token."""
    logits, cache = np.empty((len(tokens), model.vocab_size), np.float32), model.new_cache()
    for start in range(0, len(tokens), MAX_BATCH_TOKENS):
        block = logits[start : start + MAX_BATCH_TOKENS]
        block[:] = cache.forward(tokens[: start + len(block)], n_logits=len(block))
    return logits


def compute_log_probs(model: Model, tokens: list[int]) -> Float32:
    """Return the log-probabilities (T, V) after every token."""
    logits = compute_logits(model, tokens)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def generate_tokens(
    target: Model,
    draft: Model | None,
    prompt: list[int],
    n_tokens: int,
    sampling: Sampling,
    end_marks: Mapping[int, str],
) -> list[int]:
    """Return the target's continuation of up to n_tokens, with the end token if it comes; a draft only makes it faster."""
    cache, verifier, drafter = target.new_cache(), CoupledVerifier(target.vocab_size, sampling), None
    if draft:
        sampler = Sampler(draft.vocab_size, sampling)
        drafter = ModelDrafter(draft.new_cache(), sampler, verifier.get_draft_stream, end_marks)
    state = DecodingState([*prompt], n_tokens, target.n_positions, drafter, verifier, FixedLength(GAMMA), end_marks)
    while not state.is_finished:
        proposal = state.propose().tokens
        logits = cache.forward(state.tokens + proposal, len(proposal) + 1)
        state.commit(state.verify(logits), 0.0)
    return state.tokens[len(prompt) :] + [token for token, name in end_marks.items() if name == state.stop_reason]


# -------------------------------------------------------------------------------------------------------------- losses


def get_byte_lengths(tokenizer: Tokenizer) -> Int64:
    """Return the bytes of text of each token (V,)."""
    lengths = np.array([len(piece) for piece in tokenizer.pieces])
    lengths[:FIRST_BYTE] = 0
    lengths[FIRST_BYTE : FIRST_BYTE + 256] = 1
    return lengths


def compute_token_losses(model: Model, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return the nats of tokens[1:], each given all before it, up to the model's seq_len."""
    tokens = tokens[: model.config.seq_len + 1]
    log_probs = compute_log_probs(model, tokens[:-1])
    return -log_probs[np.arange(len(log_probs)), tokens[1:]].astype(np.float64)


def compute_nats_per_byte(model: Model, tokenizer: Tokenizer, stories: Sequence[str], n_bytes: Sequence[int]) -> float:
    """Return the mean loss over the first n_bytes of each story; a token across that border counts by its share of bytes.

    Bytes beyond the model's seq_len do not count.
    """
    lengths = get_byte_lengths(tokenizer)
    nats, counted = 0.0, 0
    for story, limit in zip(stories, n_bytes, strict=True):
        tokens = tokenizer.encode(story)
        losses = compute_token_losses(model, tokens)
        ends = np.cumsum(lengths[tokens[1 : len(losses) + 1]]) - 1  # no dummy space
        starts = np.concatenate([[0], ends[:-1]])
        # The dummy space alone is a token of no bytes: it counts whole.
        share = np.clip((limit - starts) / np.maximum(ends - starts, 1e-9), 0.0, 1.0)
        nats += float((losses * share).sum())
        counted += min(limit, int(ends[-1]))
    return nats / counted


def compute_losses_by_position(model: Model, tokenizer: Tokenizer, rows: npt.NDArray[np.int32], width: int) -> list[float]:
    """Return the nats per byte in each bucket of `width` positions, over rows (N, T + 1) of stories."""
    nats = np.array([compute_token_losses(model, row.tolist()) for row in rows])
    n_bytes = get_byte_lengths(tokenizer)[rows[:, 1:]]
    sums = [values.reshape(len(rows), -1, width).sum((0, 2)) for values in (nats, n_bytes)]
    return [float(rate) for rate in sums[0] / sums[1]]


def print_losses(args: argparse.Namespace, pair: Pair, tokenizer: Tokenizer, held_out: list[str]) -> None:
    """Print the losses of the references and the target over the same bytes, then of the pair by position."""
    byte_tokenizer = Tokenizer(args.byte_tokenizer) if args.byte_tokenizer else tokenizer
    n_bytes = [
        int(get_byte_lengths(byte_tokenizer)[byte_tokenizer.encode(story)[1 : args.byte_tokens]].sum()) - 1 for story in held_out
    ]
    print(f"held out: {len(n_bytes)} stories, {sum(n_bytes)} bytes, their first {args.byte_tokens} tokens", flush=True)
    for path in args.reference:
        print(
            f"{path.name}: {compute_nats_per_byte(load_model(path), byte_tokenizer, held_out, n_bytes):.4f} nats per byte",
            flush=True,
        )
    whole = [len(story.encode()) for story in held_out]
    print(f"target: {compute_nats_per_byte(pair[0], tokenizer, held_out, n_bytes):.4f} nats per byte", flush=True)
    print(
        f"target: {compute_nats_per_byte(pair[0], tokenizer, held_out, whole):.4f}, whole stories (first "
        f"{pair[0].n_positions} tokens)"
    )
    for name, model in zip(("target", "draft"), pair, strict=True):
        n, length = sum(map(math.prod, LLAMA.shapes(model.config).values())), model.config.seq_len
        rows = pack_rows(encode_stories(tokenizer, held_out), length + 1, np.random.default_rng(0))
        buckets = compute_losses_by_position(model, tokenizer, rows, length // 8)
        print(f"{name}: {n} parameters, by eighths of seq_len", *(f"{b:.3f}" for b in buckets), flush=True)


# ---------------------------------------------------------------------------------------------------------- acceptance


class AcceptanceRates(NamedTuple):
    """The acceptance of the draft's tokens along the target's own continuations.

    Attributes:
        rejection: Mean of sum min(p, q).
        coupled: Share of tokens that both models choose with the same noise. At temperature 0 both rates are the share of
            positions with equal argmax.
        first_window: `rejection` while the draft still sees the whole text.
    """

    rejection: float
    coupled: float
    first_window: float


def measure_acceptance(
    target: Model,
    draft: Model,
    prompts: Sequence[list[int]],
    n_tokens: int,
    samplings: Sequence[Sampling],
    end_marks: Mapping[int, str],
) -> AcceptanceRates:
    """Measure the acceptance token by token, as if each proposal were the first of its step.

    p and q are both cut to their top-p set. Beyond its seq_len the draft's window slides. The token that ends a story counts, and
    nothing after it.

    Args:
        target: The target.
        draft: The draft.
        prompts: Tokens of the prompts.
        n_tokens: Limit of new tokens.
        samplings: One for each prompt.
        end_marks: Tokens that end a story, and their names.
    """
    results: list[tuple[float, bool, bool]] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        tokens = prompt + generate_tokens(target, draft, prompt, n_tokens, sampling, end_marks)
        sampler = Sampler(target.config.vocab_size, sampling)
        p, q = sampler.new_probs(), sampler.new_probs()
        logits = [compute_logits(model, tokens[:-1]) for model in (target, draft)]
        for position in range(len(prompt), len(tokens)):
            sampler.compute_probabilities(p, logits[0][position - 1])
            proposal = sampler.draw(q, logits[1][position - 1], TARGET_NOISE, position)
            overlap = float(np.minimum(p, q).sum())
            results.append((overlap, proposal == tokens[position], position <= draft.config.seq_len))
    overlaps, same, inside = (np.array(column) for column in zip(*results, strict=True))
    return AcceptanceRates(float(overlaps.mean()), float(same.mean()), float(overlaps[inside].mean()))


def print_acceptance(args: argparse.Namespace, pair: Pair, tokenizer: Tokenizer, held_out: list[str]) -> None:
    """Print the acceptance at several temperatures."""
    prompts = [tokenizer.encode(story)[: args.prompt_tokens] for story in pick_evenly(held_out, args.prompts)]
    for temperature, top_p in ((0.0, 0.9), (0.8, 0.9), (1.0, 0.9), (1.0, 1.0)):
        samplings = [Sampling(temperature, 0, top_p, args.seed + i) for i in range(len(prompts))]
        rates = measure_acceptance(*pair, prompts, args.tokens, samplings, tokenizer.eos_tokens)
        values = (f"{name} {rate:.3f}" for name, rate in rates._asdict().items())
        print(f"acceptance at {temperature}, top-p {top_p}:", *values, flush=True)


# --------------------------------------------------------------------------------------------------------------- speed


def print_speeds(args: argparse.Namespace, tokenizer: Tokenizer, held_out: list[str]) -> None:
    """Print the mean speed of the target alone and of the pair with its defaults: coupled verification and an int8 draft."""
    prompts = [" ".join(story.split()[: args.prompt_words]) for story in pick_evenly(held_out, args.prompts)]
    pair = SpeculativeDecoder(args.out / "target.bin", args.out / "draft.bin", tokenizer)
    alone = Setting("target alone", "", SpeculativeDecoder(pair.target, None, tokenizer), "alone")
    settings = [alone, *(Setting(f"γ {gamma}", "", pair, "pair", gamma) for gamma in args.gamma)]
    seeded_prompts = [*enumerate(prompts, 1)]
    cases = [SweepCase(prompt, args.tokens, Sampling(t, 0, 0.9, seed)) for t in (0.0, 1.0) for seed, prompt in seeded_prompts]
    for result in measure(settings, cases, 1).compute_cells():
        rates = f"{result.tokens_per_second:.0f} tok/s, {result.speedup_mean:.2f} times the target alone"
        print(f"{result.setting}, temperature {result.temperature}: {result.acceptance_rate:.3f} accepted, {rates}", flush=True)


# ------------------------------------------------------------------------------------------------------------- command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--byte-tokenizer", type=Path, help="tokenizer.bin that defines the bytes to count")
    parser.add_argument("--byte-tokens", type=int, default=250, help="tokens counted of each story, BOS included")
    parser.add_argument("--reference", type=Path, nargs="*", default=[], help="models with that tokenizer")
    parser.add_argument("--stories", type=int, help="number of held-out stories; all by default")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens of a prompt, to measure acceptance token by token")
    parser.add_argument("--prompt-words", type=int, default=8, help="words of a prompt, to measure speed")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate after each prompt")
    parser.add_argument("--gamma", type=int, nargs="*", default=[4], help="draft tokens per step, to measure speed")
    parser.add_argument("--seed", type=int, default=0)


def run_command(args: argparse.Namespace) -> None:
    """Evaluate the pair in args.out on the held-out stories of args.text."""
    held_out = Stories.read(args.text).held_out[: args.stories]
    tokenizer = Tokenizer(args.out / "tokenizer.bin")
    target = load_model(args.out / "target.bin")
    draft = load_model(args.out / "draft.bin", n_positions=target.n_positions)
    print_losses(args, (target, draft), tokenizer, held_out)
    print_acceptance(args, (target, draft), tokenizer, held_out)
    print_speeds(args, tokenizer, held_out)


def pick_evenly(stories: list[str], n: int) -> list[str]:
    """Return n stories, evenly spaced."""
    return stories[:: max(len(stories) // n, 1)][:n]
