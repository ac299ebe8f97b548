"""ModelRunner: one forward pass of the target over a batch of sequences, and the verification of their drafts."""

import time
from dataclasses import dataclass, field

from specdec.engine.sequence import Sequence
from specdec.events import Event, PrefillProgress
from specdec.model.model import BatchInput, Model
from specdec.speculative import Verified

PrefillChunk = tuple[Sequence, int]  # a sequence and the number of tokens to run
Outcomes = dict[Sequence, Verified | Exception]
SequenceEvent = tuple[Sequence, Event | PrefillProgress | Exception]


@dataclass
class Batch:
    """The sequences of one forward pass, and the events of planning it.

    Attributes:
        chunks: The sequences to prefill, each with its number of tokens.
        decoding: The sequences that decode. A sequence with a token tree is alone, without chunks.
        events: Events and errors of sequences, in order.
    """

    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    events: list[SequenceEvent] = field(default_factory=list)

    def add_event(self, sequence: Sequence, event: Event | PrefillProgress | Exception | None) -> None:
        """Add an event of a sequence, unless there is none."""
        if event is not None:
            self.events.append((sequence, event))

    @property
    def token_counts(self) -> list[tuple[Sequence, int]]:
        """Each sequence of the pass with its number of tokens."""
        return [*self.chunks, *((sequence, 1 + len(sequence.state.draft.tokens)) for sequence in self.decoding)]

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the pass."""
        return sum(n for _, n in self.token_counts)


@dataclass
class Results:
    """The results of a forward pass over a batch.

    Attributes:
        outcomes: The verified tokens of each sequence that decoded, or the error of one that failed.
        seconds: Time of the pass and of the verification.
        experts: See `Step`.
    """

    outcomes: Outcomes
    seconds: float
    experts: tuple[float, int]


class ModelRunner:
    """A runner of batches: prefill chunks, and the last tokens and drafts of decoding sequences.

    Args:
        target: The target.
    """

    def __init__(self, target: Model) -> None:
        """Set the model that all passes run."""
        self._target = target

    def run(self, batch: Batch) -> Results:
        """Run one forward pass over a batch, if it has sequences, and verify the drafts of those that decode.

        If the pass fails, each sequence runs in a pass of its own, so that only the one that causes the error fails.
        """
        start = time.perf_counter()
        outcomes = self._run(batch) if batch.chunks or batch.decoding else {}
        return Results(outcomes, time.perf_counter() - start, self._target.experts_read)

    def _run(self, batch: Batch) -> Outcomes:
        """Return the verified tokens or the error of each sequence; a prefilled one without an error has no entry."""
        try:
            return self._run_and_verify(batch)
        except Exception as error:
            if len(batch.chunks) + len(batch.decoding) == 1:
                return {sequence: error for sequence, _ in batch.token_counts}
        outcomes: Outcomes = {}
        for part in (*(Batch([chunk]) for chunk in batch.chunks), *(Batch(decoding=[each]) for each in batch.decoding)):
            outcomes |= self._run(part)
        return outcomes

    def _run_and_verify(self, batch: Batch) -> Outcomes:
        """Run one pass and verify; run it again if a pass in a signal handler has overwritten its logits. Raises its error."""
        target, chunks, decoding = self._target, batch.chunks, batch.decoding
        with target.lock:
            while True:
                n_passes = target.n_passes
                if decoding and decoding[0].has_tree:
                    state = decoding[0].state
                    assert state.draft.parents is not None
                    all_logits = [decoding[0].cache.forward_tree(state.tokens, state.draft.tokens, state.draft.parents)]
                else:
                    # inputs: the prefill chunks, then the sequences that decode
                    inputs: list[BatchInput] = []
                    for sequence, n in chunks:
                        inputs.append((sequence.cache, sequence.get_prefill_input(n), 0, len(sequence.tokens)))
                    for sequence in decoding:
                        draft = sequence.state.draft.tokens
                        inputs.append((sequence.cache, sequence.tokens + draft, len(draft) + 1, 0))
                    all_logits = target.forward(inputs)[len(chunks) :]
                outcomes: Outcomes = {}
                for sequence, logits in zip(decoding, all_logits, strict=True):
                    try:
                        outcomes[sequence] = sequence.state.verify(logits)
                    except Exception as error:
                        outcomes[sequence] = error
                if target.n_passes <= n_passes + 1:  # else a pass in a signal handler has overwritten these logits
                    return outcomes
