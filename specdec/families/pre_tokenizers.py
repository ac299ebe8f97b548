"""Pre-tokenizers of published models, which a GGUF file gives only by name.

The names and their meaning are llama.cpp's (src/llama-vocab.cpp).
"""

from typing import NamedTuple

from specdec.argument_checks import JSONObject

SENTENCEPIECE, BYTE_BPE, CHAR_BPE = "SentencePiece's pieces", "BPE over bytes", "BPE over characters"
TOKENIZER_MODELS = {"llama": SENTENCEPIECE, "gpt2": BYTE_BPE, "gemma4": CHAR_BPE}  # of tokenizer.ggml.model
DEFAULT_PRE_TOKENIZER = "default"  # also if the name is missing; llama.cpp's own, not a model's


class PreTokenizer(NamedTuple):
    """A description of how a byte-level BPE tokenizer splits text into words.

    Attributes:
        regexes: Patterns that split the text one after another, before words become bytes.
        has_single_digits: Whether each digit is split off first.
        has_gpt2_regex: Whether GPT-2's split is done by the byte-level step.
        ignore_merges: Whether a word that is a token becomes that token, whatever the merges are.
        has_nfc: Whether the text is normalized to NFC first.
        has_bos: Whether a BOS token is added if the file does not say.
    """

    regexes: tuple[str, ...] = ()
    has_single_digits: bool = False
    has_gpt2_regex: bool = False
    ignore_merges: bool = False
    has_nfc: bool = False
    has_bos: bool = False


# Llama 3 and Qwen2 differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Qwen3.5: marks count as letters.
_MARKED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# GPT-4o and Mistral split before a capital after a small letter; GPT-4o (and Phi-4-mini) keeps more together.
_UPPER, _LOWER, _CONTRACTION = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UP_TO_THREE_DIGITS, _ONE_DIGIT = PreTokenizer((_WORDS % "{1,3}",)), PreTokenizer((_WORDS % "",))
# Seed-Coder and Seed-OSS split off line breaks after punctuation.
_SEED_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_OLD_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Kimi K2 and Moonlight: as GPT-4o, but with Chinese characters apart.
_KIMI_UPPER, _KIMI_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_WORDS = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LING_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_HAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_PRE_TOKENIZERS_BY_NAMES = {
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_CASED_WORDS % (_CONTRACTION, _CONTRACTION, "{1,3}"),)),
    "tekken": PreTokenizer((_CASED_WORDS % ("", "", ""),), ignore_merges=True, has_bos=True),  # Mistral since Nemo
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _UP_TO_THREE_DIGITS._replace(
        ignore_merges=True, has_bos=True
    ),
    "glm4 glm5": _UP_TO_THREE_DIGITS._replace(ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": _UP_TO_THREE_DIGITS,  # including Granite 4 and SmolLM3
    "qwen35": PreTokenizer((_MARKED_WORDS,), has_nfc=True),
    "qwen2 deepseek-r1-qwen": _ONE_DIGIT._replace(has_nfc=True),
    "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2": _ONE_DIGIT,
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _WORDS % "")),
    "seed-coder": PreTokenizer((_SEED_WORDS,)),
    "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert jina-es jina-de "
    "jina-v2-es jina-v2-de": PreTokenizer(has_gpt2_regex=True),
    # Granite 3, too.
    "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2": PreTokenizer(has_single_digits=True,
    has_gpt2_regex=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _OLD_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$", _HAN, r"\p{N}+",
        )
    ),
    "kimi-k2": PreTokenizer((_KIMI_WORDS,)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_LING_WORDS,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    # A punctuation mark in front of Latin letters belongs to them, and marks count as letters.
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    # MiniCPM 5, which is a Llama otherwise.
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _WORDS % "+"), ignore_merges=True),
    DEFAULT_PRE_TOKENIZER: PreTokenizer((r"[\p{P}$+<=>^~|]+", _OLD_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip
PRE_TOKENIZERS = {
    name: split for names, split in _PRE_TOKENIZERS_BY_NAMES.items() for name in names.split()
}  # of tokenizer.ggml.pre
# Special tokens that keep the white space after them, in models in which the others strip it.
NON_STRIPPING_TOKENS = ("<unk>", "<s>", "<|endoftext|>")


def has_rstrip_special_tokens(keys: JSONObject) -> bool:
    """Return whether a GGUF file is a Phi-3 model, in which special tokens remove the white space that follows them in a text.

    Args:
        keys: The metadata of the file; its name, architecture and tokenizer model show the family.
    """
    is_named = any(name in str(keys.get("general.name")).lower() for name in ("phi-3", "phi3"))
    is_phi3 = (
        keys.get("general.architecture") == "phi3"
        and TOKENIZER_MODELS.get(str(keys.get("tokenizer.ggml.model"))) == SENTENCEPIECE
    )
    return is_named or is_phi3
