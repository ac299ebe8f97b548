"""`specdec serve`: OpenAI's interface and a page to talk at. Knows no arrays and no formats."""

import ipaddress
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import specdec
from specdec.cli.exits import say, writing
from specdec.cli.model_loading import Loaded, decoder_of, drawn_as_advised, found, models_of
from specdec.cli.model_resolver import find_model
from specdec.cli.options import flag, in_options, of_sampling, of_server
from specdec.cli.prompts import text_in
from specdec.cli.request import MODELS, WORDS, Request, with_models
from specdec.decoder import SpeculativeDecoder
from specdec.draft.settings import AUTO
from specdec.loaders import optional_dependencies
from specdec.loaders.loader import room_beside
from specdec.loaders.model_aliases import short_names
from specdec.runtime.memory import physical_memory_bytes
from specdec.sampling import Sampling
from specdec.text.chat_template import TemplateError
from specdec.text.conversation import Settings as ChatSettings
from specdec.ui.output import on_one_line
from specdec.ui.signals import signals

if TYPE_CHECKING:
    from specdec.server.model_manager import Served

SERVING = {optional_dependencies.STARLETTE: "to answer requests", optional_dependencies.UVICORN: "to listen"}
LAST_WORDS_SECONDS = 10.0  # behind the grace; then the process ends as it stands
LONGEST_KEY = 1000
MOST_LINES = 1000  # of the log, that wait for who reads them
_UNSAID = "for requests that do not say. By default the model's own (generation_config.json), else"
OF_ONE = ("tokenizer", "template", "stage")  # options that no other model can have
CACHE_SHARE = 0.5  # of the memory beside the weights, that caches may take


@dataclass(frozen=True, kw_only=True)
class ServeRequest(Request):
    """Of `specdec serve`."""

    offers = (
        f"word model draft {MODELS} template gamma tree served_temperature served_top_p served_top_k threads host port "
        "api_key_file no_key slots queue cache keep_alive grace"
    )
    served_temperature: float | None = of_sampling(
        None, "-t", "--temperature", metavar="X", min=0.0, help=f"Temperature {_UNSAID} 0.7. 0 is greedy."
    )
    served_top_p: float | None = of_sampling(
        None, "-p", "--top-p", metavar="X", min=0.0, max=1.0, help=f"Top-p {_UNSAID} 0.9. 0, 1: off."
    )
    served_top_k: int | None = of_sampling(None, "-k", "--top-k", metavar="N", min=0, help=f"Top-k {_UNSAID} 0. 0: off.")
    host: str = of_server(
        "127.0.0.1", "--host", metavar="HOST", help="Listen at this address. Others than this machine's own need a key."
    )
    port: int = of_server(8080, "--port", metavar="N", min=0, max=65535, help="Listen at this port. 0: a free one.")
    api_key_file: str = of_server("", "--api-key-file", metavar="FILE", help="Ask for one of the keys in this file, one a line.")
    no_key: bool = flag("--no-key", group="Server", help="Listen beyond this machine without a key: for everybody.")
    slots: int = of_server(8, "--slots", metavar="N", min=1, max=256, help="Texts that are written at once.")
    queue: int = of_server(64, "--queue", metavar="N", min=0, max=4096, help="Texts that wait beside them; more are refused.")
    cache: int = of_server(
        0, "--cache", metavar="MB", min=0,
        help="Memory for keys and values of texts that run or may go on. 0: half of what is there beside the weights.",
    )  # fmt: skip
    keep_alive: float = of_server(
        300.0, "--keep-alive", metavar="S", min=0.0, max=1e9,
        help="Without -m: seconds that a model stays which nobody asks. It goes earlier where another one needs its memory.",
    )  # fmt: skip
    grace: float = of_server(
        10.0, "--grace", metavar="S", min=0.0, max=3600.0, help="Seconds that answers have to end after SIGTERM."
    )

    def settled(self) -> "ServeRequest":
        """With its models where they belong, and somebody who is asked for."""
        if self.api_key_file and self.no_key:
            raise ValueError("--api-key-file and --no-key contradict each other; leave one of them out")
        if self.word and self.word.isdecimal():
            raise ValueError(f"{self.word!r} is no model; the port is --port {self.word}")
        host, _, port = self.host.rpartition(":")
        if port.isdecimal() and host and ":" not in host.strip("[]"):
            raise ValueError(f"--host {self.host} has a port in it; expected --host {host} --port {port}")
        if not (self.is_local or self.api_key_file or self.no_key):
            raise ValueError(
                f"--host {self.host} lets other machines ask; --api-key-file FILE names their keys, --no-key lets everybody"
            )
        model = self.word or self.model
        if model and "keep_alive" in self.given:
            raise ValueError("--keep-alive is for a server without -m, which loads models as they are asked for")
        if not model and (fixed := [option for field, option in self.given.items() if field in OF_ONE]):
            raise ValueError(f"{fixed[0]} is of one model; name it with -m")
        return with_models(replace(self, word=None, model=model), AUTO) if model else self

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can ask."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host.lower() == "localhost"

    @property
    def keys(self) -> list[str]:
        """Those in the file. Raises ValueError for what are none."""
        if not self.api_key_file:
            return []
        keys = [line.strip() for line in text_in(self.api_key_file).splitlines() if line.strip()]
        if not keys or not all(key.isascii() and key.isprintable() and len(key) <= LONGEST_KEY for key in keys):
            raise ValueError(
                f"{self.api_key_file} holds no API key, or one that no header can hold; expected one a line, in ASCII"
            )
        return keys

    def sampling_of(self, advised: Mapping[str, Any]) -> Sampling:
        """For who says nothing: by options, else as the model's files advise, else as in a chat."""
        named: dict[str, Any] = {
            "temperature": self.served_temperature, "top_p": self.served_top_p, "top_k": self.served_top_k,
        }  # fmt: skip
        chat = replace(ChatSettings(), **advised)
        return replace(chat.sampling(0), **{name: value for name, value in named.items() if value is not None})

    @property
    def name(self) -> str:
        """What clients call the model: its name on the hub, or its file's; never where it is."""
        return self.titles[0] if os.path.exists(str(self.model)) else on_one_line(str(self.model))


