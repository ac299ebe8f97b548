"""The served models: each is loaded on its first request and unloaded when it is idle. Knows no HTTP."""

import gc
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from specdec.argument_checks import shorten
from specdec.draft.installed_models import get_model_sizes
from specdec.engine.metrics import Metrics, merge_metrics
from specdec.runtime.memory import get_physical_memory_bytes
from specdec.server.engine_thread import EngineThread, ShutdownError
from specdec.server.field_validation import APIError
from specdec.server.generation_fields import CACHE_SHARE, ServedModel
from specdec.speculative_decoder import SpeculativeDecoder

MAX_WEIGHTS_SHARE = 0.75  # of the memory, for the weights of all models if there are several
# the directories of a local path, which are hidden from clients; their names may contain spaces
LOCAL_DIRECTORY_PATTERN = re.compile(r"(?<![^\s'\"(=])(?:[A-Za-z]:)?[/\\]+(?=\S)(?:[^/\\:;,]*[^/\\:;,\s][/\\]+)*")
SAMPLE_TOKENS = 1024  # between two lengths of a sequence, from whose caches the size per token is computed
LIST_MAX_AGE_S = 30.0  # of the list of models
UNKNOWN_NAME_MAX_AGE_S = 2.0  # of the list, for a request for a model that is not on it


class ModelInstance(NamedTuple):
    """A loaded model with its engine.

    Attributes:
        model: The model with its name and its chat template.
        engine: Generates the outputs of the model.
        created: Time of loading, in Unix seconds.
    """

    model: ServedModel
    engine: EngineThread
    created: int


def start_instance(
    model: ServedModel, max_running: int, max_waiting: int, cache_limit: int, log: Callable[[str], object]
) -> ModelInstance:
    """Start the engine of a model and a thread that prewarms it, and return them as an instance.

    Args:
        model: The model.
        max_running: Maximum number of sequences that are generated at once.
        max_waiting: Maximum number of waiting sequences.
        cache_limit: Memory limit of all KV caches together, in bytes; 0 for a share of what the weights leave free.
        log: Called with a line about the size of the KV caches.
    """
    cache_bytes, target = model.get_cache_bytes(cache_limit), model.decoder.target
    bytes_per_token = (target.get_sequence_bytes(2 * SAMPLE_TOKENS) - target.get_sequence_bytes(SAMPLE_TOKENS)) / SAMPLE_TOKENS
    total = f"at most {cache_bytes / 10**9:.1f} GB in total"
    log(f"the KV cache takes {bytes_per_token / 1000:.1f} kB per token in {target.kv}, and {total}")
    threading.Thread(target=prewarm, args=(model.decoder,), name="prewarm", daemon=True).start()
    return ModelInstance(model, EngineThread(model.decoder, max_running, max_waiting, cache_bytes), int(time.time()))


def prewarm(decoder: SpeculativeDecoder) -> None:
    """Start the helper processes and load the vocabulary of structured output, so that the first request need not wait.

    The processes render templates, encode text and check schemas. Errors are ignored; the request that meets them reports them.
    """
    with suppress(Exception):
        decoder.encode_chat([{"role": "user", "content": "Hello."}])
    with suppress(Exception):
        decoder.json_object()


@dataclass
class ModelEntry:
    """A model that is loaded or is being loaded, with a count of the requests that use it.

    Attributes:
        name: The name that clients use.
        n_bytes: Size of the weights.
        loading: A future that is done once the model is loaded, or has the error if it cannot be loaded.
        instance: The model while it is loaded.
        progress: Progress of loading, from 0 to 1.
        n_requests: Number of requests that use the model or wait for it.
        last_used: Time of loading, or of the end of the last request.
    """

    name: str
    n_bytes: int
    loading: "Future[None]" = field(default_factory=Future)
    instance: ModelInstance | None = None
    progress: float = 0.0
    n_requests: int = 0
    last_used: float = 0.0


