"""Tests of hf_tokenizer.py and vocabulary.py against the tokenizers library, for every kind of vocabulary."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.text.hf_encoder import load_encoder
from specdec.text.hf_tokenizer import HFTokenizer
from specdec.text.tokenizer_lookup import NOT_SHARED, SharedVocabulary, compare_vocabularies, count_known_ids, load_tokenizer
from specdec.tokenizer import RenderedSegment, StreamingDetokenizer, Tokenizer, TokenizerError
from tests.tools.checkpoint_files import ROOT, write_tokenizer
from tests.tools.tokenizer_files import TEXTS, get_path, load_library_tokenizer

pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")

KINDS = ("gpt2", "smollm2", "qwen2", "qwen35", "llama3", "phi4", "tekken", "lfm2", "llama2", "mistral", "metaspace", "gemma3")
SPECIAL_NAMES = [
    "<|endoftext|>",
    "<|im_start|>user<|im_end|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<s> </s> <unk>",
    "<tool_call>{}",
]
CORPUS = [
    *TEXTS,
    *(f"say {special_name} to me" for special_name in SPECIAL_NAMES),
    "def f(x):\n\treturn {\n\t\t'a': [1, 22, 333, 4444],\n\t}\r\n\r\n# done",
    "1984 3.14159 1e-10 0x7f ١٢٣ ½ Ⅳ",
    "   leading, trailing   \n\n\n   ",
    "🙂🙂‍↕️ 👩‍👩‍👧‍👦 🇩🇪 é e\u0301 \u200b\u00a0\u2003\ufeff|",
    "日本語の文章です。中文也可以。한국어 ไทย हिन्दी",
    "it's I'LL they'd WE'RE ▁▁ Ġ Ċ ÃŁ",
    "\x00\x01\x7f\u0085\ufffd \U0010ffff",
    "a" * 300,
]
STRIP_FLAGS = ("single_word", "lstrip", "rstrip")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def write_changed(tmp_path: Path, kind: str, **parts: Any) -> Path:
    """Write a copy of a tokenizer.json with some parts replaced."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(get_path(kind).read_text("utf-8")) | parts), "utf-8")
    return path


def make_sequence(*decoders: Any) -> Any:
    return {"type": "Sequence", "decoders": decoders}


def decode_streaming(tokenizer: HFTokenizer, tokens: list[int]) -> str:
    stream = StreamingDetokenizer(tokenizer)
    return "".join([stream.push(token) for token in tokens]) + stream.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_decoded_texts_equal_the_librarys(kind: str) -> None:
    tokenizer, library = HFTokenizer(get_path(kind), bos=0), load_library_tokenizer(kind)
    library.encode_special_tokens = True
    for text in filter(None, CORPUS):
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text).ids
        assert decode_streaming(tokenizer, tokens) == tokenizer.decode(tokens) == library.decode(tokens)


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "llama3"])
def test_a_byte_level_tokenizer_inverts_every_text(kind: str) -> None:
    tokenizer = HFTokenizer(get_path(kind))
    assert [tokenizer.decode(tokenizer.encode(text)) for text in CORPUS] == CORPUS


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_decode_like_the_library(kind: str) -> None:
    """Covers invalid characters, except bytes after complete ones in one run: see the next test."""
    tokenizer, library = HFTokenizer(get_path(kind)), load_library_tokenizer(kind)
    rng = random.Random(1)
    non_byte_tokens = [token for token in range(tokenizer.vocab_size) if not (library.id_to_token(token) or "").startswith("<0x")]
    for _ in range(300):
        tokens = rng.choices(range(tokenizer.vocab_size) if not tokenizer.utf8_errors.endswith("byte") else non_byte_tokens, k=30)
        assert decode_streaming(tokenizer, tokens) == library.decode(tokens), tokens


