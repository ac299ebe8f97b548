"""Build the tokenizer that the metadata keys of a GGUF file describe. Independent of models.

The meaning of the keys and their defaults are llama.cpp's (src/llama-vocab.cpp). The model `llama` is SentencePiece's BPE, done
by `Tokenizer`. Other BPE models are those of the package tokenizers, with the split named by the key `pre`.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.argument_checks import JSONObject, shorten
from specdec.families.pre_tokenizers import (
    BYTE_BPE,
    DEFAULT_PRE_TOKENIZER,
    NON_STRIPPING_TOKENS,
    PRE_TOKENIZERS,
    SENTENCEPIECE,
    TOKENIZER_MODELS,
)
from specdec.text.hf_encoder import Encoder
from specdec.text.hf_tokenizer import HFTokenizer, check_library, wrap_library_errors
from specdec.tokenizer import SPECIAL_TOKENS_STRIP_KEY, AnyTokenizer, SentencePieceVocab, Tokenizer, TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
NO_EOS_TOKENS: Mapping[int, str] = MappingProxyType({})
SPACE = "\u2581"  # SentencePiece's space
TYPE_PHRASES: Mapping[type, str] = MappingProxyType({str: "a string", bool: "true or false"})
LIST_PHRASES: Mapping[type, str] = MappingProxyType(
    {str: "a list of strings", int: "a list of integers", float: "a list of numbers"}
)
EOS_KEYS = {"eos_token_id": "eos", "eot_token_id": "eot", "eom_token_id": "eom"}
# Names of end-of-sequence tokens of any type. The keys can name too few: some files name <|im_end|> and not <|endoftext|>.
EOS_NAMES = {
    **dict.fromkeys(
        ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"), "eos"
    ),
    **dict.fromkeys(("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>"), "eot"),
    **dict.fromkeys(("_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~["), "eot"),
    "<|observation|>": "eot",  # GLM's, after a tool call; named in its folders, but by no key of its GGUF files
    "<|eom_id|>": "eom",
}
HARMONY_END = "<|end|>"  # does not end an answer if the vocabulary has both tokens of one of these pairs (harmony's channels)
CHANNEL_EOS_PAIRS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def load_gguf_tokenizer(path: Path, keys: JSONObject, eos_tokens: Mapping[int, str] = NO_EOS_TOKENS) -> AnyTokenizer:
    """Build the tokenizer of a GGUF file from the file's metadata.

    Args:
        path: The file, for errors.
        keys: The keys that start with "tokenizer.ggml.", without this prefix.
        eos_tokens: End-of-sequence tokens in addition to the file's.

    Raises:
        TokenizerError: The keys are inconsistent or the tokenizer is not supported.
    """
    values = _TokenizerKeys(path, keys, eos_tokens)
    kind = TOKENIZER_MODELS.get(values.get_value("model", str, ""))
    if kind is None:
        raise values.make_unsupported_error("model", TOKENIZER_MODELS)
    if kind == SENTENCEPIECE:
        return Tokenizer(path, _make_sentencepiece_vocab(values))
    check_library(path)
    vocab = values.get_vocab()
    try:
        with wrap_library_errors(f"the package tokenizers cannot read the vocabulary of {path}"):
            library = (_make_byte_level_bpe if kind == BYTE_BPE else _make_character_bpe)(values, vocab)
            encoder = Encoder(library, vocab)
    except TokenizerError:
        values.check_merges(vocab)
        raise
    return HFTokenizer(path, values.get_token_id("bos_token_id"), values.eos_tokens, encoder, values.duplicates)


def read_gguf_bos_and_eos(path: Path, keys: JSONObject, n_rows: int) -> tuple[int | None, dict[int, str]]:
    """Return the BOS id (or None) and the named end-of-sequence ids of a GGUF file, for a tokenizer that replaces the file's own.

    Args:
        path: The GGUF file, for errors.
        keys: See `load_gguf_tokenizer`; the tokens may be missing.
        n_rows: The size of the model's vocabulary.

    Raises:
        TokenizerError: A key is not valid.
    """
    values = _TokenizerKeys(path, {"tokens": [""] * n_rows} | dict(keys))
    return values.get_token_id("bos_token_id"), values.eos_tokens


class _TokenizerKeys:
    """The tokenizer keys of a GGUF file, each validated when it is read.

    Args:
        path: The file, for errors.
        keys: The keys that start with "tokenizer.ggml.", without this prefix.
        eos_tokens: End-of-sequence tokens in addition to the file's.

    Attributes:
        tokens: Names of all tokens.
        types: Type of each token.
        duplicates: Names by id of the tokens with the name of an earlier one, filled by `get_vocab`. They are only decoded.

    Raises:
        TokenizerError: Any method, for a key with an invalid value.
    """

    def __init__(self, path: Path, keys: JSONObject, eos_tokens: Mapping[int, str] = NO_EOS_TOKENS) -> None:
        self._path, self._keys, self._extra_eos_tokens = path, keys, eos_tokens
        self.tokens: list[str] = self._get_list("tokens", str)
        self.types: list[int] = self._get_list("token_type", int) if "token_type" in keys else [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise TokenizerError(f"{path}: {len(self.types)} token types for {len(self.tokens)} tokens")
        self.duplicates: dict[int, str] = {}

    def make_error(self, key: str, expected: str) -> TokenizerError:
        """Return a TokenizerError, to be raised, about the value of a key; `expected` is a phrase for the valid values."""
        return TokenizerError(f"{self._path}: tokenizer.ggml.{key} is {self._format_value(key)}; expected {expected}")

    def make_unsupported_error(self, key: str, supported: Iterable[str]) -> TokenizerError:
        """Return a TokenizerError, to be raised, about an unsupported value of a key; its message lists the supported ones."""
        names = ", ".join(supported)
        return TokenizerError(f"{self._path}: tokenizer.ggml.{key} is {self._format_value(key)}; supported: {names}")

    def _format_value(self, key: str) -> str:
        value = self._keys.get(key)
        return "missing" if value is None else shorten(value, repr)

    def get_value(self, key: str, kind: type, default: Any) -> Any:
        """Return the value of a key, or the default if the key is missing; raise TokenizerError if its type is not `kind`."""
        value = self._keys.get(key, default)
        if type(value) is not kind:
            raise self.make_error(key, TYPE_PHRASES[kind])
        return value

    def get_token_id(self, key: str) -> int | None:
        """Return the token id that a key holds, or None if the key is missing or means "none".

        Raises:
            TokenizerError: The value is not an id of the vocabulary.
        """
        token = self._keys.get(key)
        if token is None or (type(token) is int and token in (-1, 2**32 - 1)):  # also mean "none"
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise self.make_error(key, f"an id below {len(self.tokens)}")
        return token

    def get_scores(self) -> list[float]:
        scores: list[float] = self._get_list("scores", float)
        if len(scores) != len(self.tokens) or any(score != score for score in scores):
            raise TokenizerError(f"{self._path}: tokenizer.ggml.scores must be one number for each of {len(self.tokens)} tokens")
        return scores

    def get_vocab(self) -> dict[str, int]:
        """Return the first id of each token's name, without unused tokens and empty names."""
        names = self._get_utf8_strings("tokens")
        used: Sequence[int] = range(len(names))
        if UNUSED in self.types or "" in names:
            used = [token for token in used if names[token] and self.types[token] != UNUSED]
        ids = {names[token]: token for token in reversed(used)}
        if len(ids) < len(used):
            self.duplicates |= {token: names[token] for token in used if ids[names[token]] != token}
        return ids

    def get_merges(self) -> list[Any]:
        """Return the BPE merges, each a pair of tokens, which may be unknown (see `check_merges`)."""
        return [tuple(merge.split(" ", 1)) for merge in self._get_utf8_strings("merges")]

    def check_merges(self, vocab: Collection[str]) -> None:
        """Raise TokenizerError for a merge with an unknown token; the library, which checks the same, does not say which."""
        for pair in self.get_merges():
            if len(pair) != 2 or not all(name in vocab for name in (*pair, "".join(pair))):
                name = shorten(" ".join(pair), repr)
                raise TokenizerError(f"{self._path}: the merge {name} does not join two tokens into a third")

    def find_tokens_of_type(self, *types: int) -> list[int]:
        """Return the ids of all tokens with one of the given token types, such as CONTROL."""
        return [token for token, kind in enumerate(self.types) if kind in types]

    @functools.cached_property
    def eos_tokens(self) -> dict[int, str]:
        """The end-of-sequence tokens by id: those in EOS_KEYS, those with a name in EOS_NAMES, and the additional ones."""
        named_ids = [token for token, name in enumerate(self.tokens) if name in EOS_NAMES and self.types[token] != UNUSED]
        names = {self.tokens[token] for token in named_ids}
        if any(names >= pair for pair in CHANNEL_EOS_PAIRS):
            named_ids = [token for token in named_ids if self.tokens[token] != HARMONY_END]
        keyed = {self.get_token_id(key): name for key, name in EOS_KEYS.items()}
        eos_tokens = {token: EOS_NAMES[self.tokens[token]] for token in named_ids}
        eos_tokens |= {token: name for token, name in keyed.items() if token is not None}
        return eos_tokens | {token: name for token, name in self._extra_eos_tokens.items() if token < len(self.tokens)}

    def get_rstrip_ids(self) -> list[int]:
        """Return the ids of special tokens that remove the white space after them in a text; none unless a key enables that."""
        if not self.get_value(SPECIAL_TOKENS_STRIP_KEY, bool, False):
            return []
        special = self.find_tokens_of_type(UNKNOWN, CONTROL, USER_DEFINED)
        return [token for token in special if self.tokens[token] not in NON_STRIPPING_TOKENS]

    def _get_utf8_strings(self, key: str) -> list[str]:
        """Return the list of strings that a key holds; raise TokenizerError if one is not valid UTF-8."""
        strings = self._get_list(key, str)
        try:
            "".join(strings).encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"{self._path}: tokenizer.ggml.{key} are not valid UTF-8") from None
        return strings

    def _get_list(self, key: str, kind: type) -> list[Any]:
        values = self._keys.get(key)
        if not isinstance(values, list) or {*map(type, values)} != {kind}:
            raise self.make_error(key, LIST_PHRASES[kind])
        return values