def run(request: ServeRequest) -> None:
    """Serve OpenAI's and Anthropic's interfaces over HTTP, and a page to talk at.

    specdec serve -m HuggingFaceTB/SmolLM2-135M-Instruct

    Without -m: every model that `specdec models` lists, each loaded when it is asked for.
    """
    request = request.settled()
    places, keys = found(request, SERVING) if request.model else [], request.keys
    if lacking := optional_dependencies.missing(SERVING):
        raise ValueError(lacking)
    if not request.model and request.draft and request.draft.lower() not in WORDS:
        find_model(request.draft, WORDS)  # before models are loaded that it is to draft for
    from specdec.server.listener import bound  # which nothing else needs

    with bound(request.host, request.port) as sock:
        models: Loaded | None = None
        if request.model:
            with models_of(request, places) as models:
                pass
            request = models.drafted(request)
        with writing():
            serve(request, models, sock, keys)


def serve(request: ServeRequest, models: Loaded | None, sock: socket.socket, keys: list[str]) -> None:
    """Answer until a signal asks for the end."""
    from specdec.server.app import app_of
    from specdec.server.auth import Guard
    from specdec.server.listener import Listener
    from specdec.server.model_manager import Shelf, only
    from specdec.server.streaming import Service

    log = Log().tell
    if models:
        shelf = only(served(request, models.decoder))
        guessed = f"; tokens are guessed {request.roles.guessed}" if request.roles.guessed else ""
        what = f"{request.name} ({models.decoder.weights}){guessed}"
    else:
        shelf = Shelf(Source(request), request.keep_alive, log)
        n = len(shelf.sizes())
        if not n:
            raise ValueError("there is no model to serve; specdec models pull org/name downloads one, -m names one")
        what = f"{n} models, each loaded when it is asked for; specdec models lists them"
    service = Service(shelf, f"specdec-{specdec.__version__}-{specdec.__arithmetic__}")
    app = Guard(app_of(service), keys, {"localhost", request.host, socket.gethostname()}, log)
    listener = Listener(app, sock, request.grace, log)
    signals.text_begins(request.grace + LAST_WORDS_SECONDS)
    host, port = sock.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    sock.listen()  # so that what the line says is true
    print(f"{address} serves {what}", flush=True)
    listener.start()
    while listener.is_alive() and not signals.asked:
        signals.sleep(1.0)
        shelf.sweep()
    if not signals.asked:
        raise ValueError("the server ended by itself")
    listener.stop_listening()
    shelf.close(request.grace)
    listener.join()
    signals.granted()