def test_each_invalid_byte_becomes_one_replacement_character() -> None:
    """The library replaces a whole run of bytes if one is invalid; here complete characters stay."""
    tokenizer, library = HFTokenizer(get_path("llama2")), load_library_tokenizer("llama2")

    def to_ids(data: bytes) -> list[int]:
        return [library.token_to_id(f"<0x{byte:02X}>") for byte in data]

    for data in (b"\xe6\x97", b"\xff", b"\xf0\x9f\x99", b"\xc3\xe6", b"\xe6\x97\xa5"):
        assert tokenizer.decode(to_ids(data)) == library.decode(to_ids(data)), data
    assert tokenizer.decode(to_ids("é".encode() + b"\xe6\x97")) == "é\ufffd\ufffd"
    assert library.decode(to_ids("é".encode() + b"\xe6\x97")) == "\ufffd" * 4


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_a_stream_returns_characters_as_soon_as_they_are_complete(kind: str) -> None:
    tokenizer, library = HFTokenizer(get_path(kind)), load_library_tokenizer(kind)
    names = ["Ã", "©"] if kind == "gpt2" else ["<0xC3>", "<0xA9>"]
    first, second = (library.token_to_id(name) for name in names)
    space = library.token_to_id("Ġthe" if kind == "gpt2" else "▁the")
    stream = StreamingDetokenizer(tokenizer)
    assert [stream.push(token) for token in (first, second)] == ["", "é"]
    assert stream.push(first) == ""
    assert stream.peek([second, space]) == ["é", " the"]
    assert stream.push(second) == "é"
    assert stream.flush() == ""


def test_one_space_is_stripped_only_at_the_start() -> None:
    tokenizer, library = HFTokenizer(get_path("llama2")), load_library_tokenizer("llama2")
    the, one, bos = (library.token_to_id(name) for name in ("▁the", "▁", "<s>"))
    for tokens in ([the, the], [bos, the], [one, one, the], [bos, bos, the, bos, the], [one, bos, the]):
        assert decode_streaming(tokenizer, tokens) == library.decode(tokens)
    assert StreamingDetokenizer(tokenizer).peek([the, the]) == ["the", " the"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_tokens_name_in_a_text_is_plain_text(kind: str) -> None:
    tokenizer, library = HFTokenizer(get_path(kind)), load_library_tokenizer(kind)
    special_ids = {token for token, added in library.get_added_tokens_decoder().items() if added.special}
    for token in special_ids:
        name = library.id_to_token(token)
        assert token in library.encode(name).ids
        from_template = [each for each in tokenizer.encode("say twice") if each in special_ids]
        assert [each for each in tokenizer.encode(f"say {name} twice") if each in special_ids] == from_template
    assert all(tokenizer.token_to_bytes(token) is None for token in special_ids)


def test_only_the_template_adds_bos() -> None:
    def encode_empty(kind: str, **options: Any) -> list[int]:
        return HFTokenizer(get_path(kind), **options).encode("")

    begin = load_library_tokenizer("llama3").token_to_id("<|begin_of_text|>")
    assert encode_empty("llama3") == [begin]
    assert encode_empty("llama3", bos=5) == [begin]
    assert encode_empty("llama2", eos_tokens={2: "eos"}) == [1]
    assert encode_empty("gpt2", bos=7, eos_tokens={0: "eos"}) == [7]
    assert encode_empty("gpt2", eos_tokens={3: "eos", 0: "eos"}) == [0]
    assert HFTokenizer(get_path("gpt2"), bos=7).encode("the")[0] != 7


def test_a_template_with_eos_adds_no_eos_to_a_prompt(tmp_path: Path) -> None:
    ids = {name: {"id": name, "ids": [token], "tokens": [name]} for token, name in ((1, "<s>"), (2, "</s>"))}
    single: list[Any] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ids]
    template = [single[0], {"Sequence": {"id": "A", "type_id": 0}}, single[1]]
    path = write_changed(
        tmp_path, "llama2", post_processor={"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": ids}
    )
    assert HFTokenizer(path).encode("the") == HFTokenizer(get_path("llama2")).encode("the")


def test_truncation_and_padding_are_disabled() -> None:
    tokenizer = HFTokenizer(get_path("mistral"))
    assert len(tokenizer.encode("the mill " * 50)) > 100
    assert tokenizer.encode("the") == [1, load_library_tokenizer("mistral").token_to_id("▁the")]


def test_eos_tokens_come_from_the_model_or_neighbouring_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(get_path("smollm2").read_bytes())
    assert HFTokenizer(path).eos_tokens == {}
    for neighbour, eos, token in (
        ("special_tokens_map.json", "<|endoftext|>", 0),
        ("tokenizer_config.json", {"content": "<|im_end|>", "special": True}, 2),
    ):
        (tmp_path / neighbour).write_text(json.dumps({"eos_token": eos}))
        assert HFTokenizer(path).eos_tokens == {token: "eos"}
    assert HFTokenizer(path, eos_tokens={1: "eos", 2: "eos"}).eos_tokens == {1: "eos", 2: "eos"}
    for damaged in ("[]", "{", '{"eos_token": 7}', '{"eos_token": "nobody"}'):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        assert HFTokenizer(path).eos_tokens == {0: "eos"}


