"""Resolution, loading and warm-up of the models that a request names, with a status line."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import specdec
from specdec.argument_checks import JSONDict
from specdec.cli.common_options import DRAFT_KEYWORDS, ModelRequest, PromptRequest
from specdec.cli.option_fields import PARAMETER_OPTIONS
from specdec.cli.output_errors import print_message
from specdec.draft.model_bundle import LOOKUP, MTP
from specdec.draft.settings import AUTO
from specdec.engine.disk_prompt_cache import PromptCache
from specdec.loaders import CheckpointError, optional_dependencies, read_json_object
from specdec.loaders.model_loader import PackMode
from specdec.loaders.model_paths import find_required_packages, resolve_path
from specdec.model.model import KVFormatName
from specdec.protocols import Constraint
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.text import structured_output
from specdec.ui.progress import LOADING, STATUS_DELAY_S, TIMING, ProgressBar, show_status

ANY_JSON_OBJECT = "json"  # value of --schema for any JSON object
WARN_TEMPERATURE = 2.0  # above it, most outputs are noise
WARN_KV_BYTES = 10**9  # KV cache of one sequence that prints a note


@dataclass
class LoadedModels:
    """The loaded decoder, the request with the draft that was found, and how long loading and warm-up took."""

    decoder: SpeculativeDecoder
    request: ModelRequest
    load_seconds: float = 0.0
    warmup_seconds: float = 0.0

    @property
    def metadata(self) -> JSONDict:
        """The formats and the arithmetic revision that the output depends on, besides model names and sampling."""
        return {"weights": self.decoder.weights, "kv": self.decoder.target.kv, "arithmetic": specdec.__arithmetic__}


@contextmanager
def load_models(request: ModelRequest, paths: list[str | Path] | None = None) -> Iterator[LoadedModels]:
    """Load the models of a request, yield them before the warm-up, and warm them up when the context is left.

    Show a status line meanwhile, and print notes on a very high temperature and on a draft that fits the target badly.

    Args:
        request: The resolved request.
        paths: Paths of target, draft and stage; None resolves the request's names.
    """
    target, draft, stage = paths or resolve_model_paths(request)
    if request.temperature > WARN_TEMPERATURE:
        print_message(f"-t {request.temperature:g} makes nearly all tokens equally likely; use -j N for threads")
    with show_status() as show:
        begin = time.perf_counter()
        decoder = load_decoder(request, (target, draft, stage), lambda name, share: show(ProgressBar(f"{LOADING} {name}", share)))
        show(LOADING)
        is_neighbour = request.draft == AUTO and draft not in DRAFT_KEYWORDS and bool(decoder.draft)
        if request.draft == AUTO:
            head_or_lookup = MTP if decoder.draft else LOOKUP
            request = replace(request, draft=str(draft) if is_neighbour else head_or_lookup)
        models = LoadedModels(decoder, request)
        yield models
        loaded = time.perf_counter()
        show(TIMING)
        decoder.warm_up()
        models.load_seconds, models.warmup_seconds = loaded - begin, time.perf_counter() - loaded
    if is_neighbour and decoder.draft:
        name, weights = Path(draft).name, decoder.draft.weights.format_names
        advice = "" if decoder.autotuner.is_draft_profitable else ", which does not pay: -d lookup starts sooner"
        print_message(f"draft: {name} next to the model, {weights}, {decoder.autotuner.guess_cost:.2g} of a pass{advice}")
    for note in decoder.bundle.notes:
        print_message(note)


def load_decoder(
    request: ModelRequest, paths: Sequence[str | Path], on_progress: Callable[[str, float], None]
) -> SpeculativeDecoder:
    """Load the models at the given paths into a decoder without warming it up.

    If a draft was found next to the target, and cannot be used, the target is loaded without it.

    Args:
        request: The resolved request.
        paths: Paths of target, draft and stage; "" for none.
        on_progress: Called with the name and the loaded fraction of a model.
    """
    target, draft, stage = paths

    def load(draft: str | Path) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target,
            draft or None,
            request.tokenizer or None,
            stage=stage or None,
            **asdict(request.draft_settings),
            n_threads=request.threads or None,
            quantize=request.quantize,
            template=request.template or None,
            kv=cast(KVFormatName, request.kv),
            pack=cast(PackMode, request.pack),
            packed=request.packed or request.weight_cache,
            progress=on_progress,
            prompt_cache=open_prompt_cache(request),
        )

    if request.draft == AUTO and draft not in DRAFT_KEYWORDS:
        with suppress(CheckpointError, ValueError):
            return load(draft)
        draft = AUTO
    return load(draft)


def open_prompt_cache(request: ModelRequest) -> PromptCache | None:
    """Return the disk cache of processed prompts in the folder of --prompt-cache, None without that option."""
    if not request.prompt_cache:
        return None
    return PromptCache(request.prompt_cache, request.prompt_cache_size * 10**6, specdec.__arithmetic__, print_message)


def find_model(name: str, candidates: Sequence[str] = ()) -> Path:
    """Return the path of a model, and download the model if it is not installed, with a status line meanwhile.

    Args:
        name: Path, alias or hub name of the model, as in `resolve_path`.
        candidates: Keywords that would be valid in place of a name, for suggestions.

    Raises:
        CheckpointError: The model is neither installed nor downloadable.
    """
    with show_status(f"looking for {name}", STATUS_DELAY_S):
        return resolve_path(name, candidates=candidates)


def resolve_model_paths(request: ModelRequest, packages: Mapping[str, str] | None = None) -> list[str | Path]:
    """Return the paths of target, draft and stage, and download the models if needed; keywords such as lookup are kept.

    The draft "auto" becomes the path of a draft next to the target, if there is one.

    Args:
        request: The request, with its models named.
        packages: Purpose of each further package that the run needs, by name; packages that read the models are added.

    Raises:
        CheckpointError: A package or a model is missing. All missing packages are reported before any download.
    """
    names = [str(request.model), request.draft, request.stage]
    packages = {**(packages or {}), **(structured_output.REQUIRED_PACKAGES if request.schema or request.regex else {})}
    files = ["" if name in DRAFT_KEYWORDS else name for name in names]
    if missing := optional_dependencies.format_missing_packages({**find_required_packages(files, request.tokenizer), **packages}):
        raise CheckpointError(missing)
    paths = [find_model(file, DRAFT_KEYWORDS if i else ()) if file else names[i] for i, file in enumerate(files)]
    if request.draft == AUTO:
        from specdec.draft.installed_models import find_neighbour_draft

        paths[1] = find_neighbour_draft(Path(paths[0])) or AUTO
    return paths


def make_constraint_factory(request: ModelRequest) -> Callable[[SpeculativeDecoder], Constraint | None]:
    """Return a function that takes a decoder and makes the constraint of --regex or --schema, None without these options.

    The schema file is read now, so that an error in it is reported before models load.

    Raises:
        CheckpointError: The schema file cannot be read, or is not a JSON object.
    """
    if request.regex:
        return lambda decoder: decoder.regex(request.regex)
    if request.schema == ANY_JSON_OBJECT:
        return SpeculativeDecoder.json_object
    schema = read_json_object(Path(request.schema)) if request.schema else None
    return lambda decoder: None if schema is None else decoder.json_schema(schema)


def resolve_max_tokens(request: PromptRequest, decoder: SpeculativeDecoder, n_prompt: int) -> int:
    """Return the limit of new tokens by -n, --max-tokens and the context's size.

    Print a note if an option exceeds the context, and if the KV cache may be large.

    Args:
        request: The resolved request.
        decoder: The decoder.
        n_prompt: Tokens of the prompt.

    Raises:
        ValueError: -n leaves no token after the prompt.
    """
    target, steps = decoder.target, request.steps
    n_free = target.n_positions + 1 - n_prompt  # the last token is never run
    if steps and steps < n_prompt:
        new = f"use --max-tokens {min(200, n_free)} to generate {min(200, n_free)} new ones"
        raise ValueError(f"-n {steps} counts the prompt, which has {n_prompt} tokens; {new}")
    if request.max_tokens is not None:
        n, limit = request.max_tokens, f"--max-tokens {request.max_tokens}"
    elif steps:
        # llama2.c counts positions: n steps make n + 1 tokens, BOS included
        n, limit = steps + 1 - n_prompt, f"-n {steps}" if "steps" in request.given else ""
    else:
        n, limit = max(decoder.n_positions + 1 - n_prompt, 1), ""  # the decoder reports a prompt that is too long
        if n < n_free:
            print_message(f"this machine's memory has room for {n:,} of the {n_free:,} tokens that the target's context has left")
    if n > n_free and limit:
        context = f"the target's context of {target.n_positions:,} tokens"
        print_message(f"{limit} exceeds {context}; generating at most {n_free:,} new ones")
    n = min(n, n_free)
    if (n_bytes := target.get_sequence_bytes(n_prompt + n)) >= WARN_KV_BYTES:
        smaller = "" if target.kv == "q8" else "; use --kv q8 to take less"
        print_message(f"the KV cache of {n_prompt + n:,} tokens in {target.kv} may take {n_bytes / 10**9:.1f} GB{smaller}")
    return n


def get_recommended_sampling(request: ModelRequest, decoder: SpeculativeDecoder) -> JSONDict:
    """Return the sampling settings that the target's files recommend, by name, without those that options set; print a note."""
    given = {name.removeprefix("served_") for name in request.given}
    recommended_by_files = decoder.bundle.checkpoint.default_sampling if decoder.bundle.checkpoint else {}
    recommended = {name: value for name, value in recommended_by_files.items() if name not in given}
    if recommended:
        options = ", ".join(f"{PARAMETER_OPTIONS[name]} {value:g}" for name, value in recommended.items())
        print_message(f"sampling recommended by {request.labels.target}'s files: {options}")
    return recommended
