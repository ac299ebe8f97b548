"""tokenizer_gguf.py: a GGUF file's tokenizer is that of the tokenizer.json it was made of; and models in such files."""

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.families.pre_tokenizers import SPLITS
from specdec.loaders import load_checkpoint, read_vocabulary
from specdec.loaders.loader import load_model
from specdec.text.gguf_tokenizer import gguf_tokenizer
from specdec.text.tokenizer_lookup import tokenizer_of
from specdec.text.vocabulary import common_vocabulary
from specdec.tokenizer import STRIPS, Part, Tokenizer, TokenizerError
from tests.cli.test_cli import Run, run  # noqa: F401  (a fixture)
from tests.tools.gguf_files import TOKENIZERS, Keys, gguf_bytes, tokenizer_keys, with_tokenizer

pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
from specdec.text.hf_tokenizer import JsonTokenizer
from tests.test_end_to_end import SAMPLINGS, folder, text_of

BYTE_LEVEL = ["gpt2", "smollm2", "qwen2", "qwen35", "llama3", "phi4", "tekken", "lfm2"]
TEXTS = [
    "", " ", "  two", "Once upon a time", "I'm she'D we'LL they'Re", "1234 5,678.9", "a\n\n\tb \r\n", "été 日本 🙂🙂 Ωя",
    "e\u0301", "हिन्दी ก็ \u0301x",
    "aCamelCase HTTPServer Élan'S A/B//\n", "<s></s><unk><0x41> <|im_end|><|endoftext|><|eot_id|>", "<tool_call>x</tool_call>",
    "\x00\x1b\u00a0\u2003", "a" * 40,
]  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(7)
    pool = "  \n\tthe rivr'sdTM0129.,!?<|>/é日🙂\u0301Ω"
    return TEXTS + ["".join(rng.choices(pool, k=rng.randrange(1, 40))) for _ in range(200)]


def keys_of(name: str, **changes: Any) -> Keys:
    """Without their common beginning."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in tokenizer_keys(name).items()} | changes
    return {key: value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "llama2", "gemma3"])
def test_ids_and_texts_are_those_of_the_tokenizer_json(name: str) -> None:
    """But for what only decodes so that a text is not itself: SentencePiece's own sign of a space, in a text."""
    ours, theirs = gguf_tokenizer(Path("x.gguf"), keys_of(name)), JsonTokenizer(TOKENIZERS / f"{name}.json")
    assert ours.vocab_size == theirs.vocab_size
    for text in texts():
        tokens = theirs.encode(text)
        if text:  # of no text a tokenizer.json knows no BOS
            assert ours.encode(text) == tokens, text
        assert ours.decode(tokens) == theirs.decode(tokens)
    n = ours.vocab_size
    assert [ours.says(token) for token in range(n)] == [theirs.says(token) for token in range(n)]
    assert common_vocabulary(theirs, n, ours, n).n_common == n


def test_marks_are_those_of_the_keys_and_of_known_names() -> None:
    def marks(name: str, **changes: Any) -> dict[str, str]:
        tokenizer, keys = gguf_tokenizer(Path("x"), keys_of(name, **changes)), keys_of(name)
        return {keys["tokens"][token]: mark for token, mark in tokenizer.end_marks.items()}

    assert marks("llama3") == {"<|end_of_text|>": "eos", "<|eot_id|>": "eot"}
    assert marks("smollm2") == {"<|im_end|>": "eos", "<|endoftext|>": "eos"}
    assert marks("smollm2", eos_token_id=5, eot_token_id=7)[keys_of("smollm2")["tokens"][7]] == "eot"
    assert marks("llama2") == {"</s>": "eos"}  # BOS ends nothing
    assert marks("gemma3") == {"<eos>": "eos", "<end_of_turn>": "eot"}
    assert marks("gpt2", eos_token_id=2**32 - 1) == {"<|endoftext|>": "eos"}


