"""Prompts of models that fill in the middle of a text, such as code. Knows no server."""

from collections.abc import Sequence
from dataclasses import replace

from specdec.engine.request import GenerationRequest
from specdec.server.field_validation import UNSUPPORTED, APIError
from specdec.tokenizer import AnyTokenizer, RenderedSegment

# in the prompt, these precede the text before the gap, the text after the gap, and the output
INFILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
)

FILE_MARKS = (  # before the name of a repository, and before each file; both precede the infill
    ("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"), ("", "<|file_separator|>"),
)  # fmt: skip
# tokens that follow a completed infill, as in llama.cpp
END_NAMES = ("<|fim_pad|>", "<fim_pad>", *(name for marks in FILE_MARKS for name in marks if name))


def encode_prompt(tokenizer: AnyTokenizer, prompt: str, suffix: str) -> list[int]:
    """Return the token ids of a raw prompt, or of an infill prompt if the output is to be followed by a suffix.

    Names of special tokens in a prompt are text, unless the prompt already has all three infill marks of the model.

    Raises:
        APIError: There is a suffix, and the model has no infill marks.
    """
    if suffix:
        return encode_infill(tokenizer, prompt, suffix, "suffix")
    marks = _find_marks(tokenizer) if any(marks[0] in prompt for marks in INFILL_MARKS) else ()
    if not (marks and all(mark in prompt for mark in marks)):
        return tokenizer.encode(prompt)
    return _encode_start(tokenizer) + _encode_segments(tokenizer, (prompt, False))


def encode_infill(
    tokenizer: AnyTokenizer,
    before: str,
    after: str,
    field: str,
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> list[int]:
    """Return the token ids of a prompt whose output fills the gap between two texts.

    Args:
        tokenizer: The model's tokenizer.
        before: The text before the gap.
        after: The text after the gap.
        field: Name of the request's field, for errors.
        files: Name and text of other files of the project. The first ones are left out if there are too many tokens.
        max_tokens: Maximum number of tokens of a prompt with files; None for no limit. A prompt without files may be longer.

    Raises:
        APIError: The model has no infill marks.
    """
    if not (marks := _find_marks(tokenizer)):
        raise APIError(f"{field} is not supported by this model, which has no tokens for it; leave it out", field, UNSUPPORTED)
    start, (first, second, third) = _encode_start(tokenizer), [(mark, False) for mark in marks]
    gap = first, (before, True), second, (after, True), third
    project, mark = next((each for each in FILE_MARKS if _is_token(tokenizer, each[1])), ("", ""))
    head = _encode_segments(tokenizer, (project, False), ("project\n", True)) if project else []
    tail = _encode_segments(tokenizer, *([(mark, False), ("file\n", True)] if mark else []), *gap)
    separator = (mark, False) if mark else ("\n\n--- snippet ---\n\n", True)
    parts, room = list[list[int]](), None if max_tokens is None else max_tokens - len(start + head + tail)
    for name, text in reversed(files):
        part = _encode_segments(tokenizer, separator, (f"{name}\n{text}" if mark else text, True))
        if room is not None and sum(map(len, parts)) + len(part) > room:
            break
        parts.insert(0, part)
    if not parts:
        return start + _encode_segments(tokenizer, *gap)
    return [*start, *head, *(token for part in parts for token in part), *tail]


def end_infills(requests: Sequence[GenerationRequest], tokenizer: AnyTokenizer) -> list[GenerationRequest]:
    """Return requests whose outputs also end at the tokens that follow a completed infill."""
    specials = tokenizer.specials
    names = [name for name in END_NAMES if _is_token(tokenizer, name)]
    visible = {specials[name]: name for name in names if name in specials}  # the text of others is shown anyway
    return [
        replace(request, stop_strings=[*request.stop_strings, *names], visible_tokens={**request.visible_tokens, **visible})
        for request in requests
    ]


def _encode_start(tokenizer: AnyTokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds before a text: BOS, or none."""
    start, letter = tokenizer.encode("a"), _encode_segments(tokenizer, ("a", True))
    return start[: len(start) - len(letter)]


def _encode_segments(tokenizer: AnyTokenizer, *segments: tuple[str, bool]) -> list[int]:
    """Return the token ids of all segments together: pairs of a text and whether names of special tokens in it are text."""
    return tokenizer.encode_rendered([RenderedSegment(*each) for each in segments if each[0]])


def _is_token(tokenizer: AnyTokenizer, name: str) -> bool:
    """Return whether a name is encoded as a single token when names of special tokens are not text."""
    return len(_encode_segments(tokenizer, (name, False))) == 1


def _find_marks(tokenizer: AnyTokenizer) -> tuple[str, ...]:
    """Return the first of INFILL_MARKS that are all single tokens of the tokenizer; empty if there are none."""
    return next((marks for marks in INFILL_MARKS if all(_is_token(tokenizer, mark) for mark in marks)), ())
