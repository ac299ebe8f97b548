"""Tests of gguf_tokenizer.py: equality with the original tokenizer.json, and models in GGUF files."""

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.families.pre_tokenizers import PRE_TOKENIZERS
from specdec.loaders import load_checkpoint, read_vocabulary
from specdec.loaders.model_loader import load_model
from specdec.text.gguf_tokenizer import load_gguf_tokenizer
from specdec.text.tokenizer_lookup import compare_vocabularies, resolve_tokenizer
from specdec.tokenizer import SPECIAL_TOKENS_STRIP_KEY, RenderedSegment, Tokenizer, TokenizerError
from tests.tools.command_runs import Run, run  # noqa: F401  (a fixture)
from tests.tools.fuzz_common import check_one_line
from tests.tools.gguf_files import TOKENIZERS, Keys, gguf_bytes, make_model_with_tokenizer, make_tokenizer_keys

pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.text.hf_tokenizer import HFTokenizer
from tests.tools.model_folders import SAMPLINGS, generate_tokens, make_folder

BYTE_LEVEL = ["gpt2", "smollm2", "qwen2", "qwen35", "llama3", "phi4", "tekken", "lfm2"]
TEXTS = [
    "", " ", "  two", "Once upon a time", "I'm she'D we'LL they'Re", "1234 5,678.9", "a\n\n\tb \r\n", "été 日本 🙂🙂 Ωя",
    "e\u0301", "हिन्दी ก็ \u0301x",
    "aCamelCase HTTPServer Élan'S A/B//\n", "<s></s><unk><0x41> <|im_end|><|endoftext|><|eot_id|>", "<tool_call>x</tool_call>",
    "\x00\x1b\u00a0\u2003", "a" * 40,
]  # fmt: skip


def make_texts() -> list[str]:
    rng = random.Random(7)
    pool = "  \n\tthe rivr'sdTM0129.,!?<|>/é日🙂\u0301Ω"
    return TEXTS + ["".join(rng.choices(pool, k=rng.randrange(1, 40))) for _ in range(200)]


def make_keys(name: str, **changes: Any) -> Keys:
    """Return the tokenizer keys of a fixture without "tokenizer.ggml."."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in make_tokenizer_keys(name).items()} | changes
    return {key: value for key, value in keys.items() if value is not None}


def add_tokens(keys: Keys, kind: int, *names: str) -> Keys:
    """Return tokenizer keys with more tokens of a type, and scores of 0 where tokens have scores."""
    added = {"tokens": [*names], "token_type": [kind] * len(names), "scores": [0.0] * len(names)}
    return keys | {key: keys[key] + added[key] for key in added if key in keys}


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "llama2", "gemma3"])
def test_ids_and_texts_equal_the_tokenizer_json(name: str) -> None:
    """Leaves out texts with SentencePiece's space symbol, which do not decode to themselves."""
    ours, theirs = load_gguf_tokenizer(Path("x.gguf"), make_keys(name)), HFTokenizer(TOKENIZERS / f"{name}.json")
    assert ours.vocab_size == theirs.vocab_size
    for text in make_texts():
        tokens = theirs.encode(text)
        if text:  # a tokenizer.json adds no BOS to the empty text
            assert ours.encode(text) == tokens, text
        assert ours.decode(tokens) == theirs.decode(tokens)
    n = ours.vocab_size
    assert [ours.token_to_bytes(token) for token in range(n)] == [theirs.token_to_bytes(token) for token in range(n)]
    assert compare_vocabularies(theirs, n, ours, n).n_common == n


def test_eos_tokens_come_from_keys_and_known_names() -> None:
    def get_eos(name: str, **changes: Any) -> dict[str, str]:
        tokenizer, keys = load_gguf_tokenizer(Path("x"), make_keys(name, **changes)), make_keys(name)
        return {keys["tokens"][token]: eos for token, eos in tokenizer.eos_tokens.items()}

    assert get_eos("llama3") == {"<|end_of_text|>": "eos", "<|eot_id|>": "eot"}
    assert get_eos("smollm2") == {"<|im_end|>": "eos", "<|endoftext|>": "eos"}
    assert get_eos("smollm2", eos_token_id=5, eot_token_id=7)[make_keys("smollm2")["tokens"][7]] == "eot"
    assert get_eos("llama2") == {"</s>": "eos"}  # BOS does not end a text
    assert get_eos("gemma3") == {"<eos>": "eos", "<end_of_turn>": "eot"}
    assert get_eos("gpt2", eos_token_id=2**32 - 1) == {"<|endoftext|>": "eos"}


