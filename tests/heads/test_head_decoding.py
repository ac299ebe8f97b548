"""Heads in the loop: texts and distributions are the target's own, whoever takes turns on it."""

import itertools
import json
import pickle
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder, Step
from specdec.draft.calibration import measure
from specdec.draft.model import HeadDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Statistics, decode
from specdec.heads.head import Head
from specdec.loaders import CheckpointError
from specdec.loaders.loader import load_model
from specdec.quant import INT8
from specdec.sampling import Sampler
from specdec.text.vocabulary import Vocabulary
from specdec.tokenizer import BOS
from specdec.verification import VERIFIERS
from tests.cli.test_cli import Run, run  # noqa: F401  (a fixture)
from tests.conftest import Pair
from tests.tools import reference
from tests.tools.head_files import DIALECTS, write_folder, write_gguf
from tests.tools.random_heads import head_of, random_head
from tests.tools.random_models import END_MARKS, begun, continuation, tiny_model

SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]


def drafter_of(head, sampling, verify="coupled"):
    return HeadDrafter(head, Sampler(105, sampling), VERIFIERS[verify](105, sampling).draft_noise, END_MARKS)


def events_of(target, head, sampling, gamma=4, verify="coupled", prompt=(BOS, 7, 9), max_tokens=60):
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    policy = FixedLength(gamma)
    return decode(target, drafter_of(head, sampling, verify), verifier, list(prompt), max_tokens, policy, END_MARKS)


def tokens_of(events):
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


def texts_of_random_heads(n_pairs, first=0):
    """That none of them changes a text; how many tokens were compared, and how many proposals stood."""
    n, statistics = 0, Statistics()
    for case in range(first, first + n_pairs):
        rng = np.random.default_rng(case)
        target = tiny_model(case, layers=3)
        numbers = {"seq_len": int(rng.choice([16, 128])), "norm_before_residual": bool(rng.choice([False, True]))}
        head = head_of(target, rng.choice([None, INT8]) or INT8, seed=case, n_rows=int(rng.choice([0, 30, 104])), **numbers)
        sampling = Sampling(*[(0.0, 0, 0.0), (1.0, 0, 0.9), (0.7, 20, 0.95), (1.5, 0, 1.0)][case % 4], case)
        prompt = rng.integers(3, 105, int(rng.choice([1, 2, 5, 100]))).tolist()
        plain, _ = continuation(target, None, sampling, prompt=prompt, max_tokens=200)
        gamma = int(rng.choice([1, 2, 4, 63], p=[0.4, 0.3, 0.25, 0.05]))
        for event in events_of(target, head, sampling, gamma, prompt=prompt, max_tokens=200):
            statistics.add(event)
            if isinstance(event, Step):
                assert event.tokens == plain[: len(event.tokens)]
                plain = plain[len(event.tokens) :]
                n += len(event.tokens)
        assert not plain
    return n, statistics.n_accepted


def test_a_head_changes_no_text():
    """From prompts of one token on, past the head's window, to the target's last position."""
    n, n_accepted = texts_of_random_heads(16)
    assert n > 400 and n_accepted > 4


@pytest.mark.campaign
def test_nor_100_000_tokens():
    n, case = 0, 100
    while n < 100_000:
        n += texts_of_random_heads(50, case)[0]
        case += 50


def test_a_long_prompt_is_caught_up_with_and_the_text_goes_to_the_last_position():
    target, sampling = tiny_model(2, seq_len=400, layers=3), Sampling(1.0, 0, 0.0, 9)
    head, prompt = head_of(target, n_rows=80, seq_len=64), np.random.default_rng(1).integers(3, 105, 300).tolist()
    plain, statistics = [], Statistics()
    for event in decode(target, None, VERIFIERS["coupled"](105, sampling), prompt, 200, FixedLength(1), {}):
        plain += event.tokens if isinstance(event, Step) else []
    verifier = VERIFIERS["coupled"](105, sampling)
    drafter = HeadDrafter(head, Sampler(105, sampling), verifier.draft_noise, {})
    for event in decode(target, drafter, verifier, prompt, 200, FixedLength(5), {}):
        statistics.add(event)
        if isinstance(event, Step):
            assert event.tokens == plain[: len(event.tokens)]
            del plain[: len(event.tokens)]
    assert not plain and statistics.stop_reason == "seq_len" and statistics.n_generated == 101 and statistics.n_drafted > 300


