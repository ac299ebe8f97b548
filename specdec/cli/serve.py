"""`specdec serve`: the APIs of OpenAI, Anthropic and ollama over HTTP, and a chat page."""

import ipaddress
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.common_options import DRAFT_KEYWORDS, TEMPLATE, PromptCacheOptions, SpeculationOptions, with_models
from specdec.cli.model_loading import (
    LoadedModels,
    find_model,
    get_recommended_sampling,
    load_decoder,
    load_models,
    resolve_model_paths,
)
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import guard_output, print_message
from specdec.draft.settings import AUTO
from specdec.loaders import optional_dependencies
from specdec.speculative_decoder import SpeculativeDecoder
from specdec.ui.plain_views import sanitize_line
from specdec.ui.signals import signals
from specdec.ui.stderr_log import StderrLog

if TYPE_CHECKING:
    from specdec.server.generation_fields import ServedModel
    from specdec.server.model_manager import ModelInstance

REQUIRED_PACKAGES = {optional_dependencies.STARLETTE: "to answer requests", optional_dependencies.UVICORN: "to listen"}
EXIT_MARGIN_S = 10.0  # after the grace period; then the process is ended
_IF_UNSET = "For requests that set none. By default the model's own, else"
SINGLE_MODEL_OPTIONS = ("tokenizer", "template", "stage")  # options that need -m
ON_DEMAND_OPTIONS = ("keep_alive", "models")  # options of a server without -m


@dataclass(frozen=True, kw_only=True)
class ServedRequest(SpeculationOptions, PromptCacheOptions):
    """The options of `specdec serve` and `specdec batch`."""

    template: str = TEMPLATE
    served_temperature: float | None = option(None, "-t, --temperature X", "Sampling", f"{_IF_UNSET} 0.7. 0: greedy.", min=0.0)
    served_top_p: float | None = option(None, "-p, --top-p X", "Sampling", f"{_IF_UNSET} 0.9. 0, 1: off.", min=0.0, max=1.0)
    served_top_k: int | None = option(None, "-k, --top-k N", "Sampling", f"{_IF_UNSET} 0. 0: off.", min=0)
    cache: int = option(0, "--cache MB", "Server", "Memory for all KV caches. 0: half of what the weights leave free.", min=0)
    reasoning_budget: int = option(-1, "--reasoning-budget N", "Server", "Maximum tokens of a thought. -1: off.", min=-1)

    @property
    def name(self) -> str:
        """The model's name for clients: its name on the hub, or its file's name, never its path."""
        return self.labels.target if os.path.exists(str(self.model)) else sanitize_line(str(self.model))


