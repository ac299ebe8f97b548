"""The decoding loop of one sequence, without a scheduler."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.events import Event, Prompt
from specdec.protocols import Constraint, Drafter, LengthPolicy
from specdec.speculative import DecodingState
from specdec.verification import Verifier


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
