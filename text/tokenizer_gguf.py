"""The tokenizer whose keys a GGUF file holds. Knows nothing of models.

What the keys mean, and what holds where they are silent, is llama.cpp's (src/llama-vocab.cpp): `llama` is SentencePiece's BPE,
which `Tokenizer` does; `gpt2` is BPE over bytes, for which a tokenizer.json of the split that `pre` names is written, and read by
`JsonTokenizer`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checks import short
from ..tokenizer import AnyTokenizer, Pieces, Tokenizer, TokenizerError
from .tokenizer_json import JsonTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
SPACE = "\u2581"  # as SentencePiece writes it
END_KEYS = {"eos_token_id": "eos", "eot_token_id": "eot", "eom_token_id": "eom"}
# of control tokens those that end a text, also where the keys name but one: Qwen2's say <|im_end|> and not <|endoftext|>
END_NAMES = {
    "<|endoftext|>": "eos", "<|end_of_text|>": "eos", "<|im_end|>": "eot", "<|eot_id|>": "eot", "<|end|>": "eot",
    "<end_of_turn>": "eot", "<|eom_id|>": "eom",
}  # fmt: skip
# Llama 3's and Qwen2's splits differ in how many digits stay together
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# in Qwen3.5's marks are letters
MARKED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# GPT-4o's and Mistral's cut where a capital follows a small letter, GPT-4o's (Phi-4-mini's too) keeps more together
_UPPER, _LOWER, _CONTRACTION = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = ("gpt-4o",)
TEKKEN = ("tekken",)  # Mistral's since Nemo, Ministral 3's
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "lfm2")
THREE_DIGITS = (*LLAMA3, "dbrx", "smaug-bpe")  # Granite 4's and SmolLM3's
QWEN35 = ("qwen35",)
QWEN2 = ("qwen2", "deepseek-r1-qwen")
GPT2 = ("gpt-2", "gpt2", "phi-2")
SMOLLM = ("smollm", "refact")  # and Granite 3's
DEFAULT = "default"  # what a silent file means, too: of nobody's own, but llama.cpp's
SPLITS = (*GPT2, *SMOLLM, *THREE_DIGITS, *QWEN2, *QWEN35, *GPT4O, *TEKKEN, DEFAULT)
# one behind the other
DEFAULT_SPLITS = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def gguf_tokenizer(path: Path, keys: Mapping[str, Any]) -> AnyTokenizer:
    """The tokenizer of a GGUF file; keys: those that begin with tokenizer.ggml, without that.

    Raises TokenizerError for keys that do not fit together, and for a kind of tokenizer that is not done here.
    """
    values = _Keys(path, keys)
    model = values.a("model", str, "")
    if model == "llama":
        return Tokenizer(path, _pieces(values))
    if model != "gpt2":
        raise values.refusal("model", "llama or gpt2: other kinds of tokenizers are not done here")
    data = json.dumps(_tokenizer_json(values)).encode()
    return JsonTokenizer(path, values.token("bos_token_id"), values.end_marks(), data)


class _Keys:
    """The keys, each checked as it is read, and the tokens."""

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        self._path, self._keys = path, keys
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
        marks = [token for token in self.of(CONTROL, USER_DEFINED) if self.tokens[token] in END_NAMES]
        keyed = {self.token(key): name for key, name in END_KEYS.items()}
        return {token: END_NAMES[self.tokens[token]] for token in marks} | {
            token: name for token, name in keyed.items() if token is not None
        }

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
    marks = keys.end_marks() | ({} if bos is None else {bos: "bos"})  # the stories models end a text by beginning one
    unknown = keys.token("unknown_token_id") or 0
    by_name = {keys.tokens[token].upper(): token for token in keys.of(BYTE)}
    pieces = [token.replace(SPACE, " ").encode("utf-8", "surrogateescape") for token in keys.tokens]
    return Pieces(
        pieces=pieces,
        scores=keys.scores(),
        from_text=keys.of(NORMAL, USER_DEFINED),
        byte_ids=[by_name.get(f"<0X{byte:02X}>", unknown) for byte in range(256)],
        whole=[pieces[token] for token in keys.of(USER_DEFINED) if pieces[token] and token not in marks],
        silent={*keys.of(UNKNOWN, CONTROL, UNUSED), *marks},
        end_marks=marks,
        bos=bos if bos is not None else min(marks, default=unknown),
        begins=begins,
        has_space=keys.a("add_space_prefix", bool, True),
    )


def _tokenizer_json(keys: _Keys) -> dict[str, Any]:
    pre = keys.a("pre", str, DEFAULT)
    if pre not in SPLITS:
        raise keys.refusal("pre", f"one of {', '.join(SPLITS)}")
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in GPT2 + SMOLLM}
    vocabulary = keys.vocabulary()
    bos, marks = keys.token("bos_token_id"), keys.end_marks()
    begins = keys.a("add_bos_token", bool, pre in LLAMA3 + TEKKEN) and bos is not None
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token, "content": keys.tokens[token], "special": keys.types[token] == CONTROL or token in marks,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for token in keys.of(CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre in QWEN2 + QWEN35 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_first_split(pre), of_bytes]},
        "post_processor": _beginning(keys.tokens[bos], bos) if begins and bos is not None else None,
        "decoder": of_bytes,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre in LLAMA3 + TEKKEN, "vocab": vocabulary,
            "merges": keys.merges(vocabulary),
        },
    }  # fmt: skip


def _first_split(pre: str) -> list[dict[str, Any]]:
    """What cuts a text before its words become bytes; GPT-2's own split is made with the bytes."""
    if pre in SMOLLM:
        return [{"type": "Digits", "individual_digits": True}]
    if pre in GPT2:
        return []
    if pre in GPT4O + TEKKEN:
        splits = [CASED_WORDS % ((_CONTRACTION, _CONTRACTION, "{1,3}") if pre in GPT4O else ("", "", ""))]
    elif pre in QWEN35:
        splits = [MARKED_WORDS]
    else:
        splits = [*DEFAULT_SPLITS] if pre == DEFAULT else [WORDS % ("{1,3}" if pre in THREE_DIGITS else "")]
    return [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in splits]


def _beginning(name: str, token: int) -> dict[str, Any]:
    """A template that puts a token in front."""
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }
