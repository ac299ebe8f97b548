"""Encode text with a Hugging Face tokenizer.json through the tokenizers package. Independent of models.

Names of special tokens in a text do not become special tokens.
"""

import base64
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from specdec.tokenizer import RenderedSegment

MAX_NORMALIZED_BYTES = 256 << 20  # of a normalized text; the library uses 17 bytes of memory for each
UNASSIGNED_CODEPOINTS = range(0x40000, 0xE0000)  # planes 4 to 13, in which Unicode defines no character
UNASSIGNED_CHARACTER = re.compile(f"[{chr(UNASSIGNED_CODEPOINTS[0])}-{chr(UNASSIGNED_CODEPOINTS[-1])}]")
# Maximum growth of a text in bytes, by the type of a normalizer or pre-tokenizer.
MAX_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 5, "ByteLevel": 3}

SpecialTokenSpan = tuple[int, int, int]  # id of a special token; start and end of its name in a text


class Encoder:
    """An encoder from text to token ids by a tokenizer of the tokenizers package. Threads may share it.

    Args:
        library: The package's tokenizer, whose truncation and padding are turned off.
        vocab: Its token ids by name, if they are known; listing them takes a while.

    Attributes:
        names: The names of all tokens by id.
        specials: The names of the special tokens by id.
        decoder: The decoder as written in a tokenizer.json, parsed from JSON.
    """

    def __init__(self, library: Any, vocab: Mapping[str, int] | None = None) -> None:
        """Collect the names of the tokens; raise the package's errors if it cannot encode any text."""
        self._hf_tokenizer = library
        library.no_truncation()
        library.no_padding()
        self._added = library.get_added_tokens_decoder()
        self.names: dict[int, str] = {token: name for name, token in (vocab or library.get_vocab()).items()}
        self.names |= {token: added.content for token, added in self._added.items()}
        self.specials = {token: added.content for token, added in self._added.items() if added.special}
        self.decoder = _to_json(library.decoder)
        self.max_growth = _get_max_growth(_to_json(library.normalizer)) * _get_max_growth(_to_json(library.pre_tokenizer))
        self._prefix_ids = _get_prefix_ids(_to_json(library.post_processor))
        self._unknown_ids = set[int]()  # what the model makes of an unknown character
        with suppress(Exception):
            self._unknown_ids = {token.id for token in library.model.tokenize(chr(UNASSIGNED_CODEPOINTS[0]))}
        self._placeholder_tokenizer: _PlaceholderTokenizer | None = None
        self.encode("a")  # raises now what any text would raise

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs to rebuild the encoder from its JSON."""
        return load_encoder, (self._hf_tokenizer.to_str().encode(),)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, after the ids that the file's post-processor puts in front; special names stay text.

        Raises:
            ValueError: The text could become too long when it is normalized.
        """
        _check_growth(len(text.encode()), self.max_growth)
        return [*self._prefix_ids, *self._encode_with_spans(text, [])]

    def encode_segments(self, segments: Sequence[RenderedSegment]) -> list[int]:
        """Return the token ids of the segments of a rendered chat template, without ids in front.

        Names of special tokens are plain text in message segments. The ids are the library's own for the whole text, if the
        library finds the same special tokens with and without the messages.

        Raises:
            ValueError: The text could become too long when it is normalized.
        """
        texts = [segment.text for segment in segments]
        text = "".join(texts)
        _check_growth(len(text.encode()), self.max_growth)
        # Find the template's special tokens in the text with one mask character per message.
        mask = _find_unused_characters(text, 1, *self.specials.values())[0]
        masked_texts = [mask if segment.is_message else segment.text for segment in segments]
        starts, masked_starts = ([0, *itertools.accumulate(map(len, each))] for each in (texts, masked_texts))
        masked, template_spans = "".join(masked_texts), list[SpecialTokenSpan]()
        for token, start, end in self._encode_parse_special(masked)[1]:
            if mask not in masked[start:end]:
                i = bisect_right(masked_starts, start) - 1
                shift = starts[i] - masked_starts[i]
                template_spans.append((token, start + shift, end + shift))
        ids, spans = self._encode_parse_special(text)
        return ids if spans == template_spans else self._encode_with_spans(text, template_spans)

    def _encode_parse_special(self, text: str) -> tuple[list[int], list[SpecialTokenSpan]]:
        """Return the ids of a text in which names of special tokens become those tokens, and the spans of these names."""
        encoding = _encode_one(self._hf_tokenizer, text)
        ids, spans = encoding.ids, list[SpecialTokenSpan]()
        for i in [i for i, token in enumerate(ids) if token in self.specials]:
            name, (start, end) = self.specials[ids[i]], encoding.token_to_chars(i)
            while start < end and text[start].isspace() and not name[:1].isspace():  # some tokens strip white space
                start += 1
            while start < end and text[end - 1].isspace() and not name[-1:].isspace():
                end -= 1
            if ids[i] not in self._unknown_ids or text[start:end] == name:
                spans.append((ids[i], start, end))
        return ids, spans

    def _encode_with_spans(self, text: str, spans: list[SpecialTokenSpan]) -> list[int]:
        """Return the ids of a text in which only the given spans become special tokens; names elsewhere stay text."""
        placeholder_tokenizer = self._placeholder_tokenizer
        if placeholder_tokenizer is None or any(
            placeholder in text for placeholder in placeholder_tokenizer.placeholders.values()
        ):
            placeholder_tokenizer = self._placeholder_tokenizer = self._make_placeholder_tokenizer(text)
        parts, at = list[str](), 0
        for token, start, end in spans:
            parts += text[at:start], placeholder_tokenizer.placeholders[_get_strip_flags(self._added[token])]
            at = end
        encoded: list[int] = _encode_one(placeholder_tokenizer.tokenizer, "".join([*parts, text[at:]])).ids
        reachable = self.specials.keys() - self._unknown_ids  # names that are also pieces of the model
        if (placeholder_tokenizer.ids.keys() | reachable).isdisjoint(encoded):
            return encoded
        remaining_spans, ids = iter(spans), list[int]()
        for token in encoded:
            if token in placeholder_tokenizer.ids:
                ids.append(next(remaining_spans)[0] if (original := placeholder_tokenizer.ids[token]) is None else original)
            else:
                ids += self._encode_by_character(self.specials[token]) if token in reachable else [token]
        return ids

    def _encode_by_character(self, name: str) -> list[int]:
        """Return the ids of a special token's name encoded as plain text, one character at a time."""
        ids = [token.id for character in name for token in self._hf_tokenizer.model.tokenize(character)]
        return [token for token in ids if token not in self.specials]

    def _make_placeholder_tokenizer(self, text: str) -> "_PlaceholderTokenizer":
        """Return a tokenizer in which special tokens are placeholders, single characters that this text does not contain."""
        import tokenizers

        library: Any = self._hf_tokenizer
        tokenizer: Any = tokenizers.Tokenizer(library.model)
        if library.normalizer is not None:
            tokenizer.normalizer = library.normalizer
        if library.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = library.pre_tokenizer
        n, last = library.get_vocab_size(with_added_tokens=False), max(self.names, default=-1)
        if (
            last >= n and library.model.token_to_id(name := self.names[last]) == last
        ):  # else new ids could collide with the model's
            tokenizer.add_special_tokens([name])
            tokenizer.encode_special_tokens = True
        strip_flags = {_get_strip_flags(self._added[token]) for token in self.specials}
        placeholders = dict(zip(strip_flags, _find_unused_characters(text, len(strip_flags)), strict=True))
        plain_ids = {added.content: token for token, added in self._added.items() if not added.special}
        tokenizer.add_tokens([added for added in self._added.values() if not added.special])
        for (left, right), placeholder in placeholders.items():
            tokenizer.add_tokens([tokenizers.AddedToken(placeholder, lstrip=left, rstrip=right, normalized=False)])
        ids = {name: plain_ids.get(name) for name in (*plain_ids, *placeholders.values())}
        return _PlaceholderTokenizer(tokenizer, placeholders, {tokenizer.token_to_id(name): token for name, token in ids.items()})


