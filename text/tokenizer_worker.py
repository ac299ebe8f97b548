"""Encodes with a tokenizer.json, by the package tokenizers; runs in a process of `workers`. Knows nothing of the rest.

A file's normalizers, patterns and templates may double a text thirty times, look at it for hours, or panic.
"""

import itertools
import json
from bisect import bisect_right
from contextlib import suppress
from typing import Any

MOST_BYTES = 2 << 30  # of memory
RARE = range(0x40000, 0xE0000)  # planes 4 to 13, of which Unicode has given out none
MOST_IDS, MOST_IDS_PER_CHARACTER = 1000, 64  # in front of a text, and of one; NFKC makes 18 characters of one, of 2 bytes each

Mark = tuple[int, int, int]  # a special token, and from where to where in a text its name stands


class Encoder:
    """A file's tokenizer, which takes a text whole: nothing cut off, nothing filled up."""

    def __init__(self, data: bytes) -> None:
        import tokenizers

        self._of_text = tokenizers.Tokenizer.from_str
        self._library = tokenizers.Tokenizer.from_buffer(data)
        self._library.no_truncation()
        self._library.no_padding()
        self.added = {token: (added.content, added.special) for token, added in self._library.get_added_tokens_decoder().items()}
        self._specials = {token: name for token, (name, is_special) in self.added.items() if is_special}
        self._unknown = set[int]()  # which the model writes for what it has no token for
        with suppress(Exception):
            self._unknown = {token.id for token in self._library.model.tokenize(chr(RARE[0]))}
        self._letters = dict[int, str]()
        self._lettered: Any = None
        self.encode("a")  # a template of tokens that are not there panics here

    def description(self) -> dict[str, Any]:
        """Ids, their names, the added tokens with whether each is special, and the decoder as the file has it."""
        ids = sorted(set(self._library.get_vocab().values()))
        decoder = self._library.decoder
        return {
            "ids": ids,
            "names": [self._library.id_to_token(token) for token in ids],
            "added": [[token, *added] for token, added in self.added.items()],
            "decoder": json.loads(decoder.__getstate__()) if decoder else None,
        }

    def encode(self, text: str) -> list[int]:
        """What the file's template puts in front, and the ids of the text, in which every name is text."""
        self._library.encode_special_tokens = True
        encoding = self._library.encode(text)
        from_template: list[int] = encoding.special_tokens_mask
        n_in_front = from_template.index(0) if 0 in from_template else len(from_template)
        ids: list[int] = [token for i, token in enumerate(encoding.ids) if i < n_in_front or not from_template[i]]
        # a unigram model has the names among its pieces
        is_obeyed = any(token in self._specials and token not in self._unknown for token in ids[n_in_front:])
        return ids[:n_in_front] + self._spelled(text, []) if is_obeyed else ids

    def rendered(self, parts: list[tuple[str, bool]]) -> list[int]:
        """The ids of a text of parts, each with whether it is what somebody said; else special tokens' names are those.

        They are the library's own for the whole, if it finds the special tokens in it that it finds without what was said.
        """
        text = "".join([words for words, _ in parts])
        hole = _letters_beside(text, 1, *self._specials.values())[0]
        begins, shifts, without = list[int](), list[int](), ""
        at = 0
        for words, is_said in parts:
            begins.append(len(without))
            shifts.append(at - len(without))
            without += hole if is_said else words
            at += len(words)
        own = [
            (token, start + shift, end + shift)
            for token, start, end in self._obeyed(without)[1]
            if hole not in without[start:end]
            for shift in [shifts[bisect_right(begins, start) - 1]]
        ]
        ids, marks = self._obeyed(text)
        return ids if marks == own else self._spelled(text, own)

    def _obeyed(self, text: str) -> tuple[list[int], list[Mark]]:
        """The ids of a text in which special tokens' names are those, and where they are."""
        self._library.encode_special_tokens = False
        encoding = self._library.encode(text, add_special_tokens=False)
        marks = list[Mark]()
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._specials:
                name = self._specials[token]
                while start < end and text[start].isspace() and not name[:1].isspace():  # which some take with them
                    start += 1
                while start < end and text[end - 1].isspace() and not name[-1:].isspace():
                    end -= 1
                if token not in self._unknown or text[start:end] == name:
                    marks.append((token, start, end))
        return encoding.ids, marks

    def _spelled(self, text: str, marks: list[Mark]) -> list[int]:
        """The ids of a text in which those marks are special tokens, and whatever else looks like one is text."""
        if not self._lettered or not set(text).isdisjoint(self._letters.values()):
            self._letters = dict(zip(self._specials, _letters_beside(text, len(self._specials)), strict=True))
            self._lettered = self._with_letters()
        lettered, at = "", 0
        for token, start, end in marks:
            lettered += text[at:start] + self._letters[token]
            at = end
        ids: list[int] = self._lettered.encode(lettered + text[at:], add_special_tokens=False).ids
        return ids

    def _with_letters(self) -> Any:
        """A copy in which each special token's name is its letter, before anything is normalized."""
        content = json.loads(self._library.to_str())
        letter_of = {self._specials[token]: letter for token, letter in self._letters.items()}
        for added in content["added_tokens"]:
            if added["special"]:
                added |= {"content": letter_of[added["content"]], "normalized": False, "single_word": False}
        content["post_processor"] = None
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {letter_of.get(name, name): token for name, token in model["vocab"].items()}
        else:
            model["vocab"] = [[letter_of.get(name, name), score] for name, score in model["vocab"]]
        if "merges" in model:
            pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if letter_of.keys().isdisjoint((*pair, "".join(pair)))]
        if model.get("unk_token"):
            model["unk_token"] = letter_of.get(model["unk_token"], model["unk_token"])
        return self._of_text(json.dumps(content))


def _letters_beside(text: str, n: int, *names: str) -> list[str]:
    """So many characters that stand in none of those strings. Raises ValueError."""
    taken = set(text).union(*names)
    letters = list(itertools.islice((chr(code) for code in RARE if chr(code) not in taken), n))
    if len(letters) < n:
        raise ValueError("a text of nearly all characters")
    return letters


encoder: Encoder | None = None


def answer(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """With data, which is a tokenizer.json, what it holds; then the ids of a "text", or of a conversation's "parts"."""
    global encoder
    if encoder is None:
        encoder = Encoder(data)
        return encoder.description()
    ids = encoder.encode(request["text"]) if "text" in request else encoder.rendered(request["parts"])
    n_characters = len(request["text"]) if "text" in request else sum(len(words) for words, _ in request["parts"])
    if len(ids) > MOST_IDS + MOST_IDS_PER_CHARACTER * n_characters:
        return {"error": f"it becomes {len(ids)} tokens"}
    return {"ids": ids}
