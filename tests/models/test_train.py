"""Training of the embedded pair: rows of stories, evaluation, and, if torch is installed, two steps of each training."""

import itertools
import json
import random

import numpy as np
import pytest

from models import evaluate, features, questions, stories
from specdec.heads.head import Head
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.loaders import load_checkpoint
from specdec.loaders.model_loader import load_model
from specdec.loaders.model_paths import DEFAULT_TARGET, DEFAULT_TOKENIZER
from specdec.model import get_architecture
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.sampling import Sampling
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.tokenizer import BOS, Tokenizer

WORDS = "the a little dog cat bird found saw big red ball in garden was happy and said Mia Tom"


def make_small_model(seed: int = 0, seq_len: int = 128) -> Model:
    config = ModelConfig(32, 48, 2, 4, 2, 300, seq_len)
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in LLAMA.shapes(config).items()}
    return Model(config, LLAMA.plan_weights(config, tensors).pack(), n_threads=1)


def story(rng: random.Random) -> str:
    return ". ".join(" ".join(rng.choices(WORDS.split(), k=8)) for _ in range(rng.randint(2, 6))) + "."


# ---------------------------------------------------------------------------------------------------------------- rows


def make_stories(n: int) -> list[np.ndarray]:
    """Return stories of 5 to 40 tokens, each BOS and then a number of its own."""
    rng = np.random.default_rng(1)
    return [np.array([BOS] + [10 + i] * int(rng.integers(4, 40)), np.int32) for i in range(n)]


def test_every_story_is_whole_in_a_row_that_starts_with_bos():
    rows = stories.pack_rows(make_stories(100), 50, np.random.default_rng(0))
    assert (rows[:, 0] == BOS).all()
    text = " ".join(map(str, rows.ravel().tolist()))
    assert all(" ".join(map(str, one.tolist())) in text for one in make_stories(100))


def test_batches_resume_at_any_step():
    first = stories.iterate_batches(make_stories(30), 50, 4, 0, seed=7)
    batches = [next(first) for _ in range(12)]
    later = stories.iterate_batches(make_stories(30), 50, 4, 9, seed=7)
    for rows in batches[9:]:
        np.testing.assert_array_equal(next(later), rows)


# --------------------------------------------------------------------------------------------------------- evaluation


def test_logits_of_long_text_equal_those_of_single_tokens():
    model = make_small_model()
    tokens = np.random.default_rng(3).integers(3, 300, 2 * MAX_BATCH_TOKENS - 5).tolist()
    alone = [
        make_small_model().new_cache().forward(tokens[:n])[0].copy()
        for n in (1, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS + 1, len(tokens))
    ]
    logits = evaluate.compute_logits(model, tokens)
    np.testing.assert_array_equal(logits[[0, MAX_BATCH_TOKENS - 1, MAX_BATCH_TOKENS, -1]], alone)


def test_loss_is_log_probability_per_byte():
    tokenizer = Tokenizer(DEFAULT_TOKENIZER)
    target = load_model(DEFAULT_TARGET)
    text = "Once upon a time, there was a bird.\nIt sang: é!"
    tokens = tokenizer.encode(text)
    nats = -sum(evaluate.compute_log_probs(target, tokens)[i, token] for i, token in enumerate(tokens[1:]))
    n_bytes = len(text.encode())
    assert evaluate.get_byte_lengths(tokenizer)[tokens].sum() - 1 == n_bytes
    assert evaluate.compute_nats_per_byte(target, tokenizer, [text], [n_bytes]) == pytest.approx(nats / n_bytes)
    assert 0.3 < nats / n_bytes < 1.5


def test_draft_equal_to_target_is_always_accepted():
    samplings = [Sampling(temperature, 0, 0.9, 5) for temperature in (0.0, 1.0)]
    rates = evaluate.measure_acceptance(make_small_model(), make_small_model(), [[BOS, 20], [BOS, 30]], 40, samplings, {})
    assert rates == pytest.approx((1, 1, 1), abs=1e-6)


def test_acceptance_equals_overlap_of_distributions():
    """Coupled noise agrees on a token with a probability of at least sum min(p, q) / (2 - sum min(p, q))."""
    target, draft = make_small_model(), make_small_model(seed=1, seq_len=32)
    draft = Model(draft.config, draft.weights, 1, n_positions=128)
    prompts = [[BOS, 10 + i] for i in range(8)]
    samplings = [Sampling(1.0, 0, 1.0, seed) for seed in range(8)]
    rates = evaluate.measure_acceptance(target, draft, prompts, 100, samplings, {})
    assert 0 < rates.rejection < 0.9
    # 800 tokens: 4 standard deviations are less than 0.07
    assert rates.rejection / (2 - rates.rejection) - 0.07 < rates.coupled < rates.rejection + 0.07


# ------------------------------------------------------------------------------------------------------ training data of heads


