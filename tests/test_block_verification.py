"""Block verification (Sun et al. 2024): the target's distribution, exactly and over rounds, and never fewer accepted tokens."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from specdec.sampling import Sampler, Sampling, compute_block_acceptance, draw_residual
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS, BlockVerifier, Draft
from tests.tools import reference
from tests.tools.decode import END_MARKS, get_cache, make_model_drafter, verify_proposal
from tests.tools.random_models import make_started_policy, tiny_model
from tests.tools.verification_tables import PLAIN, Table, generate_with_seeds, row


def random_table(rng, size=3, flatness=0.7):
    return Table(rng.dirichlet(np.full(size, flatness), size) + 1e-6)


def compute_lengths_and_next(p, q, proposals):
    """Return the probability of each accepted length, and the distribution of the next token, from the compiled steps.

    p and q are given by position.
    """
    n, weight, acceptance, weights = len(proposals), 1.0, [], []
    for i, token in enumerate(proposals):
        weights.append(weight)
        h, weight = compute_block_acceptance(row(p[i]), row(q[i]), len(p[i]), token, weight)
        acceptance.append(h)
    acceptance.append(weight)
    remaining, lengths = 1.0, [0.0] * (n + 1)
    for length in range(n, 0, -1):
        lengths[length] = remaining * acceptance[length]
        remaining -= lengths[length]
    lengths[0] = remaining
    next_probs = []
    for i in range(n):
        residual = row(p[i])
        draw_residual(residual, row(q[i]), len(p[i]), weights[i], 0, 0, 0, (np.empty(1, np.int64), np.empty(1)))
        next_probs.append(residual[0, : len(p[i])] / residual[0].sum())
    return lengths, [*next_probs, p[n]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_sum_over_all_proposals_and_draws_is_the_targets_distribution(n):
    """Without random draws: all proposals over 3 tokens, all accepted lengths, then the target's own tokens; 60 random pairs."""
    rng = np.random.default_rng(n)
    for case in range(60):
        target, draft = (random_table(rng, flatness=rng.choice([0.2, 1.0, 5.0])).probs for _ in range(2))
        target, draft = target / target.sum(1, keepdims=True), draft / draft.sum(1, keepdims=True)
        draft = target if case % 10 == 0 else draft
        generated = Counter()
        for proposals in itertools.product(range(3), repeat=n):
            context = (0, *proposals)
            p, q = [target[token] for token in context], [draft[token] for token in context[:-1]]
            draft_mass = math.prod(q[i][token] for i, token in enumerate(proposals))
            lengths, next_probs = compute_lengths_and_next(p, q, proposals)
            for length, token in itertools.product(range(n + 1), range(3)):
                generated[(*proposals[:length], token)] += draft_mass * lengths[length] * next_probs[length][token]
        for sequence in itertools.product(range(3), repeat=n + 1):
            chain = [target[a][b] for a, b in itertools.pairwise((0, *sequence))]
            mass = sum(generated[sequence[:k]] * math.prod(chain[k:]) for k in range(1, n + 2))
            assert mass == pytest.approx(math.prod(chain), abs=2e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_rounds_do_not_reuse_noise_of_earlier_verifications(verify):
    """Sequences of 4 tokens over 2 with a poor draft, so that most rounds are cut short and their positions are drafted again.

    Chi-square over 20,000 fixed seeds of 16 sequences, false alarm below 1e-6 per case. With noise keyed by position alone, as
    `rejection` does, `block` reaches 355 (draft noise) and 672 (acceptance draws), and the limit is 58.
    """
    target, draft = Table([[0.5, 0.5], [0.4, 0.6]]), Table([[0.85, 0.15], [0.7, 0.3]])
    counts = Counter(generate_with_seeds(target, draft, verify, 20_000, 4, 3, [0]))
    reference.check_counts(counts, target.expect(4))


def count_accepted_of_same_drafts(target, draft, prompts, gamma, n_rounds):
    """Return how many tokens of n_rounds drafts each verifier accepts, by round: (2, n_rounds)."""
    target, draft, accepted = get_cache(target), get_cache(draft), []
    for seed in range(n_rounds):
        sampling, prompt = Sampling(*PLAIN, seed), prompts[seed % len(prompts)]
        drafter = make_model_drafter(draft, BlockVerifier, sampling, eos_tokens={})
        proposal = drafter.propose(prompt, make_started_policy(gamma))
        logits = target.forward(prompt + proposal.tokens, gamma + 1)
        verifiers = [VERIFIERS[verify](target.model.vocab_size, sampling) for verify in ("rejection", "block")]
        accepted.append([verify_proposal(logits, proposal, verifier, len(prompt), {})[1] for verifier in verifiers])
    return np.array(accepted).T


def make_pairs():
    rng = np.random.default_rng(1)
    for size, flatness in ((2, 1.0), (3, 0.5), (5, 1.0), (16, 0.7)):
        yield random_table(rng, size, flatness), random_table(rng, size, flatness), [[token] for token in range(size)]
    yield tiny_model(0, vocab=31, scale=0.1), tiny_model(1, vocab=31, scale=0.1), [[BOS, i, 30 - i] for i in range(3, 28)]


@pytest.mark.campaign
@pytest.mark.parametrize("case", range(5))
def test_mean_acceptance_is_not_below_that_of_rejection(case):
    """With the same drafts, 10,000 rounds: 15 to 28% more. Required: 3 standard errors; measured: 8 to 15 (chance < 1e-6)."""
    target, draft, prompts = list(make_pairs())[case]
    rejection, block = count_accepted_of_same_drafts(target, draft, prompts, 4, 10_000)
    gain = block - rejection
    assert gain.mean() > 3 * gain.std() / 100


@pytest.mark.campaign
def test_a_single_token_is_accepted_as_often_as_by_rejection():
    """Both are the same for one token: acceptance rates of 10,000 rounds, within 5 standard errors (false alarm 6e-7)."""
    rng = np.random.default_rng(5)
    rejection, block = count_accepted_of_same_drafts(random_table(rng), random_table(rng), [[0], [1], [2]], 1, 10_000)
    assert abs(block.mean() - rejection.mean()) < 5 * (block - rejection).std() / 100


@pytest.mark.parametrize("verify", VERIFIERS)
def test_nothing_is_verified_after_an_eos_token_or_a_mismatch(verify):
    """Rows after both hold no valid logits, and a draft token after the end-of-sequence token does not count."""
    logits = np.full((5, 6), np.nan, np.float32)
    logits[0], logits[1] = np.eye(6)[3], np.eye(6)[EOS]
    verifier = VERIFIERS[verify](6, Sampling(0.0))
    assert verify_proposal(logits, Draft([3, EOS, 4, 4]), verifier, 7, END_MARKS) == ([3, EOS], 2)
    assert verify_proposal(logits, Draft([4, EOS, 4, 4]), verifier, 7, END_MARKS) == ([3], 0)
    with pytest.raises(ValueError, match="not finite"):
        verify_proposal(logits, Draft([3, EOS, 4, 4]), verifier, 7, {})


def test_coupled_verification_draws_only_the_needed_tokens(monkeypatch):
    drawn = []
    monkeypatch.setattr(Sampler, "draw", lambda self, probs, logits, *_: drawn.append(logits[0]) or int(logits[1]))
    verifier = VERIFIERS["coupled"](6, Sampling(0.0))
    logits = np.array([[0, 3], [1, 4], [2, 5], [3, 5]], np.float32)
    assert verify_proposal(logits, Draft([3, 5, 5]), verifier, 7, END_MARKS) == ([3, 4], 1)
    assert drawn == [0, 1]