def _make_sentencepiece_vocab(keys: _TokenizerKeys) -> SentencePieceVocab:
    bos = keys.get_token_id("bos_token_id")
    add_bos = keys.get_value("add_bos_token", bool, True) and bos is not None
    eos_tokens = keys.eos_tokens
    unknown = keys.get_token_id("unknown_token_id") or 0
    byte_token_ids = {keys.tokens[token].upper(): token for token in keys.find_tokens_of_type(BYTE)}
    pieces = [token.replace(SPACE, " ").encode("utf-8", "surrogateescape") for token in keys.tokens]
    return SentencePieceVocab(
        pieces=pieces,
        scores=keys.get_scores(),
        mergeable_ids=[token for token in keys.find_tokens_of_type(NORMAL, USER_DEFINED) if token not in eos_tokens],
        byte_ids=[byte_token_ids.get(f"<0X{byte:02X}>", unknown) for byte in range(256)],
        user_defined=[
            pieces[token] for token in keys.find_tokens_of_type(USER_DEFINED) if pieces[token] and token not in eos_tokens
        ],
        non_text_ids={*keys.find_tokens_of_type(UNKNOWN, CONTROL, UNUSED), *eos_tokens, *([] if bos is None else [bos])},
        eos_tokens=eos_tokens,
        bos=bos if bos is not None else min(eos_tokens, default=unknown),
        add_bos=add_bos,
        add_space_prefix=keys.get_value("add_space_prefix", bool, True),
        space_symbol=SPACE,
        rstrip_ids={*keys.get_rstrip_ids()},
    )