def test_questions_cover_all_tasks_and_topics_but_held_out_ones():
    n = len(questions.TASKS) * len(questions.TOPICS)
    sample = list(itertools.islice(questions.questions(questions.TOPICS, 3), n + 5))
    assert len({*sample[:n]}) == n
    assert sample[n] in sample[:n]
    assert not {*questions.TOPICS} & {*questions.HELD_OUT_TOPICS}


def test_teacher_outputs_are_target_states_and_top_tokens():
    model, layers = make_small_model(), (0, 2)
    tokens = np.random.default_rng(3).integers(3, 300, 2 * MAX_BATCH_TOKENS - 5).tolist()
    lesson = features.compute_teacher_outputs(model.new_cache(layers), tokens)
    assert lesson.states.shape == (len(tokens), len(layers) * 32)
    for n in (1, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS + 1, len(tokens)):
        alone = model.new_cache(layers)
        log_probs = evaluate.compute_log_probs(make_small_model(), tokens[:n])[-1]
        alone.forward(tokens[:n])
        np.testing.assert_array_equal(lesson.states[n - 1], alone.get_hidden_states(tokens[:n], n - 1)[0].astype(np.float16))
        np.testing.assert_array_equal(lesson.ids[n - 1], np.argsort(-log_probs)[: features.N_TEACHER_TOKENS])
        np.testing.assert_allclose(lesson.log_probs[n - 1], np.sort(log_probs)[::-1][: features.N_TEACHER_TOKENS], rtol=2e-3)


def test_chat_model_fills_rows_with_answers(pair):
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, template="llama2", n_threads=1)
    rows = features.generate_rows(decoder, 2, 400, seed=5)
    assert rows.shape == (2, 400)
    question = next(questions.questions(questions.TOPICS, 5))
    prompt = decoder.encode_chat([{"role": "user", "content": question}])
    assert rows[0, : len(prompt)].tolist() == prompt
    [(text, n_prompt)] = features.generate_held_out(decoder, rows, 1, 10)
    assert len(text) == n_prompt + 10
    assert text[n_prompt:] == decoder.generate(text[:n_prompt], 10, temperature=0).tokens


# ------------------------------------------------------------------------------------------------------------ training

