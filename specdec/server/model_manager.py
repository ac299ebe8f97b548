"""The models that are served: each is loaded when somebody asks for it, and dropped when it is idle. Knows no HTTP."""

import gc
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from specdec.engine.metrics import Figures, merged
from specdec.engine.scheduler import Closed, Engine
from specdec.server.openai_requests import Model
from specdec.server.validation import Refused
from specdec.validation import short

WEIGHTS_SHARE = 0.75  # of the memory, that weights of all models may take, or those of one alone
# of a path on this machine, which no client is told: all but its last name, up to which a name may hold spaces
FOLDERS = re.compile(r"(?<![^\s'\"(=])(?:[A-Za-z]:)?[/\\]+(?=\S)(?:[^/\\:;,]*[^/\\:;,\s][/\\]+)*")
LISTED_SECONDS, LOOKED_SECONDS = 30.0, 2.0  # that a list of what there is holds; for who asks for what is not on it


class Served(NamedTuple):
    """A model that is loaded, and what writes its texts. created: when that was, in Unix seconds."""

    model: Model
    engine: Engine
    created: int


class Source(Protocol):
    """Where models come from. n_bytes: of memory that there is."""

    n_bytes: float

    def sizes(self) -> Mapping[str, int]:
        """The models that there are, by the names that clients say: how many bytes each takes."""

    def load(self, name: str, tell: Callable[[float], None]) -> Served:
        """A model of that name; tells the share of it that is loaded. Raises ValueError, and MemoryError."""

    def limit(self, served: list[Served]) -> None:
        """Shares what memory those models leave among their caches."""


@dataclass
class Place:
    """A model that is loaded or is being loaded. users: requests that ask it or wait for it; since: when that last changed."""

    name: str
    n_bytes: int
    loading: "Future[Served]" = field(default_factory=Future)
    share: float = 0.0
    users: int = 0
    since: float = 0.0

    @property
    def served(self) -> Served | None:
        """The model, once it is loaded."""
        loading = self.loading  # another thread may replace it
        return loading.result() if loading.done() and not loading.exception() else None


class One:
    """A source of a model that is there."""

    n_bytes = 0.0

    def __init__(self, served: Served) -> None:
        self._served = served

    def sizes(self) -> Mapping[str, int]:
        return {self._served.model.name: self._served.model.decoder.target.weights.n_bytes}

    def load(self, name: str, tell: Callable[[float], None]) -> Served:
        return self._served

    def limit(self, served: list[Served]) -> None:
        """Its caches have what they were given."""