def test_a_proposal_is_drawn_from_the_heads_logits_with_the_targets_noise():
    target = tiny_model(0, layers=3)
    head, sampling = head_of(target, n_rows=50), SAMPLINGS[1]
    prompt = [BOS, 7, 9, 20, 33]
    target.forward(prompt[:-1])
    proposed = drafter_of(head, sampling).propose(prompt, begun(5)).tokens
    sampler, text = Sampler(105, sampling), prompt
    for token in proposed:
        assert token == sampler.draw(sampler.new_probs(), head.forward(text)[0], 0, len(text)) and token in head.target_ids
        text = [*text, token]
    assert len(proposed) == 5 or proposed[-1] in END_MARKS
    assert drafter_of(head, sampling).propose([BOS], begun(5)).tokens == []
    target.hidden_layers = (1,)  # whoever takes them away
    assert drafter_of(head, sampling).propose([8, *prompt], begun(5)).tokens == []


@pytest.mark.parametrize("verify", VERIFIERS)
def test_texts_that_take_turns_are_what_each_is_alone(verify):
    target, sampling = tiny_model(5, layers=3), Sampling(1.0, 0, 0.0, 7)
    heads = [head_of(target, n_rows=60), head_of(target, seed=1, n_rows=90)]
    asked = [(head, [BOS, *range(3, 3 + n)]) for head, n in ((heads[0], 0), (heads[0], 20), (heads[1], 2), (heads[1], 41))]
    alone = [tokens_of(events_of(target, head, sampling, verify=verify, prompt=prompt)) for head, prompt in asked]
    streams = [events_of(target, head, sampling, verify=verify, prompt=prompt) for head, prompt in asked]
    rounds = [*itertools.zip_longest(*streams)]
    assert [tokens_of(filter(None, events)) for events in zip(*rounds, strict=True)] == alone
    heads[0].forward([1, 2]), target.forward([], 0), target.forward([8, 9])  # another's passes
    assert tokens_of(events_of(target, *asked[1][:1], sampling, verify=verify, prompt=asked[1][1])) == alone[1]


def test_threads_that_share_a_head_write_what_each_writes_alone():
    target, sampling = tiny_model(6, layers=3), Sampling(1.0, 0, 0.0, 7)
    head = head_of(target, n_rows=60)
    prompts = [[BOS, *range(3, 3 + n)] for n in (1, 9, 30)]
    alone = [tokens_of(events_of(target, head, sampling, prompt=prompt, max_tokens=90)) for prompt in prompts]
    found = {}

    def write(i):
        found[i] = [tokens_of(events_of(target, head, sampling, prompt=prompts[i], max_tokens=90)) for _ in range(4)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [alone[i]] * 4 for i in range(3)}


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("n_runs", [600, pytest.param(5_000, marks=pytest.mark.campaign)])
def test_texts_of_a_head_of_some_ids_have_the_targets_distribution(verify, n_runs):
    """Chi-square of the first two tokens, cells of few together, false alarm below 1e-6 a case; the seeds are fixed."""
    target = tiny_model(8, vocab=12, layers=3, scale=0.2)
    head, prompt = head_of(target, n_rows=7), [3, 4, 5]

    def softmax(tokens):
        powers = np.exp(target.forward(tokens)[0].astype(np.float64))
        return powers / powers.sum()

    first = softmax(prompt)
    expected = n_runs * np.concatenate([first[a] * softmax([*prompt, a]) for a in range(12)])
    counts = Counter()
    for seed in range(n_runs):
        sampling = Sampling(1.0, 0, 0.0, seed)
        verifier = VERIFIERS[verify](12, sampling)
        drafter = HeadDrafter(head, Sampler(12, sampling), verifier.draft_noise, {})
        counts[tuple(tokens_of(decode(target, drafter, verifier, prompt, 2, FixedLength(3), {})))] += 1
    seen = np.array([counts[a, b] for a in range(12) for b in range(12)])
    large = expected >= 5
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(large)] + [(seen[~large].sum(), expected[~large].sum())]
    chi = sum((n - mean) ** 2 / mean for n, mean in cells if mean)
    assert seen.sum() == n_runs and chi < reference.chi_square_limit(len(cells) - 1, 4.8)


