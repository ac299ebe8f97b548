"""Train the tokenizers of tests/fixtures/tokenizers: `python -m tests.tools.make_tokenizers`; committed with tokenizers 0.23.3.

A family's way of splitting, spelling and beginning a text each, over a few words; the shapes are those that the published files
of GPT-2, SmolLM2, Qwen2, Qwen3.5, Llama 3, Phi-4-mini, Ministral 3, LFM2, Llama 2, Mistral and Gemma 3 have.
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
# Llama 3's and Qwen2's pattern differ in how many digits stay together; in Qwen3.5's marks are letters
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# GPT-4o's, which Phi-4-mini has, and Mistral's begin a word at a capital behind a small letter
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


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(names: list[AddedToken], first: list[pre_tokenizers.PreTokenizer], use_regex: bool, size: int) -> Tokenizer:
    """BPE over GPT-2's bytes, after a first split."""
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


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def gpt2() -> Tokenizer:
    return byte_level(special("<|endoftext|>"), [], True, 400)


def smollm2() -> Tokenizer:
    return byte_level(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), [pre_tokenizers.Digits(True)], True, 400)


def qwen2(pattern: str = PATTERN % "") -> Tokenizer:
    """Special tokens behind the others, among them such as are text."""
    tokenizer = byte_level([], [split(pattern)], False, 400)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


def qwen35() -> Tokenizer:
    marks = (PATTERN % "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
    return qwen2(marks)


def llama3() -> Tokenizer:
    """The template puts <|begin_of_text|> in front."""
    tokenizer = byte_level([], [split(PATTERN % "{1,3}")], False, 400)
    tokenizer.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"))
    return begun(tokenizer, "<|begin_of_text|>")


def lfm2() -> Tokenizer:
    """As Llama 3's, its special tokens in front."""
    names = special("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return begun(byte_level(names, [split(PATTERN % "{1,3}")], False, 400), "<|startoftext|>")


def begun(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """With a token of that name in front of texts."""
    bos = (name, tokenizer.token_to_id(name))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def phi4() -> Tokenizer:
    tokenizer = byte_level([], [split(CASED)], False, 400)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"))
    return tokenizer


def tekken() -> Tokenizer:
    """Ministral 3's: special tokens first, <s> in front, words that are tokens whole."""
    first = [pre_tokenizers.Split(Regex(TEKKEN), behavior="isolated")]
    tokenizer = byte_level(
        special("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), first, False, 400
    )
    tokenizer.model.ignore_merges = True
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def sentence_pieces(size: int) -> Tokenizer:
    """BPE over characters with a byte for what has no piece, and BOS in front; a space is "▁"."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    rare = "ÇàùéîüößΩμέγα日本語の文章です。中也可以🎉\n"  # which is written in bytes
    words = WORDS.translate(str.maketrans("", "", rare))
    trained.train_from_iterator([words], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: token for token, name in enumerate(names)}
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>"))
    bos = ("<s>", 1)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[bos])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = sentence_pieces(250)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def mistral() -> Tokenizer:
    """The newer spelling of the same, and settings of a training run that are none of a text's."""
    tokenizer = sentence_pieces(250)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="</s>")
    return tokenizer


def metaspace() -> Tokenizer:
    """Spelled by the decoder Metaspace, without bytes."""
    tokenizer = sentence_pieces(250)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def gemma3() -> Tokenizer:
    """No space is put in front; runs of lines and of spaces are tokens of their own, the latter by SentencePiece's spelling."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rare = "ÇàùéîüößΩμέγα日本語の文章です。中也可以🎉"  # which is written in bytes
    words = WORDS.translate(str.maketrans("", "", rare)).split()
    trained.train_from_iterator([" ".join(words)], trainers.BpeTrainer(vocab_size=250, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    own = ["<unused0>", "<start_of_turn>", "<end_of_turn>"]
    runs = [sign * n for sign, least in (("\n", 1), ("▁", 2)) for n in range(least, 9)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(set(model["vocab"]) - {*runs}, key=model["vocab"].__getitem__)
    vocab = {name: token for token, name in enumerate([*marks, *own, *runs, *bytes_, *pieces])}
    parts = [(run[:cut], run[cut:]) for run in runs for cut in range(1, len(run))]
    trained_merges = [(left, right) for left, right in model["merges"] if left + right not in runs]
    tokenizer = Tokenizer(models.BPE(vocab, parts + trained_merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special(*marks, *own[1:]))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in (own[0], *runs)])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    bos = ("<bos>", vocab["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[bos]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


KINDS = {
    make.__name__: make for make in (gpt2, smollm2, qwen2, qwen35, llama3, phi4, tekken, lfm2, llama2, mistral, metaspace, gemma3)
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in KINDS.items():
        make().save(str(FOLDER / f"{name}.json"), pretty=False)
