"""The decoding loop of one sequence, without a scheduler, and helpers over it."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from specdec.draft.draft_length import FixedLength
from specdec.draft.model_drafters import ModelDrafter
from specdec.events import Event, Prompt, Proposal, Statistics, Step
from specdec.model.model import Model
from specdec.protocols import Constraint, Drafter, LengthPolicy
from specdec.runtime.simd import Float32
from specdec.sampling import Sampler, Sampling
from specdec.speculative import DecodingState
from specdec.text.detokenizer import EventDetokenizer
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, Draft, Verifier

END_MARKS = {BOS: "bos", EOS: "eos"}
SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]


class FakeCache:
    """A KV cache, and its model, for drafters and `decode`; a test adds `forward` and `vocab_size`."""

    lock, n_positions, longrope_threshold, can_slide = nullcontext(), 100, 0, True

    @property
    def model(self):
        return self

    def can_draft(self, tokens):
        return True


class FakeDrafter:
    """A drafter whose proposals are what a function of the tokens and the policy returns."""

    def __init__(self, propose):
        self.propose = lambda tokens, policy: Draft(propose(tokens, policy)[: policy.max_tokens])

    def prepare(self, tokens):
        pass

    def observe(self, logits, rows, n_tokens):
        pass


def decode(
    cache: Any,
    drafter: Drafter | None,
    verifier: Verifier,
    prompt: list[int],
    max_tokens: int,
    policy: LengthPolicy,
    eos_tokens: Mapping[int, str] = END_MARKS,
    constraint: Constraint | None = None,
) -> Iterator[Event]:
    """Prefill a prompt, decode it to its end and yield the events; `cache` is a KVCache of the target or like one."""
    model, prompt = cache.model, [*prompt]
    state = DecodingState(
        [*prompt], max_tokens, model.n_positions, drafter, verifier, policy, eos_tokens, constraint, model.longrope_threshold
    )
    cache.forward(prompt[:-1], 0)
    if drafter:
        drafter.prepare(prompt)
    yield Prompt(prompt, 0.0)
    while not state.is_finished:
        if state.propose().tokens:
            yield state.proposal
        begin = time.perf_counter()
        with model.lock:  # another thread's pass would overwrite the logits
            verified = state.verify(run_target(cache, state))
        yield state.commit(verified, time.perf_counter() - begin)


def run_target(cache: Any, state: DecodingState) -> Float32:
    """Return the target's logits at the last token and the draft of a sequence that has proposed."""
    draft = state.draft
    if draft.parents is None:
        return cache.forward(state.tokens + draft.tokens, len(draft.tokens) + 1)
    return cache.forward_tree(state.tokens, draft.tokens, draft.parents)


def get_steps(events: Iterable[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def get_tokens(events: Iterable[Event]) -> list[int]:
    """Return all generated tokens."""
    return [token for step in get_steps(events) for token in step.tokens]


def add_text(event: Event, detokenizer: EventDetokenizer) -> Event:
    """Return an event of a sequence with its text."""
    if isinstance(event, Step):
        return detokenizer.add_text(event)
    return detokenizer.add_draft_text(event) if isinstance(event, Proposal) else detokenizer.add_prompt_text(event)


def collect(events: Iterable[Event]) -> tuple[list[int], Statistics]:
    """Return all generated tokens, and the statistics."""
    statistics, events = Statistics(), [*events]
    for event in events:
        statistics.add(event)
    return get_tokens(events), statistics


def make_model_drafter(draft, verifier, sampling, n_ids=None, eos_tokens=END_MARKS):
    """Return a drafter with a draft model, or with a cache of one, for a target of n_ids tokens, by default the draft's."""
    cache = get_cache(draft)
    vocab_size = cache.model.vocab_size
    return ModelDrafter(cache, Sampler(n_ids or vocab_size, sampling, vocab_size), verifier.get_draft_stream, eos_tokens)


def get_cache(model: Any) -> Any:
    """Return a new cache of a model; a cache is returned as it is."""
    return model.new_cache() if isinstance(model, Model) else model


def generate_tokens(target, draft, sampling, gamma=4, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60, eos_tokens=END_MARKS):
    """Return the tokens that models, or caches of them, generate, and the statistics."""
    target = get_cache(target)
    verifier = VERIFIERS[verify](target.model.vocab_size, sampling)
    drafter = make_model_drafter(draft, verifier, sampling, target.model.vocab_size, eos_tokens) if draft else None
    return collect(decode(target, drafter, verifier, [*prompt], max_tokens, FixedLength(gamma), eos_tokens))


def verify_proposal(logits, draft, verifier, position, end_marks):
    """Return the new tokens of a sequence with `position` tokens and this draft, and how many draft tokens are accepted."""
    state = DecodingState([0] * position, 99, 99, None, verifier, FixedLength(1), end_marks)
    state.draft = draft
    return state.verify(logits)[:2]
