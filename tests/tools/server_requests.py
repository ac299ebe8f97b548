"""Requests to the server, and a scheduler that outputs given tokens."""

from specdec import Prompt, Step
from tests.fakes.server import FakeScheduler

MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"


class TokenScheduler(FakeScheduler):
    """A scheduler whose outputs are the given tokens, `size` per step."""

    def __init__(self, decoder, tokens, size):
        super().__init__()
        self.decoder, self.pieces = decoder, [tokens[i : i + size] for i in range(0, len(tokens), size)]

    def submit(self, requests, callbacks, client):
        for request, on_event in zip(requests, callbacks, strict=True):
            detokenizer = request.make_detokenizer(self.decoder.tokenizer)
            steps = [Step(tokens, [], 0, 0.0, 0.0) for tokens in self.pieces]
            on_event(detokenizer.add_prompt_text(Prompt([1], 0.0)))
            for event in (*steps, Step([], [], 0, 0.0, 0.0, "eos")):
                on_event(detokenizer.add_text(event))
        return [self for _ in requests]


WORDS = [
    "auto", "required", "any", "tool", "none", "text", "json_object", "json_schema", "user", "assistant", "function", "weather",
    "", "input_text", "tool_use", "tool_result", "thinking", "message", "function_call", "function_call_output", "reasoning",
    "{}",    "\u00e9\U0001f600", "enabled", "high",
]  # fmt: skip


KEYS = [
    "type", "name", "role", "content", "text", "function", "format", "schema", "parameters", "input_schema", "arguments",
    "call_id", "id", "tool_use_id", "input", "output", "effort", "properties", "5", "summary", "strict",
    "json_schema", "description",
]  # fmt: skip


def random_json(rng, depth):
    value_type = rng.randrange(8 if depth < 4 else 5)
    if value_type < 2:
        return rng.choice(WORDS)
    if value_type < 5:
        return rng.choice([None, True, False, 0, 1, -1, 0.5, 1e300, 2**70])
    if value_type < 6:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): random_json(rng, depth + 1) for _ in range(rng.randrange(4))}