# Decoders


def head_folder(path: Path, pair: Pair, dialect: str = "speculators", **numbers) -> Path:
    config, tensors, ids = random_head(load_model(pair.target).config, **{"n_rows": 80, "layers": (1, 2, 3)} | numbers)
    return write_folder(path, config, tensors, ids, dialect)


def written(decoder, sampling=SAMPLINGS[1], n=60):
    return tokens_of(decoder.stream("Once upon", n, sampling))


def test_a_named_head_drafts(pair: Pair, tmp_path: Path) -> None:
    """Of a named and of a loaded target; int8 by default."""
    path, alone = head_folder(tmp_path / "head", pair), SpeculativeDecoder(pair.target, None, pair.tokenizer)
    for target in (pair.target, load_model(pair.target)):
        for gamma in (4, 63, "auto"):
            decoder = SpeculativeDecoder(target, path, pair.tokenizer, gamma=gamma)
            assert decoder.shared == {"head": 80} and isinstance(decoder.draft, Head)
            assert decoder.weights.startswith("target fp32, head ") and decoder.weights.endswith("int8 (80 of 300 tokens)")
            for sampling in SAMPLINGS:
                assert written(decoder, sampling) == written(alone, sampling)
    whole = SpeculativeDecoder(pair.target, path, pair.tokenizer, quantize="none")
    assert whole.weights == "target fp32, head fp32 (80 of 300 tokens)"


def test_a_heads_costs_are_measured(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer)
    decoder.warm_up()
    curve = decoder.tuning.curve
    assert curve and curve.draft_token > 0 and curve.passes[1] > 0


def test_a_prompt_is_read_by_the_target_first(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer)
    prompt = [1, *[260, 261] * 50]
    shares = [*decoder.read(prompt)]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert decoder.target.unread(prompt) == 0 and decoder.draft and decoder.draft.unread(prompt) == 0
    assert [*decoder.read(prompt)] == []


