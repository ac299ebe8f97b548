"""Prompts of models that fill in the middle of a text, such as code. Knows no server."""

from specdec.server.field_validation import UNSUPPORTED, APIError
from specdec.text.chat_template import ChatTokenizer
from specdec.tokenizer import AnyTokenizer, RenderedSegment

# in the prompt, these precede the text before the gap, the text after the gap, and the output
INFILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)


def encode_prompt(tokenizer: AnyTokenizer, prompt: str, suffix: str) -> list[int]:
    """Return the token ids of a raw prompt, or of one whose output is followed by a suffix.

    In a prompt that has the model's three marks of a gap already, names of special tokens are tokens. Otherwise they are text.

    Raises:
        APIError: There is a suffix, and the model has no marks of a gap.
    """
    marks = _find_marks(tokenizer) if suffix or "fim" in prompt or "code_" in prompt else ()
    if suffix and not marks:
        raise APIError("suffix is not supported by this model, which has no tokens for it; leave it out", "suffix", UNSUPPORTED)
    if suffix:
        texts = ((marks[0], False), (prompt, True), (marks[1], False), (suffix, True), (marks[2], False))
        segments = [RenderedSegment(*each) for each in texts if each[0]]
    elif marks and all(mark in prompt for mark in marks):
        segments = [RenderedSegment(prompt, False)]
    else:
        return tokenizer.encode(prompt)
    assert isinstance(tokenizer, ChatTokenizer)
    start, letter = tokenizer.encode("a"), tokenizer.encode_rendered([RenderedSegment("a", True)])
    return start[: len(start) - len(letter)] + tokenizer.encode_rendered(segments)  # with BOS, if the tokenizer adds one


def _find_marks(tokenizer: AnyTokenizer) -> tuple[str, ...]:
    """Return the first of INFILL_MARKS that are all single tokens of the tokenizer; empty if there are none."""
    if isinstance(tokenizer, ChatTokenizer):
        for marks in INFILL_MARKS:
            if all(len(tokenizer.encode_rendered([RenderedSegment(mark, False)])) == 1 for mark in marks):
                return marks
    return ()
