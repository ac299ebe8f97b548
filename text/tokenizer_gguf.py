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
from ..tokenizer import STRIPS, AnyTokenizer, Pieces, Tokenizer, TokenizerError
from .tokenizer_json import JsonTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
SPACE = "\u2581"  # as SentencePiece writes it
END_KEYS = {"eos_token_id": "eos", "eot_token_id": "eot", "eom_token_id": "eom"}
# what ends a text by its name, of whatever type, also where the keys name but one: Qwen2's say <|im_end|> and not <|endoftext|>
END_NAMES = {
    **dict.fromkeys(
        ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"), "eos"
    ),
    **dict.fromkeys(("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>"), "eot"),
    **dict.fromkeys(("_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~["), "eot"),
    "<|eom_id|>": "eom",
}
END = "<|end|>"  # which is within an answer where there are both of one of these pairs, as in harmony's channels
OF_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# of the special tokens of Phi-3, those that leave the white space behind them
LEAVING = ("<unk>", "<s>", "<|endoftext|>")
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
GPT4O = ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
TEKKEN = ("tekken",)  # Mistral's since Nemo, Ministral 3's
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
GLM = ("glm4", "glm5")
THREE_DIGITS = (*LLAMA3, *GLM, "dbrx", "smaug-bpe", "chatglm-bpe")  # Granite 4's and SmolLM3's among them
QWEN35 = ("qwen35",)
QWEN2 = ("qwen2", "deepseek-r1-qwen")
ONE_DIGIT = (*QWEN2, "megrez", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "grok-2")
GPT2 = (
    "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum",
    "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
)  # fmt: skip
SMOLLM = ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")  # and Granite 3's
GEMMA4 = "gemma4"  # a model: BPE as SentencePiece has it
DEFAULT = "default"  # what a silent file means, too: of nobody's own, but llama.cpp's
# of splits that are made one behind the other, those of each
_HAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
CHAINS = {
    "falcon": (
        r"[\p{P}$+<=>^~|`]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", "[0-9][0-9][0-9]",
    ),
    "deepseek-llm": (
        r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$", _HAN, r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    DEFAULT: (
        r"[\p{P}$+<=>^~|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
}  # fmt: skip
SPLITS = (*CHAINS, *GPT2, *SMOLLM, *THREE_DIGITS, *ONE_DIGIT, *QWEN35, *GPT4O, *TEKKEN)


def gguf_tokenizer(path: Path, keys: Mapping[str, Any]) -> AnyTokenizer:
    """The tokenizer of a GGUF file; keys: those that begin with tokenizer.ggml, without that.

    Raises TokenizerError for keys that do not fit together, and for a kind of tokenizer that is not done here.
    """
    values = _Keys(path, keys)
    model = values.a("model", str, "")
    if model == "llama":
        return Tokenizer(path, _pieces(values))
    if model not in ("gpt2", GEMMA4):
        raise values.refusal("model", "llama, gpt2 or gemma4: other kinds of tokenizers are not done here")
    data = json.dumps(_gemma_json(values) if model == GEMMA4 else _tokenizer_json(values)).encode()
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
        marks = [token for token, name in enumerate(self.tokens) if name in END_NAMES and self.types[token] != UNUSED]
        names = {self.tokens[token] for token in marks}
        if any(names >= pair for pair in OF_CHANNELS):
            marks = [token for token in marks if self.tokens[token] != END]
        keyed = {self.token(key): name for key, name in END_KEYS.items()}
        return {token: END_NAMES[self.tokens[token]] for token in marks} | {
            token: name for token, name in keyed.items() if token is not None
        }

    def stripping(self) -> list[int]:
        """The ids that take the white space behind them: special tokens of Phi-3."""
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


def _gemma_json(keys: _Keys) -> dict[str, Any]:
    """BPE over characters, where spaces are letters: cut at the ends of lines alone; bytes stand for what is no token."""
    vocabulary, bos, unknown = keys.vocabulary(), keys.token("bos_token_id"), keys.token("unknown_token_id")
    ends = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _written_as_json(
        keys,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False},
        post_processor=_beginning(keys.tokens[bos], bos) if bos is not None else None,
        decoder={"type": "Sequence", "decoders": ends},
        model={
            "unk_token": None if unknown is None else keys.tokens[unknown], "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False, "vocab": vocabulary, "merges": keys.merges(vocabulary),
        },
    )  # fmt: skip


def _tokenizer_json(keys: _Keys) -> dict[str, Any]:
    pre = keys.a("pre", str, DEFAULT)
    if pre not in SPLITS:
        raise keys.refusal("pre", "a split that is done here, as are llama-bpe, qwen2, gpt-4o, tekken, smollm and gpt-2")
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in GPT2 + SMOLLM}
    vocabulary, bos = keys.vocabulary(), keys.token("bos_token_id")
    begins = keys.a("add_bos_token", bool, pre in LLAMA3 + TEKKEN) and bos is not None
    return _written_as_json(
        keys,
        normalizer={"type": "NFC"} if pre in QWEN2 + QWEN35 else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*_first_split(pre), of_bytes]},
        post_processor=_beginning(keys.tokens[bos], bos) if begins and bos is not None else None,
        decoder=of_bytes,
        model={
            "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre in LLAMA3 + GLM + TEKKEN,
            "vocab": vocabulary, "merges": keys.merges(vocabulary),
        },
    )  # fmt: skip


def _written_as_json(keys: _Keys, model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What a tokenizer.json of BPE holds, with the added tokens of the keys."""
    marks, stripping = keys.end_marks(), keys.stripping()
    of_bpe = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token, "content": keys.tokens[token], "special": keys.types[token] == CONTROL or token in marks,
                "single_word": False, "lstrip": False, "rstrip": token in stripping, "normalized": False,
            }
            for token in sorted({*keys.of(CONTROL, USER_DEFINED), *marks})
        ],
        "model": of_bpe | model,
        **parts,
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
    elif pre in CHAINS:
        splits = [*CHAINS[pre]]
    else:
        splits = [WORDS % ("{1,3}" if pre in THREE_DIGITS else "")]
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
