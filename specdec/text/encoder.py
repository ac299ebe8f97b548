"""Encode with a tokenizer.json, by the package tokenizers, without special tokens that a text spells. Knows nothing of models."""

import base64
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from specdec.tokenizer import Part

MAX_NORMALIZED_BYTES = 256 << 20  # of a text as a file's normalizers may write it; the library takes 17 bytes of memory for each
RARE = range(0x40000, 0xE0000)  # planes 4 to 13, in which Unicode defines no character
RARE_LETTER = re.compile(f"[{chr(RARE[0])}-{chr(RARE[-1])}]")
# times that the bytes of a text may become more, by the types of normalizers and pre-tokenizers
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 5, "ByteLevel": 3}

Mark = tuple[int, int, int]  # a special token, and from where to where in a text its name stands


class Encoder:
    """The tokenizer of a file, which takes a text whole: nothing is truncated or padded. Threads may share it.

    names: of all tokens, by their ids; specials: of the special ones. decoder: as the file has it.
    Raises what the library raises for a file that it cannot read.
    """

    def __init__(self, data: bytes) -> None:
        import tokenizers

        _check_added_tokens(data)
        self._package = tokenizers
        self._library = library = tokenizers.Tokenizer.from_buffer(data)
        library.no_truncation()
        library.no_padding()
        self._added = library.get_added_tokens_decoder()
        self.names: dict[int, str] = {token: name for name, token in library.get_vocab().items()}
        self.names |= {token: added.content for token, added in self._added.items()}
        self.specials = {token: added.content for token, added in self._added.items() if added.special}
        self.decoder = _json_of(library.decoder)
        self._growth = _growth(_json_of(library.normalizer)) * _growth(_json_of(library.pre_tokenizer))
        self._in_front = _in_front(_json_of(library.post_processor))
        self._unknown = set[int]()  # ids of what the model has no token for
        with suppress(Exception):
            self._unknown = {token.id for token in library.model.tokenize(chr(RARE[0]))}
        self._speller: _Speller | None = None
        self.encode("a")  # which tells now what goes wrong with any text

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoder, (self._library.to_str().encode(),)

    def encode(self, text: str) -> list[int]:
        """Return the ids that the file's template puts in front, and those of the text."""
        _check_growth(len(text.encode()), self._growth)
        return [*self._in_front, *self._spelled(text, [])]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Return the ids of a text of parts. Names of special tokens in what was said are text; in the rest they are the tokens.

        The ids are the library's own for the whole, if it finds the special tokens in it that it finds without what was said.
        """
        words = [part.words for part in parts]
        text = "".join(words)
        _check_growth(len(text.encode()), self._growth)
        hole = _letters_besides(text, 1, *self.specials.values())[0]
        holed = [hole if part.is_said else part.words for part in parts]
        begins, holed_begins = ([0, *itertools.accumulate(map(len, each))] for each in (words, holed))
        without, own = "".join(holed), list[Mark]()
        for token, start, end in self._obeyed(without)[1]:
            if hole not in without[start:end]:
                i = bisect_right(holed_begins, start) - 1
                shift = begins[i] - holed_begins[i]
                own.append((token, start + shift, end + shift))
        ids, marks = self._obeyed(text)
        return ids if marks == own else self._spelled(text, own)

    def _obeyed(self, text: str) -> tuple[list[int], list[Mark]]:
        """Return the ids of a text in which special tokens' names are those, and where they are."""
        encoding = _encoding(self._library, text)
        ids, marks = encoding.ids, list[Mark]()
        for i in [i for i, token in enumerate(ids) if token in self.specials]:
            name, (start, end) = self.specials[ids[i]], encoding.token_to_chars(i)
            while start < end and text[start].isspace() and not name[:1].isspace():  # which some take with them
                start += 1
            while start < end and text[end - 1].isspace() and not name[-1:].isspace():
                end -= 1
            if ids[i] not in self._unknown or text[start:end] == name:
                marks.append((ids[i], start, end))
        return ids, marks

    def _spelled(self, text: str, marks: list[Mark]) -> list[int]:
        """Return the ids of a text in which those marks are special tokens, and whatever else looks like one is text."""
        speller = self._speller
        if speller is None or any(letter in text for letter in speller.letters.values()):
            speller = self._speller = self._new_speller(text)
        lettered, at = list[str](), 0
        for token, start, end in marks:
            lettered += text[at:start], speller.letters[_strips(self._added[token])]
            at = end
        found: list[int] = _encoding(speller.tokenizer, "".join([*lettered, text[at:]])).ids
        reached = self.specials.keys() - self._unknown  # by a model that has names among the pieces of its texts
        if (speller.ids.keys() | reached).isdisjoint(found):
            return found
        own, ids = iter(marks), list[int]()
        for token in found:
            if token in speller.ids:
                ids.append(next(own)[0] if (known := speller.ids[token]) is None else known)
            else:
                ids += self._by_characters(self.specials[token]) if token in reached else [token]
        return ids

    def _by_characters(self, name: str) -> list[int]:
        """Return the ids of a name's characters, one by one."""
        ids = [token.id for character in name for token in self._library.model.tokenize(character)]
        return [token for token in ids if token not in self.specials]

    def _new_speller(self, text: str) -> "_Speller":
        """Return one for texts that hold no other letters than this text does."""
        library: Any = self._library
        tokenizer: Any = self._package.Tokenizer(library.model)
        if library.normalizer is not None:
            tokenizer.normalizer = library.normalizer
        if library.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = library.pre_tokenizer
        n, last = library.get_vocab_size(with_added_tokens=False), max(self.names, default=-1)
        if last >= n and library.model.token_to_id(name := self.names[last]) == last:  # or new ids could be those of the model
            tokenizer.add_special_tokens([name])
            tokenizer.encode_special_tokens = True
        strips = {_strips(self._added[token]) for token in self.specials}
        letters = dict(zip(strips, _letters_besides(text, len(strips)), strict=True))
        plain = {added.content: token for token, added in self._added.items() if not added.special}
        tokenizer.add_tokens([added for added in self._added.values() if not added.special])
        for (left, right), letter in letters.items():
            tokenizer.add_tokens([self._package.AddedToken(letter, lstrip=left, rstrip=right, normalized=False)])
        ids = {name: plain.get(name) for name in (*plain, *letters.values())}
        return _Speller(tokenizer, letters, {tokenizer.token_to_id(name): token for name, token in ids.items()})


def _strips(added: Any) -> tuple[bool, bool]:
    """Return whether an added token takes the white space on its left, and on its right."""
    return added.lstrip, added.rstrip


class _Speller(NamedTuple):
    """A tokenizer of the same model to which no name is a special token's: letters that no text holds are.

    letters: by whether they take the white space on their left and right. ids: what ids of its added tokens are in the file;
    None for letters.
    """

    tokenizer: Any
    letters: Mapping[tuple[bool, bool], str]
    ids: Mapping[int, int | None]


def _encoding(tokenizer: Any, text: str) -> Any:
    """Return the library's encoding of a text, with nothing in front. A batch lets other threads run; `encode` would not."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _letters_besides(text: str, n: int, *names: str) -> list[str]:
    """Return n characters that none of those strings holds. Raise ValueError."""
    taken = set(RARE_LETTER.findall("".join([text, *names])))
    free = list(itertools.islice((chr(code) for code in RARE if chr(code) not in taken), n))
    if len(free) < n:
        raise ValueError("a text of nearly all characters")
    return free


def _json_of(part: Any) -> Any:
    """Return how the file writes one of the library's objects."""
    return None if part is None else json.loads(part.__getstate__())  # a Sequence may be false


def _check_added_tokens(data: bytes) -> None:
    """Raise ValueError for a file whose added tokens may become too long when the library normalizes them, as it loads them.

    A file is read for that only where a token may be normalized; the name of that field may be written with escapes.
    """
    if re.search(rb'"normalized"\s*:\s*true', data) or re.search(rb"\\u00[2-7]", data):
        content = json.loads(data)
        n = sum(len(added["content"].encode()) for added in content.get("added_tokens") or [])
        _check_growth(n, _growth(content.get("normalizer")))


def _check_growth(n_bytes: int, growth: float) -> None:
    """Raise ValueError for a text that normalizers and pre-tokenizers may make too long."""
    if n_bytes * growth > MAX_NORMALIZED_BYTES:
        raise ValueError(f"a text may grow beyond {MAX_NORMALIZED_BYTES >> 20} MiB")


def _growth(part: Any) -> int:
    """Return how many bytes a normalizer or pre-tokenizer may make of one byte of a text, at most."""
    if part is None:
        return 1
    if part["type"] == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("pretokenizers") or []))
    if part["type"] == "Precompiled":  # a trie behind its size, and what it leads to
        data = base64.b64decode(part["precompiled_charsmap"])
        return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")), default=1)
    new: str = part.get("content") or part.get("prepend") or part.get("replacement") or ""
    return (1 + len(new.encode())) * GROWTH.get(part["type"], 1)


def _in_front(processor: Any) -> list[int]:
    """Return the ids that a post-processor puts in front of a text."""
    match processor:
        case {"type": "Sequence", "processors": list(processors)}:
            return [token for each in reversed(processors) for token in _in_front(each)]
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(tokens)}:
            names = itertools.takewhile(bool, (piece.get("SpecialToken") for piece in single))
            return [token for name in names for token in tokens[name["id"]]["ids"]]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(token)]}:
            return [token]
    return []
