"""The decoding loop of one sequence, without a scheduler, and helpers over it."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.draft.draft_length import FixedLength
from specdec.draft.model_drafters import ModelDrafter
from specdec.events import Event, Prompt, Statistics, Step
from specdec.model.model import Model
from specdec.protocols import Constraint, Drafter, LengthPolicy
from specdec.sampling import Sampler
from specdec.speculative import DecodingState
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, Verifier

END_MARKS = {BOS: "bos", EOS: "eos"}


def decode(
    cache: Any,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    policy: LengthPolicy,
    eos_tokens: Mapping[int, str],
    constraint: Constraint | None = None,
) -> Iterator[Event]:
    """Prefill a prompt, decode it to its end and yield the events; `cache` is a KVCache of the target or like one."""
    model, prompt = cache.model, [*prompt]
    state = DecodingState(
        [*prompt], max_tokens, model.n_positions, drafter, verifier, policy, eos_tokens, constraint, model.longrope_threshold
    )
    begin = time.perf_counter()
    cache.forward(prompt[:-1], 0)
    if drafter:
        drafter.prepare(prompt)
    yield Prompt(prompt, time.perf_counter() - begin)
    while not state.is_finished:
        draft = state.propose()
        if draft.tokens:
            yield state.proposal
        begin = time.perf_counter()
        if draft.parents is None:
            logits = cache.forward(state.tokens + draft.tokens, len(draft.tokens) + 1)
        else:
            logits = cache.forward_tree(state.tokens, draft.tokens, draft.parents)
        verified = state.verify(logits)
        yield state.commit(verified, time.perf_counter() - begin, model.experts_read)


def get_cache(model: Any) -> Any:
    """Return a new cache of a model; a cache is returned as it is."""
    return model.new_cache() if isinstance(model, Model) else model


def generate_tokens(target, draft, sampling, gamma=4, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60):
    """Return the tokens that models, or caches of them, generate, and the statistics."""
    target, drafter = get_cache(target), None
    verifier = VERIFIERS[verify](target.model.vocab_size, sampling)
    if draft:
        draft = get_cache(draft)
        drafter = ModelDrafter(draft, Sampler(draft.model.vocab_size, sampling), verifier.get_draft_stream, END_MARKS)
    statistics, tokens = Statistics(len(prompt)), []
    for event in decode(target, drafter, verifier, list(prompt), max_tokens, FixedLength(gamma), END_MARKS):
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    return tokens, statistics


def verify_proposal(logits, draft, verifier, position, end_marks):
    """Return the new tokens of a sequence with `position` tokens and this draft, and how many draft tokens are accepted."""
    state = DecodingState([0] * position, 99, 99, None, verifier, FixedLength(1), end_marks)
    state.draft = draft
    return state.verify(logits)[:2]