def test_a_text_begins_as_the_keys_say() -> None:
    def encode(name: str, text: str, **changes: Any) -> list[int]:
        return gguf_tokenizer(Path("x"), keys_of(name, **changes)).encode(text)

    bos = keys_of("llama3")["bos_token_id"]
    assert encode("llama3", "a")[0] == bos and encode("llama3", "") == [bos]
    assert encode("llama3", "a", add_bos_token=False) == encode("llama3", "a")[1:]
    assert encode("gpt2", "a", add_bos_token=True)[0] == keys_of("gpt2")["bos_token_id"] != encode("gpt2", "a")[0]
    bos = keys_of("llama2")["bos_token_id"]
    assert encode("llama2", "the")[0] == bos and encode("llama2", "") == [bos]
    assert encode("llama2", "the", add_bos_token=False) == encode("llama2", "the")[1:]
    assert encode("llama2", " the", add_space_prefix=False) == encode("llama2", "the")
    plain = gguf_tokenizer(Path("x"), keys_of("llama2", add_space_prefix=False, add_bos_token=False))
    assert plain.decode(plain.encode(" the")) == " the"
    assert plain.encode("") == [bos]


def test_tokens_of_a_users_own_are_one_wherever_they_stand() -> None:
    """Of two that begin alike the longer; text between them is no new beginning."""
    keys = keys_of("llama2")
    first = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], "<t>", "<t>x"]
    keys["token_type"] = [*keys["token_type"], 4, 4]
    keys["scores"] = [*keys["scores"], 0.0, 0.0]
    tokenizer = gguf_tokenizer(Path("x"), keys)
    tokens = tokenizer.encode("the<t>xthe <t>")
    assert [token for token in tokens if token >= first] == [first + 1, first]
    assert tokenizer.decode(tokens) == "the<t>x the <t>"  # each stretch has a space in front, as in llama.cpp
    assert tokens[1:] == [*tokenizer.encode("the")[1:], first + 1, *tokenizer.encode("the ")[1:], first]
    assert tokenizer.encode("the\u2581the") == tokenizer.encode("the the")


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_what_ends_a_text_does_so_by_its_name_whatever_its_type(name: str, kind: int) -> None:
    def marks(*names: str) -> dict[str, str]:
        keys = keys_of(name)
        more = {"tokens": [*names], "token_type": [kind] * len(names), "scores": [0.0] * len(names)}
        keys |= {key: keys[key] + more[key] for key in more if key in keys}
        tokenizer = gguf_tokenizer(Path("x"), keys)
        found = {keys["tokens"][token]: mark for token, mark in tokenizer.end_marks.items()}
        for token in range(len(keys["tokens"]) - len(names), len(keys["tokens"])):
            if keys["tokens"][token] in found:
                assert tokenizer.says(token) is None
        return {each: found[each] for each in names if each in found}

    assert marks("<|end|>", "<|user|>", "[EOT]", "<end_of_utterance>", "<|observation|>") == dict.fromkeys(
        ("<|end|>", "[EOT]", "<end_of_utterance>", "<|observation|>"), "eot"
    )
    assert marks("<|end|>", "<|return|>", "<|call|>") == {"<|return|>": "eot", "<|call|>": "eot"}
    assert marks("<|end|>", "<|return|>") == {"<|end|>": "eot", "<|return|>": "eot"}


@pytest.mark.parametrize("kind", [3, 4])
def test_phi3s_marks_take_the_white_space_behind_them(kind: int) -> None:
    keys = keys_of("llama2")
    keys |= {"tokens": [*keys["tokens"], "<|user|>"], "token_type": [*keys["token_type"], kind], "scores": [*keys["scores"], 0.0]}
    for strips in (False, True):
        tokenizer = gguf_tokenizer(Path("x"), keys | {STRIPS: strips})
        assert isinstance(tokenizer, Tokenizer)
        mark, the = len(keys["tokens"]) - 1, tokenizer.encode("the")[1:]
        parts = [Part("<|user|>\n ", False), Part("\tthe", True)]
        assert (tokenizer.encode_rendered(parts) == [mark, *the]) is strips
        if kind == 4:
            assert (tokenizer.encode("the<|user|> \nthe")[1:] == [*the, mark, *the]) is strips


def test_an_end_mark_that_is_a_users_own_is_not_obeyed_in_a_text() -> None:
    """As converters had it: <|im_end|> of type 4."""
    for name in ("gpt2", "llama2"):
        keys = keys_of(name)
        keys["tokens"] = [*keys["tokens"], "<|im_end|>", "\udcff"]
        keys["token_type"] = [*keys["token_type"], 4, 4]
        if name == "gpt2":
            keys = {key: value[:-1] if key in ("tokens", "token_type") else value for key, value in keys.items()}
        else:
            keys["scores"] = [*keys["scores"], 0.0, 0.0]
        tokenizer = gguf_tokenizer(Path("x"), keys)
        mark = keys["tokens"].index("<|im_end|>")
        tokens = tokenizer.encode("a <|im_end|>")
        assert mark in tokenizer.end_marks and mark not in tokens
        assert tokenizer.decode(tokens) == "a <|im_end|>"
        assert isinstance(tokenizer, Tokenizer | JsonTokenizer)
        assert tokenizer.encode_rendered([Part("<|im_end|>", False)])[-1] == mark