class ModelSource:
    """A source of the models that `specdec models` lists, or of a folder's, each loaded when a request needs it.

    Attributes:
        memory_bytes: Memory of the machine, in bytes.

    Args:
        folder: The folder; "" for the installed models.
        load: Loads a model by its name and returns its instance; called on the loader thread with a callback for the progress.
        divides_memory: Whether the KV caches share the memory that the weights leave free; if not, each keeps its limit.
    """

    def __init__(self, folder: str, load: Callable[[str, Callable[[float], None]], ModelInstance], divides_memory: bool) -> None:
        """Remember the arguments; nothing is loaded yet."""
        self._folder, self._load, self._divides_memory = folder, load, divides_memory
        self.memory_bytes = get_physical_memory_bytes()

    def list_models(self) -> Mapping[str, int]:
        """Return the size in bytes of each model that can be loaded, by name, aliases included."""
        return get_model_sizes(Path(self._folder) if self._folder else None)

    def load(self, name: str, on_progress: Callable[[float], None]) -> ModelInstance:
        """Load a model by its name or alias and return its instance; reports the progress, from 0 to 1, to a callback.

        Raises:
            ValueError: The model is not found or cannot be loaded.
            MemoryError: There is not enough memory.
        """
        return self._load(name, on_progress)

    def limit_caches(self, instances: list[ModelInstance]) -> None:
        """Divide half of the memory that the weights leave free equally among the models' KV caches."""
        if instances and self._divides_memory:
            free_bytes = self.memory_bytes - sum(each.model.decoder.target.weights.n_bytes for each in instances)
            for each in instances:
                each.engine.limit_caches(int(CACHE_SHARE * free_bytes / len(instances)))


class SingleModelSource(ModelSource):
    """A source with only one model, which is already loaded."""

    def __init__(self, instance: ModelInstance) -> None:
        """Set the only model."""
        self._instance = instance

    def list_models(self) -> Mapping[str, int]:
        """Return a mapping from the name of the only model to the size of its weights in bytes."""
        return {self._instance.model.name: self._instance.model.decoder.target.weights.n_bytes}