def test_an_eos_token_has_no_text() -> None:
    token = load_library_tokenizer("gpt2").token_to_id("Ġthe")
    assert HFTokenizer(get_path("gpt2"), eos_tokens={token: "eos"}).decode([token]) == ""


def test_unknown_ids_are_rejected_and_gaps_have_no_text(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(get_path("gpt2"))
    with pytest.raises(ValueError, match=f"token is {tokenizer.vocab_size}; expected 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([tokenizer.vocab_size])
    model = json.loads(get_path("gpt2").read_text("utf-8"))["model"]
    model["vocab"]["zzz"] = 1000
    sparse = HFTokenizer(write_changed(tmp_path, "gpt2", model=model))
    assert sparse.vocab_size == 1001
    assert sparse.decode([500, 1000, 500]) == "zzz"
    assert (sparse.token_to_bytes(500), sparse.token_to_bytes(-1), sparse.token_to_bytes(10**6)) == (None, None, None)


def test_a_pickled_tokenizer_is_equivalent() -> None:
    tokenizer = HFTokenizer(get_path("llama2"), eos_tokens={2: "eos"})
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert [copy.encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]
    assert (copy.eos_tokens, copy.vocab_size, copy.path) == ({2: "eos"}, tokenizer.vocab_size, tokenizer.path)


@pytest.mark.parametrize(("text", "error"), [(7, TypeError), ("half \ud83d", ValueError)])
def test_an_invalid_text_is_rejected(text: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the text"):
        HFTokenizer(get_path("gpt2")).encode(text)


# Files


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"[1, 2]", "is not a tokenizer.json"),
        (b"\xff\xfe", "is not a tokenizer.json"),
        (get_path("gpt2").read_bytes()[:-2000], "is not a tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "is not a tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "is not a tokenizer.json"),
        (
            get_path("llama3").read_bytes().replace(b'"special_tokens":{"<|b', b'"special_tokens":{"<|c'),
            "is not a tokenizer.json",
        ),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        HFTokenizer(tmp_path)
    assert str(path) in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        make_sequence({"type": "ByteFallback"}, BYTE_LEVEL),
        make_sequence({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        make_sequence({"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        make_sequence({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}),
        make_sequence({"type": "ByteFallback"}, {"type": "Replace", "pattern": {"String": "a"}, "content": " "}),
    ],
)
def test_an_unsupported_decoder_is_rejected(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(TokenizerError, match=r"decoder.*expected ByteLevel, Metaspace or SentencePiece"):
        HFTokenizer(write_changed(tmp_path, "llama2", decoder=decoder))


def repeat_stage(stage: Any, kind: str, n: int = 40) -> Any:
    """Return a Sequence that applies a stage n times."""
    return {"type": "Sequence", kind: [stage] * n}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
GROWTH_ERROR = r"not a tokenizer\.json, or the package tokenizers cannot read it: a text may grow beyond 256 MiB$"
NORMALIZED_TOKENS = [
    {"id": 0, "content": "<|endoftext|a", "special": True, "normalized": True} | dict.fromkeys(STRIP_FLAGS, False)
]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": repeat_stage(DOUBLING, "normalizers")}, GROWTH_ERROR),
        ({"normalizer": repeat_stage(DOUBLING | {"pattern": {"String": ""}}, "normalizers")}, GROWTH_ERROR),
        ({"pre_tokenizer": repeat_stage(BYTE_LEVEL, "pretokenizers")}, GROWTH_ERROR),
        ({"normalizer": repeat_stage(DOUBLING, "normalizers"), "added_tokens": NORMALIZED_TOKENS}, GROWTH_ERROR),
        ({"decoder": make_sequence(*[DOUBLING] * 40, {"type": "Fuse"})}, "has a decoder with"),
    ],
)
def test_a_file_that_grows_texts_exponentially_is_rejected(parts: Any, words: str, tmp_path: Path) -> None:
    path = write_changed(tmp_path, "gpt2", **parts)
    with pytest.raises(TokenizerError, match=words):
        HFTokenizer(path)
    path.write_bytes(path.read_bytes().replace(b'"normalized": true', b'"norma\\u006cized": true'))
    with pytest.raises(TokenizerError, match=words):
        HFTokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_grow_at_most_by_max_growth(kind: str) -> None:
    encoder, library = load_encoder(get_path(kind).read_bytes()), load_library_tokenizer(kind)
    for text in filter(None, [*CORPUS, "\ufdfa", "\u0958", "\U0001d160", "\u0130", "x", " "]):
        normalized = library.normalizer.normalize_str(text) if library.normalizer is not None else text
        words = library.pre_tokenizer.pre_tokenize_str(normalized) if library.pre_tokenizer is not None else [(normalized, None)]
        n = sum(len(word.encode()) for word, _ in words)
        assert n <= len(text.encode()) * encoder.max_growth


def test_a_recursively_doubling_template_is_harmless(tmp_path: Path) -> None:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    doubling = {"type": "TemplateProcessing", "single": [piece, piece], "pair": [], "special_tokens": {}}
    path = write_changed(tmp_path, "gpt2", post_processor={"type": "Sequence", "processors": [doubling] * 60})
    assert HFTokenizer(path).encode("the") == HFTokenizer(get_path("gpt2")).encode("the")


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_ids_equal_the_librarys_template(kind: str) -> None:
    encoding = load_library_tokenizer(kind).encode("a")
    assert HFTokenizer(get_path(kind))._encoder._prefix_ids == encoding.ids[: encoding.special_tokens_mask.index(0)]


def test_a_special_tokens_name_in_a_text_copies_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a vocabulary of 262,144 tokens takes 4 seconds of CPU time."""
    tokenizers = [HFTokenizer(get_path(kind)) for kind in KINDS]
    monkeypatch.setattr("specdec.text.hf_encoder.json.loads", pytest.fail)
    for tokenizer in tokenizers:
        for name, token in tokenizer.specials.items():
            assert token not in tokenizer.encode_rendered([RenderedSegment("x ", False), RenderedSegment(f"say {name}", True)])


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "smollm2"])
def test_ids_after_gaps_in_a_vocabulary_stay_the_same(kind: str, tmp_path: Path) -> None:
    """Also in a text with a special token's name, for which the library assigns new ids."""
    model = json.loads(get_path(kind).read_text("utf-8"))["model"]
    n = len(model["vocab"])
    model["vocab"] |= {f"\u0120zz{i}": n + 1 + i for i in range(8)}
    model["ignore_merges"] = True
    tokenizer = HFTokenizer(
        write_changed(tmp_path, kind, model=model, pre_tokenizer={"type": "WhitespaceSplit"}, normalizer=None)
    )
    name = next(iter(tokenizer.specials))
    expected = [model["vocab"][f"\u0120zz{i}"] for i in range(8)]
    text = " ".join(f"\u0120zz{i}" for i in range(8))
    assert tokenizer.encode_rendered([RenderedSegment(text, True)]) == expected
    ids = tokenizer.encode_rendered([RenderedSegment(name, False), RenderedSegment(f" {text} {name}", True)])
    assert ids[: 1 + len(expected)] == [tokenizer.specials[name], *expected] and tokenizer.specials[name] not in ids[1:]


def test_a_special_name_that_the_model_would_merge_is_encoded_by_character(tmp_path: Path) -> None:
    """The model can form it by merges, or as a whole word."""
    content, name = json.loads(get_path("gpt2").read_text("utf-8")), "<|endoftext|>"
    model, pre_tokenizer = content["model"], BYTE_LEVEL | {"add_prefix_space": False, "use_regex": False}
    names = [name[:i] for i in range(2, len(name))]
    model["vocab"] |= {each: len(model["vocab"]) + i for i, each in enumerate(names)}
    merges = [*([each[:-1], each[-1]] for each in (*names, name)), *model["merges"]]
    for change in ({"ignore_merges": True}, {"merges": merges}):
        tokenizer = HFTokenizer(write_changed(tmp_path, "gpt2", model=model | change, pre_tokenizer=pre_tokenizer))
        token_id, character_ids = tokenizer.specials[name], [token for letter in name for token in tokenizer.encode(letter)]
        assert tokenizer.encode(name) == character_ids and tokenizer.decode(character_ids) == name
        assert tokenizer.encode_rendered([RenderedSegment(name, False), RenderedSegment(name, True)]) == [
            token_id,
            *character_ids,
        ]


def test_a_panic_of_the_library_is_reported_and_not_fatal(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = HFTokenizer(
        write_changed(
            tmp_path,
            "gpt2",
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"add_prefix_space": False}]},
        )
    )
    with pytest.raises(
        TokenizerError, match=r"^the tokenizer .*tokenizer\.json cannot encode the text: Onig: .*retry-limit"
    ) as caught:
        tokenizer.encode("a" * 40 + "b")
    assert "\n" not in str(caught.value)
    assert tokenizer.encode("the river") == HFTokenizer(get_path("gpt2")).encode("the river")


def test_a_huge_token_id_is_rejected_quickly(tmp_path: Path) -> None:
    model = json.loads(get_path("gpt2").read_text("utf-8"))["model"]
    model["vocab"]["zzz"] = 4_000_000_000
    with pytest.raises(ValueError, match="has 4000000001 tokens, the target has 400"):
        count_known_ids(HFTokenizer(write_changed(tmp_path, "gpt2", model=model)), 400)


def test_a_folder_without_a_tokenizer_json_is_reported_with_advice(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; .* tokenizer=\.\.\."):
        load_tokenizer(tmp_path)


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"gpt2\.json needs the package tokenizers.*; pip install tokenizers$"):
        load_tokenizer(get_path("gpt2"))


def test_llama2c_models_import_neither_the_library_nor_the_hub(tokenizer_path: Path) -> None:
    program = f"import sys, specdec.text.tokenizer_lookup as t, pathlib; t.load_tokenizer(pathlib.Path({str(tokenizer_path)!r}))"
    program += "\nassert not {'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# Vocabularies


def load_twice(kind: str, **options: Any) -> tuple[HFTokenizer, HFTokenizer]:
    return HFTokenizer(get_path(kind), **options), HFTokenizer(get_path(kind), **options)


def test_padding_rows_are_not_in_the_shared_vocabulary() -> None:
    target, draft = load_twice("qwen2")
    n = target.vocab_size
    assert compare_vocabularies(target, n + 40, draft, n + 8) == SharedVocabulary(n, n)
    assert compare_vocabularies(target, n, draft, n + 8) == SharedVocabulary(n, n)
    assert count_known_ids(target, n) == n
    assert compare_vocabularies(target, n + 40, get_path("qwen2"), n + 8) == SharedVocabulary(n, n)


def test_a_copy_of_the_targets_tokenizer_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFTokenizer(get_path("qwen2"))
    (tmp_path / "tokenizer.json").write_bytes(get_path("qwen2").read_bytes())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    n = target.vocab_size
    assert compare_vocabularies(target, n, tmp_path, n + 9) == SharedVocabulary(n, n)
    with pytest.raises(TokenizerError, match="package tokenizers"):
        compare_vocabularies(target, n, get_path("gpt2"), n)


def test_an_older_tokenizer_of_the_family_shares_its_ids(tmp_path: Path) -> None:
    target = HFTokenizer(get_path("qwen2"))
    added = json.loads(get_path("qwen2").read_text("utf-8"))["added_tokens"]
    draft = HFTokenizer(write_changed(tmp_path, "qwen2", added_tokens=added[:-2]))
    n = target.vocab_size
    assert compare_vocabularies(target, n + 5, draft, n + 5) == SharedVocabulary(n, n - 2)
    assert compare_vocabularies(draft, n + 5, target, n + 5) == SharedVocabulary(n - 2, n - 2)


def test_only_special_tokens_may_have_different_names(tmp_path: Path) -> None:
    target = HFTokenizer(get_path("llama3"))
    data = json.loads(get_path("llama3").read_text("utf-8"))
    added = data["added_tokens"]
    added[2]["content"] = "<|finetune_right_pad_id|>"
    draft = HFTokenizer(write_changed(tmp_path, "llama3", added_tokens=added))
    n = target.vocab_size
    assert compare_vocabularies(target, n, draft, n) == SharedVocabulary(n, n)
    added[2]["special"] = False
    draft = HFTokenizer(write_changed(tmp_path, "llama3", added_tokens=added))
    found = compare_vocabularies(target, n, draft, n)
    assert (found.n_target, found.n_common) == (n, n)
    ours = [token for token in range(n) if token != added[2]["id"]]
    assert [found.target_ids[token] for token in ours] == ours and found.target_ids[added[2]["id"]] == NOT_SHARED


@pytest.mark.parametrize(("one", "other"), [("gpt2", "smollm2"), ("gpt2", "llama2"), ("llama2", "smollm2"), ("qwen2", "llama3")])
def test_tokens_with_the_same_bytes_are_mapped(one: str, other: str) -> None:
    target, draft = HFTokenizer(get_path(one)), HFTokenizer(get_path(other))
    n_target, n_draft = target.vocab_size, draft.vocab_size
    found = compare_vocabularies(target, n_target + 3, draft, n_draft + 7)
    assert (found.n_target, found.n_common, len(found.target_ids)) == (n_target, n_target, n_draft)
    shared = [(token, other) for other, token in enumerate(found.target_ids) if token != NOT_SHARED]
    assert len({token for token, _ in shared}) == len(shared) and max(found.target_ids) < n_target
    for token, other_token in shared:
        assert target.token_to_bytes(token) == draft.token_to_bytes(other_token)
        assert target.token_to_bytes(token) is not None or target.id_to_token(token) == draft.id_to_token(other_token)
    words = [{tokenizer.token_to_bytes(token) for token in range(n)} for tokenizer, n in ((target, n_target), (draft, n_draft))]
    assert len(shared) >= len(words[0] & words[1] - {None})


def test_a_character_is_mapped_to_a_character_not_a_byte() -> None:
    """SentencePiece has a byte token and a character token of the same bytes; GPT-2 has only one."""
    target, draft = HFTokenizer(get_path("llama2")), HFTokenizer(get_path("gpt2"))
    for one, other in ((target, draft), (draft, target)):
        found = compare_vocabularies(one, one.vocab_size, other, other.vocab_size).target_ids
        for text in ("e", "Q", "7"):
            ids = [next(t for t in reversed(range(x.vocab_size)) if x.token_to_bytes(t) == text.encode()) for x in (one, other)]
            assert found[ids[1]] == ids[0]


def test_tokenizers_that_share_too_few_tokens_are_rejected(tmp_path: Path) -> None:
    target = HFTokenizer(get_path("llama2"))
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), *((b"%d words" % i, 0.0) for i in range(500))]
    draft = Tokenizer(write_tokenizer(tmp_path / "draft.bin", pieces))
    with pytest.raises(ValueError, match=r"draft\.bin has 2 of the 509 tokens of .*llama2\.json; a draft needs 10%") as caught:
        compare_vocabularies(target, target.vocab_size, draft, draft.vocab_size)
    assert "\n" not in str(caught.value)


