"""Staged speculative decoding: a second-level drafter drafts for the draft model, which runs these tokens in one pass.

(Spector and Re 2023, arXiv:2308.04623.) A token of the draft model is a function of its logits, the noise and the position, and
logits do not depend on the other tokens of a pass. So the proposals are bit for bit those that the draft model would have made
alone, with the same q, whatever the second level drafts. A second-level token that is rejected costs only time.

It serves large drafts: the included pair, whose draft takes 20 us a pass, has 0.99 to 1.03 of its speed with it.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

from specdec.draft.draft_length import CostModel
from specdec.draft.lookup import LookupDrafter
from specdec.draft.model_drafters import ModelDrafter
from specdec.model.kv_cache import KVCache
from specdec.model.model import get_token_headroom
from specdec.protocols import LengthPolicy
from specdec.runtime.simd import Float32
from specdec.sampling import Sampler
from specdec.verification import Draft

SecondLevelDrafter = ModelDrafter | LookupDrafter  # these can propose after the unverified tokens of another proposal (`tail`)


class StagedDraftCache:
    """A draft model's cache that runs second-level draft tokens along with each requested sequence in the same pass.

    If the next requested sequence continues with the second-level tokens, its logits are available already.

    Args:
        cache: The draft model's cache.
        drafter: The second-level drafter.
        costs: The costs of the draft model's passes and of second-level drafts.
        policy: Decides how many second-level tokens a pass gets; it sees the passes of the draft model as its steps.
    """

    can_slide = True

    def __init__(self, cache: KVCache, drafter: SecondLevelDrafter, costs: CostModel, policy: LengthPolicy) -> None:
        """Wrap the draft model's cache; no second-level token is drafted yet."""
        self._cache, self._drafter, self._costs, self._policy = cache, drafter, costs, policy
        self.model = cache.model
        self._tokens: list[int] = []  # the sequence, without unverified tokens
        self._max_tokens = self._n_visible = 0  # how many tokens are drafted after it, and how many of it the model sees
        self._last_input: list[int] = []  # input of the last pass, with the second-level tokens at its end
        self._n_drafted, self._n_accepted = -1, 0  # second-level tokens of the last pass; -1: there is no pass
        self._pass_number = 0  # of the last pass; a later pass of the model overwrites its logits
        self._seconds = 0.0, 0.0  # of the last pass and of its second-level draft
        self._logits: Float32

    def can_draft(self, tokens: list[int]) -> bool:
        """Return True: the draft model sees any sequence."""
        return True

    def start_round(self, tokens: list[int], max_tokens: int) -> None:
        """Store the tokens of the sequence, after which the next `forward` calls draft a proposal of up to max_tokens tokens."""
        self._tokens, self._max_tokens, self._n_visible = tokens, max_tokens, 0

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Return the draft model's logits at the last token, from its last pass if that ran the tokens, else from a new pass.

        The result is (1, V), or (0, V) if n_logits is 0, and valid until the next call.
        """
        if not n_logits:
            return self._cache.forward(tokens, 0)
        n = len(tokens)
        self._n_visible = self._n_visible or n
        used = n - len(self._last_input) + self._n_drafted  # second-level tokens
        if not 0 <= used <= self._n_drafted or self.model.n_passes != self._pass_number or self._last_input[:n] != tokens:
            self._run_ahead(tokens)
            used = 0
        self._n_accepted = max(self._n_accepted, used)
        return self._logits[used : used + 1]

    def _run_ahead(self, tokens: list[int]) -> None:
        """Draft second-level tokens after the given ones, run the draft model over all, and store the logits.

        The result of the pass before is first reported to the second-level policy.
        """
        begin = time.perf_counter()
        if self._n_drafted >= 0:
            self._policy.update(self._n_drafted, self._n_accepted, *self._seconds)
            self._costs.end_pass(1 + self._n_drafted, 1 + self._n_accepted, self._seconds[0])
        self._costs.begin_pass()
        tail, drafted = tokens[self._n_visible :], list[int]()
        headroom = get_token_headroom(len(tokens), self.model.n_positions, self.model.longrope_threshold)
        if self._policy.start(min(self._max_tokens - len(tail) - 1, headroom)):
            drafted = self._drafter.propose(self._tokens, self._policy, tail).tokens
            n_rows = self.model.vocab_size  # the sequence may contain tokens that this model does not have
            drafted = drafted[: next((i for i, token in enumerate(drafted) if token >= n_rows), None)]
        self._last_input, self._n_drafted, self._n_accepted = tokens + drafted, -1, 0
        self._pass_number = self.model.n_passes + 1
        pass_begin = time.perf_counter()
        self._logits = self._cache.forward(self._last_input, len(drafted) + 1)
        self._seconds = time.perf_counter() - pass_begin, pass_begin - begin
        self._n_drafted = len(drafted)


class StagedDrafter(ModelDrafter):
    """A drafter with a draft model that a second-level drafter speeds up; the proposals are the draft model's own.

    Args:
        caches: The sequence's caches of the draft model, and of the second-level model if there is one.
        second_level: The second-level drafter; it samples with the draft's noise.
        costs: See `StagedDraftCache`.
        policy: The second-level draft length.
        sampler: See `ModelDrafter`.
        noise: See `ModelDrafter`.
        eos_tokens: See `ModelDrafter`.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        second_level: SecondLevelDrafter,
        costs: CostModel,
        policy: LengthPolicy,
        sampler: Sampler,
        noise: Callable[[int], int],
        eos_tokens: Collection[int],
    ) -> None:
        """Wrap the first cache in a `StagedDraftCache` and draft from that."""
        self._second_level = second_level
        self._staged_cache = StagedDraftCache(caches[0], second_level, costs, policy)
        super().__init__(self._staged_cache, sampler, noise, eos_tokens)
        # locked in one order everywhere, so that no two threads wait for each other
        self._models = sorted((cache.model for cache in caches), key=id)

    def prepare(self, tokens: list[int]) -> None:
        """Prefill the draft model and the second-level drafter with the tokens of a sequence."""
        super().prepare(tokens)
        self._second_level.prepare(tokens)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Return a proposal of the draft model; see `ModelDrafter.propose`. All models are locked meanwhile."""
        with ExitStack() as locks:
            for model in self._models:
                locks.enter_context(model.lock)
            self._staged_cache.start_round(tokens, policy.max_tokens)
            return super().propose(tokens, policy, tail)
