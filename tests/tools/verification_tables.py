"""Models that are tables of probabilities."""

import itertools
import math

import numpy as np

from specdec.draft.draft_length import FixedLength
from specdec.runtime.memory import zeros
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS
from tests.tools.decode import FakeCache, decode, get_tokens, make_model_drafter

PLAIN = (1.0, 0, 0.0)  # temperature, top_k, top_p: the logits' own softmax


class Table(FakeCache):
    """A model of a few tokens, and its cache, in which the next token depends only on the last one."""

    def __init__(self, probs):
        self.probs = np.array(probs)
        self.vocab_size = len(self.probs)

    def forward(self, tokens, n_logits=1):
        return np.log(self.probs[tokens[len(tokens) - n_logits :]]).astype(np.float32)

    def expect(self, n):
        """Return the probability of each sequence of n tokens after token 0."""
        sequences = itertools.product(range(self.vocab_size), repeat=n)
        return {tokens: math.prod(self.probs[a][b] for a, b in itertools.pairwise((0, *tokens))) for tokens in sequences}


def row(values):
    out = zeros(1, 16)
    out[0, : len(values)] = values
    return out


def generate_with_seeds(target, draft, verify, n_runs, n_tokens, gamma, prompt):
    """Yield the output for each of n_runs seeds."""
    for seed in range(n_runs):
        sampling = Sampling(*PLAIN, seed)
        verifier = VERIFIERS[verify](len(target.probs), sampling)
        drafter = make_model_drafter(draft, verifier, sampling, eos_tokens={})
        yield tuple(get_tokens(decode(target, drafter, verifier, prompt, n_tokens, FixedLength(gamma), {})))