def test_bos_and_space_prefix_follow_the_keys() -> None:
    def encode(name: str, text: str, **changes: Any) -> list[int]:
        return load_gguf_tokenizer(Path("x"), make_keys(name, **changes)).encode(text)

    bos = make_keys("llama3")["bos_token_id"]
    assert encode("llama3", "a")[0] == bos and encode("llama3", "") == [bos]
    assert encode("llama3", "a", add_bos_token=False) == encode("llama3", "a")[1:]
    assert encode("gpt2", "a", add_bos_token=True)[0] == make_keys("gpt2")["bos_token_id"] != encode("gpt2", "a")[0]
    bos = make_keys("llama2")["bos_token_id"]
    assert encode("llama2", "the")[0] == bos and encode("llama2", "") == [bos]
    assert encode("llama2", "the", add_bos_token=False) == encode("llama2", "the")[1:]
    assert encode("llama2", " the", add_space_prefix=False) == encode("llama2", "the")
    plain = load_gguf_tokenizer(Path("x"), make_keys("llama2", add_space_prefix=False, add_bos_token=False))
    assert plain.decode(plain.encode(" the")) == " the"
    assert plain.encode("") == [bos]


def test_user_defined_tokens_match_anywhere() -> None:
    """Prefer the longer of two tokens with the same start; add no second BOS to the text between them."""
    keys = add_tokens(make_keys("llama2"), 4, "<t>", "<t>x")
    first = len(keys["tokens"]) - 2
    tokenizer = load_gguf_tokenizer(Path("x"), keys)
    tokens = tokenizer.encode("the<t>xthe <t>")
    assert [token for token in tokens if token >= first] == [first + 1, first]
    assert tokenizer.decode(tokens) == "the<t>x the <t>"  # each stretch gets a leading space, as in llama.cpp
    assert tokens[1:] == [*tokenizer.encode("the")[1:], first + 1, *tokenizer.encode("the ")[1:], first]
    assert tokenizer.encode("the\u2581the") == tokenizer.encode("the the")


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_known_eos_names_count_with_any_token_type(name: str, kind: int) -> None:
    def get_eos(*names: str) -> dict[str, str]:
        keys = add_tokens(make_keys(name), kind, *names)
        tokenizer = load_gguf_tokenizer(Path("x"), keys)
        found = {keys["tokens"][token]: eos for token, eos in tokenizer.eos_tokens.items()}
        for token in range(len(keys["tokens"]) - len(names), len(keys["tokens"])):
            if keys["tokens"][token] in found:
                assert tokenizer.token_to_bytes(token) is None
        return {each: found[each] for each in names if each in found}

    assert get_eos("<|end|>", "<|user|>", "[EOT]", "<end_of_utterance>", "<|observation|>") == dict.fromkeys(
        ("<|end|>", "[EOT]", "<end_of_utterance>", "<|observation|>"), "eot"
    )
    assert get_eos("<|end|>", "<|return|>", "<|call|>") == {"<|return|>": "eot", "<|call|>": "eot"}
    assert get_eos("<|end|>", "<|return|>") == {"<|end|>": "eot", "<|return|>": "eot"}


@pytest.mark.parametrize("kind", [3, 4])
def test_phi3_special_tokens_strip_the_white_space_after_them(kind: int) -> None:
    keys = add_tokens(make_keys("llama2"), kind, "<|user|>")
    for is_stripped in (False, True):
        tokenizer = load_gguf_tokenizer(Path("x"), keys | {SPECIAL_TOKENS_STRIP_KEY: is_stripped})
        assert isinstance(tokenizer, Tokenizer)
        special, the = len(keys["tokens"]) - 1, tokenizer.encode("the")[1:]
        segments = [RenderedSegment("<|user|>\n ", False), RenderedSegment("\tthe", True)]
        assert (tokenizer.encode_rendered(segments) == [special, *the]) is is_stripped
        if kind == 4:
            assert (tokenizer.encode("the<|user|> \nthe")[1:] == [*the, special, *the]) is is_stripped