def test_a_llama2c_file_and_a_tokenizer_json_of_one_vocabulary_match(tmp_path: Path) -> None:
    library = load_library_tokenizer("llama2")
    names = [library.id_to_token(token) for token in range(library.get_vocab_size())]
    merges = ["".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    scores = {name: -float(rank) for rank, name in enumerate(merges)}
    pieces = [(name.replace("▁", " ").encode(), scores.get(name, -1e6)) for name in names]
    target, draft = Tokenizer(write_tokenizer(tmp_path / "tokenizer.bin", pieces)), HFTokenizer(get_path("llama2"))
    n = len(names)
    assert compare_vocabularies(target, n, draft, n) == compare_vocabularies(draft, n, target, n) == SharedVocabulary(n, n)
    pieces[n - 1] = (b"other", pieces[n - 1][1])
    other = Tokenizer(write_tokenizer(tmp_path / "other.bin", pieces))
    ids = compare_vocabularies(draft, n, other, n).target_ids
    assert [token for token in range(n) if ids[token] != token] == [0, n - 1]  # <unk> is not a special token in llama2.c
    assert ids[0] == ids[n - 1] == NOT_SHARED


def test_a_tokenizer_of_another_size_is_rejected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    target = HFTokenizer(get_path("qwen2"))
    n = target.vocab_size
    for rows in (n - 1, n // 2, 2 * n, 10 * n):
        with pytest.raises(
            ValueError,
            match=rf"qwen2\.json has {n} tokens, the draft has {rows}; pass the draft's own tokenizer with tokenizer=\.\.\.",
        ):
            compare_vocabularies(HFTokenizer(get_path("qwen2")), n, target, rows)
    assert count_known_ids(tokenizer, 300) == 300
    for rows in (299, 301):
        with pytest.raises(ValueError, match=f"has 300 tokens, the target has {rows}"):
            count_known_ids(tokenizer, rows)
    with_pad = [*json.loads(get_path("llama2").read_text("utf-8"))["added_tokens"]]
    pad = with_pad[0] | {"id": HFTokenizer(get_path("llama2")).vocab_size, "content": "[PAD]"}
    padded = HFTokenizer(write_changed(tmp_path, "llama2", added_tokens=[*with_pad, pad]))
    assert count_known_ids(padded, pad["id"]) == pad["id"] == padded.vocab_size - 1
