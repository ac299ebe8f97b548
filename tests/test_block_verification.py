"""Block verification (Sun et al. 2024): the target's distribution, exactly and over rounds, and never fewer accepted."""

import contextlib
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from specdec.draft.model import ModelDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Step, decode
from specdec.runtime.memory import zeros
from specdec.sampling import Sampler, Sampling, redraw, weigh_prefix
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, BlockVerifier, Draft
from tests.tools import reference
from tests.tools.random_models import END_MARKS, begun, judge, tiny_model

PLAIN = (1.0, 0, 0.0)  # temperature, top_k, top_p: the logits' own softmax


class Table:
    """A model of a few tokens whose next one hangs on the last one alone."""

    lock, n_passes, n_positions, n_short = contextlib.nullcontext(), 0, 100, 0
    experts_read = 0.0, 0

    def __init__(self, probs):
        self.probs = np.array(probs)
        self.config = SimpleNamespace(vocab_size=len(self.probs))

    def forward(self, tokens, n_logits=1):
        return np.log(self.probs[tokens[len(tokens) - n_logits :]]).astype(np.float32)


def random_table(rng, size=3, flatness=0.7):
    return Table(rng.dirichlet(np.full(size, flatness), size) + 1e-6)


def row(values):
    out = zeros(1, 16)
    out[0, : len(values)] = values
    return out