def test_a_user_defined_eos_token_is_plain_text_in_a_text() -> None:
    """Some converters wrote <|im_end|> with type 4."""
    for name, names in (("gpt2", ["<|im_end|>"]), ("llama2", ["<|im_end|>", "\udcff"])):
        keys = add_tokens(make_keys(name), 4, *names)
        tokenizer = load_gguf_tokenizer(Path("x"), keys)
        eos = keys["tokens"].index("<|im_end|>")
        tokens = tokenizer.encode("a <|im_end|>")
        assert eos in tokenizer.eos_tokens and eos not in tokens
        assert tokenizer.decode(tokens) == "a <|im_end|>"
        assert isinstance(tokenizer, Tokenizer | HFTokenizer)
        assert tokenizer.encode_rendered([RenderedSegment("<|im_end|>", False)])[-1] == eos


def test_a_file_without_a_split_uses_llama_cpps_default() -> None:
    """Ids are those of llama_tokenize, llama.cpp of llama_cpp_python 0.3.36, for the same file."""
    for text, ids in {
        "a12345 b²³": [65, 17, 18, 19, 20, 21, 221, 66, 127, 111, 127, 112],
        "$9.99 (x)--y=z": [4, 25, 14, 25, 25, 221, 8, 88, 9, 13, 13, 89, 29, 90],
        "I'm the  river.\n\n1": [41, 7, 77, 262, 221, 268, 317, 14, 199, 199, 17],
        "`~é«»": [64, 94, 294, 127, 105, 127, 120],
    }.items():
        assert [load_gguf_tokenizer(Path("x"), make_keys("gpt2", pre=pre)).encode(text) for pre in (None, "default")] == [
            ids,
            ids,
        ]


def test_unused_tokens_are_not_in_the_vocabulary() -> None:
    keys = add_tokens(make_keys("gpt2"), 5, "[PAD0]", "[PAD0]")
    n = len(keys["tokens"]) - 2
    tokenizer = load_gguf_tokenizer(Path("x"), keys)
    assert tokenizer.vocab_size == n and tokenizer.token_to_bytes(n) is None


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "llama2"])
def test_of_two_tokens_with_one_name_the_first_encodes_and_both_are_decoded(name: str) -> None:
    """Google's GGUF files of Gemma 4 have such pairs; a special token's second id has no text either."""
    keys = make_keys(name)
    special = next(i for i, kind in enumerate(keys["token_type"]) if kind == 3)
    once = load_gguf_tokenizer(Path("x"), keys)
    ids = once.encode("Once! A b")
    text, n = ids[-1], len(keys["tokens"])
    for key, more in (("tokens", None), ("token_type", None), ("scores", 0.0)):
        if key in keys:
            own = keys[key]
            keys[key] = [*own, *[own[token] if more is None else more for token in (text, special)]]
    twice = load_gguf_tokenizer(Path("x"), keys)
    assert twice.encode("Once! A b") == ids and twice.vocab_size == n + 2
    assert twice.token_to_bytes(n) == once.token_to_bytes(text) and once.token_to_bytes(text)
    assert twice.token_to_bytes(n + 1) is None
    assert twice.decode([*ids, n]) == once.decode([*ids, text])


