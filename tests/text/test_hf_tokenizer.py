"""tokenizer_json.py against the tokenizers library's own decoding, and vocabulary.py, over every way of spelling tokens."""

import importlib.util
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.text.hf_tokenizer import JsonTokenizer, load_tokenizer
from specdec.text.vocabulary import NOT_SHARED, Vocabulary, common_vocabulary, known_ids
from specdec.tokenizer import Part, TextStream, Tokenizer, TokenizerError
from tests.test_tokenizer import TEXTS
from tests.tools.checkpoint_files import ROOT, write_tokenizer

FOLDER = ROOT / "tests" / "fixtures" / "tokenizers"
KINDS = ("gpt2", "smollm2", "qwen2", "qwen35", "llama3", "phi4", "tekken", "lfm2", "llama2", "mistral", "metaspace", "gemma3")
MARKS = ["<|endoftext|>", "<|im_start|>user<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<s> </s> <unk>", "<tool_call>{}"]
CORPUS = [
    *TEXTS,
    *(f"say {mark} to me" for mark in MARKS),
    "def f(x):\n\treturn {\n\t\t'a': [1, 22, 333, 4444],\n\t}\r\n\r\n# done",
    "1984 3.14159 1e-10 0x7f ١٢٣ ½ Ⅳ",
    "   leading, trailing   \n\n\n   ",
    "🙂🙂‍↕️ 👩‍👩‍👧‍👦 🇩🇪 é e\u0301 \u200b\u00a0\u2003\ufeff|",
    "日本語の文章です。中文也可以。한국어 ไทย हिन्दी",
    "it's I'LL they'd WE'RE ▁▁ Ġ Ċ ÃŁ",
    "\x00\x01\x7f\u0085\ufffd \U0010ffff",
    "a" * 300,
]
is_missing = importlib.util.find_spec("tokenizers") is None
STRIPS = ("single_word", "lstrip", "rstrip")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
needs_library = pytest.mark.skipif(is_missing, reason='needs the package tokenizers: pip install ".[test]"')


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind}.json"


def oracle(kind: str) -> Any:
    """The library's tokenizer, with nothing cut off and nothing filled up."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path_of(kind)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def changed(tmp_path: Path, kind: str, **parts: Any) -> Path:
    """A copy of a tokenizer.json with other parts."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path_of(kind).read_text("utf-8")) | parts), "utf-8")
    return path


def sequence(*decoders: Any) -> Any:
    return {"type": "Sequence", "decoders": decoders}


def streamed(tokenizer: JsonTokenizer, tokens: list[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join([stream.push(token) for token in tokens]) + stream.end()


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_the_librarys_ids_and_its_text_again(kind: str) -> None:
    tokenizer, library = JsonTokenizer(path_of(kind), bos=0), oracle(kind)
    library.encode_special_tokens = True
    for text in filter(None, CORPUS):
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text).ids
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens) == library.decode(tokens)


@needs_library
@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "llama3"])
def test_a_tokenizer_of_bytes_gives_every_text_back(kind: str) -> None:
    tokenizer = JsonTokenizer(path_of(kind))
    assert [tokenizer.decode(tokenizer.encode(text)) for text in CORPUS] == CORPUS


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_are_shown_as_the_library_decodes_them(kind: str) -> None:
    """Broken characters too, but where bytes of a piece follow whole ones in one run: see the next test."""
    tokenizer, library = JsonTokenizer(path_of(kind)), oracle(kind)
    rng = random.Random(1)
    said = [token for token in range(tokenizer.vocab_size) if not (library.id_to_token(token) or "").startswith("<0x")]
    for _ in range(300):
        tokens = rng.choices(range(tokenizer.vocab_size) if not tokenizer.broken_characters.endswith("byte") else said, k=30)
        assert streamed(tokenizer, tokens) == library.decode(tokens), tokens


@needs_library
def test_broken_bytes_are_a_mark_each_and_spoil_no_neighbour() -> None:
    """The library gives up a whole run of bytes where one of them is broken; what is whole is shown here, as it came."""
    tokenizer, library = JsonTokenizer(path_of("llama2")), oracle("llama2")

    def of(data: bytes) -> list[int]:
        return [library.token_to_id(f"<0x{byte:02X}>") for byte in data]

    for data in (b"\xe6\x97", b"\xff", b"\xf0\x9f\x99", b"\xc3\xe6", b"\xe6\x97\xa5"):
        assert tokenizer.decode(of(data)) == library.decode(of(data)), data
    assert tokenizer.decode(of("é".encode() + b"\xe6\x97")) == "é\ufffd\ufffd"
    assert library.decode(of("é".encode() + b"\xe6\x97")) == "\ufffd" * 4


