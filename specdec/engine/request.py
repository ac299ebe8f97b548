"""Requests for one completion, and the keyword arguments of the methods that take them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.argument_checks import check_int, check_strings, shorten
from specdec.draft.model_bundle import ModelBundle
from specdec.loaders.model_loader import check_memory
from specdec.protocols import Constraint
from specdec.sampling import Sampling, SamplingOverrides
from specdec.text.detokenizer import EventDetokenizer
from specdec.tokenizer import AnyTokenizer

if TYPE_CHECKING:
    from specdec.text.reasoning import ReasoningMarks

Stop = str | Sequence[str]


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion: the prompt, the limits of the output, the sampling parameters and what to report.

    Attributes:
        prompt: Token ids, BOS first.
        max_tokens: The maximum number of tokens after the prompt.
        sampling: The sampling parameters.
        stop_strings: Strings before which the output ends.
        top_logprobs: None for no log probabilities, else the number of most likely tokens that are reported in addition to the
            sampled one, before temperature.
        prediction: Tokens that are expected in the output; they are proposed for as long as they are accepted.
        constraint: The constraint of the output; None for none.
        visible_tokens: Special tokens that appear in the output, with their names there.
        include_draft_text: Whether events contain the text of draft tokens.
        reasoning_marks: The marks around a thought, in which stop strings have no effect; None for none.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: Sequence[str] = ()
    top_logprobs: int | None = None
    prediction: Sequence[int] = ()
    constraint: Constraint | None = None
    visible_tokens: Mapping[int, str] = field(default_factory=dict)
    include_draft_text: bool = False
    reasoning_marks: "ReasoningMarks | None" = None

    def make_detokenizer(self, tokenizer: AnyTokenizer) -> EventDetokenizer:
        """Return a new detokenizer, which adds text to the events of a sequence for this request."""
        splitter = self.reasoning_marks.make_splitter() if self.reasoning_marks else None
        return EventDetokenizer(tokenizer, self.stop_strings, self.visible_tokens, self.include_draft_text, splitter)


class GenerationKwargs(SamplingOverrides, total=False):
    """The keyword arguments of generation methods: `stop` strings, `constraint`, and sampling parameters."""

    stop: Stop
    constraint: Constraint | None


def validate_request(request: GenerationRequest, bundle: ModelBundle) -> GenerationRequest:
    """Check the values of a request, and return it with its numbers, strings and token ids as Python's own types.

    The prompt must be the result of `ModelBundle.encode`, which has checked it.

    Raises:
        ValueError: If a value is not valid, or the sequence exceeds the context length or the memory.
        TypeError: If a value has the wrong type.
    """
    stop_strings = check_strings("stop", request.stop_strings)
    max_tokens = check_int("max_tokens", request.max_tokens, 0)
    check_memory(bundle.target, len(request.prompt) + max_tokens - 1)  # the last token is never run
    if not isinstance(sampling := request.sampling, Sampling):
        raise TypeError(f"sampling is {shorten(sampling, repr)}; expected Sampling(temperature=..., seed=...)")
    if sampling.biases and (bad_id := sampling.biases[-1][0]) >= bundle.n_ids:
        raise ValueError(f"logit_bias holds the id {bad_id}; expected ids from 0 to {bundle.n_ids - 1}")
    constraint = request.constraint
    if constraint is not None and not callable(getattr(constraint, "begin", None)):
        raise TypeError(f"constraint is {shorten(constraint, repr)}; expected the result of json_schema, json_object or regex")
    if getattr(constraint, "tokenizer", bundle.tokenizer) is not bundle.tokenizer:
        methods = "json_schema, json_object or regex"
        raise ValueError(f"the constraint was made for another tokenizer; make it with this decoder's {methods}")
    prediction = bundle.encode(request.prediction) if request.prediction else []
    return replace(request, max_tokens=max_tokens, stop_strings=stop_strings, prediction=prediction)
