"""Reranker: its scores are those of transformers, whatever else is scored with them and however the model is stored."""

import math
from pathlib import Path

import pytest

from specdec import SpeculativeDecoder
from specdec.loaders.rerankers import INSTRUCTION, QWEN3_TEMPLATE
from specdec.tokenizer import RenderedSegment
from tests.tools import rerankers
from tests.tools.hf_folders import WEIGHTS, read_folder_tensors, safetensors_bytes
from tests.tools.rerankers import DOCUMENTS, QUERY, make_reranker, make_reranker_gguf

EXPECTED = [  # of `python -m tests.tools.rerankers`, transformers 5.23
    [0.4335439148886981, 0.8414999400909876, 0.9969574720992835, 0.6415780037585345, 0.7731503445081847],
    [0.953127787814383, 0.9643018225115162, 0.9277920175442225, 0.9360210940033106, 0.852949273334121],
    [0.846817884641258, 0.4586054079303921, 0.0930560169927801, 0.5564993655409852, 0.29423411983012543],
]
TEMPLATE = QWEN3_TEMPLATE.replace("{instruction}", INSTRUCTION)  # as llama.cpp's converter writes it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("models") / "tiny-Qwen3-Reranker")


@pytest.fixture(scope="module")
def decoder(folder: Path) -> SpeculativeDecoder:
    return load(folder)


def load(path: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder(path, None, n_threads=1, kv="f32")


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    decoder = load(make_reranker(tmp_path / "Qwen3-Reranker-tiny", seed))
    assert decoder.score(QUERY, DOCUMENTS, rerankers.INSTRUCTION) == pytest.approx(EXPECTED[seed], abs=1e-5)
    assert decoder.score(QUERY, DOCUMENTS) == decoder.score(QUERY, DOCUMENTS, INSTRUCTION) != EXPECTED[seed]


def test_a_score_does_not_depend_on_the_other_documents(decoder: SpeculativeDecoder) -> None:
    documents = [("The robin " * (7 * i % 30))[: 5 * i] for i in range(21)] + ["The robin "] * 2
    scores = decoder.score(QUERY, documents)
    assert scores == [decoder.score(QUERY, [document])[0] for document in documents]
    assert decoder.score(QUERY, documents[::-1]) == scores[::-1] and len({*scores}) > 15


def test_gguf_files_and_classification_heads_give_the_same_scores(folder: Path, tmp_path: Path) -> None:
    expected, rows = load(folder).score(QUERY, DOCUMENTS), rerankers.read_answer_rows(folder)
    for name, template, head in (("a.gguf", TEMPLATE, rows), ("Qwen3-Reranker.gguf", None, None), ("b.gguf", TEMPLATE, None)):
        assert load(make_reranker_gguf(folder, tmp_path / name, template, head)).score(QUERY, DOCUMENTS) == pytest.approx(
            expected, abs=1e-5
        )
    inverse = load(make_reranker_gguf(folder, tmp_path / "c.gguf", TEMPLATE, rows[::-1])).score(QUERY, DOCUMENTS)
    assert inverse == pytest.approx([1 - score for score in expected], abs=1e-5)
    classifier = make_reranker(tmp_path / "Qwen3-Reranker-seq-cls")
    tensors = read_folder_tensors(classifier) | {"score.weight": ("F32", rows[:1] - rows[1:])}
    (classifier / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    config = (classifier / "config.json").read_text()
    (classifier / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    assert load(classifier).score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-5)


def test_a_template_of_the_file_is_used(folder: Path, tmp_path: Path) -> None:
    decoder = load(make_reranker_gguf(folder, tmp_path / "other.gguf", "<|im_start|>{document}\n{query}"))
    segments = [("<|im_start|>", False), ("{query} b", True), ("\n", False), ("a {document}", True)]
    tokens = decoder.tokenizer.encode_rendered([RenderedSegment(*segment) for segment in segments])  # type: ignore[union-attr]
    logits = decoder.target.new_cache().forward(tokens)[0].tolist()
    yes, no = (logits[decoder.encode(text)[0]] for text in ("yes", "no"))
    assert decoder.score("a {document}", ["{query} b"]) == pytest.approx([1 / (1 + math.exp(no - yes))])
    with pytest.raises(ValueError, match="instruction is not supported"):
        decoder.score("a", ["b"], "c")


@pytest.mark.parametrize(
    ("query", "documents", "instruction", "error", "word"),
    [
        (5, ["a"], None, TypeError, "query"), ("a", [], None, ValueError, "documents"), ("a", "b", None, ValueError, "documents"),
        ("a", ["b", 5], None, TypeError, r"documents\[1\]"), ("a", ["\ud800"], None, ValueError, r"documents\[0\]"),
        ("a", ["b"], 5, TypeError, "instruction"), ("a", ["b", "c " * 700], None, ValueError, r"documents\[1\] has \d+ tokens"),
        ("a", ["b" * 10**6], None, ValueError, r"documents\[0\] has \d+ characters"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_scored_are_named(
    decoder: SpeculativeDecoder, query: object, documents: object, instruction: object, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        decoder.score(query, documents, instruction)  # type: ignore[arg-type]


def test_other_models_are_rejected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for path in (make_reranker(tmp_path / "deep" / "er" / "Qwen3-0.6B"), make_reranker_gguf(folder, tmp_path / "x.gguf", None)):
        with pytest.raises(ValueError, match="not a reranker"):
            load(path).score("a", ["b"])