class ModelManager:
    """The models of the server: loads them when requests need them, and unloads those that no request uses.

    Models are loaded and unloaded on a thread of their own.

    Args:
        source: The source that lists and loads models.
        keep_alive: Seconds that an unused model stays loaded; None for ever.
        log: Callback for a log line.
    """

    def __init__(self, source: ModelSource, keep_alive: float | None, log: Callable[[str], object]) -> None:
        """Create a manager that has loaded no model."""
        self._source, self._keep_alive, self._log = source, keep_alive, log
        self._entries = dict[str, ModelEntry]()  # the most recently requested one is last
        self._lock = threading.Lock()  # the event loop acquires it, so hold it briefly
        self._loader, self._is_closed = ThreadPoolExecutor(1, "loading"), False
        self._model_sizes: Mapping[str, int] = {}
        self._list_time, self._list_lock = float("-inf"), threading.Lock()
        self._unloaded_metrics = dict[str, Metrics]()

    def list_models(self, max_age_s: float = LIST_MAX_AGE_S) -> Mapping[str, int]:
        """Return the size in bytes of each available model by its name, from a list that is at most max_age_s seconds old.

        A new list takes a while, and only one thread makes it. Meanwhile others get the previous list, or wait if there is none.
        """
        if time.monotonic() - self._list_time >= max_age_s and self._list_lock.acquire(blocking=not self._model_sizes):
            try:
                self._model_sizes = self._source.list_models()
                self._list_time = time.monotonic()
            finally:
                self._list_lock.release()
        return self._model_sizes

    def get_instance(self, name: str) -> ModelInstance | None:
        """Return the model with the given name if it is loaded, otherwise None."""
        entry = self._entries.get(name)
        return entry.instance if entry else None

    @property
    def _instances(self) -> list[ModelInstance]:
        """The models that are loaded now."""
        return [instance for entry in [*self._entries.values()] if (instance := entry.instance)]

    @property
    def metrics(self) -> dict[str, Metrics]:
        """The metrics of each model by its name, also of those that were unloaded."""
        with self._lock:
            metrics = {**self._unloaded_metrics}
            for instance in self._instances:
                name = instance.model.name
                metrics[name] = merge_metrics([instance.engine.metrics, metrics.get(name, Metrics())])
            return metrics

    def acquire(self, name: str) -> ModelEntry:
        """Return the entry of a model and count a request that uses it; starts to load the model if needed.

        Does not wait: the entry's future `loading` is done once the model is loaded. Each call needs a call of `release`.

        Args:
            name: Name of the model; if empty, the most recently requested one, or the first of the list.

        Raises:
            APIError: There is no such model.
            ShutdownError: The server is shutting down.
        """
        sizes = self._model_sizes if name in self._entries else self.list_models()
        if name and name not in self._entries and name not in sizes:
            sizes = self.list_models(UNKNOWN_NAME_MAX_AGE_S)
        with self._lock:
            if self._is_closed:
                raise ShutdownError()
            name = name or next(reversed(self._entries), "") or next(iter(sizes), "")
            if name not in self._entries and name not in sizes:
                available = list(sizes)
                more = f" and {len(available) - 8} more, which /v1/models lists" if len(available) > 8 else ""
                hint = f"available: {', '.join(available[:8])}{more}"
                raise APIError(f"model {shorten(name, repr)} not found; {hint}", "model", "model_not_found", 404)
            if not (entry := self._entries.pop(name, None)):
                entry = ModelEntry(name, sizes[name])
                self._loader.submit(self._load, entry)
            self._entries[name] = entry
            entry.n_requests += 1
            return entry

    def release(self, entry: ModelEntry) -> None:
        """Count the end of a request that uses a model, so that the model can be unloaded once no other request uses it."""
        with self._lock:
            entry.n_requests -= 1
            entry.last_used = time.monotonic()

    def unload_idle(self) -> None:
        """Start to unload the models that no request has used for `keep_alive` seconds, on the loader's thread.

        Does nothing if `keep_alive` is None.
        """
        if self._keep_alive is not None and self._find_idle(oldest := time.monotonic() - self._keep_alive):
            self._loader.submit(self._unload_idle, oldest)

    def _find_idle(self, oldest: float = math.inf) -> list[ModelEntry]:
        """Return the entries of loaded models that no request uses, last used before the time `oldest`."""
        return [
            entry for entry in [*self._entries.values()] if entry.instance and not entry.n_requests and entry.last_used < oldest
        ]

    def close(self, grace: float) -> None:
        """Reject new requests and those that wait for a model, abort running ones after `grace` seconds, and wait for them."""
        deadline = time.monotonic() + grace
        with self._lock:
            self._is_closed = True
            for entry in self._entries.values():
                if not entry.loading.done():
                    entry.loading.set_exception(ShutdownError())
        for instance in self._instances:
            instance.engine.close(max(deadline - time.monotonic(), 0.0))
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _load(self, entry: ModelEntry) -> None:
        """Load a model, on the loader's thread, after unloading idle models if memory is short.

        Sets the result or the error of the entry's future `loading`. After an error, the entry is removed, so that a later
        request tries again.
        """
        try:
            self._free_memory(entry)
            start = time.monotonic()
            instance = self._source.load(entry.name, partial(self._report_progress, entry))
        except Exception as error:
            if not isinstance(error, APIError | ShutdownError):
                message = f"{entry.name} cannot be loaded: {error}"
                self._log(message)
                error = APIError(LOCAL_DIRECTORY_PATTERN.sub("", message), "model", None, 503)
            with self._lock:
                self._entries.pop(entry.name, None)
                if not entry.loading.done():
                    entry.loading.set_exception(error)
            return
        entry.n_bytes, entry.last_used = instance.model.decoder.target.weights.n_bytes, time.monotonic()
        self._log(f"loaded {entry.name} in {entry.last_used - start:.1f} s")
        with self._lock:
            if not self._is_closed:
                entry.instance = instance
                entry.loading.set_result(None)
        if not entry.instance:
            instance.engine.close(0.0)
        self._source.limit_caches(self._instances)

    def _report_progress(self, entry: ModelEntry, progress: float) -> None:
        """Store the loading progress of a model, from 0 to 1; raises ShutdownError, to stop the loading, after a shutdown."""
        if self._is_closed:
            raise ShutdownError()
        entry.progress = progress

    def _free_memory(self, entry: ModelEntry) -> None:
        """Unload idle models, the longest unused first, until the given model fits; raises APIError if that is not enough."""
        while True:
            with self._lock:
                others = [each for each in self._entries.values() if each is not entry]
                if not others or sum(each.n_bytes for each in (entry, *others)) <= MAX_WEIGHTS_SHARE * self._source.memory_bytes:
                    return
                if not (idle := self._find_idle()):
                    busy = ", ".join(each.name for each in others)
                    raise APIError(
                        f"not enough memory for {entry.name} next to {busy}; try again later", "model", "no_memory", 503
                    )
                oldest = min(idle, key=lambda each: each.last_used)
                del self._entries[oldest.name]
            self._unload(oldest)

    def _unload_idle(self, oldest: float) -> None:
        with self._lock:
            for entry in (idle := self._find_idle(oldest)):
                del self._entries[entry.name]
        for entry in idle:
            self._unload(entry)

    def _unload(self, entry: ModelEntry) -> None:
        if entry.instance:
            entry.instance.engine.close(0.0)
            with self._lock:
                earlier = self._unloaded_metrics.get(entry.name, Metrics())
                self._unloaded_metrics[entry.name] = merge_metrics([earlier, entry.instance.engine.metrics])
            entry.instance = None
        gc.collect()  # frees the weights at once, since models are reference cycles
        self._log(f"unloaded {entry.name}")
        self._source.limit_caches(self._instances)


def make_single_model_manager(instance: ModelInstance) -> ModelManager:
    """Return a ModelManager with only the given loaded model, which is never unloaded."""
    manager, name = ModelManager(SingleModelSource(instance), None, lambda line: None), instance.model.name
    manager._entries[name] = ModelEntry(name, 0, instance=instance)
    return manager
