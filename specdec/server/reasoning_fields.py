"""The fields of a request that control a model's thoughts, and their effect on the engine's requests. Knows no interface."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.argument_checks import check_choice
from specdec.engine.request import GenerationRequest
from specdec.server.field_validation import Fields, check_bool, check_object
from specdec.server.generation_fields import ResponseOptions, ServedModel
from specdec.text.chat_template import ChatTemplate
from specdec.text.reasoning import find_reasoning_marks
from specdec.text.reasoning_constraint import ReasoningConstraint

REASONING_FORMATS = ("auto", "deepseek", "none")
NO_BUDGET = -1  # llama.cpp's value for thoughts of any length


class ReasoningFields:
    """The fields `reasoning_format`, `thinking_budget_tokens`, `enable_thinking` and `thinking` (as in Anthropic's API), parsed.

    Args:
        fields: The remaining fields of the body.
        model: The served model.
        template: The chat template of the conversation.

    Attributes:
        is_enabled: Whether a field switches thinking on or off; None if none does.

    Raises:
        APIError: A field is invalid.
    """

    def __init__(self, fields: Fields, model: ServedModel, template: ChatTemplate) -> None:
        """Take the fields out of `fields` and check them."""
        self._template, self._tokenizer = template, model.decoder.tokenizer
        self._is_raw = fields.take_choice("reasoning_format", REASONING_FORMATS, "auto") == "none"
        default: tuple[bool | None, int] = None, model.reasoning_budget
        self.is_enabled, budget = fields.take("thinking", partial(_parse_thinking, budget=default[1]), default)
        self.is_enabled = fields.take("enable_thinking", check_bool, self.is_enabled)
        budget = fields.take_int("thinking_budget_tokens", budget, NO_BUDGET)
        self._budget = None if budget == NO_BUDGET else budget

    def apply(
        self, requests: Sequence[GenerationRequest], options: ResponseOptions, is_required: bool
    ) -> tuple[list[GenerationRequest], ResponseOptions]:
        """Return the requests and options of a chat with the marks of its thoughts, and a constraint if one is needed.

        The constraint limits the length of a thought, and lets the grammar hold only after it. Both are returned unchanged if the
        model has no marks of thoughts.

        Args:
            requests: The engine's requests, all with the same prompt.
            options: What the response contains.
            is_required: Whether the outputs must match the grammar, so that they cannot end in a thought.
        """
        tokenizer = self._tokenizer
        if not (marks := find_reasoning_marks(self._template, tokenizer, requests[0].prompt)):
            return [*requests], options
        parser, grammar, constraint = options.tool_parser, options.grammar, None
        if (grammar or self._budget is not None) and not marks.closes_in_prompt:
            # the format's own grammar of calls and answers has their headers
            has_headers = parser is not None and parser.is_always_parsed and grammar is not None and grammar.kind == "tools"
            limits = marks.without_header() if has_headers else marks
            constraint = ReasoningConstraint(limits, tokenizer, budget=self._budget, is_required=is_required)
        # a raw output has the names of special tokens without `SPECIAL_TOKEN_MARK` in front
        visible = {token: text[self._is_raw :] for token, text in marks.visible_tokens.items()}
        marked = [
            replace(
                request,
                visible_tokens={**visible, **request.visible_tokens},
                reasoning_marks=None if self._is_raw else marks,
                constraint=None if grammar else constraint,
            )
            for request in requests
        ]
        return marked, replace(options, reasoning_constraint=constraint if grammar else None)


def _parse_thinking(name: str, value: Any, budget: int) -> tuple[bool, int]:
    """Return whether the field `thinking` switches thinking on, and the maximum number of tokens of a thought."""
    types = ["enabled", "adaptive", "disabled"]
    is_enabled = check_choice(f"type of {name}", check_object(name, value).get("type"), types) != "disabled"
    return is_enabled, Fields(value).take_int("budget_tokens", budget, 0)
