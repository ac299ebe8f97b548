"""Train the tokenizers of tests/fixtures/tokenizers: `python -m tests.tools.make_tokenizers`; committed with tokenizers 0.23.3.

Each splits, decodes and begins a text like its family, with a vocabulary trained on a few words. The structure is that of the
published files of GPT-2, SmolLM2, Qwen2, Qwen3.5, Llama 3, Phi-4-mini, Ministral 3, LFM2, Llama 2, Mistral and Gemma 3.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parents[1] / "fixtures" / "tokenizers"
WORDS = """Once upon a time there was a little robin who lived near the old mill by the river. Every day the robin went to the
river and sang a song, and the miller said: "What a song that is!" They were friends. I'm sure she'd said it's theirs, we'll see.
def main(argv: list[str]) -> int:
    for i in range(10):
        print(f"{i}: {argv[i]!r}")
    return 0
In 1984 and 2024 there were 365 and 366 days; 3.14159 is pi. Çà et là, où l'été naît. Für Elise, größer. Привет, мир! Ωμέγα.
日本語の文章です。中文也可以。🙂🙂 🎉"""
# The patterns of Llama 3 and Qwen2 differ in how many digits stay together; Qwen3.5's treats marks as letters.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# GPT-4o's pattern, which Phi-4-mini uses, and Mistral's start a new word at a capital after a small letter.
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_special_tokens(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def train_byte_level(names: list[AddedToken], first: list[pre_tokenizers.PreTokenizer], use_regex: bool, size: int) -> Tokenizer:
    """Train BPE over GPT-2's bytes, after a first split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def make_regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def gpt2() -> Tokenizer:
    return train_byte_level(make_special_tokens("<|endoftext|>"), [], True, 400)


def smollm2() -> Tokenizer:
    return train_byte_level(
        make_special_tokens("<|endoftext|>", "<|im_start|>", "<|im_end|>"), [pre_tokenizers.Digits(True)], True, 400
    )


def qwen2(pattern: str = PATTERN % "") -> Tokenizer:
    """Train Qwen2's: special tokens come after the others, and some added tokens are text."""
    tokenizer = train_byte_level([], [make_regex_split(pattern)], False, 400)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(make_special_tokens("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


def qwen35() -> Tokenizer:
    pattern = (PATTERN % "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
    return qwen2(pattern)


def llama3() -> Tokenizer:
    """Train Llama 3's: the post-processor prepends <|begin_of_text|>."""
    tokenizer = train_byte_level([], [make_regex_split(PATTERN % "{1,3}")], False, 400)
    tokenizer.add_special_tokens(
        make_special_tokens("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>")
    )
    return prepend_token(tokenizer, "<|begin_of_text|>")


def lfm2() -> Tokenizer:
    """Train LFM2's: like Llama 3's with special tokens first."""
    names = make_special_tokens("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return prepend_token(train_byte_level(names, [make_regex_split(PATTERN % "{1,3}")], False, 400), "<|startoftext|>")


def prepend_token(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """Make the tokenizer prepend a token to texts, and return it."""
    bos = (name, tokenizer.token_to_id(name))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def phi4() -> Tokenizer:
    tokenizer = train_byte_level([], [make_regex_split(CASED)], False, 400)
    tokenizer.add_special_tokens(make_special_tokens("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"))
    return tokenizer


def tekken() -> Tokenizer:
    """Train Ministral 3's: special tokens first, <s> prepended, and words in the vocabulary are not split (ignore_merges)."""
    first = [pre_tokenizers.Split(Regex(TEKKEN), behavior="isolated")]
    tokenizer = train_byte_level(
        make_special_tokens("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), first, False, 400
    )
    tokenizer.model.ignore_merges = True
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def train_sentencepiece(size: int) -> Tokenizer:
    """Train BPE over characters with byte fallback and BOS prepended; a space is "▁"."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    rare = "ÇàùéîüößΩμέγα日本語の文章です。中也可以🎉\n"  # encoded as bytes
    words = WORDS.translate(str.maketrans("", "", rare))
    trained.train_from_iterator([words], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: token for token, name in enumerate(names)}
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(make_special_tokens("<unk>", "<s>", "</s>"))
    bos = ("<s>", 1)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[bos])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = train_sentencepiece(250)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def mistral() -> Tokenizer:
    """Train Mistral's: Metaspace instead of a normalizer, and truncation and padding, which do not apply to prompts."""
    tokenizer = train_sentencepiece(250)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="</s>")
    return tokenizer


def metaspace() -> Tokenizer:
    """Train a tokenizer with the decoder Metaspace, without bytes."""
    tokenizer = train_sentencepiece(250)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def gemma3() -> Tokenizer:
    """Train Gemma 3's: no space is prepended, and runs of newlines and of "▁" are tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rare = "ÇàùéîüößΩμέγα日本語の文章です。中也可以🎉"  # encoded as bytes
    words = WORDS.translate(str.maketrans("", "", rare)).split()
    trained.train_from_iterator([" ".join(words)], trainers.BpeTrainer(vocab_size=250, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    special_names = ["<unused0>", "<start_of_turn>", "<end_of_turn>"]
    runs = [sign * n for sign, min_n in (("\n", 1), ("▁", 2)) for n in range(min_n, 9)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(set(model["vocab"]) - {*runs}, key=model["vocab"].__getitem__)
    vocab = {name: token for token, name in enumerate([*marks, *special_names, *runs, *bytes_, *pieces])}
    run_merges = [(run[:cut], run[cut:]) for run in runs for cut in range(1, len(run))]
    trained_merges = [(left, right) for left, right in model["merges"] if left + right not in runs]
    tokenizer = Tokenizer(models.BPE(vocab, run_merges + trained_merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(make_special_tokens(*marks, *special_names[1:]))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in (special_names[0], *runs)])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    bos = ("<bos>", vocab["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[bos]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {
    make.__name__: make for make in (gpt2, smollm2, qwen2, qwen35, llama3, phi4, tekken, lfm2, llama2, mistral, metaspace, gemma3)
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in TOKENIZERS.items():
        make().save(str(FOLDER / f"{name}.json"), pretty=False)
