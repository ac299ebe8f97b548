"""What published tokenizers do that a GGUF file says by a name alone. Knows nothing of files.

Names and what they mean are llama.cpp's (src/llama-vocab.cpp).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

PIECES, BYTES, CHARACTERS = "SentencePiece's pieces", "BPE over bytes", "BPE over characters"
KINDS = {"llama": PIECES, "gpt2": BYTES, "gemma4": CHARACTERS}  # of tokenizer.ggml.model
DEFAULT = "default"  # what a silent file means, too: of nobody's own, but llama.cpp's


class Split(NamedTuple):
    """How a tokenizer of BPE over bytes cuts a text.

    regexes: what cuts it, one behind the other, before its words become bytes; each_digit: whether each digit is cut off first;
    has_words: whether GPT-2's own split is made with the bytes; ignore_merges: whether a word that is a token is that one
    whatever the merges say; composes: whether a text is NFC first; begins: whether it has a BOS where a file is silent.
    """

    regexes: tuple[str, ...] = ()
    each_digit: bool = False
    has_words: bool = False
    ignore_merges: bool = False
    composes: bool = False
    begins: bool = False


# Llama 3's and Qwen2's splits differ in how many digits stay together
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# in Qwen3.5's marks are letters
_MARKED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# GPT-4o's and Mistral's cut where a capital follows a small letter, GPT-4o's (Phi-4-mini's too) keeps more together
_UPPER, _LOWER, _CONTRACTION = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS, _ONE_DIGIT = Split((_WORDS % "{1,3}",)), Split((_WORDS % "",))
# Seed-Coder's, and Seed-OSS's, leave line breaks behind punctuation apart
_SEED_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_OLD_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_HAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_BY_NAMES = {
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_CASED_WORDS % (_CONTRACTION, _CONTRACTION, "{1,3}"),)),
    "tekken": Split((_CASED_WORDS % ("", "", ""),), ignore_merges=True, begins=True),  # Mistral's since Nemo
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _THREE_DIGITS._replace(
        ignore_merges=True, begins=True
    ),
    "glm4 glm5": _THREE_DIGITS._replace(ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": _THREE_DIGITS,  # Granite 4's and SmolLM3's among them
    "qwen35": Split((_MARKED_WORDS,), composes=True),
    "qwen2 deepseek-r1-qwen": _ONE_DIGIT._replace(composes=True),
    "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2": _ONE_DIGIT,
    "seed-coder": Split((_SEED_WORDS,)),
    "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert jina-es jina-de "
    "jina-v2-es jina-v2-de": Split(has_words=True),
    # Granite 3's too
    "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2": Split(each_digit=True, has_words=True),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _OLD_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": Split(
        (
            r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$", _HAN, r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    DEFAULT: Split((r"[\p{P}$+<=>^~|]+", _OLD_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip
SPLITS = {name: split for names, split in _BY_NAMES.items() for name in names.split()}  # of tokenizer.ggml.pre
KNOWN_SPLITS = "llama-bpe, qwen2, gpt-4o, tekken, smollm and gpt-2"  # such as people know
# special tokens that leave the white space behind them, of models whose others take it
LEAVING = ("<unk>", "<s>", "<|endoftext|>")


def special_tokens_strip(keys: Mapping[str, Any]) -> bool:
    """Whether a GGUF file's special tokens take the white space behind them, as a Phi-3's do, which its name tells."""
    is_named = any(name in str(keys.get("general.name")).lower() for name in ("phi-3", "phi3"))
    is_one = keys.get("general.architecture") == "phi3" and KINDS.get(str(keys.get("tokenizer.ggml.model"))) == PIECES
    return is_named or is_one