INVALID: dict[str, tuple[str, Keys, tuple[str, ...]]] = {
    "no model": ("gpt2", {"model": None}, ("tokenizer.ggml.model is missing; supported", "supported: llama, gpt2, gemma4")),
    "another model": ("gpt2", {"model": "bert"}, ("model is 'bert'", "supported: llama, gpt2, gemma4")),
    "another split": ("gpt2", {"pre": "viking"}, ("pre is 'viking'", f"; supported: {', '.join(sorted(PRE_TOKENIZERS))}")),
    "a numeric split": ("gpt2", {"pre": 5}, ("tokenizer.ggml.pre is 5; expected a string",)),
    "no merges": ("gpt2", {"merges": None}, ("tokenizer.ggml.merges",)),
    "merges of unknown tokens": ("gpt2", {"merges": ["qq zz"]}, ("the merge 'qq zz'",)),
    "a merge of one token": ("gpt2", {"merges": ["a"]}, ("the merge 'a'",)),
    "a token that is not UTF-8": (
        "gpt2",
        {"tokens": [*make_keys("gpt2")["tokens"][:-1], "\udcff"]},
        ("tokens", "not valid UTF-8"),
    ),
    "merges that are not UTF-8": ("gpt2", {"merges": ["\udcff a"]}, ("merges", "not valid UTF-8")),
    "numeric tokens": ("gpt2", {"tokens": [1, 2]}, ("tokenizer.ggml.tokens is [1, 2]; expected a list of strings",)),
    "no tokens": ("gpt2", {"tokens": []}, ("tokenizer.ggml.tokens",)),
    "too few types": ("gpt2", {"token_type": [1, 1]}, ("2 token types",)),
    "string types": ("gpt2", {"token_type": ["a"]}, ("token_type is ['a']; expected a list of integers",)),
    "no scores": ("llama2", {"scores": None}, ("scores is missing; expected a list of numbers",)),
    "too few scores": ("llama2", {"scores": [1.0]}, ("scores",)),
    "NaN scores": ("llama2", {"scores": [float("nan")] * len(make_keys("llama2")["tokens"])}, ("scores",)),
    "an EOS id beyond the tokens": ("llama2", {"eos_token_id": 10**6}, ("eos_token_id",)),
    "a string as BOS id": ("gpt2", {"bos_token_id": "<s>"}, ("bos_token_id",)),
    "a numeric flag": ("llama2", {"add_bos_token": 1}, ("add_bos_token is 1; expected true or false",)),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_keys_are_reported_by_name(case: str) -> None:
    name, changes, words = INVALID[case]
    with pytest.raises(TokenizerError) as caught:
        load_gguf_tokenizer(Path("model.gguf"), make_keys(name, **changes))
    message = str(caught.value)
    assert message.startswith("model.gguf") and all(word in message for word in words), message
    check_one_line(message, *words)


# Models


def write_gguf(path: Path, source: Path, tokenizer: str = "smollm2", **changes: Any) -> Path:
    """Write a folder of tests/test_end_to_end.py as a GGUF file."""
    keys, tensors = make_model_with_tokenizer(tokenizer, source)
    path.write_bytes(gguf_bytes(keys | changes, tensors))
    return path


def test_a_gguf_file_generates_and_drafts_like_its_folder(tmp_path: Path) -> None:
    source, other = make_folder(tmp_path / "folder"), make_folder(tmp_path / "other", seed=1)
    target, draft = write_gguf(tmp_path / "target.gguf", source), write_gguf(tmp_path / "draft", other)
    expected = SpeculativeDecoder(source, None)
    for decoder in (
        SpeculativeDecoder(target, None),
        SpeculativeDecoder(target, draft, gamma=4),
        SpeculativeDecoder(source, draft),
    ):
        for sampling in SAMPLINGS:
            got, complete = generate_tokens(decoder, sampling), generate_tokens(expected, sampling)
            assert got == complete[: len(got)]
            assert (
                len(got) == len(complete)
                or complete[len(got)] in decoder.tokenizer.eos_tokens
                or got[-1] in decoder.tokenizer.eos_tokens
            )
    checkpoint = load_checkpoint(target)
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("{{ messages }}", "{{ tools }}")


def test_equal_keys_make_one_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = "specdec.text.tokenizer_lookup.load_gguf_tokenizer"
    monkeypatch.setattr(make, lambda path, keys: made.append(path) or load_gguf_tokenizer(path, keys))
    source = make_folder(tmp_path / "folder")
    target, draft = write_gguf(tmp_path / "target.gguf", source), write_gguf(tmp_path / "draft.gguf", source)
    SpeculativeDecoder(target, draft)
    assert made == [target]
    SpeculativeDecoder(target, write_gguf(tmp_path / "other.gguf", source, **{"tokenizer.ggml.eos_token_id": 0}))
    assert made == [target, target, tmp_path / "other.gguf"]


def test_a_draft_with_another_tokenizer_is_mapped(tmp_path: Path) -> None:
    source, other = make_folder(tmp_path / "folder"), make_folder(tmp_path / "other", tokenizer="gpt2")
    draft, alone = (
        write_gguf(tmp_path / "draft.gguf", other, "gpt2"),
        generate_tokens(SpeculativeDecoder(source, None), SAMPLINGS[1]),
    )
    shared = SpeculativeDecoder(source, other).shared
    assert shared["draft"] > 380
    for target in (source, write_gguf(tmp_path / "target.gguf", source)):
        decoder = SpeculativeDecoder(target, draft, gamma=3)
        assert decoder.shared == shared and generate_tokens(decoder, SAMPLINGS[1]) == alone


def test_a_gguf_file_can_be_the_tokenizer_of_a_loaded_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "target.gguf", make_folder(tmp_path / "folder"))
    decoder = SpeculativeDecoder(load_model(path), tokenizer=path)
    assert generate_tokens(decoder, SAMPLINGS[1]) == generate_tokens(SpeculativeDecoder(path), SAMPLINGS[1])
    assert read_vocabulary(TOKENIZERS / "gpt2.json") == {}


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_a_given_tokenizer_keeps_the_models_eos_tokens(tmp_path: Path, name: str) -> None:
    """Covers a tokenizer.json, which names none, and GGUF and llama2.c files, which have their own."""
    source = make_folder(tmp_path / "folder", tokenizer=name)
    n = load_checkpoint(source).config.vocab_size
    target = write_gguf(tmp_path / "target.gguf", source, name, **{"tokenizer.ggml.eot_token_id": n - 2})
    other = write_gguf(tmp_path / "other.gguf", source, name, **{"tokenizer.ggml.eot_token_id": n - 3})
    model_tokenizer, alone = resolve_tokenizer(None, load_checkpoint(target), n), TOKENIZERS / f"{name}.json"
    assert model_tokenizer.eos_tokens[n - 2] == "eot"
    given = resolve_tokenizer(alone, load_checkpoint(target), n)
    assert given.eos_tokens == model_tokenizer.eos_tokens and given.encode("")[0] == model_tokenizer.encode("")[0]
    assert resolve_tokenizer(other, load_checkpoint(target), n).eos_tokens == {n - 3: "eot"} | model_tokenizer.eos_tokens
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, n - 4, n + 4]}))
    llama2c_path, piece_bytes = tmp_path / "tokenizer.bin", b"".join(struct.pack("<fi", 0.0, 1) + b"x" for _ in range(n))
    llama2c_path.write_bytes(struct.pack("<I", 1) + piece_bytes)
    for path in (other, llama2c_path):
        named = resolve_tokenizer(path, load_checkpoint(source), n)
        assert {2, n - 4} <= named.eos_tokens.keys() < {*range(n)} and named.token_to_bytes(n - 4) is None