def test_a_file_that_names_no_split_has_llama_cpps_default() -> None:
    """Ids are those of llama_tokenize, llama.cpp of llama_cpp_python 0.3.36, for the same file."""
    for text, ids in {
        "a12345 b²³": [65, 17, 18, 19, 20, 21, 221, 66, 127, 111, 127, 112],
        "$9.99 (x)--y=z": [4, 25, 14, 25, 25, 221, 8, 88, 9, 13, 13, 89, 29, 90],
        "I'm the  river.\n\n1": [41, 7, 77, 262, 221, 268, 317, 14, 199, 199, 17],
        "`~é«»": [64, 94, 294, 127, 105, 127, 120],
    }.items():
        assert [gguf_tokenizer(Path("x"), keys_of("gpt2", pre=pre)).encode(text) for pre in (None, "default")] == [ids, ids]


def test_unused_tokens_are_none() -> None:
    keys = keys_of("gpt2")
    n = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], "[PAD0]", "[PAD0]"]
    keys["token_type"] = [*keys["token_type"], 5, 5]
    tokenizer = gguf_tokenizer(Path("x"), keys)
    assert tokenizer.vocab_size == n and tokenizer.says(n) is None


BAD: dict[str, tuple[str, Keys, tuple[str, ...]]] = {
    "no model": ("gpt2", {"model": None}, ("tokenizer.ggml.model", "llama, gpt2 or gemma4")),
    "another model": ("gpt2", {"model": "bert"}, ("'bert'", "llama, gpt2 or gemma4")),
    "another split": ("gpt2", {"pre": "viking"}, ("'viking'", "smollm")),
    "a split that is a number": ("gpt2", {"pre": 5}, ("tokenizer.ggml.pre",)),
    "no merges": ("gpt2", {"merges": None}, ("tokenizer.ggml.merges",)),
    "merges of nothing": ("gpt2", {"merges": ["qq zz"]}, ("the merge 'qq zz'",)),
    "merges of one": ("gpt2", {"merges": ["a"]}, ("the merge 'a'",)),
    "a token twice": ("gpt2", {"tokens": [*keys_of("gpt2")["tokens"][:-1], "!"]}, ("tokens 1 and 399 are both '!'",)),
    "a token that is no text": ("gpt2", {"tokens": [*keys_of("gpt2")["tokens"][:-1], "\udcff"]}, ("tokens", "no UTF-8")),
    "merges that are no text": ("gpt2", {"merges": ["\udcff a"]}, ("merges", "no UTF-8")),
    "tokens that are numbers": ("gpt2", {"tokens": [1, 2]}, ("tokenizer.ggml.tokens",)),
    "no tokens": ("gpt2", {"tokens": []}, ("tokenizer.ggml.tokens",)),
    "too few types": ("gpt2", {"token_type": [1, 1]}, ("2 token types",)),
    "types in words": ("gpt2", {"token_type": ["a"]}, ("token_type",)),
    "no scores": ("llama2", {"scores": None}, ("scores",)),
    "too few scores": ("llama2", {"scores": [1.0]}, ("scores",)),
    "scores that are none": ("llama2", {"scores": [float("nan")] * len(keys_of("llama2")["tokens"])}, ("scores",)),
    "a mark beyond the tokens": ("llama2", {"eos_token_id": 10**6}, ("eos_token_id",)),
    "a mark in words": ("gpt2", {"bos_token_id": "<s>"}, ("bos_token_id",)),
    "a flag that is a number": ("llama2", {"add_bos_token": 1}, ("add_bos_token", "bool")),
}


@pytest.mark.parametrize("what", BAD)
def test_keys_that_make_no_tokenizer_are_named(what: str) -> None:
    name, changes, words = BAD[what]
    with pytest.raises(TokenizerError) as caught:
        gguf_tokenizer(Path("model.gguf"), keys_of(name, **changes))
    message = str(caught.value)
    assert message.startswith("model.gguf") and "\n" not in message and len(message) < 300
    assert all(word in message for word in words), message


# Models


