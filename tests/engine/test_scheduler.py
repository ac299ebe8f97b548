"""The scheduler: planning a batch, running it and committing its tokens are separate calls that return what they did."""

import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import CostModel
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Sequence, SequenceStatus
from specdec.events import Proposal, Step
from specdec.tokenizer import BOS
from tests.tools.decode import get_tokens
from tests.tools.prompt_caches import GREEDY, add_sequence

PROMPTS = ([BOS, 5, 6], [BOS, 7, 8, 9])


@pytest.fixture(scope="module")
def decoder(pair):
    return SpeculativeDecoder(pair.endless, pair.draft, pair.tokenizer, n_threads=1, gamma=3, quantize="none")


@pytest.fixture
def scheduler(decoder):
    decoder.warm_up()
    return decoder.make_scheduler(PrefixCache(decoder.bundle, 4), 2)


def run(scheduler, batch):
    return scheduler.commit(batch, scheduler.runner.run(batch))


def test_a_planned_batch_proposes_and_its_run_commits(scheduler, decoder):
    sequence = add_sequence(scheduler, decoder, PROMPTS[0], 12)
    while not (batch := scheduler.schedule()).decoding:
        run(scheduler, batch)
    assert batch.decoding == [sequence] and sequence.status is SequenceStatus.VERIFY
    assert isinstance(batch.events[-1][1], Proposal) and sequence.tokens == PROMPTS[0]
    ((_, step),) = run(scheduler, batch)
    assert isinstance(step, Step) and sequence.tokens == [*PROMPTS[0], *step.tokens]
    assert sequence.status is SequenceStatus.DECODE


def test_a_batch_that_never_runs_keeps_its_drafts_and_changes_no_output(scheduler, decoder):
    sequences = [add_sequence(scheduler, decoder, prompt, 12) for prompt in PROMPTS]
    events, n_proposals = {sequence: [] for sequence in sequences}, 0
    while scheduler.waiting or scheduler.running:
        abandoned = scheduler.schedule()
        batch = scheduler.schedule()
        n_proposals += sum(isinstance(event, Proposal) for _, event in abandoned.events)
        assert not any(isinstance(event, Proposal) for _, event in batch.events if abandoned.decoding)
        for sequence, event in run(scheduler, batch):
            events[sequence].append(event)
    assert n_proposals
    for sequence in sequences:
        steps = [event for event in events[sequence] if isinstance(event, Step)]
        assert get_tokens(steps) == get_tokens(decoder.stream(sequence.request.prompt, 12, GREEDY))


def test_the_time_to_a_first_token_counts_if_a_stop_string_cuts_its_step(scheduler, decoder):
    tokens = get_tokens(decoder.stream(PROMPTS[0], 12, GREEDY))
    text = decoder.tokenizer.decode(tokens[:1])
    request = GenerationRequest(PROMPTS[0], 12, GREEDY, [text.strip()], prediction=tokens)
    sequence = Sequence(request, decoder.tokenizer)
    *_, step = scheduler.stream(sequence)
    assert (step.stop_reason, len(step.tokens), sequence.n_steps) == ("stop", 1, 1) and step.n_nodes > 1
    assert sum(scheduler.metrics.time_to_first_token.counts) == 1


def test_an_empty_batch_runs_no_pass(scheduler, decoder):
    n_passes = decoder.target.n_passes
    assert run(scheduler, scheduler.schedule()) == [] and decoder.target.n_passes == n_passes


def test_a_correction_of_costs_ends_where_a_batch_begins(scheduler, decoder, monkeypatch):
    """Not with each sequence: the others of a batch would have to learn it again."""
    begun = []
    monkeypatch.setattr(CostModel, "begin_batch", lambda costs: begun.append(costs))
    for n_batches in (1, 2):
        for prompt in PROMPTS:
            add_sequence(scheduler, decoder, prompt, 12)
        while scheduler.waiting or scheduler.running:
            run(scheduler, scheduler.schedule())
        assert len(begun) == n_batches