def load_encoder(data: bytes) -> Encoder:
    """Return the encoder for the contents of a tokenizer.json; raise an error of the package for contents that it cannot read."""
    import tokenizers

    _check_added_tokens(data)
    return Encoder(tokenizers.Tokenizer.from_buffer(data))


def _get_strip_flags(added: Any) -> tuple[bool, bool]:
    """Return two booleans: whether an added token removes the white space on its left, and on its right."""
    return added.lstrip, added.rstrip


class _PlaceholderTokenizer(NamedTuple):
    """A copy of a tokenizer that has placeholders, characters unused in the text, in the place of its special tokens.

    Attributes:
        tokenizer: The library's tokenizer.
        placeholders: The placeholder for each pair of strip flags (left, right).
        ids: The ids in the file by the ids of added tokens here; None for placeholders.
    """

    tokenizer: Any
    placeholders: Mapping[tuple[bool, bool], str]
    ids: Mapping[int, int | None]


def _encode_one(tokenizer: Any, text: str) -> Any:
    """Return the library's encoding of one text without the ids that a post-processor adds.

    It is encoded as a batch, during which other threads can run, unlike in the library's `encode`.
    """
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _find_unused_characters(text: str, n: int, *names: str) -> list[str]:
    """Return n characters, unassigned in Unicode, that occur neither in the text nor in the names.

    Raises:
        ValueError: There are too few of these characters.
    """
    used = set(UNASSIGNED_CHARACTER.findall("".join([text, *names])))
    free = list(itertools.islice((chr(code) for code in UNASSIGNED_CODEPOINTS if chr(code) not in used), n))
    if len(free) < n:
        raise ValueError("the text uses nearly all characters")
    return free