class Shelf:
    """keep_alive: seconds that a model which nobody asks stays, None for ever; tell: a line of the log."""

    def __init__(self, source: Source, keep_alive: float | None, tell: Callable[[str], object]) -> None:
        self._source, self._keep_alive, self._tell = source, keep_alive, tell
        self._places = dict[str, Place]()  # the one that was asked for last is the last
        self._lock = threading.Lock()  # the event loop takes it: nothing within may take long
        self._loader, self._is_closed = ThreadPoolExecutor(1, "loading"), False
        self._sizes: Mapping[str, int] = {}
        self._listed, self._listing = float("-inf"), threading.Lock()
        self._gone = Figures()  # of models that were dropped

    def sizes(self, seconds: float = LISTED_SECONDS) -> Mapping[str, int]:
        """Return the models that there are and their bytes, as they were so many seconds ago or later.

        Takes long. One thread lists at a time; who comes meanwhile gets the list before, if there is one.
        """
        if time.monotonic() - self._listed >= seconds and self._listing.acquire(blocking=not self._sizes):
            try:
                self._sizes = self._source.sizes()
                self._listed = time.monotonic()
            finally:
                self._listing.release()
        return self._sizes

    def loaded(self, name: str) -> Served | None:
        """That model, if it is loaded."""
        place = self._places.get(name)
        return place.served if place else None

    @property
    def _served(self) -> list[Served]:
        """The models that are loaded."""
        return [served for place in [*self._places.values()] if (served := place.served)]

    @property
    def figures(self) -> Figures:
        """Of all texts."""
        with self._lock:
            return merged([self._gone, *(each.engine.figures for each in self._served)])

    def begin(self, name: str) -> Place:
        """That model, or that of which the last request was, or the first that there is; it is loaded if need be.

        Whoever begins has to end. Raises Refused for another name, and Closed.
        """
        sizes = self._sizes if name in self._places else self.sizes()
        if name and name not in self._places and name not in sizes:
            sizes = self.sizes(LOOKED_SECONDS)
        with self._lock:
            if self._is_closed:
                raise Closed()
            name = name or next(reversed(self._places), "") or next(iter(sizes), "")
            if name not in self._places and name not in sizes:
                there = list(sizes)
                told = f"there is {there[0]}" if len(there) == 1 else f"there are {', '.join(there[:8])}{' …' * (len(there) > 8)}"
                raise Refused(f"there is no model {short(name, repr)} here; {told}", "model", "model_not_found", 404)
            if not (place := self._places.pop(name, None)):
                place = Place(name, sizes[name])
                self._loader.submit(self._load, place)
            self._places[name] = place
            place.users += 1
            return place

    def end(self, place: Place) -> None:
        with self._lock:
            place.users -= 1
            place.since = time.monotonic()

    def sweep(self) -> None:
        """Drop the models that have been idle for long."""
        if self._keep_alive is not None and self._idle(oldest := time.monotonic() - self._keep_alive):
            self._loader.submit(self._drop_idle, oldest)

    def _idle(self, oldest: float = math.inf) -> list[Place]:
        """Those that nobody has asked since then."""
        return [each for each in [*self._places.values()] if each.served and not each.users and each.since < oldest]

    def close(self, grace: float) -> None:
        """No new texts; those that run end, or are cut after so many seconds. Who waits for a model is refused at once."""
        end = time.monotonic() + grace
        with self._lock:
            self._is_closed = True
            for place in self._places.values():
                with suppress(InvalidStateError):  # of one that is loaded
                    place.loading.set_exception(Closed())
        for served in self._served:
            served.engine.close(max(end - time.monotonic(), 0.0))
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _load(self, place: Place) -> None:
        """On the loader's thread, one at a time."""
        try:
            self._make_room(place)
            begin = time.monotonic()
            served = self._source.load(place.name, partial(self._goes_on, place))
            place.n_bytes = served.model.decoder.target.weights.n_bytes
            place.since = time.monotonic()
            self._tell(f"loaded {place.name} in {place.since - begin:.1f} s")
            try:
                place.loading.set_result(served)
            except InvalidStateError:  # the server ends
                served.engine.close(0.0)
            self._source.limit(self._served)
        except Exception as error:
            with self._lock:
                self._places.pop(place.name, None)
            if not isinstance(error, Refused):
                told = f"{place.name} cannot be loaded: {error}"
                self._tell(told)
                error = Refused(FOLDERS.sub("", told), "model", None, 503)
            with suppress(InvalidStateError):
                place.loading.set_exception(error)

    def _goes_on(self, place: Place, share: float) -> None:
        """Note the share of a model that is loaded. Raises Closed, which ends the loading."""
        if self._is_closed:
            raise Closed()
        place.share = share

    def _make_room(self, place: Place) -> None:
        """Drops what is idle, the longest first, as far as need be. Raises Refused where that is not enough."""
        while True:
            with self._lock:
                others = [each for each in self._places.values() if each is not place]
                if not others or sum(each.n_bytes for each in (place, *others)) <= WEIGHTS_SHARE * self._source.n_bytes:
                    return
                if not (idle := self._idle()):
                    busy = ", ".join(each.name for each in others)
                    raise Refused(
                        f"there is no memory for {place.name} beside {busy}; ask again later", "model", "no_memory", 503
                    )
                first = min(idle, key=lambda each: each.since)
                del self._places[first.name]
            self._drop(first)

    def _drop_idle(self, oldest: float) -> None:
        with self._lock:
            for place in (idle := self._idle(oldest)):
                del self._places[place.name]
        for place in idle:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        if served := place.served:
            served.engine.close(0.0)
            with self._lock:
                self._gone = merged([self._gone, served.engine.figures])
        place.loading = Future()
        del served
        gc.collect()  # weights are large, and models refer to themselves
        self._tell(f"dropped {place.name}")
        self._source.limit(self._served)


def only(served: Served) -> Shelf:
    """One model, which stays."""
    shelf, name = Shelf(One(served), None, lambda line: None), served.model.name
    place = Place(name, 0)
    place.loading.set_result(served)
    shelf._places[name] = place
    return shelf