SEQ_LEN, TINY_VOCAB = 64, 300


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Return a function that runs a command of train.py with tiny models and the text in tmp_path."""
    for package in ("torch", "sentencepiece"):
        pytest.importorskip(package, reason=f"training needs {package}: pip install '.[train]'")
    from models import train as module

    monkeypatch.setattr(module, "TARGET", ModelConfig(32, 48, 2, 4, 2, TINY_VOCAB, SEQ_LEN))
    monkeypatch.setattr(module, "DRAFT", ModelConfig(16, 32, 1, 2, 1, TINY_VOCAB, SEQ_LEN // 2))
    monkeypatch.setattr(module, "QUERY_BLOCK", 24)  # several of them in a row
    monkeypatch.setattr(stories, "HELD_OUT_STORIES", 6)
    monkeypatch.setattr(stories, "DEV_STORIES", 4)
    rng = random.Random(0)
    for name, n in ((stories.TRAIN_FILE, 40), (stories.VALID_FILE, 20)):
        (tmp_path / name).write_text(stories.STORY_SEPARATOR.join(story(rng) for _ in range(n)), encoding="utf-8")

    def run(*arguments: str) -> None:
        module.main([*arguments, "--text", str(tmp_path), "--out", str(tmp_path)])

    run.module = module
    run("tokenizer", "--vocab-size", str(TINY_VOCAB))
    return run


STEPS = ["--steps", "2", "--decay-steps", "1", "--warmup", "1", "--lr", "0.05", "--batch", "4", "--no-compile"]


def assert_exported(module, config, path, tokens):
    """Assert that the library's logits of the exported file equal the torch model's.

    Both are sums of fp32 products in different orders, so a few units in the last place of the largest logit apart: 1e-4 of
    it is a hundred of them, and a tensor at another's place is far above.
    """
    import torch

    model = module.Model(config).eval()
    model.load_state_dict(torch.load(path.with_suffix(".pt"))["model"])
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0].numpy()
    logits = evaluate.compute_logits(load_model(path), tokens)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_two_steps_of_training_give_files_the_library_runs(train, tmp_path, capsys):
    train("target", *STEPS)
    train("write", "--rows", "6", "--batch", "3")
    train("draft", *STEPS, "--text-rows", "8")
    tokens = np.random.default_rng(2).integers(3, TINY_VOCAB, SEQ_LEN).tolist()
    assert_exported(train.module, train.module.TARGET, tmp_path / "target.bin", tokens)
    assert_exported(train.module, train.module.DRAFT, tmp_path / "draft.bin", tokens[: SEQ_LEN // 2])

    capsys.readouterr()
    train("target", *STEPS[2:], "--steps", "3", "--draft", str(tmp_path / "draft.bin"))  # resumes, close to the draft
    assert "step 2 of 3" in capsys.readouterr().out
    log = [json.loads(line) for line in (tmp_path / "target.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [2, 3]
    assert 0 < log[-1]["dev_accepted"] < 1

    train("evaluate", "--prompts", "2", "--tokens", "30", "--stories", "4")
    printed = capsys.readouterr().out
    assert "target: " in printed and "times the target alone" in printed
    of = {line.partition(", ")[0] for line in printed.splitlines() if ", temperature " in line}
    assert of == {"target alone", "γ 4"}
    for name in ("target", "draft"):
        torch_model = train.module.Model.load(tmp_path / f"{name}.bin")
        torch_model.export(tmp_path / "again.bin")
        assert (tmp_path / "again.bin").read_bytes() == (tmp_path / f"{name}.bin").read_bytes()


def test_target_generates_rows_past_story_ends(train, tmp_path):
    train("target", *STEPS)
    train("write", "--rows", "4", "--batch", "4", "--seed", "3")
    alone = np.load(tmp_path / "written.npy")
    assert alone.shape == (4, SEQ_LEN + 1)
    assert (alone[:, 0] == BOS).all()
    train("draft", *STEPS, "--text-rows", "8")
    train("write", "--rows", "4", "--batch", "4", "--seed", "3")  # a draft helps, and changes nothing
    np.testing.assert_array_equal(np.load(tmp_path / "written.npy"), alone)


HEAD = ["--depths", "3", "--length", "24", "--draft-vocab", "40", "--held-out", "2", "--held-out-tokens", "20"]


@pytest.fixture
def train_head(train, tmp_path, monkeypatch):
    """Return a function that trains a head on a tiny target and its rows in tmp_path."""
    monkeypatch.setattr(features, "HELD_OUT_ROWS", 2)
    monkeypatch.setattr(features, "N_TEACHER_TOKENS", 8)
    train("target", *STEPS)
    train("write", "--rows", "6", "--batch", "6")

    def run(*arguments: str) -> None:
        train.module.main(["head", "--target", str(tmp_path / "target.bin"), "--out", str(tmp_path), *HEAD, *STEPS, *arguments])

    return run


def test_two_head_steps_write_a_folder_and_resume(train_head, tmp_path, capsys):
    train_head()
    printed = capsys.readouterr().out
    assert "depth 5: " in printed
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    taught = (tmp_path / "states.npy").stat().st_mtime_ns
    train_head("--steps", "3")
    assert "step 2 of 3" in capsys.readouterr().out
    assert (tmp_path / "states.npy").stat().st_mtime_ns == taught
    log = [json.loads(line) for line in (tmp_path / "head.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [2, 3]
    assert all(0 < record["accepted"] < 1 for record in log)


def test_head_may_be_narrower_than_target(train_head, tmp_path):
    train_head("--dim", "16")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["transformer_layer_config"]["hidden_size"] == 16
    assert config["target_hidden_size"] == 32


def test_missing_training_data_is_reported(train, tmp_path):
    train("target", *STEPS)
    with pytest.raises(SystemExit, match="has no chat template"):
        train.module.main(["head", "--target", str(tmp_path / "target.bin"), "--out", str(tmp_path)])
    np.save(tmp_path / "written.npy", np.zeros((20, 9), np.int32))
    with pytest.raises(ValueError, match="20 rows, and 20 of them are held out"):
        train.module.main(["head", "--target", str(tmp_path / "target.bin"), "--out", str(tmp_path)])


@pytest.mark.parametrize("options", [[], ["--dim", "16"]], ids=["target width", "narrower"])
def test_library_head_logits_equal_training_logits(train_head, train, tmp_path, options):
    """Compare logits at every depth behind several contexts; see `assert_exported`."""
    import torch

    train_head(*options)
    target, checkpoint = load_model(tmp_path / "target.bin"), load_checkpoint(tmp_path / "head")
    weights = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors, None).pack()
    head = Head(checkpoint.config, weights, target, checkpoint.target_ids, n_threads=1, kv="f32")
    tokens = np.random.default_rng(4).integers(3, TINY_VOCAB, 12).tolist()
    ids, dim = checkpoint.target_ids, checkpoint.config.dim
    trained = train.module.heads.make_head(load_checkpoint(tmp_path / "target.bin"), torch.from_numpy(ids), 24, dim)
    parameters = torch.load(tmp_path / "head.pt")["model"]
    trained.load_state_dict({name: tensor.bfloat16().float() for name, tensor in parameters.items()})
    for n in (2, 5, 8):  # tokens of the context; the rest are draft tokens
        target_cache = target.new_cache(head.target_layers)
        target_cache.forward(tokens[:n])
        states = torch.from_numpy(target_cache.get_hidden_states(tokens[:n], 0).copy())
        states = torch.cat([states, torch.zeros(12 - n, states.shape[1])])[None]
        with torch.no_grad():
            depth_logits = trained(states, torch.tensor([tokens]), 4)
        head_cache = head.new_draft_cache(target_cache)
        for depth in range(4):
            logits = head_cache.forward(tokens[: n + 1 + depth])[0]
            expected = depth_logits[depth][0, n - 1].numpy()
            np.testing.assert_allclose(logits[ids], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            assert np.isinf(np.delete(logits, ids)).all()
