"""What `specdec ngrams` counts: a target's own texts, or those of a file. Knows no terminals."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..decoder import SpeculativeDecoder
from ..decoding import Step
from ..sampling import Sampling
from ..tokenizer import AnyTokenizer

TEXT_TOKENS = 256  # of each text at most
PIECE = 2000  # characters of a file that are taken as a text, to the end of a line


def written(
    decoder: SpeculativeDecoder,
    prompts: Sequence[str],
    n_tokens: int,
    sampling: Sampling,
    tell: Callable[[float], object],
    is_asked: Callable[[], object],
) -> Iterator[list[int]]:
    """Texts of the target with the seeds from the sampling's on, the prompts in turn, until there are so many tokens.

    tell: is told the share that is done; is_asked: whether to stop with what there is.
    """
    done = 0
    seeds = range(sampling.seed, sampling.seed + (n_tokens if sampling.temperature else 1))  # greedy, there is one text
    for seed, prompt in itertools.product(seeds, prompts):
        text = decoder.encode(prompt)
        most = min(TEXT_TOKENS, n_tokens - done, decoder.n_positions + 1 - len(text))
        for event in decoder.stream(prompt, most, replace(sampling, seed=seed % 2**63)):
            text += event.tokens if isinstance(event, Step) else []
            if is_asked():
                break
        done += len(text)
        yield text
        tell(done / n_tokens)
        if done >= n_tokens or is_asked():
            return


def read(
    path: Path, tokenizer: AnyTokenizer, tell: Callable[[float], object], is_asked: Callable[[], object]
) -> Iterator[list[int]]:
    """The texts of a file, as `written`'s. Raises ValueError for one that cannot be read."""
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not valid UTF-8") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    begin = 0
    while begin < len(whole) and not is_asked():
        end = whole.find("\n", begin + PIECE) + 1 or len(whole)
        yield tokenizer.encode(whole[begin:end])
        begin = end
        tell(begin / len(whole))