def test_a_gguf_file_without_tokens_has_eos_tokens(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "folder")
    n = load_checkpoint(source).config.vocab_size
    keys, tensors = make_model_with_tokenizer("smollm2", source)
    known = {key: value for key, value in keys.items() if "tokenizer" not in key} | {"tokenizer.ggml.eos_token_id": 7}
    target = tmp_path / "target.gguf"
    target.write_bytes(gguf_bytes(known, tensors))
    assert resolve_tokenizer(TOKENIZERS / "smollm2.json", load_checkpoint(target), n).eos_tokens == {7: "eos"}


def test_sentencepiece_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "target.gguf", make_folder(tmp_path / "folder", tokenizer="llama2"), "llama2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    decoder = SpeculativeDecoder(path)
    assert isinstance(decoder.tokenizer, Tokenizer)
    steps = [event for event in decoder.stream("the river", 20, Sampling(1.0, seed=1)) if isinstance(event, Step)]
    assert steps
    assert decoder.generate("the river", 0).text == "the river"
    with pytest.raises(TokenizerError, match=r"x\.gguf needs the package tokenizers, .*; pip install tokenizers$"):
        load_gguf_tokenizer(Path("x.gguf"), make_keys("gpt2"))


def test_the_command_line_reads_a_gguf_file(run: Run, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "folder")
    target = write_gguf(tmp_path / "target.gguf", source)
    code, out, err = run("-m", target, "-d", "self", "-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json")
    assert (code, err) == (0, "") and json.loads(out)["text"].startswith("The cat sat")
    target.write_bytes(target.read_bytes()[:-4000])
    code, _, err = run("-m", target)
    assert code == 2 and "truncated" in err and err.count("\n") == 1
    (source / "config.json").unlink()
    (source / "model-Q8_0.gguf").touch()
    code, _, err = run("-m", source)
    assert code == 2 and "model-Q8_0.gguf" in err and err.count("\n") == 1