@needs_library
@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_a_stream_gives_characters_whole_and_as_soon_as_they_are(kind: str) -> None:
    tokenizer, library = JsonTokenizer(path_of(kind)), oracle(kind)
    names = ["Ã", "©"] if kind == "gpt2" else ["<0xC3>", "<0xA9>"]
    first, second = (library.token_to_id(name) for name in names)
    space = library.token_to_id("Ġthe" if kind == "gpt2" else "▁the")
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (first, second)] == ["", "é"]
    assert stream.push(first) == ""
    assert stream.peek([second, space]) == ["é", " the"]
    assert stream.push(second) == "é"
    assert stream.end() == ""


@needs_library
def test_one_space_goes_from_the_beginning_of_a_text_alone() -> None:
    tokenizer, library = JsonTokenizer(path_of("llama2")), oracle("llama2")
    the, one, bos = (library.token_to_id(name) for name in ("▁the", "▁", "<s>"))
    for tokens in ([the, the], [bos, the], [one, one, the], [bos, bos, the, bos, the], [one, bos, the]):
        assert streamed(tokenizer, tokens) == library.decode(tokens)
    assert TextStream(tokenizer).peek([the, the]) == ["the", " the"]


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_special_tokens_name_in_a_text_is_text(kind: str) -> None:
    tokenizer, library = JsonTokenizer(path_of(kind)), oracle(kind)
    marks = {token for token, added in library.get_added_tokens_decoder().items() if added.special}
    for mark in marks:
        name = library.id_to_token(mark)
        assert mark in library.encode(name).ids
        from_template = [token for token in tokenizer.encode("say twice") if token in marks]
        assert [token for token in tokenizer.encode(f"say {name} twice") if token in marks] == from_template
    assert all(tokenizer.says(mark) is None for mark in marks)


@needs_library
def test_the_template_alone_writes_what_a_text_begins_with() -> None:
    def begins(kind: str, **marks: Any) -> list[int]:
        return JsonTokenizer(path_of(kind), **marks).encode("")

    begin = oracle("llama3").token_to_id("<|begin_of_text|>")
    assert begins("llama3") == [begin]
    assert begins("llama3", bos=5) == [begin]
    assert begins("llama2", end_marks={2: "eos"}) == [1]
    assert begins("gpt2", bos=7, end_marks={0: "eos"}) == [7]
    assert begins("gpt2", end_marks={3: "eos", 0: "eos"}) == [0]
    assert JsonTokenizer(path_of("gpt2"), bos=7).encode("the")[0] != 7


@needs_library
def test_a_template_that_ends_a_text_does_not_end_a_prompt(tmp_path: Path) -> None:
    ids = {name: {"id": name, "ids": [token], "tokens": [name]} for token, name in ((1, "<s>"), (2, "</s>"))}
    single: list[Any] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ids]
    template = [single[0], {"Sequence": {"id": "A", "type_id": 0}}, single[1]]
    path = changed(
        tmp_path, "llama2", post_processor={"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": ids}
    )
    assert JsonTokenizer(path).encode("the") == JsonTokenizer(path_of("llama2")).encode("the")


@needs_library
def test_nothing_is_cut_off_and_nothing_filled_up() -> None:
    tokenizer = JsonTokenizer(path_of("mistral"))
    assert len(tokenizer.encode("the mill " * 50)) > 100
    assert tokenizer.encode("the") == [1, oracle("mistral").token_to_id("▁the")]


@needs_library
def test_end_marks_come_from_the_model_or_else_from_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path_of("smollm2").read_bytes())
    assert JsonTokenizer(path).end_marks == {}
    for neighbour, eos, token in (
        ("special_tokens_map.json", "<|endoftext|>", 0),
        ("tokenizer_config.json", {"content": "<|im_end|>", "special": True}, 2),
    ):
        (tmp_path / neighbour).write_text(json.dumps({"eos_token": eos}))
        assert JsonTokenizer(path).end_marks == {token: "eos"}
    assert JsonTokenizer(path, end_marks={1: "eos", 2: "eos"}).end_marks == {1: "eos", 2: "eos"}
    for damaged in ("[]", "{", '{"eos_token": 7}', '{"eos_token": "nobody"}'):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        assert JsonTokenizer(path).end_marks == {0: "eos"}


