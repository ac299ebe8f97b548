"""A request becomes models: found, loaded and warm, with what is being done in a line of the terminal."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import specdec
from specdec.cli.exits import say
from specdec.cli.model_resolver import find_model
from specdec.cli.options import OF_PARAMETERS
from specdec.cli.request import WORDS, Asked, Request
from specdec.decoder import SpeculativeDecoder
from specdec.draft.resolver import HEAD, MTP, NGRAM
from specdec.draft.settings import AUTO
from specdec.engine.decoding import Shape
from specdec.engine.prefix_cache import PromptCache
from specdec.loaders import CheckpointError, optional_dependencies, read_object
from specdec.loaders.loader import Pack
from specdec.loaders.model_lookup import needs, telling_how_to_restore
from specdec.model.transformer import KV
from specdec.text import structured_output
from specdec.ui.progress import LOADING, TIMING, Bar, loading

NOTHING: Mapping[str, str] = {}
ANY_OBJECT = "json"  # as a schema
HOT = 2.0  # a temperature above which few texts are one
LARGE_BYTES = 10**9  # for keys and values, that a text may take without a word


@dataclass
class Loaded:
    """What writes, and how long it took to get there."""

    decoder: SpeculativeDecoder
    load_seconds: float = 0.0
    warmup_seconds: float = 0.0

    def drafted(self, request: Asked) -> Asked:
        """That request, whose draft is named as it was chosen, where the choice was left open."""
        return replace(request, draft=MTP if self.decoder.draft else NGRAM) if request.draft == AUTO else request

    @property
    def made_with(self) -> dict[str, Any]:
        """What a text depends on beside the names of models and how it is drawn."""
        return {"weights": self.decoder.weights, "kv": self.decoder.target.kv, "arithmetic": specdec.__arithmetic__}


@contextmanager
def models_of(request: Request, places: list[str | Path] | None = None) -> Iterator[Loaded]:
    """The models that a request names, or of the `places` where they are. Inside they are not warm yet, which takes its time."""
    target, draft, stage = places or found(request)
    if request.temperature > HOT:
        say(f"-t {request.temperature:g} is the temperature, and makes nearly any token as likely as others; threads are -j N")
    with loading() as show:
        begin = time.perf_counter()
        decoder = decoder_of(request, (target, draft, stage), lambda name, share: show(Bar(f"{LOADING} {name}", share)))
        show(LOADING)
        models = Loaded(decoder)
        yield models
        loaded = time.perf_counter()
        show(TIMING)
        decoder.warm_up()
        models.load_seconds, models.warmup_seconds = loaded - begin, time.perf_counter() - loaded
    for name, n in decoder.shared.items():
        if name != HEAD:  # which was made so
            say(f"the {name} has another vocabulary, with {n:,} of the target's {decoder.n_ids:,} tokens: it guesses those alone")
    for (larger, writer), (smaller, drafter) in itertools.pairwise(decoder.team.models.items()):
        own, other = (each.weights.n_bytes for each in (drafter, writer))
        if own >= other and not drafter.config.experts:  # of which a token reads a few
            sizes = f"({own / 10**6:,.1f} and {other / 10**6:,.1f} MB of weights)"
            say(f"the {smaller} is not smaller than the {larger} {sizes}, so it saves no time; name the large model with -m")


def decoder_of(request: Request, places: Sequence[str | Path], tell: Callable[[str, float], None]) -> SpeculativeDecoder:
    """The models that are in those places, not warm yet; tells the share of one that is loaded."""
    target, draft, stage = places
    with telling_how_to_restore():
        return SpeculativeDecoder(
            target,
            draft or None,
            request.tokenizer or None,
            stage=stage or None,
            **asdict(request.drafting),
            n_threads=request.threads or None,
            quantize=request.quantize,
            template=request.template or None,
            kv=cast(KV, request.kv),
            pack=cast(Pack, request.pack),
            progress=tell,
            prompt_cache=prompts_of(request),
        )


def prompts_of(request: Request) -> PromptCache | None:
    """The folder that a request keeps prompts in."""
    if not request.prompt_cache:
        return None
    return PromptCache(request.prompt_cache, request.prompt_cache_size * 10**6, specdec.__arithmetic__, say)


def found(request: Request, more: Mapping[str, str] = NOTHING) -> list[str | Path]:
    """Return where target, draft and stage are, downloaded if need be.

    more: packages that the run takes beside those that read the models, and what for: all that lack are told before anything is
    fetched or loaded. Raises CheckpointError.
    """
    names = [str(request.model), request.draft, request.stage]
    more = {**more, **(structured_output.NEEDS if request.schema or request.regex else {})}
    files = ["" if name in WORDS else name for name in names]
    if lacking := optional_dependencies.missing({**needs(files, request.tokenizer), **more}):
        raise CheckpointError(lacking)
    return [find_model(file, WORDS if i else ()) if file else names[i] for i, file in enumerate(files)]


def shaping(request: Request) -> Callable[[SpeculativeDecoder], Shape | None]:
    """What makes the shape that a request names, of a decoder; a file that holds none is told now, before anything is loaded."""
    if request.regex:
        return lambda decoder: decoder.regex(request.regex)
    if not request.schema:
        return lambda decoder: None
    if request.schema == ANY_OBJECT:
        return SpeculativeDecoder.json_object
    if request.schema.lstrip().startswith("{"):
        raise ValueError("--schema takes the name of a file; write the schema to one, such as --schema schema.json")
    schema = read_object(Path(request.schema))
    return lambda decoder: decoder.json_schema(schema)


def room_of(request: Request, decoder: SpeculativeDecoder, n_prompt: int) -> int:
    """How many tokens may follow the prompt, by -n or --max-tokens; tells what memory a large text takes. Raises ValueError where
    -n has none left."""
    n, target = _room_of(request, decoder, n_prompt), decoder.target
    if (n_bytes := target.text_bytes(n_prompt + n)) >= LARGE_BYTES:
        smaller = "" if target.kv == "q8" else "; --kv q8 takes less"
        say(f"keys and values of {n_prompt + n:,} tokens in {target.kv} may take {n_bytes / 10**9:.1f} GB{smaller}")
    return n


def _room_of(request: Request, decoder: SpeculativeDecoder, n_prompt: int) -> int:
    n_positions = decoder.target.n_positions
    room = n_positions + 1 - n_prompt  # the last token is never run
    name, option, steps = "max_tokens", "--max-tokens", request.steps
    if request.max_tokens is not None:
        n = request.max_tokens
    elif steps:
        if steps < n_prompt:
            n = min(200, room)
            raise ValueError(
                f"-n {steps} counts the prompt, which has {n_prompt} tokens; --max-tokens {n} would write {n} new ones"
            )
        # llama2.c counts positions: n steps make n + 1 tokens, BOS included
        name, option, n = "steps", "-n", steps + 1 - n_prompt
    else:
        if decoder.n_positions < n_positions:
            say(f"this machine's memory has room for {decoder.n_positions} of the {n_positions} tokens of the target's context")
        return max(decoder.n_positions + 1 - n_prompt, 1)  # of a prompt that is too long for it the decoder tells
    if n > room and name in request.given:
        told = f"{option} {getattr(request, name)} exceeds the target's context of {n_positions:,} tokens"
        say(f"{told}; writing up to {room:,} new ones")
    return min(n, room)


def drawn_as_advised(request: Request, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """How the model's files advise to draw, by the names of `Sampling`, where no option says otherwise; a line tells it."""
    given = {name.removeprefix("served_") for name in request.given}
    of_files = decoder.team.source.sampling if decoder.team.source else {}
    advised: dict[str, Any] = {name: value for name, value in of_files.items() if name not in given}
    if "top_k" in advised:
        advised["top_k"] = int(advised["top_k"])
    if advised:
        told = ", ".join(f"{OF_PARAMETERS[name]} {value:g}" for name, value in advised.items())
        say(f"drawn as {request.titles[0]}'s files advise: {told}")
    return advised