def lengths_and_behind(p, q, proposals):
    """By the compiled steps: the odds of each accepted length, and the distribution of the token behind it; p and q by place."""
    n, weight, odds, weights = len(proposals), 1.0, [], []
    for i, token in enumerate(proposals):
        weights.append(weight)
        h, weight = weigh_prefix(row(p[i]), row(q[i]), len(p[i]), token, weight)
        odds.append(h)
    odds.append(weight)
    left, lengths = 1.0, [0.0] * (n + 1)
    for length in range(n, 0, -1):
        lengths[length] = left * odds[length]
        left -= lengths[length]
    lengths[0] = left
    behind = []
    for i in range(n):
        residual = row(p[i])
        redraw(residual, row(q[i]), len(p[i]), weights[i], 0, 0, 0)
        behind.append(residual[0, : len(p[i])] / residual[0].sum())
    return lengths, [*behind, p[n]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_sum_over_all_proposals_and_lots_is_the_targets_distribution(n):
    """No dice: every proposal over 3 tokens, every accepted length, then the target's own tokens; 60 random pairs."""
    rng = np.random.default_rng(n)
    for case in range(60):
        target, draft = (random_table(rng, flatness=rng.choice([0.2, 1.0, 5.0])).probs for _ in range(2))
        target, draft = target / target.sum(1, keepdims=True), draft / draft.sum(1, keepdims=True)
        draft = target if case % 10 == 0 else draft
        written = Counter()
        for proposals in itertools.product(range(3), repeat=n):
            context = (0, *proposals)
            p, q = [target[token] for token in context], [draft[token] for token in context[:-1]]
            drawn = math.prod(q[i][token] for i, token in enumerate(proposals))
            lengths, behind = lengths_and_behind(p, q, proposals)
            for length, token in itertools.product(range(n + 1), range(3)):
                written[(*proposals[:length], token)] += drawn * lengths[length] * behind[length][token]
        for text in itertools.product(range(3), repeat=n + 1):
            chain = [target[a][b] for a, b in itertools.pairwise((0, *text))]
            mass = sum(written[text[:k]] * math.prod(chain[k:]) for k in range(1, n + 2))
            assert mass == pytest.approx(math.prod(chain), abs=2e-6)


def rounds_of(target, draft, verify, n_runs, n_tokens, gamma, prompt):
    """The text of each of n_runs seeds."""
    for seed in range(n_runs):
        sampling = Sampling(*PLAIN, seed)
        verifier = VERIFIERS[verify](len(target.probs), sampling)
        drafter = ModelDrafter(draft, Sampler(draft.config.vocab_size, sampling), verifier.draft_noise, {})
        events = decode(target, drafter, verifier, prompt, n_tokens, FixedLength(gamma), {})
        yield tuple(token for event in events if isinstance(event, Step) for token in event.tokens)


@pytest.mark.campaign
@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_rounds_share_no_noise_that_the_one_before_has_judged_by(verify):
    """Texts of 4 tokens over 2 by a poor draft, so that most rounds are cut short and their places are drafted again.

    Chi-square over 20,000 seeds of 16 texts, false alarm below 1e-6 a case; the seeds are fixed. With noise keyed as
    `rejection` does, by position alone, `block` reaches 355 (its proposals' noise) and 672 (its lots') where 58 is the limit.
    """
    target, draft = Table([[0.5, 0.5], [0.4, 0.6]]), Table([[0.85, 0.15], [0.7, 0.3]])
    counts = Counter(rounds_of(target, draft, verify, 20_000, 4, 3, [0]))
    chi = 0.0
    for text in itertools.product(range(2), repeat=4):
        expected = 20_000 * math.prod(target.probs[a][b] for a, b in itertools.pairwise((0, *text)))
        chi += (counts[text] - expected) ** 2 / expected
    assert chi < reference.chi_square_limit(15, 4.8)


def accepted_of_the_same_drafts(target, draft, prompts, gamma, n_rounds):
    """How many of n_rounds proposals each verifier accepts, round by round: (2, n_rounds)."""
    vocab_size, accepted = draft.config.vocab_size, []
    for seed in range(n_rounds):
        sampling, prompt = Sampling(*PLAIN, seed), prompts[seed % len(prompts)]
        sampler = Sampler(draft.config.vocab_size, sampling)
        proposal = ModelDrafter(draft, sampler, BlockVerifier.draft_noise, {}).propose(prompt, begun(gamma))
        logits = target.forward(prompt + proposal.tokens, gamma + 1)
        verifiers = [VERIFIERS[verify](vocab_size, sampling) for verify in ("rejection", "block")]
        accepted.append([judge(logits, proposal, verifier, len(prompt), {})[1] for verifier in verifiers])
    return np.array(accepted).T


def pairs():
    rng = np.random.default_rng(1)
    for size, flatness in ((2, 1.0), (3, 0.5), (5, 1.0), (16, 0.7)):
        yield random_table(rng, size, flatness), random_table(rng, size, flatness), [[token] for token in range(size)]
    yield tiny_model(0, vocab=31, scale=0.1), tiny_model(1, vocab=31, scale=0.1), [[BOS, i, 30 - i] for i in range(3, 28)]


@pytest.mark.campaign
@pytest.mark.parametrize("case", range(5))
def test_on_the_average_no_fewer_are_accepted_than_by_rejection(case):
    """Of the same drafts, 10,000 rounds: 15 to 28% more here. Asked: 3 standard errors; measured: 8 to 15 (odds below 1e-6)."""
    target, draft, prompts = list(pairs())[case]
    rejection, block = accepted_of_the_same_drafts(target, draft, prompts, 4, 10_000)
    gain = block - rejection
    assert gain.mean() > 3 * gain.std() / 100


@pytest.mark.campaign
def test_one_proposal_stands_as_often_as_by_rejection():
    """There the two are one: shares of 10,000 rounds, within 5 of their standard errors (false alarm 6e-7)."""
    rng = np.random.default_rng(5)
    rejection, block = accepted_of_the_same_drafts(random_table(rng), random_table(rng), [[0], [1], [2]], 1, 10_000)
    assert abs(block.mean() - rejection.mean()) < 5 * (block - rejection).std() / 100


@pytest.mark.parametrize("verify", VERIFIERS)
def test_nothing_is_judged_behind_an_end_mark_or_a_mismatch(verify):
    """Rows that no token can be drawn from lie behind both, and a proposal behind the end mark is none."""
    logits = np.full((5, 6), np.nan, np.float32)
    logits[0], logits[1] = np.eye(6)[3], np.eye(6)[EOS]
    verifier = VERIFIERS[verify](6, Sampling(0.0))
    assert judge(logits, Draft([3, EOS, 4, 4]), verifier, 7, END_MARKS) == ([3, EOS], 2)
    assert judge(logits, Draft([4, EOS, 4, 4]), verifier, 7, END_MARKS) == ([3], 0)
    with pytest.raises(ValueError, match="not finite"):
        judge(logits, Draft([3, EOS, 4, 4]), verifier, 7, {})


def test_coupled_verification_draws_no_token_that_is_not_needed(monkeypatch):
    drawn = []
    monkeypatch.setattr(Sampler, "draw", lambda self, probs, logits, *_: drawn.append(logits[0]) or int(logits[1]))
    verifier = VERIFIERS["coupled"](6, Sampling(0.0))
    logits = np.array([[0, 3], [1, 4], [2, 5], [3, 5]], np.float32)
    assert judge(logits, Draft([3, 5, 5]), verifier, 7, END_MARKS) == ([3, 4], 1)
    assert drawn == [0, 1]
