"""Conversations with a small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.text.conversation import ChatSettings, Conversation
from tests.tools.model_folders import make_chat_folder

QUESTION = "Where did the robin go?"


N_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("chat") / "chat-model")


@pytest.fixture
def make_conversation(model: Path) -> Callable[..., Conversation]:
    def make(draft: str | None = None, system: str = "Sing.", **settings: Any) -> Conversation:
        decoder = SpeculativeDecoder(model, draft, n_threads=1, gamma=4)
        return Conversation(decoder, system, ChatSettings(**{"max_tokens": N_TOKENS, "seed": 5} | settings), "chat-model")

    return make