def gguf(path: Path, source: Path, tokenizer: str = "smollm2", **changes: Any) -> Path:
    """A folder of tests/test_end_to_end.py as a GGUF file."""
    keys, tensors = with_tokenizer(tokenizer, source)
    path.write_bytes(gguf_bytes(keys | changes, tensors))
    return path


def test_a_file_says_what_the_folder_says_and_drafts_for_it(tmp_path: Path) -> None:
    source, other = folder(tmp_path / "folder"), folder(tmp_path / "other", seed=1)
    target, draft = gguf(tmp_path / "target.gguf", source), gguf(tmp_path / "draft", other)
    expected = SpeculativeDecoder(source, None)
    for decoder in (
        SpeculativeDecoder(target, None),
        SpeculativeDecoder(target, draft, gamma=4),
        SpeculativeDecoder(source, draft),
    ):
        for sampling in SAMPLINGS:
            got, whole = text_of(decoder, sampling), text_of(expected, sampling)
            assert got == whole[: len(got)]
            assert (
                len(got) == len(whole) or whole[len(got)] in decoder.tokenizer.end_marks or got[-1] in decoder.tokenizer.end_marks
            )
    assert load_checkpoint(target).chat_template == "{{ messages }}"


def test_the_same_tokenizer_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = "specdec.text.tokenizer_lookup.gguf_tokenizer"
    monkeypatch.setattr(make, lambda path, keys: made.append(path) or gguf_tokenizer(path, keys))
    source = folder(tmp_path / "folder")
    target, draft = gguf(tmp_path / "target.gguf", source), gguf(tmp_path / "draft.gguf", source)
    SpeculativeDecoder(target, draft)
    assert made == [target]
    SpeculativeDecoder(target, gguf(tmp_path / "other.gguf", source, **{"tokenizer.ggml.eos_token_id": 0}))
    assert made == [target, target, tmp_path / "other.gguf"]


def test_a_draft_of_another_tokenizer_is_translated(tmp_path: Path) -> None:
    source, other = folder(tmp_path / "folder"), folder(tmp_path / "other", tokenizer="gpt2")
    draft, alone = gguf(tmp_path / "draft.gguf", other, "gpt2"), text_of(SpeculativeDecoder(source, None), SAMPLINGS[1])
    shared = SpeculativeDecoder(source, other).shared
    assert shared["draft"] > 380
    for target in (source, gguf(tmp_path / "target.gguf", source)):
        decoder = SpeculativeDecoder(target, draft, gamma=3)
        assert decoder.shared == shared and text_of(decoder, SAMPLINGS[1]) == alone


def test_a_file_is_a_tokenizer_for_a_loaded_model(tmp_path: Path) -> None:
    path = gguf(tmp_path / "target.gguf", folder(tmp_path / "folder"))
    decoder = SpeculativeDecoder(load_model(path), tokenizer=path)
    assert text_of(decoder, SAMPLINGS[1]) == text_of(SpeculativeDecoder(path), SAMPLINGS[1])
    assert read_vocabulary(TOKENIZERS / "gpt2.json") == {}


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_a_named_tokenizer_leaves_a_model_its_end_marks(tmp_path: Path, name: str) -> None:
    """Whether it is a tokenizer.json alone, which names none, another GGUF file or a llama2.c file, which have their own."""
    source = folder(tmp_path / "folder", tokenizer=name)
    n = load_checkpoint(source).config.vocab_size
    target = gguf(tmp_path / "target.gguf", source, name, **{"tokenizer.ggml.eot_token_id": n - 2})
    other = gguf(tmp_path / "other.gguf", source, name, **{"tokenizer.ggml.eot_token_id": n - 3})
    own, alone = tokenizer_of(None, load_checkpoint(target), n), TOKENIZERS / f"{name}.json"
    assert own.end_marks[n - 2] == "eot"
    given = tokenizer_of(alone, load_checkpoint(target), n)
    assert given.end_marks == own.end_marks and given.encode("")[0] == own.encode("")[0]
    assert tokenizer_of(other, load_checkpoint(target), n).end_marks == {n - 3: "eot"} | own.end_marks
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, n - 4, n + 4]}))
    plain, of_pieces = tmp_path / "tokenizer.bin", b"".join(struct.pack("<fi", 0.0, 1) + b"x" for _ in range(n))
    plain.write_bytes(struct.pack("<I", 1) + of_pieces)
    for path in (other, plain):
        named = tokenizer_of(path, load_checkpoint(source), n)
        assert {2, n - 4} <= named.end_marks.keys() < {*range(n)} and named.says(n - 4) is None