def served(request: ServeRequest, decoder: SpeculativeDecoder) -> "Served":
    """A model that is loaded, and what writes its texts."""
    from specdec.engine.scheduler import Engine
    from specdec.server.model_manager import Served
    from specdec.server.openai_requests import Model

    template = None
    try:
        template = decoder.chat_template
    except TemplateError as error:
        say(f"/v1/completions alone: {in_options(str(error))}")
    threading.Thread(target=awake, args=(decoder,), name="awake", daemon=True).start()
    cache_bytes = request.cache * 10**6 or int(CACHE_SHARE * room_beside(decoder.target))
    kv, per_token = decoder.target.kv, (decoder.target.text_bytes(2048) - decoder.target.text_bytes(1024)) / 1_024_000
    say(f"keys and values take {per_token:.1f} kB a token in {kv}, those of all texts up to {cache_bytes / 10**9:.1f} GB")
    engine = Engine(decoder, request.slots, request.queue, cache_bytes)
    model = Model(request.name, decoder, template, request.sampling_of(drawn_as_advised(request, decoder)))
    return Served(model, engine, int(time.time()))


def awake(decoder: SpeculativeDecoder) -> None:
    """Begin what the first request would wait for: the processes that render, encode and try schemas, and the vocabulary of
    structured output. What is wrong with them that request is told."""
    with suppress(Exception):
        decoder.encode_chat([{"role": "user", "content": "Hello."}])
    with suppress(Exception):
        decoder.json_object()


class Source:
    """The models that `specdec models` lists, as the options of a server have them."""

    def __init__(self, request: ServeRequest) -> None:
        self._request, self.n_bytes = request, physical_memory_bytes()

    def sizes(self) -> dict[str, int]:
        from specdec.cli.model_catalog import model_sizes  # which nothing else needs

        sizes = model_sizes()
        return sizes | {short: sizes[meant] for short, meant in short_names().items() if meant in sizes}

    def load(self, name: str, tell: Callable[[float], None]) -> "Served":
        """On the thread that loads."""
        request = with_models(replace(self._request, model=name), AUTO)
        decoder = decoder_of(request, found(request), lambda _, share: tell(share))
        return served(request, decoder)

    def limit(self, served: list["Served"]) -> None:
        """What memory the weights leave is half their caches', shared alike."""
        if served and not self._request.cache:
            beside = self.n_bytes - sum(each.model.decoder.target.weights.n_bytes for each in served)
            for each in served:
                each.engine.limit(int(CACHE_SHARE * beside / len(served)))


class Log:
    """Lines on stderr, which a thread writes: where nobody reads them, nothing waits, and what does not fit is dropped."""

    def __init__(self) -> None:
        self._lines, self._n_dropped = queue.Queue[str](MOST_LINES), 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def tell(self, line: str) -> None:
        try:
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} {line}")
        except queue.Full:
            self._n_dropped += 1

    def _write(self) -> None:
        """Past Python's own buffers, whose lock a write that waits would keep, also at the end."""
        while True:
            line, n = self._lines.get(), self._n_dropped
            told = [line, *([f"{n} lines of the log were dropped, since nobody read them"] if n else [])]
            with suppress(OSError, ValueError):
                for each in told:
                    os.write(sys.stderr.fileno(), f"specdec: {on_one_line(each)}\n".encode(errors="backslashreplace"))
            self._n_dropped -= n