def _to_json(part: Any) -> Any:
    """Return a component of a tokenizer (an object of the library, or None) as in tokenizer.json, parsed from JSON."""
    return None if part is None else json.loads(part.__getstate__())  # an empty Sequence is falsy


def _check_added_tokens(data: bytes) -> None:
    """Raise ValueError if the added tokens in a tokenizer.json could grow too long when the library normalizes them.

    The file is parsed only if a token may be normalized; the name of that field can be written with escapes.
    """
    if re.search(rb'"normalized"\s*:\s*true', data) or re.search(rb"\\u00[2-7]", data):
        content = json.loads(data)
        n = sum(len(added["content"].encode()) for added in content.get("added_tokens") or [])
        _check_growth(n, _get_max_growth(content.get("normalizer")))


def _check_growth(n_bytes: int, growth: float) -> None:
    """Raise ValueError if a text of `n_bytes`, which normalization can make `growth` times as long, could become too long."""
    if n_bytes * growth > MAX_NORMALIZED_BYTES:
        raise ValueError(f"a text may grow beyond {MAX_NORMALIZED_BYTES >> 20} MiB")


def _get_max_growth(part: Any) -> int:
    """Return how many bytes a normalizer or pre-tokenizer, given as parsed JSON, can make of one byte at most."""
    if part is None:
        return 1
    if part["type"] == "Sequence":
        return math.prod(map(_get_max_growth, part.get("normalizers") or part.get("pretokenizers") or []))
    if part["type"] == "Precompiled":  # size of a trie, the trie, then its replacement strings
        data = base64.b64decode(part["precompiled_charsmap"])
        return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")), default=1)
    new: str = part.get("content") or part.get("prepend") or part.get("replacement") or ""
    return (1 + len(new.encode())) * MAX_GROWTH.get(part["type"], 1)


def _get_prefix_ids(processor: Any) -> list[int]:
    """Return the token ids that a post-processor, given as parsed JSON, puts in front of a text."""
    match processor:
        case {"type": "Sequence", "processors": list(processors)}:
            return [token for each in reversed(processors) for token in _get_prefix_ids(each)]
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(tokens)}:
            names = itertools.takewhile(bool, (piece.get("SpecialToken") for piece in single))
            return [token for name in names for token in tokens[name["id"]]["ids"]]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(token)]}:
            return [token]
    return []
