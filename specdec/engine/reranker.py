"""Reranker: scores how well documents fit a query, by the probability of "yes" against "no" as the answer to a prompt.

A prompt is that of Qwen3-Reranker (arXiv:2506.05176), or of the model's own rerank template.
"""

import math
import re
from collections.abc import Generator, Sequence
from typing import TypeVar, cast

from specdec.argument_checks import check_string, is_list, shorten
from specdec.draft.model_bundle import ModelBundle
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.loaders.rerankers import INSTRUCTION, INSTRUCTION_FIELD, NAME
from specdec.model.kv_cache import KVCache
from specdec.runtime.simd import Float32
from specdec.text.chat_template import PromptTooLongError
from specdec.tokenizer import RenderedSegment

Result = TypeVar("Result")
FIELD_PATTERN = re.compile(r"(\{(?:instruction|query|document)\})")


def run_to_end(steps: Generator[None, None, Result]) -> Result:
    """Run all steps of a generator that yields after each, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Result, end.value)


class Reranker:
    """A model that was trained to judge whether a document fits a query, with its prompt template.

    Args:
        bundle: The models; only the target runs.

    Raises:
        ValueError: The target is not a reranker, or its tokenizer lacks the tokens of the answers.
    """

    def __init__(self, bundle: ModelBundle) -> None:
        """Find the template, and what gives the score: a head with weights of its own, or the logits of two tokens."""
        checkpoint, tokenizer = bundle.checkpoint, bundle.tokenizer
        if not checkpoint or not checkpoint.rerank_template:
            raise ValueError(
                f"the model is not a reranker; expected a Qwen3 model with {NAME!r} in its name, or a GGUF file with a template "
                "for reranking"
            )
        self._target, self._template, self._head = bundle.target, checkpoint.rerank_template, checkpoint.rerank_head
        self._tokenizer = tokenizer
        self._answers = [tokenizer.encode_rendered([RenderedSegment(text, False)]) for text in ("yes", "no")]
        if self._head is None and [len(tokens) for tokens in self._answers] != [1, 1]:
            raise ValueError(f"the tokenizer {tokenizer.path} has no tokens yes and no, by which rerankers answer")

    def check_instruction(self, name: str, value: object) -> str:
        """Return an instruction if it is a string and the template has a place for it; raises TypeError or ValueError if not."""
        if INSTRUCTION_FIELD not in self._template:
            raise ValueError(f"{name} is not supported by the model's template; leave it out")
        return check_string(name, value)

    def encode(self, query: str, documents: Sequence[str], instruction: str | None, n_positions: int) -> list[list[int]]:
        """Return the token ids of each document's prompt.

        Args:
            query: What is searched for.
            documents: One or more texts.
            instruction: What makes a document fit; None for the one that the model was trained with.
            n_positions: Maximum number of tokens of a prompt.

        Raises:
            ValueError: A text is not valid, there are no documents, or the template has no place for an instruction.
            PromptTooLongError: A prompt has more tokens than n_positions.
            TypeError: A text has the wrong type.
        """
        values = {"{query}": check_string("query", query), INSTRUCTION_FIELD: INSTRUCTION}
        if instruction is not None:
            values[INSTRUCTION_FIELD] = self.check_instruction("instruction", instruction)
        if not is_list(documents) or not documents:
            raise ValueError(f"documents are {shorten(documents, repr)}; expected a list of one or more strings")
        prompts = list[list[int]]()
        for i, document in enumerate(documents):
            name = f"documents[{i}]"
            values["{document}"] = check_string(name, document)
            parts = [RenderedSegment(values.get(part, part), part in values) for part in FIELD_PATTERN.split(self._template)]
            if (n := sum(len(part.text) for part in parts)) > n_positions * self._tokenizer.max_token_length:
                raise PromptTooLongError(f"{name} has {n} characters with its prompt, too many for {n_positions} tokens")
            prompts.append(self._tokenizer.encode_rendered([part for part in parts if part.text]))
            if (n := len(prompts[-1])) > n_positions:
                raise PromptTooLongError(f"{name} has {n} tokens with its prompt; the context holds {n_positions}")
        return prompts

    def score(self, prompts: Sequence[list[int]]) -> Generator[None, None, list[float]]:
        """Compute the score of each prompt, from 0 to 1. The tokens that all prompts begin with run once.

        A generator that yields after each forward pass and returns the scores.
        """
        target, scores = self._target, list[float]()
        cache = target.new_cache(() if self._head is None else (target.config.n_layers + 1,))
        for prompt in prompts:
            end = len(prompt) - cache.count_uncached_tokens(prompt, 1)
            while end < len(prompt):
                end = min(end + MAX_BATCH_TOKENS, len(prompt))
                with target.lock:
                    logits = cache.forward(prompt[:end], int(end == len(prompt)), len(prompt))
                    if len(logits):
                        scores.append(self._compute_score(cache, prompt, logits[0]))
                yield
        return scores

    def _compute_score(self, cache: KVCache, prompt: list[int], logits: Float32) -> float:
        """Return the softmax of "yes" over both answers, given the logits after a prompt and the cache that holds it."""
        if self._head is None:
            (yes,), (no,) = self._answers
            margin = float(logits[yes]) - float(logits[no])
        else:
            state = cache.get_hidden_states(prompt, len(prompt) - 1)[0]
            margin = math.fsum((self._head * state).tolist())  # exact in float64, in any order
        small = math.exp(-abs(margin))
        return (1.0 if margin >= 0 else small) / (1.0 + small)