@dataclass(frozen=True, kw_only=True)
class ServeRequest(ServedRequest):
    """The options of `specdec serve`."""

    word: str | None = argument("MODEL", "The target, as for -m.")
    host: str = option("127.0.0.1", "--host HOST", "Server", "Address to listen on. Other machines need a key, or --no-key.")
    port: int = option(8080, "--port N", "Server", "Port to listen on. 0: any free port.", min=0, max=65535)
    models: str = option("", "--models DIR", "Server", "Offer the models of this folder instead of the installed ones.")
    api_key_file: str = option("", "--api-key-file FILE", "Server", "Require one of the API keys in this file (one per line).")
    no_key: bool = option(False, "--no-key", "Server", "Let other machines connect without a key.")
    slots: int = option(8, "--slots N", "Server", "Maximum number of sequences that are generated at once.", min=1, max=256)
    queue: int = option(64, "--queue N", "Server", "Maximum number of waiting sequences; more are rejected.", min=0, max=4096)
    keep_alive: float = option(300.0, "--keep-alive S", "Server", "Seconds until an unused model is unloaded.", min=0.0, max=1e9)
    grace: float = option(10.0, "--grace S", "Server", "Seconds for running requests after SIGTERM.", min=0.0, max=3600.0)

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if two name the target."""
        super().__post_init__()
        self.check_word(self.word)

    def resolve(self) -> "ServeRequest":
        """Return a copy of the request with the names of its models filled in, after checking the address and the options.

        Raises:
            ValueError: Options contradict each other, or other machines could connect without a key.
        """
        if self.api_key_file and self.no_key:
            raise ValueError("--api-key-file and --no-key contradict each other; leave one of them out")
        if not (self.is_local or self.api_key_file or self.no_key):
            raise ValueError(f"--host {self.host} accepts other machines; use --api-key-file FILE for their keys, or --no-key")
        if self.models and (not os.path.isdir(self.models) or os.path.exists(os.path.join(self.models, "config.json"))):
            raise ValueError(f"--models {self.models} is not a folder of models; name a single model with -m")
        model = self.word or self.model
        for name in ON_DEMAND_OPTIONS if model else SINGLE_MODEL_OPTIONS:
            if name in self.given:
                raise ValueError(f"{self.given[name]} has no effect {'with' if model else 'without'} -m")
        return with_models(replace(self, word=None, model=model), AUTO) if model else self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect to the host's address."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host.lower() == "localhost"


def run(request: ServeRequest) -> None:
    """Serve the APIs of OpenAI, Anthropic and ollama over HTTP, with a chat page.

    specdec serve -m HuggingFaceTB/SmolLM2-135M-Instruct

    Without -m, the server offers every model that `specdec models` lists, or those of --models DIR, and loads each on demand.
    """
    request = request.resolve()
    paths = resolve_model_paths(request, REQUIRED_PACKAGES) if request.model else []
    if missing := optional_dependencies.format_missing_packages(REQUIRED_PACKAGES):
        raise ValueError(missing)
    if not request.model and request.draft and request.draft.lower() not in DRAFT_KEYWORDS:
        find_model(request.draft, DRAFT_KEYWORDS)  # fail now rather than at the first request
    from specdec.server.access_control import read_api_keys  # imported here, since no other command needs it
    from specdec.server.listener import bind_socket

    keys = read_api_keys(Path(request.api_key_file)) if request.api_key_file else []
    with bind_socket(request.host, request.port) as sock:
        models: LoadedModels | None = None
        if request.model:
            with load_models(request, paths) as models:
                pass
        with guard_output():
            serve(request, models, sock, keys)


def serve(request: ServeRequest, models: LoadedModels | None, sock: socket.socket, keys: list[str]) -> None:
    """Print the server's address and answer requests until a signal ends the server, then let running requests finish.

    Args:
        request: The resolved request.
        models: The loaded models; None serves all installed models and loads each on demand.
        sock: The bound socket to listen on.
        keys: API keys, empty to require none.

    Raises:
        ValueError: No model is installed, or the server stopped because of an error.
    """
    from specdec.server.access_control import AuthMiddleware
    from specdec.server.app import Endpoints
    from specdec.server.generation_response import ServerState
    from specdec.server.listener import Listener
    from specdec.server.model_manager import ModelManager, ModelSource, make_single_model_manager

    log = StderrLog().write_line
    if models:
        manager = make_single_model_manager(make_served_model(request, models.decoder, request.name))
        draft_label = models.request.labels.draft_label
        draft_note = f"; tokens are guessed {draft_label}" if draft_label else ""
        description = f"{request.name} ({models.decoder.weights}){draft_note}"
    else:
        source = ModelSource(request.models, partial(load_served_model, request), not request.cache)
        manager = ModelManager(source, request.keep_alive, log)
        if not (n := len(manager.list_models())):
            problem = f"{request.models} has no model that can be loaded" if request.models else "no model is installed"
            raise ValueError(f"{problem}; download one with specdec models pull org/name, or name one with -m")
        lister = f"specdec models {request.models}".strip()
        description = f"{n} models, each loaded on demand; {lister} lists them"
    app = AuthMiddleware(Endpoints(ServerState(manager)), keys, {"localhost", request.host, socket.gethostname()}, log)
    listener = Listener(app, sock, request.grace, log)
    signals.begin_output(request.grace + EXIT_MARGIN_S)
    sock.listen()  # before the line that announces the address
    print(f"{listener.address} serves {description}", flush=True)
    listener.start()
    while listener.is_alive() and not signals.end_signal:
        signals.sleep(1.0)
        manager.unload_idle()
    if not signals.end_signal:
        raise ValueError("the server stopped because of an error; the lines above show it")
    listener.stop_listening()
    manager.close(request.grace)
    listener.join()
    signals.clear_end_signal()


def describe_model(request: ServedRequest, decoder: SpeculativeDecoder, name: str) -> "ServedModel":
    """Return a loaded decoder with its template and default sampling; print a note if it has no template or recommends some."""
    from specdec.server.generation_fields import ServedModel

    options = {"temperature": request.served_temperature, "top_p": request.served_top_p, "top_k": request.served_top_k}
    given = {option: value for option, value in options.items() if value is not None}
    sampling = {**get_recommended_sampling(request, decoder), **given}
    return ServedModel.from_decoder(name, decoder, sampling, request.reasoning_budget, print_message)


def make_served_model(request: ServeRequest, decoder: SpeculativeDecoder, name: str) -> "ModelInstance":
    """Return a loaded decoder as an instance that the server can use, and print notes on the model and its KV cache."""
    from specdec.server.model_manager import start_instance

    model = describe_model(request, decoder, name)
    return start_instance(model, request.slots, request.queue, request.cache * 10**6, print_message)


def load_served_model(request: ServeRequest, name: str, on_progress: Callable[[float], None]) -> "ModelInstance":
    """Load a model by its name or alias with the server's options, and return its instance.

    Args:
        request: The server's request.
        name: Name or alias of the model.
        on_progress: Called with the loaded fraction.

    Raises:
        ValueError: The model is not found or cannot be loaded.
    """
    request = with_models(replace(request, model=os.path.join(request.models, name)), AUTO)
    decoder = load_decoder(request, resolve_model_paths(request), lambda _, share: on_progress(share))
    return make_served_model(request, decoder, name)