def _make_character_bpe(keys: _TokenizerKeys, vocab: dict[str, int]) -> Any:
    """Return the library's tokenizer for BPE over characters with byte fallback, in which spaces are letters.

    The text is split only at the ends of lines.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = keys.get_token_id("unknown_token_id")
    unk_token = None if unknown is None else keys.tokens[unknown]
    library = Tokenizer(models.BPE(vocab, keys.get_merges(), unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", SPACE)
    library.pre_tokenizer = _make_split(r"[^\n]+|\n+")
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_special_tokens(library, keys, add_bos=True)
    return library


def _make_byte_level_bpe(keys: _TokenizerKeys, vocab: dict[str, int]) -> Any:
    """Return the library's tokenizer for BPE over bytes, with the pre-tokenizer that the key `pre` names.

    Raises:
        TokenizerError: The pre-tokenizer is not supported.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = PRE_TOKENIZERS.get(keys.get_value("pre", str, DEFAULT_PRE_TOKENIZER))
    if split is None:
        raise keys.make_unsupported_error("pre", sorted(PRE_TOKENIZERS))
    library = Tokenizer(models.BPE(vocab, keys.get_merges(), ignore_merges=split.ignore_merges))
    if split.has_nfc:
        library.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.has_single_digits else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.has_gpt2_regex)
    library.pre_tokenizer = pre_tokenizers.Sequence([*digits, *map(_make_split, split.regexes), byte_level])
    library.decoder = decoders.ByteLevel()
    _add_special_tokens(library, keys, add_bos=keys.get_value("add_bos_token", bool, split.has_bos))
    return library


def _make_split(regex: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(regex), behavior="isolated")


def _add_special_tokens(library: Any, keys: _TokenizerKeys, add_bos: bool) -> None:
    """Add the special tokens of a GGUF file to the library's tokenizer; with `add_bos`, texts begin with its BOS, if any."""
    from tokenizers import AddedToken, processors

    eos_tokens, rstrip_ids, bos = keys.eos_tokens, keys.get_rstrip_ids(), keys.get_token_id("bos_token_id")
    for token in sorted({*keys.find_tokens_of_type(CONTROL, USER_DEFINED), *eos_tokens} - keys.duplicates.keys()):
        is_special = keys.types[token] == CONTROL or token in eos_tokens
        added = AddedToken(keys.tokens[token], rstrip=token in rstrip_ids, normalized=False, special=is_special)
        library.add_tokens([added])
    if add_bos and bos is not None:
        bos_token = {"id": "bos", "ids": [bos], "tokens": [keys.tokens[bos]]}
        library.post_processor = processors.TemplateProcessing(single="bos $A", special_tokens=[bos_token])
