"""A server that begins anew finds what the one before has read: the same texts, without reading their prompts."""

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.commands.loading import prompts_of
from specdec.commands.text import TextRequest
from specdec.drafting.prompt_cache import BLOCK, PromptCache
from specdec.serving.engine import Engine, Job
from tests.commands.test_cli import Run, run  # noqa: F401  (a fixture)
from tests.conftest import VOCAB, Pair
from tests.models import tokens_for
from tests.serving.test_engine import Heard


def written(folder, pair, jobs):
    """The texts of jobs, in an engine of their own, and how many of their prompts' tokens were there already."""
    cache = PromptCache(folder, 10**9, 2, print)
    decoder = SpeculativeDecoder(pair.endless, "ngram", pair.tokenizer, gamma=3, prompt_cache=cache)
    engine, heard = Engine(decoder, 4, 8, 10**8), [Heard() for _ in jobs]
    for job, each in zip(jobs, heard, strict=True):
        engine.submit(job, each)
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


def test_the_command_line_reads_a_prompt_once(run: Run, pair: Pair, tmp_path) -> None:  # noqa: F811
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
