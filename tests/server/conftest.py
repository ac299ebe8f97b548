"""Fixtures of the server's tests: a small model that chats, its engine, and the app over it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.server.engine_thread import EngineThread


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    from tests.tools.model_folders import SMOLLM2_TEMPLATE, TOOL_TEMPLATE_PREFIX, make_chat_folder

    path = make_chat_folder(tmp_path_factory.mktemp("serving") / "talker", TOOL_TEMPLATE_PREFIX + SMOLLM2_TEMPLATE)
    return SpeculativeDecoder(path, "lookup", n_threads=1, gamma=4)


@pytest.fixture(scope="module")
def scheduler(decoder: SpeculativeDecoder) -> Iterator[EngineThread]:
    scheduler = EngineThread(decoder, 4, 32, 10**8)
    yield scheduler
    scheduler.close(0.0)


@pytest.fixture(scope="module")
def make_test_app(decoder: SpeculativeDecoder, scheduler: EngineThread) -> Callable[..., Any]:
    from tests.fakes.server import make_app

    def app(scheduler: Any = scheduler, **options: Any) -> Any:
        return make_app(decoder, scheduler, **options)

    return app


@pytest.fixture
def prompts(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the messages, tools and options of each rendered chat."""
    calls = list[Any]()
    encode = decoder.encode_chat
    monkeypatch.setattr(decoder, "encode_chat", lambda *arguments: calls.append(arguments) or encode(*arguments))
    return calls


@pytest.fixture(scope="module")
def app(make_test_app: Callable[..., Any]) -> Any:
    return make_test_app()