@needs_library
def test_an_end_mark_is_not_text() -> None:
    token = oracle("gpt2").token_to_id("Ġthe")
    assert JsonTokenizer(path_of("gpt2"), end_marks={token: "eos"}).decode([token]) == ""


@needs_library
def test_ids_beyond_the_tokenizer_are_refused_and_gaps_say_nothing(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(path_of("gpt2"))
    with pytest.raises(ValueError, match=f"token is {tokenizer.vocab_size}; expected 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([tokenizer.vocab_size])
    model = json.loads(path_of("gpt2").read_text("utf-8"))["model"]
    model["vocab"]["zzz"] = 1000
    sparse = JsonTokenizer(changed(tmp_path, "gpt2", model=model))
    assert sparse.vocab_size == 1001
    assert sparse.decode([500, 1000, 500]) == "zzz"
    assert (sparse.says(500), sparse.says(-1), sparse.says(10**6)) == (None, None, None)


@needs_library
def test_a_pickled_tokenizer_is_the_same() -> None:
    tokenizer = JsonTokenizer(path_of("llama2"), end_marks={2: "eos"})
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert [copy.encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]
    assert (copy.end_marks, copy.vocab_size, copy.path) == ({2: "eos"}, tokenizer.vocab_size, tokenizer.path)


@needs_library
@pytest.mark.parametrize(("text", "error"), [(7, TypeError), ("half \ud83d", ValueError)])
def test_what_is_no_text_is_refused(text: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the text"):
        JsonTokenizer(path_of("gpt2")).encode(text)


# Files


@needs_library
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no tokenizer.json"),
        (b"{}", "no tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"[1, 2]", "no tokenizer.json"),
        (b"\xff\xfe", "no tokenizer.json"),
        (path_of("gpt2").read_bytes()[:-2000], "no tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "no tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "no tokenizer.json"),
        (path_of("llama3").read_bytes().replace(b'"special_tokens":{"<|b', b'"special_tokens":{"<|c'), "no tokenizer.json"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_told_in_one_line(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        JsonTokenizer(tmp_path)
    assert str(path) in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)


@needs_library
@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        sequence({"type": "ByteFallback"}, BYTE_LEVEL),
        sequence({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        sequence({"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        sequence({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}),
        sequence({"type": "ByteFallback"}, {"type": "Replace", "pattern": {"String": "a"}, "content": " "}),
    ],
)
def test_a_decoder_that_is_not_done_here_is_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    with pytest.raises(TokenizerError, match=r"decoder.*expected ByteLevel, Metaspace or SentencePiece"):
        JsonTokenizer(changed(tmp_path, "llama2", decoder=decoder))


def repeated(stage: Any, kind: str, n: int = 40) -> Any:
    """The parts of a file that do something again and again."""
    return {"type": "Sequence", kind: [stage] * n}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LOADED = r"no tokenizer\.json, or one that the package tokenizers cannot read: a text may grow beyond 256 MiB$"
NORMALIZED = [{"id": 0, "content": "<|endoftext|a", "special": True, "normalized": True} | dict.fromkeys(STRIPS, False)]


@needs_library
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": repeated(DOUBLING, "normalizers")}, LOADED),
        ({"normalizer": repeated(DOUBLING | {"pattern": {"String": ""}}, "normalizers")}, LOADED),
        ({"pre_tokenizer": repeated(BYTE_LEVEL, "pretokenizers")}, LOADED),
        ({"normalizer": repeated(DOUBLING, "normalizers"), "added_tokens": NORMALIZED}, LOADED),
        ({"decoder": sequence(*[DOUBLING] * 40, {"type": "Fuse"})}, "has a decoder with"),
    ],
)
def test_a_file_that_doubles_a_text_is_refused(parts: Any, words: str, tmp_path: Path) -> None:
    path = changed(tmp_path, "gpt2", **parts)
    with pytest.raises(TokenizerError, match=words):
        JsonTokenizer(path)
    path.write_bytes(path.read_bytes().replace(b'"normalized": true', b'"norma\\u006cized": true'))
    with pytest.raises(TokenizerError, match=words):
        JsonTokenizer(path)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_takes_no_more_bytes_than_was_expected(kind: str) -> None:
    tokenizer, library = JsonTokenizer(path_of(kind)), oracle(kind)
    for text in filter(None, [*CORPUS, "\ufdfa", "\u0958", "\U0001d160", "\u0130", "x", " "]):
        normalized = library.normalizer.normalize_str(text) if library.normalizer is not None else text
        words = library.pre_tokenizer.pre_tokenize_str(normalized) if library.pre_tokenizer is not None else [(normalized, None)]
        n = sum(len(word.encode()) for word, _ in words)
        assert n <= len(text.encode()) * tokenizer._encoder._growth


@needs_library
def test_a_template_that_grows_by_itself_takes_no_time(tmp_path: Path) -> None:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    doubling = {"type": "TemplateProcessing", "single": [piece, piece], "pair": [], "special_tokens": {}}
    path = changed(tmp_path, "gpt2", post_processor={"type": "Sequence", "processors": [doubling] * 60})
    assert JsonTokenizer(path).encode("the") == JsonTokenizer(path_of("gpt2")).encode("the")


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_front_is_what_the_librarys_template_writes(kind: str) -> None:
    encoding = oracle(kind).encode("a")
    assert JsonTokenizer(path_of(kind))._encoder._in_front == encoding.ids[: encoding.special_tokens_mask.index(0)]


@needs_library
def test_nothing_is_copied_for_a_text_that_spells_a_special_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a vocabulary of 262,144 tokens takes 4 seconds of a CPU."""
    tokenizers = [JsonTokenizer(path_of(kind)) for kind in KINDS]
    monkeypatch.setattr("specdec.text.encoder.json.loads", pytest.fail)
    for tokenizer in tokenizers:
        for name, token in tokenizer.specials.items():
            assert token not in tokenizer.encode_rendered([Part("x ", False), Part(f"say {name}", True)])


@needs_library
@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "smollm2"])
def test_ids_beyond_gaps_in_a_vocabulary_stay_what_they_are(kind: str, tmp_path: Path) -> None:
    """Also in a text that spells a special token, where the library gives letters ids of its own."""
    model = json.loads(path_of(kind).read_text("utf-8"))["model"]
    n = len(model["vocab"])
    model["vocab"] |= {f"\u0120zz{i}": n + 1 + i for i in range(8)}
    model["ignore_merges"] = True
    tokenizer = JsonTokenizer(changed(tmp_path, kind, model=model, pre_tokenizer={"type": "WhitespaceSplit"}, normalizer=None))
    name = next(iter(tokenizer.specials))
    expected = [tokenizer._ids[f"\u0120zz{i}"] for i in range(8)]
    text = " ".join(f"\u0120zz{i}" for i in range(8))
    assert tokenizer.encode_rendered([Part(text, True)]) == expected
    ids = tokenizer.encode_rendered([Part(name, False), Part(f" {text} {name}", True)])
    assert ids[: 1 + len(expected)] == [tokenizer.specials[name], *expected] and tokenizer.specials[name] not in ids[1:]


@needs_library
def test_a_special_token_that_the_model_makes_of_its_name_is_spelled_by_characters(tmp_path: Path) -> None:
    """A model makes one by merges, or takes a whole word that is one."""
    content, name = json.loads(path_of("gpt2").read_text("utf-8")), "<|endoftext|>"
    model, whole = content["model"], BYTE_LEVEL | {"add_prefix_space": False, "use_regex": False}
    names = [name[:i] for i in range(2, len(name))]
    model["vocab"] |= {each: len(model["vocab"]) + i for i, each in enumerate(names)}
    merges = [*([each[:-1], each[-1]] for each in (*names, name)), *model["merges"]]
    for change in ({"ignore_merges": True}, {"merges": merges}):
        tokenizer = JsonTokenizer(changed(tmp_path, "gpt2", model=model | change, pre_tokenizer=whole))
        mark, letters = tokenizer.specials[name], [token for letter in name for token in tokenizer.encode(letter)]
        assert tokenizer.encode(name) == letters and tokenizer.decode(letters) == name
        assert tokenizer.encode_rendered([Part(name, False), Part(name, True)]) == [mark, *letters]


@needs_library
def test_a_pattern_that_panics_is_told_and_the_next_text_is_encoded(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = JsonTokenizer(
        changed(
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
    assert tokenizer.encode("the river") == JsonTokenizer(path_of("gpt2")).encode("the river")


@needs_library
def test_an_id_beyond_all_models_is_refused_at_once(tmp_path: Path) -> None:
    model = json.loads(path_of("gpt2").read_text("utf-8"))["model"]
    model["vocab"]["zzz"] = 4_000_000_000
    with pytest.raises(ValueError, match="holds 4000000001 tokens, the target has 400"):
        known_ids(JsonTokenizer(changed(tmp_path, "gpt2", model=model)), 400)


def test_a_folder_without_a_tokenizer_json_tells_the_way_to_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; .* tokenizer=\.\.\."):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; .*tokenizer\.model: AutoTokenizer\.from_pretrained\('"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a directory"):
        load_tokenizer(tmp_path)


def test_without_the_library_one_line_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"gpt2\.json is read with the package tokenizers.*; pip install tokenizers$"):
        load_tokenizer(path_of("gpt2"))


def test_llama2c_models_load_neither_the_library_nor_the_hub(tokenizer_path: Path) -> None:
    program = f"import sys, specdec.text.hf_tokenizer as t, pathlib; t.load_tokenizer(pathlib.Path({str(tokenizer_path)!r}))"
    program += "\nassert not {'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# Vocabularies


def twins(kind: str, **marks: Any) -> tuple[JsonTokenizer, JsonTokenizer]:
    return JsonTokenizer(path_of(kind), **marks), JsonTokenizer(path_of(kind), **marks)


@needs_library
def test_rows_that_pad_a_vocabulary_are_never_said() -> None:
    target, draft = twins("qwen2")
    n = target.vocab_size
    assert common_vocabulary(target, n + 40, draft, n + 8) == Vocabulary(n, n)
    assert common_vocabulary(target, n, draft, n + 8) == Vocabulary(n, n)
    assert known_ids(target, n) == n
    assert common_vocabulary(target, n + 40, path_of("qwen2"), n + 8) == Vocabulary(n, n)


@needs_library
def test_a_copy_of_the_targets_tokenizer_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = JsonTokenizer(path_of("qwen2"))
    (tmp_path / "tokenizer.json").write_bytes(path_of("qwen2").read_bytes())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    n = target.vocab_size
    assert common_vocabulary(target, n, tmp_path, n + 9) == Vocabulary(n, n)
    with pytest.raises(TokenizerError, match="package tokenizers"):
        common_vocabulary(target, n, path_of("gpt2"), n)


@needs_library
def test_an_older_tokenizer_of_the_family_shares_the_ids_that_it_knows(tmp_path: Path) -> None:
    target = JsonTokenizer(path_of("qwen2"))
    added = json.loads(path_of("qwen2").read_text("utf-8"))["added_tokens"]
    draft = JsonTokenizer(changed(tmp_path, "qwen2", added_tokens=added[:-2]))
    n = target.vocab_size
    assert common_vocabulary(target, n + 5, draft, n + 5) == Vocabulary(n, n - 2)
    assert common_vocabulary(draft, n + 5, target, n + 5) == Vocabulary(n - 2, n - 2)


@needs_library
def test_special_tokens_may_have_other_names_and_others_may_not(tmp_path: Path) -> None:
    target = JsonTokenizer(path_of("llama3"))
    data = json.loads(path_of("llama3").read_text("utf-8"))
    added = data["added_tokens"]
    added[2]["content"] = "<|finetune_right_pad_id|>"
    draft = JsonTokenizer(changed(tmp_path, "llama3", added_tokens=added))
    n = target.vocab_size
    assert common_vocabulary(target, n, draft, n) == Vocabulary(n, n)
    added[2]["special"] = False
    draft = JsonTokenizer(changed(tmp_path, "llama3", added_tokens=added))
    found = common_vocabulary(target, n, draft, n)
    assert (found.n_target, found.n_common) == (n, n)
    ours = [token for token in range(n) if token != added[2]["id"]]
    assert [found.target_ids[token] for token in ours] == ours and found.target_ids[added[2]["id"]] == NOT_SHARED


@needs_library
@pytest.mark.parametrize(("one", "other"), [("gpt2", "smollm2"), ("gpt2", "llama2"), ("llama2", "smollm2"), ("qwen2", "llama3")])
def test_tokens_of_different_tokenizers_that_say_the_same_are_found(one: str, other: str) -> None:
    target, draft = JsonTokenizer(path_of(one)), JsonTokenizer(path_of(other))
    n_target, n_draft = target.vocab_size, draft.vocab_size
    found = common_vocabulary(target, n_target + 3, draft, n_draft + 7)
    assert (found.n_target, found.n_common, len(found.target_ids)) == (n_target, n_target, n_draft)
    shared = [(token, other) for other, token in enumerate(found.target_ids) if token != NOT_SHARED]
    assert len({token for token, _ in shared}) == len(shared) and max(found.target_ids) < n_target
    for token, other_token in shared:
        assert target.says(token) == draft.says(other_token)
        assert target.says(token) is not None or target.name(token) == draft.name(other_token)
    words = [{tokenizer.says(token) for token in range(n)} for tokenizer, n in ((target, n_target), (draft, n_draft))]
    assert len(shared) >= len(words[0] & words[1] - {None})


@needs_library
def test_a_character_that_is_a_byte_too_is_the_character() -> None:
    """SentencePiece has a token for each byte, which says what a character's says; GPT-2's vocabulary has one of both."""
    target, draft = JsonTokenizer(path_of("llama2")), JsonTokenizer(path_of("gpt2"))
    for one, other in ((target, draft), (draft, target)):
        found = common_vocabulary(one, one.vocab_size, other, other.vocab_size).target_ids
        for text in ("e", "Q", "7"):
            ids = [next(t for t in reversed(range(x.vocab_size)) if x.says(t) == text.encode()) for x in (one, other)]
            assert found[ids[1]] == ids[0]


@needs_library
def test_two_tokenizers_that_hardly_share_a_token_are_refused(tmp_path: Path) -> None:
    target = JsonTokenizer(path_of("llama2"))
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), *((b"%d words" % i, 0.0) for i in range(500))]
    draft = Tokenizer(write_tokenizer(tmp_path / "draft.bin", pieces))
    with pytest.raises(ValueError, match=r"draft\.bin has 2 of the 509 tokens of .*llama2\.json; a draft needs 10%") as caught:
        common_vocabulary(target, target.vocab_size, draft, draft.vocab_size)
    assert "\n" not in str(caught.value)


@needs_library
def test_a_llama2c_tokenizer_and_a_tokenizer_json_of_one_vocabulary_agree(tmp_path: Path) -> None:
    library = oracle("llama2")
    names = [library.id_to_token(token) for token in range(library.get_vocab_size())]
    merges = ["".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    scores = {name: -float(rank) for rank, name in enumerate(merges)}
    pieces = [(name.replace("▁", " ").encode(), scores.get(name, -1e6)) for name in names]
    target, draft = Tokenizer(write_tokenizer(tmp_path / "tokenizer.bin", pieces)), JsonTokenizer(path_of("llama2"))
    n = len(names)
    assert common_vocabulary(target, n, draft, n) == common_vocabulary(draft, n, target, n) == Vocabulary(n, n)
    pieces[n - 1] = (b"other", pieces[n - 1][1])
    other = Tokenizer(write_tokenizer(tmp_path / "other.bin", pieces))
    ids = common_vocabulary(draft, n, other, n).target_ids
    assert [token for token in range(n) if ids[token] != token] == [0, n - 1]  # an unknown character is no mark of llama2.c's
    assert ids[0] == ids[n - 1] == NOT_SHARED


@needs_library
def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    target = JsonTokenizer(path_of("qwen2"))
    n = target.vocab_size
    for rows in (n - 1, n // 2, 2 * n, 10 * n):
        with pytest.raises(
            ValueError, match=rf"qwen2\.json holds {n} tokens, the draft has {rows}; name the draft's own with tokenizer=\.\.\."
        ):
            common_vocabulary(JsonTokenizer(path_of("qwen2")), n, target, rows)
    assert known_ids(tokenizer, 300) == 300
    for rows in (299, 301):
        with pytest.raises(ValueError, match=f"holds 300 tokens, the target has {rows}"):
            known_ids(tokenizer, rows)
    with_pad = [*json.loads(path_of("llama2").read_text("utf-8"))["added_tokens"]]
    pad = with_pad[0] | {"id": JsonTokenizer(path_of("llama2")).vocab_size, "content": "[PAD]"}
    padded = JsonTokenizer(changed(tmp_path, "llama2", added_tokens=[*with_pad, pad]))
    assert known_ids(padded, pad["id"]) == pad["id"] == padded.vocab_size - 1
