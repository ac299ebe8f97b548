"""Runs with and without a second-level draft."""

from specdec.draft.draft_length import CostCurve, CostModel, FixedLength
from specdec.draft.staged import StagedDrafter
from specdec.draft.tree import TreeDrafter
from specdec.sampling import Sampler
from specdec.tokenizer import BOS
from specdec.verification import VERIFIERS
from tests.tools.decode import END_MARKS, collect, decode, generate_tokens, get_cache

LARGE = {1: 1.0, 8: 1.05, 16: 1.5, 64: 3.0}  # a pass over eight tokens takes little longer than one over one token


def run_staged(
    draft, make_second_level, sampling, verify="coupled", gamma=4, target=None, prompt=(BOS, 7, 9), n=60, models=(), max_guesses=9
):
    """Return the tokens and counts of a target with a staged draft; `make_second_level` takes the verifier.

    The second level has the last of `models`, or no model.
    """
    verifier = VERIFIERS[verify](target.vocab_size, sampling)
    sampler = Sampler(target.vocab_size, sampling, draft.vocab_size)
    caches = [model.new_cache() for model in (draft, *models)]
    second_level = make_second_level(verifier, *caches[1:])
    drafter = StagedDrafter(
        caches, second_level, CostModel(CostCurve(LARGE)), FixedLength(max_guesses), sampler, verifier.get_draft_stream, END_MARKS
    )
    tokens, statistics = collect(decode(target.new_cache(), drafter, verifier, prompt, n, FixedLength(gamma)))
    return tokens, get_counts(statistics)


def get_counts(statistics):
    return statistics.accepted_histogram, statistics.drafted_histogram, statistics.stop_reason


def run_unstaged(target, draft, sampling, verify, gamma, prompt=(BOS, 7, 9)):
    tokens, statistics = generate_tokens(target, draft, sampling, gamma, verify, prompt)
    return tokens, get_counts(statistics)


def events_of(target, draft, sampling, gamma, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60, eos_tokens=END_MARKS):
    target, draft = get_cache(target), get_cache(draft)
    verifier = VERIFIERS[verify](target.model.vocab_size, sampling)
    sampler = Sampler(target.model.vocab_size, sampling, draft.model.vocab_size)
    drafter = TreeDrafter(draft, sampler, verifier.get_draft_stream, eos_tokens)
    return list(decode(target, drafter, verifier, list(prompt), max_tokens, FixedLength(gamma), eos_tokens))