SPLITS = {
    "hunyuan-dense": [
        ("It's 1234 漢字かな,ok", ["It", "'s", " ", "123", "4", " ", "漢字かな", ",ok"]),
        ("a\n\nb!", ["a", "\n\n", "b", "!"]),
    ],
    "minicpm5": [("It's 12345!", ["It", "'s", " ", "123", "45", "!"]), ("a  b\n", ["a", " ", " b", "\n"])],
    "falcon": [("It's 12345!", ["It", "'", "s", " ", "123", "45", "!"]), ("a  b+=c", ["a", " ", " b", "+=", "c"])],
    "deepseek-llm": [("Hi there, 漢字12 z", ["Hi", " there", ",", " ", "漢字", "12", " z"]), ("a\n\nb", ["a", "\n", "\n", "b"])],
    "deepseek-v3": [
        ("Hi,World 12345!", ["Hi", ",World", " ", "123", "45", "!"]),
        ("漢字かな漢 don't", ["漢字かな漢", " don", "'t"]),
    ],
    "kimi-k2": [("I'M 漢字かなabc 1234\n", ["I'M", " ", "漢字", "かなabc", " ", "123", "4", "\n"])],
    "bailingmoe2": [("It's 12 x!!\n\ny", ["It", "'s", " ", "1", "2", " x", "!!\n\n", "y"])],
    "deepseek-coder": [("x1 = 42;", ["x", "1", " = ", "4", "2", ";"]), ("def f():\n", ["def", " f", "():", "\n"])],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_sequences_of_splits_split_like_llama_cpp(pre: str) -> None:
    """llama.cpp's cases for these tokenizers, next to its vocabularies, pass too."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    steps = [Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[pre].regexes]
    for text, words in SPLITS[pre]:
        assert [word for word, _ in Sequence(steps).pre_tokenize_str(text)] == words, text


def test_a_gemma_4_vocabulary_is_bpe_over_characters_and_spaces() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\n", "ab",
              "\u2581ab", "\n\n", "<|turn>"]  # fmt: skip
    types = [3, 3, 3, 2, *[6] * 256, *[1] * 7, 3]
    merges = ["a b", "\u2581 ab", "\n \n"]
    keys = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 2, "eos_token_id": 1,
            "unknown_token_id": 3}  # fmt: skip
    tokenizer = load_gguf_tokenizer(Path("x.gguf"), keys)
    ids = {name: token for token, name in enumerate(tokens)}
    for text, names in (
        ("ab ab", ["ab", "\u2581ab"]), ("a b\n\nab", ["a", "\u2581", "b", "\n\n", "ab"]), ("é", ["<0xC3>", "<0xA9>"]),
        ("  ab", ["\u2581", "\u2581ab"]), ("<|turn>a", None),
    ):  # fmt: skip
        got = tokenizer.encode(text)
        assert got[0] == 2 and tokenizer.decode(got) == text
        if names:
            assert got[1:] == [ids[name] for name in names], text
    assert tokenizer.encode_rendered([RenderedSegment("<|turn>", False), RenderedSegment("ab", True)])[-2:] == [
        ids["<|turn>"],
        ids["ab"],
    ]
    assert tokenizer.eos_tokens == {1: "eos"}
