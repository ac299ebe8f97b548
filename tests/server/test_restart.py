"""A restarted server reuses the prefixes that an earlier one has saved: the same outputs without the prefill."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.cli.generate import TextRequest
from specdec.cli.model_loading import open_prompt_cache
from specdec.engine.disk_prompt_cache import BLOCK_TOKENS, PromptCache
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Client
from specdec.loaders.model_loader import load_model
from specdec.server.engine_thread import EngineThread
from tests.conftest import VOCAB, Pair
from tests.tools.command_runs import Run, run  # noqa: F401  (a fixture)
from tests.tools.engine_threads import Output, submit
from tests.tools.random_heads import make_head
from tests.tools.random_models import random_tokens


def generate(folder, pair, requests):
    """Return the tokens of the requests, run by a new engine, and how many prompt tokens were cached."""
    cache = PromptCache(folder, 10**9, 2, print)
    decoder = SpeculativeDecoder(pair.endless, "lookup", pair.tokenizer, gamma=3, prompt_cache=cache)
    engine, outputs = EngineThread(decoder, 4, 8, 10**8), [Output() for _ in requests]
    for request, output in zip(requests, outputs, strict=True):
        submit(engine, request, output)
    token_lists = [output.wait() and [token for step in output.steps for token in step.tokens] for output in outputs]
    engine.close(10.0)
    cache.flush()
    return token_lists, engine.metrics.cached_tokens


def test_a_restarted_server_reuses_the_prefixes_of_a_killed_one(tmp_path, pair: Pair) -> None:
    """Nothing is saved at the end of the first one, only during its requests."""
    rng = np.random.default_rng(4)
    plain = SpeculativeDecoder(pair.endless, None, pair.tokenizer)
    common = random_tokens(plain.target.config, 500)
    suffixes = [rng.integers(3, VOCAB, 40).tolist() for _ in range(3)]
    requests = [GenerationRequest([*common, *suffix], 12, Sampling(0.8, seed=seed)) for seed, suffix in enumerate(suffixes)]
    expected = [plain.generate(request.prompt, request.max_tokens, request.sampling).tokens for request in requests]
    first, n_first = generate(tmp_path / "p", pair, requests)
    second, n_again = generate(tmp_path / "p", pair, requests)
    assert first == second == expected
    assert n_again >= 3 * (500 // BLOCK_TOKENS * BLOCK_TOKENS) > n_first


@pytest.mark.parametrize("draft_kind", ["draft", "head", "self"])
def test_drafters_find_their_restored_states(draft_kind: str, tmp_path, pair: Pair) -> None:
    """A head reads the hidden states of tokens that its target has not run; a draft model prefills by itself."""
    prompt = random_tokens(load_model(pair.endless, n_threads=1).config, 500)
    expected = SpeculativeDecoder(pair.endless, None, pair.tokenizer).generate(prompt, 30, Sampling(0.8, seed=3)).tokens
    draft_counts = set()
    for i in range(3):
        target, cache = load_model(pair.endless, n_threads=1), PromptCache(tmp_path, 10**9, 2, print) if i else None
        draft = {"draft": pair.draft, "self": "self"}.get(draft_kind) or make_head(target)
        decoder = SpeculativeDecoder(target, draft, pair.tokenizer, gamma=3, prompt_cache=cache)
        result = decoder.generate(prompt, 30, Sampling(0.8, seed=3))
        assert result.tokens == expected
        draft_counts.add((result.statistics.n_drafted, result.statistics.n_accepted))
        if cache:
            cache.flush()
    assert len(draft_counts) == 1, "restored states draft the same tokens"


def test_each_api_key_finds_only_its_own_prefixes(tmp_path, pair: Pair) -> None:
    cache = PromptCache(tmp_path, 10**9, 2, print)
    decoder = SpeculativeDecoder(pair.endless, None, pair.tokenizer, prompt_cache=cache)
    request, cached = GenerationRequest(random_tokens(decoder.target.config, 400), 3, Sampling(0.0)), []
    for name in ("a", "b", "a", "b", ""):
        engine, output = EngineThread(decoder, 2, 8, 10**8), Output()
        submit(engine, request, output, Client(name, name))
        output.wait()
        engine.close(10.0)
        cache.flush()
        cached.append(engine.metrics.cached_tokens)
    assert cached == [0, 0, 399, 399, 0]


def test_the_command_line_prefills_a_prompt_once(run: Run, pair: Pair, tmp_path) -> None:
    prompt, folder = "the cat sat on a mat. " * 30, tmp_path / "kept"
    models = ["-m", pair.endless, "-z", pair.tokenizer, "-d", "none"]
    arguments = [*models, "-t", "0.7", "-s", "5", "--max-tokens", "20", "-i", prompt]
    expected = run(*arguments)
    for _ in range(2):
        assert run(*arguments, "--prompt-cache", folder)[:2] == expected[:2]
    assert any(folder.iterdir())
    (tmp_path / "file").write_text("x")
    code, out, err = run(*arguments, "--prompt-cache", tmp_path / "file")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1, err


def test_a_request_without_a_folder_has_no_prompt_cache() -> None:
    assert open_prompt_cache(TextRequest()) is None
