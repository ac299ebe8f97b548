"""The tokenizer whose keys a GGUF file holds. Knows nothing of models.

What the keys mean, and what holds where they are silent, is llama.cpp's (src/llama-vocab.cpp): `llama` is SentencePiece's BPE,
which `Tokenizer` does; for BPE a tokenizer.json of the split that `pre` names is written, and read by `JsonTokenizer`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.families.pre_tokenizers import BYTES, DEFAULT, KINDS, KNOWN_SPLITS, LEAVING, PIECES, SPLITS
from specdec.text.hf_tokenizer import JsonTokenizer
from specdec.tokenizer import STRIPS, AnyTokenizer, Pieces, Tokenizer, TokenizerError
from specdec.validation import short

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
NO_MARKS: Mapping[int, str] = MappingProxyType({})
SPACE = "\u2581"  # as SentencePiece writes it
END_KEYS = {"eos_token_id": "eos", "eot_token_id": "eot", "eom_token_id": "eom"}
# what ends a text by its name, of whatever type, also where the keys name but one: some say <|im_end|> and not <|endoftext|>
END_NAMES = {
    **dict.fromkeys(
        ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"), "eos"
    ),
    **dict.fromkeys(("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>"), "eot"),
    **dict.fromkeys(("_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~["), "eot"),
    "<|observation|>": "eot",  # GLM's, behind a call of a tool; its folders name it, and no key of its files does
    "<|eom_id|>": "eom",
}
END = "<|end|>"  # which is within an answer where there are both of one of these pairs, as in harmony's channels
OF_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def gguf_tokenizer(path: Path, keys: Mapping[str, Any], end_marks: Mapping[int, str] = NO_MARKS) -> AnyTokenizer:
    """The tokenizer of a GGUF file; keys: those that begin with tokenizer.ggml, without that; end_marks: more than the keys name.

    Raises TokenizerError for keys that do not fit together, and for a kind of tokenizer that is not done here.
    """
    values = _Keys(path, keys, end_marks)
    kind = KINDS.get(values.a("model", str, ""))
    if kind is None:
        *others, last = KINDS
        raise values.refusal("model", f"{', '.join(others)} or {last}; other kinds of tokenizers are not supported")
    if kind == PIECES:
        return Tokenizer(path, _pieces(values))
    data = json.dumps((_of_bytes if kind == BYTES else _of_characters)(values)).encode()
    return JsonTokenizer(path, values.token("bos_token_id"), values.end_marks(), data)


def gguf_marks(path: Path, keys: Mapping[str, Any], rows: int) -> tuple[int | None, dict[int, str]]:
    """Return the id that begins a text and the ids that end one, for a tokenizer in the place of the file's own.

    Args:
        path: The GGUF file, for errors.
        keys: See `gguf_tokenizer`; the tokens may be missing.
        rows: The size of the model's vocabulary.

    Raises:
        TokenizerError: A key is not what it must be.
    """
    values = _Keys(path, {"tokens": [""] * rows} | dict(keys))
    return values.token("bos_token_id"), values.end_marks()


class _Keys:
    """The keys, each checked as it is read, and the tokens; end_marks: more than the keys name."""

    def __init__(self, path: Path, keys: Mapping[str, Any], end_marks: Mapping[int, str] = NO_MARKS) -> None:
        self._path, self._keys, self._more_marks = path, keys, end_marks
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int) if "token_type" in keys else [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise TokenizerError(f"{path}: {len(self.types)} token types for {len(self.tokens)} tokens")

    def refusal(self, key: str, expected: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: tokenizer.ggml.{key} is {short(self._keys.get(key), repr)}; expected {expected}")

    def a(self, key: str, kind: type, default: Any) -> Any:
        """A value of that type."""
        value = self._keys.get(key, default)
        if type(value) is not kind:
            raise self.refusal(key, f"a {kind.__name__}")
        return value

    def token(self, key: str) -> int | None:
        """An id, if there is one."""
        token = self._keys.get(key)
        if token is None or (type(token) is int and token in (-1, 2**32 - 1)):  # "none", too
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise self.refusal(key, f"an id below {len(self.tokens)}")
        return token

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens) or any(score != score for score in scores):
            raise TokenizerError(f"{self._path}: tokenizer.ggml.scores are not one number for each of {len(self.tokens)} tokens")
        return scores

    def vocabulary(self) -> dict[str, int]:
        """Ids by names, each its own; of what no text becomes, and of empty names, none."""
        ids: dict[str, int] = {}
        for token, name in enumerate(self._written("tokens")):
            if name and self.types[token] != UNUSED and ids.setdefault(name, token) != token:
                raise TokenizerError(f"{self._path}: the tokens {ids[name]} and {token} are both {short(name, repr)}")
        return ids

    def merges(self, vocabulary: Mapping[str, int]) -> list[str]:
        """Two tokens with a space between, which make a third."""
        merges = self._written("merges")
        for merge in merges:
            first, _, second = merge.partition(" ")
            if not (first in vocabulary and second in vocabulary and first + second in vocabulary):
                raise TokenizerError(f"{self._path}: the merge {short(merge, repr)} is not of two tokens that make a third")
        return merges

    def of(self, *types: int) -> list[int]:
        """The ids of tokens of those types."""
        return [token for token, kind in enumerate(self.types) if kind in types]

    def end_marks(self) -> dict[int, str]:
        marks = [token for token, name in enumerate(self.tokens) if name in END_NAMES and self.types[token] != UNUSED]
        names = {self.tokens[token] for token in marks}
        if any(names >= pair for pair in OF_CHANNELS):
            marks = [token for token in marks if self.tokens[token] != END]
        keyed = {self.token(key): name for key, name in END_KEYS.items()}
        named = {token: END_NAMES[self.tokens[token]] for token in marks}
        named |= {token: name for token, name in keyed.items() if token is not None}
        return named | {token: name for token, name in self._more_marks.items() if token < len(self.tokens)}

    def stripping(self) -> list[int]:
        """The ids that take the white space behind them."""
        special = self.of(UNKNOWN, CONTROL, USER_DEFINED) if self.a(STRIPS, bool, False) else []
        return [token for token in special if self.tokens[token] not in LEAVING]

    def _written(self, key: str) -> list[str]:
        """Strings, all of them UTF-8."""
        strings = self._list(key, str)
        try:
            "".join(strings).encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"{self._path}: tokenizer.ggml.{key} hold what is no UTF-8") from None
        return strings

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._keys.get(key)
        if not isinstance(values, list) or {*map(type, values)} != {kind}:
            raise self.refusal(key, f"a list of {kind.__name__}")
        return values


def _pieces(keys: _Keys) -> Pieces:
    bos = keys.token("bos_token_id")
    begins = keys.a("add_bos_token", bool, True) and bos is not None
    marks = keys.end_marks()
    unknown = keys.token("unknown_token_id") or 0
    by_name = {keys.tokens[token].upper(): token for token in keys.of(BYTE)}
    pieces = [token.replace(SPACE, " ").encode("utf-8", "surrogateescape") for token in keys.tokens]
    return Pieces(
        pieces=pieces,
        scores=keys.scores(),
        from_text=[token for token in keys.of(NORMAL, USER_DEFINED) if token not in marks],
        byte_ids=[by_name.get(f"<0X{byte:02X}>", unknown) for byte in range(256)],
        whole=[pieces[token] for token in keys.of(USER_DEFINED) if pieces[token] and token not in marks],
        silent={*keys.of(UNKNOWN, CONTROL, UNUSED), *marks, *([] if bos is None else [bos])},
        end_marks=marks,
        bos=bos if bos is not None else min(marks, default=unknown),
        begins=begins,
        has_space=keys.a("add_space_prefix", bool, True),
        space=SPACE,
        stripping={*keys.stripping()},
    )


def _of_characters(keys: _Keys) -> dict[str, Any]:
    """BPE over characters, where spaces are letters: cut at the ends of lines alone; bytes stand for what is no token."""
    unknown = keys.token("unknown_token_id")
    ends = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _written_as_json(
        keys, begins=True, unk_token=None if unknown is None else keys.tokens[unknown], is_of_bytes=False, ignore_merges=False,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, pre_tokenizer=_cut(r"[^\n]+|\n+"),
        decoder={"type": "Sequence", "decoders": ends},
    )  # fmt: skip


def _of_bytes(keys: _Keys) -> dict[str, Any]:
    """BPE over bytes, of the split that the keys name."""
    split = SPLITS.get(keys.a("pre", str, DEFAULT))
    if split is None:
        raise keys.refusal("pre", f"a split that is supported, such as {KNOWN_SPLITS}")
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split.has_words}
    digits = [{"type": "Digits", "individual_digits": True}] if split.each_digit else []
    return _written_as_json(
        keys, begins=keys.a("add_bos_token", bool, split.begins), unk_token=None, is_of_bytes=True,
        ignore_merges=split.ignore_merges, normalizer={"type": "NFC"} if split.composes else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*digits, *map(_cut, split.regexes), of_bytes]}, decoder=of_bytes,
    )  # fmt: skip


def _cut(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _written_as_json(
    keys: _Keys, begins: bool, unk_token: str | None, is_of_bytes: bool, ignore_merges: bool, **parts: Any
) -> dict[str, Any]:
    """What a tokenizer.json of BPE holds, with the vocabulary and the added tokens of the keys."""
    marks, stripping, vocabulary, bos = keys.end_marks(), keys.stripping(), keys.vocabulary(), keys.token("bos_token_id")
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token, "content": keys.tokens[token], "special": keys.types[token] == CONTROL or token in marks,
                "single_word": False, "lstrip": False, "rstrip": token in stripping, "normalized": False,
            }
            for token in sorted({*keys.of(CONTROL, USER_DEFINED), *marks})
        ],
        "model": {
            "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "unk_token": unk_token,
            "fuse_unk": not is_of_bytes, "byte_fallback": not is_of_bytes, "ignore_merges": ignore_merges, "vocab": vocabulary,
            "merges": keys.merges(vocabulary),
        },
        "post_processor": _beginning(keys.tokens[bos], bos) if begins and bos is not None else None,
        **parts,
    }  # fmt: skip


def _beginning(name: str, token: int) -> dict[str, Any]:
    """A template that puts a token in front."""
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }
