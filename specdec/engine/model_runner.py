"""ModelRunner: one forward pass of the target over a batch of sequences, and the verification of their drafts."""

from dataclasses import dataclass, field

from specdec.engine.sequence import Sequence
from specdec.events import Event, PrefillProgress
from specdec.model.model import BatchInput, Model
from specdec.speculative import Verified

PrefillChunk = tuple[Sequence, int]  # a sequence and the number of tokens to run
Results = dict[Sequence, Verified | Exception]
SequenceEvent = tuple[Sequence, Event | PrefillProgress | Exception]


@dataclass
class Batch:
    """The sequences of one forward pass, and the events so far.

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


class ModelRunner:
    """A runner of batches: prefill chunks, and the last tokens and drafts of decoding sequences.

    Args:
        target: The target.
    """

    def __init__(self, target: Model) -> None:
        """Set the model that all passes run."""
        self._target = target

    def run(self, batch: Batch) -> Results:
        """Run one forward pass over a batch, and verify the drafts of the decoding sequences.

        If the pass fails, each sequence runs in a pass of its own, so that only the one that causes the error fails.

        Returns:
            The verified tokens of each decoding sequence, and the error of each sequence that failed. A sequence that was
            prefilled without an error has no entry.
        """
        try:
            return self._run_and_verify(batch)
        except Exception as error:
            if len(batch.chunks) + len(batch.decoding) == 1:
                return dict.fromkeys((*(sequence for sequence, _ in batch.chunks), *batch.decoding), error)
        results: Results = {}
        for part in (*(Batch([chunk]) for chunk in batch.chunks), *(Batch(decoding=[each]) for each in batch.decoding)):
            results |= self.run(part)
        return results

    def _run_and_verify(self, batch: Batch) -> Results:
        """Run one pass and verify; run it again if a pass in a signal handler has overwritten its logits. Raises its error."""
        target, chunks, decode_batch = self._target, batch.chunks, batch.decoding
        with target.lock:
            while True:
                n_passes = target.n_passes
                if decode_batch and decode_batch[0].has_tree:
                    state = decode_batch[0].state
                    assert state.draft.parents is not None
                    all_logits = [decode_batch[0].cache.forward_tree(state.tokens, state.draft.tokens, state.draft.parents)]
                else:
                    # inputs: the prefill chunks, then the decode batch
                    inputs: list[BatchInput] = []
                    for sequence, n in chunks:
                        inputs.append((sequence.cache, sequence.get_prefill_input(n), 0, len(sequence.tokens)))
                    for sequence in decode_batch:
                        draft = sequence.state.draft.tokens
                        inputs.append((sequence.cache, sequence.state.tokens + draft, len(draft) + 1, 0))
                    all_logits = target.forward(inputs)[len(chunks) :]
                results: Results = {}
                for sequence, logits in zip(decode_batch, all_logits, strict=True):
                    try:
                        results[sequence] = sequence.state.verify(logits)
                    except Exception as error:
                        results[sequence] = error
                if target.n_passes <= n_passes + 1:  # else a pass in a signal handler has overwritten these logits
                    return results
