"""A server that begins anew finds what the one before has read: the same texts, without reading their prompts."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.cli.generate import TextRequest
from specdec.cli.model_loading import prompts_of
from specdec.engine.decoding import Job
from specdec.engine.prefix_cache import BLOCK, PromptCache
from specdec.engine.scheduler import Client, Engine
from specdec.loaders.loader import load_model
from tests.cli.test_cli import Run, run  # noqa: F401  (a fixture)
from tests.conftest import VOCAB, Pair
from tests.engine.test_scheduler import Heard, submit
from tests.tools.random_heads import head_of
from tests.tools.random_models import tokens_for


def written(folder, pair, jobs):
    """The texts of jobs, in an engine of their own, and how many of their prompts' tokens were there already."""
    cache = PromptCache(folder, 10**9, 2, print)
    decoder = SpeculativeDecoder(pair.endless, "ngram", pair.tokenizer, gamma=3, prompt_cache=cache)
    engine, heard = Engine(decoder, 4, 8, 10**8), [Heard() for _ in jobs]
    for job, each in zip(jobs, heard, strict=True):
        submit(engine, job, each)
    texts = [each.all() and [token for step in each.steps for token in step.tokens] for each in heard]
    engine.close(10.0)
    cache.flush()
    return texts, engine.figures.cached_tokens


def test_a_server_goes_on_where_another_one_was_killed(tmp_path, pair: Pair) -> None:
    """Nothing is written at the end of the first one but what its texts had it keep."""
    rng = np.random.default_rng(4)
    alone = SpeculativeDecoder(pair.endless, None, pair.tokenizer)
    common = tokens_for(alone.target.config, 500)
    new = [rng.integers(3, VOCAB, 40).tolist() for _ in range(3)]
    jobs = [Job([*common, *each], 12, Sampling(0.8, seed=seed)) for seed, each in enumerate(new)]
    own = [alone.generate(job.prompt, job.max_tokens, job.sampling).tokens for job in jobs]
    first, n_first = written(tmp_path / "p", pair, jobs)
    again, n_again = written(tmp_path / "p", pair, jobs)
    assert first == again == own
    assert n_again >= 3 * (500 // BLOCK * BLOCK) > n_first


@pytest.mark.parametrize("kind", ["draft", "head", "self"])
def test_what_drafts_finds_what_it_drafts_from(kind: str, tmp_path, pair: Pair) -> None:
    """A head reads the hidden states of tokens that its target has not run; a draft reads by itself."""
    prompt = tokens_for(load_model(pair.endless, n_threads=1).config, 500)
    own = SpeculativeDecoder(pair.endless, None, pair.tokenizer).generate(prompt, 30, Sampling(0.8, seed=3)).tokens
    proposed = set()
    for i in range(3):
        target, cache = load_model(pair.endless, n_threads=1), PromptCache(tmp_path, 10**9, 2, print) if i else None
        draft = {"draft": pair.draft, "self": "self"}.get(kind) or head_of(target)
        decoder = SpeculativeDecoder(target, draft, pair.tokenizer, gamma=3, prompt_cache=cache)
        written = decoder.generate(prompt, 30, Sampling(0.8, seed=3))
        assert written.tokens == own
        proposed.add((written.statistics.n_drafted, written.statistics.n_accepted))
        if cache:
            cache.flush()
    assert len(proposed) == 1, "restored states are those that were read"


def test_each_key_finds_its_own(tmp_path, pair: Pair) -> None:
    cache = PromptCache(tmp_path, 10**9, 2, print)
    decoder = SpeculativeDecoder(pair.endless, None, pair.tokenizer, prompt_cache=cache)
    job, cached = Job(tokens_for(decoder.target.config, 400), 3, Sampling(0.0)), []
    for name in ("a", "b", "a", "b", ""):
        engine, heard = Engine(decoder, 2, 8, 10**8), Heard()
        submit(engine, job, heard, Client(name, name))
        heard.all()
        engine.close(10.0)
        cache.flush()
        cached.append(engine.figures.cached_tokens)
    assert cached == [0, 0, 399, 399, 0]


def test_the_command_line_reads_a_prompt_once(run: Run, pair: Pair, tmp_path) -> None:
    prompt, folder = "the cat sat on a mat. " * 30, tmp_path / "kept"
    asked = ["-m", pair.endless, "-z", pair.tokenizer, "-d", "none", "-t", "0.7", "-s", "5", "--max-tokens", "20", "-i", prompt]
    wanted = run(*asked)
    for _ in range(2):
        assert run(*asked, "--prompt-cache", folder)[:2] == wanted[:2]
    assert any(folder.iterdir())
    (tmp_path / "file").write_text("x")
    for wrong in (["--prompt-cache", tmp_path / "file"], ["--prompt-cache-size", "5"]):
        code, out, err = run(*asked, *wrong)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1, err


def test_a_request_without_a_folder_keeps_nothing() -> None:
    assert prompts_of(TextRequest()) is None
    with pytest.raises(ValueError, match="--prompt-cache names"):
        TextRequest(prompt_cache_size=3, given={"prompt_cache_size": "--prompt-cache-size"})