def test_a_pickled_decoder_has_its_head(pair: Pair, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(pair.target, head_folder(tmp_path / "head", pair), pair.tokenizer, verify="rejection")
    again = pickle.loads(pickle.dumps(decoder))
    assert isinstance(again.draft, Head) and again.draft.target is again.target and again.weights == decoder.weights
    assert written(again) == written(decoder)
    other = SpeculativeDecoder(load_model(pair.target), None, pair.tokenizer)
    with pytest.raises(ValueError, match=r"^the draft is a head of another target"):
        SpeculativeDecoder(other.target, decoder.draft, pair.tokenizer)


def test_a_head_drafts_as_far_as_the_memory_holds_its_texts(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of borrowed weights there is one copy; behind its last position it proposes nothing."""
    path, target = head_folder(tmp_path / "head", pair), load_model(pair.target)
    whole, alone = SpeculativeDecoder(target, path, pair.tokenizer, gamma=4), SpeculativeDecoder(target, None, pair.tokenizer)
    assert isinstance(whole.draft, Head)
    room = target.weights.n_bytes + 4 * (whole.draft._own[1].n_bytes + whole.draft.text_bytes(60))
    monkeypatch.setattr("specdec.loaders.loader.physical_memory_bytes", lambda: room)
    decoder = SpeculativeDecoder(target, path, pair.tokenizer, gamma=4)
    assert decoder.draft and 30 < decoder.draft.n_positions < 80
    monkeypatch.undo()
    sampling = Sampling(1.0, 0, 0.0, 3)
    steps = [event for event in decoder.stream([1, *[260] * 20], 100, sampling) if isinstance(event, Step)]
    assert steps[0].draft_tokens and not steps[-1].draft_tokens
    for prompt in ([1, *[260] * 20], [1, *[261] * 90]):
        assert decoder.generate(prompt, 30, sampling).tokens == alone.generate(prompt, 30, sampling).tokens


def test_what_a_head_cannot_be_is_told(pair: Pair, tmp_path: Path) -> None:
    path = head_folder(tmp_path / "head", pair)
    for refused in (
        lambda: SpeculativeDecoder(pair.target, path, pair.tokenizer, stage="ngram"),
        lambda: SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, stage=path),
        lambda: SpeculativeDecoder(path, None, pair.tokenizer),
        lambda: SpeculativeDecoder(pair.target, path, pair.tokenizer, tree="on"),
        lambda: SpeculativeDecoder(SpeculativeDecoder(pair.target, path, pair.tokenizer).draft, None, pair.tokenizer),
        lambda: SpeculativeDecoder(pair.target, head_folder(tmp_path / "wide", pair, target_dim=32), pair.tokenizer),
        lambda: load_model(path),
    ):
        with pytest.raises((ValueError, CheckpointError), match=" head") as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dialect", [*DIALECTS, "gguf"])
def test_the_command_line_takes_a_head_wherever_it_takes_a_draft(run: Run, pair: Pair, tmp_path: Path, dialect: str) -> None:
    config, tensors, ids = random_head(load_model(pair.target).config, n_rows=80, layers=(1, 2, 3))
    path = tmp_path / "my-head.gguf"
    path = write_gguf(path, config, tensors, ids) if dialect == "gguf" else head_folder(tmp_path / "my-head", pair, dialect)
    asked = ("-m", pair.target, "-d", path, "-z", pair.tokenizer, "-i", "Once upon", "-s", 5)
    code, out, err = run(*asked, "-n", 40, "-g", 4, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "") and told["n_drafted"] and told["settings"]["weights"].endswith("int8 (80 of 300 tokens)")
    assert told["tokens"] == json.loads(run(*asked[:2], *asked[4:], "-d", "none", "-n", 40, "--json")[1])["tokens"]
    if dialect == "gguf":
        (prompts := tmp_path / "prompts").write_text("Once upon\n")
        assert json.loads(run("race", *asked, "-n", 40, "--json")[1])["same_text"]
        code, out, err = run("sweep", *asked[:6], "--prompts", prompts, "--max-tokens", 20, "--gammas", "2,auto", "--json")
        assert code == 0 and "the draft alone, trees and stages are left out: a head writes no text" in err + out
        code, out, err = run(*asked, "-n", 40, "--tree", "on")
        assert (code, out) == (2, "") and err.count("\n") == 1 and "a head proposes chains" in err


def test_a_head_is_timed_while_others_write_on_its_target(monkeypatch):
    target = tiny_model(8, layers=3)
    head, clock = head_of(target), time.perf_counter

    def others_turn():
        if target.lock.acquire(blocking=False):
            target.forward([7, 8, 9])
            target.lock.release()

    def busy():
        thread = threading.Thread(target=others_turn)
        thread.start()
        thread.join()
        return clock()

    monkeypatch.setattr("specdec.draft.calibration.time.perf_counter", busy)
    assert measure(target, head, Vocabulary(105, 105)).draft_cost(1) > 0


@pytest.mark.parametrize("n_positions", [1, 2, 3])
def test_a_text_of_few_positions_has_drafts_too(pair: Pair, n_positions):
    target = load_model(pair.target, n_positions=n_positions)
    plain = SpeculativeDecoder(target, None, tokenizer=pair.tokenizer).generate("", n_positions, seed=4)
    for draft in (load_model(pair.draft), head_of(target)):
        decoder = SpeculativeDecoder(target, draft, tokenizer=pair.tokenizer)
        assert decoder.generate("", n_positions, seed=4).tokens == plain.tokens


def test_a_head_whose_states_its_target_does_not_keep_is_silent(pair: Pair):
    target = load_model(pair.target)
    plain = SpeculativeDecoder(target, None, tokenizer=pair.tokenizer).generate("", 20, seed=4)
    decoder = SpeculativeDecoder(target, head_of(target), tokenizer=pair.tokenizer)
    target.hidden_layers = ()
    assert decoder.generate("", 20, seed=4).tokens == plain.tokens