def test_a_gguf_file_without_tokens_tells_what_ends_a_text(tmp_path: Path) -> None:
    source = folder(tmp_path / "folder")
    n = load_checkpoint(source).config.vocab_size
    keys, tensors = with_tokenizer("smollm2", source)
    known = {key: value for key, value in keys.items() if "tokenizer" not in key} | {"tokenizer.ggml.eos_token_id": 7}
    target = tmp_path / "target.gguf"
    target.write_bytes(gguf_bytes(known, tensors))
    assert tokenizer_of(TOKENIZERS / "smollm2.json", load_checkpoint(target), n).end_marks == {7: "eos"}


def test_sentence_pieces_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path / "target.gguf", folder(tmp_path / "folder", tokenizer="llama2"), "llama2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    decoder = SpeculativeDecoder(path)
    assert isinstance(decoder.tokenizer, Tokenizer)
    steps = [event for event in decoder.stream("the river", 20, Sampling(1.0, seed=1)) if isinstance(event, Step)]
    assert steps
    assert decoder.generate("the river", 0).text == "the river"
    with pytest.raises(TokenizerError, match=r"x\.gguf is read with the package tokenizers, .*; pip install tokenizers$"):
        gguf_tokenizer(Path("x.gguf"), keys_of("gpt2"))


def test_the_command_line_reads_a_file(run: Run, tmp_path: Path) -> None:
    source = folder(tmp_path / "folder")
    target = gguf(tmp_path / "target.gguf", source)
    code, out, err = run("-m", target, "-d", "self", "-i", "The cat sat", "-n", 30, "-s", 5, "-t", 1, "--json")
    assert (code, err) == (0, "") and json.loads(out)["text"].startswith("The cat sat")
    target.write_bytes(target.read_bytes()[:-4000])
    code, _, err = run("-m", target)
    assert code == 2 and "truncated" in err and err.count("\n") == 1
    (source / "config.json").unlink()
    (source / "model-Q8_0.gguf").touch()
    code, _, err = run("-m", source)
    assert code == 2 and "model-Q8_0.gguf" in err and err.count("\n") == 1


CUT = {
    "falcon": [("It's 12345!", ["It", "'", "s", " ", "123", "45", "!"]), ("a  b+=c", ["a", " ", " b", "+=", "c"])],
    "deepseek-llm": [("Hi there, 漢字12 z", ["Hi", " there", ",", " ", "漢字", "12", " z"]), ("a\n\nb", ["a", "\n", "\n", "b"])],
    "deepseek-coder": [("x1 = 42;", ["x", "1", " = ", "4", "2", ";"]), ("def f():\n", ["def", " f", "():", "\n"])],
}


@pytest.mark.parametrize("pre", CUT)
def test_splits_that_are_made_one_behind_the_other_cut_as_they_say(pre: str) -> None:
    """llama.cpp's cases of these tokenizers, which lie beside their vocabularies there, pass too."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    steps = [Split(Regex(each), "isolated") for each in SPLITS[pre].regexes]
    for text, words in CUT[pre]:
        assert [word for word, _ in Sequence(steps).pre_tokenize_str(text)] == words, text


def test_a_gemma_4_vocabulary_is_bpe_of_characters_with_spaces_for_letters() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\n", "ab",
              "\u2581ab", "\n\n", "<|turn>"]  # fmt: skip
    types = [3, 3, 3, 2, *[6] * 256, *[1] * 7, 3]
    merges = ["a b", "\u2581 ab", "\n \n"]
    keys = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 2, "eos_token_id": 1,
            "unknown_token_id": 3}  # fmt: skip
    tokenizer = gguf_tokenizer(Path("x.gguf"), keys)
    ids = {name: token for token, name in enumerate(tokens)}
    for text, names in (
        ("ab ab", ["ab", "\u2581ab"]), ("a b\n\nab", ["a", "\u2581", "b", "\n\n", "ab"]), ("é", ["<0xC3>", "<0xA9>"]),
        ("  ab", ["\u2581", "\u2581ab"]), ("<|turn>a", None),
    ):  # fmt: skip
        got = tokenizer.encode(text)
        assert got[0] == 2 and tokenizer.decode(got) == text
        if names:
            assert got[1:] == [ids[name] for name in names], text
    assert tokenizer.encode_rendered([Part("<|turn>", False), Part("ab", True)])[-2:] == [ids["<|turn>"], ids["ab"]]
    assert tokenizer.end_marks == {1: "eos"}
