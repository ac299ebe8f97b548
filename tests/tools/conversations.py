"""Conversations with a small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.engine.prefix_cache import KVSlot
from specdec.text.chat_template import Message
from specdec.text.conversation import ChatSettings, Conversation
from specdec.ui.chat import ChatSession
from tests.tools.hf_folders import FIXTURES
from tests.tools.model_folders import make_folder

QUESTION = "Where did the robin go?"


N_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_folder(tmp_path_factory.mktemp("chat") / "chat-model", positions=320)
    (path / "chat_template.jinja").write_bytes((FIXTURES / "chat" / "smollm2.jinja").read_bytes())
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    return path


@pytest.fixture
def make_conversation(model: Path) -> Callable[..., Conversation]:
    def make(draft: str | None = None, system: str = "Sing.", **settings: Any) -> Conversation:
        decoder = SpeculativeDecoder(model, draft, n_threads=1, gamma=4)
        return Conversation(decoder, system, ChatSettings(**{"max_tokens": N_TOKENS, "seed": 5} | settings), "chat-model")

    return make


def get_decoder(conversation: Conversation) -> SpeculativeDecoder:
    return conversation._decoder


def get_visible_messages(conversation: Conversation) -> list[Message]:
    """Return the messages that the next prompt renders, with the system prompt and without dropped turns."""
    return conversation._get_visible_messages()


def get_slots(decoder: SpeculativeDecoder) -> list[KVSlot]:
    """Return the slots with the KV caches of a decoder's sequences."""
    prefix_cache = decoder._prefix_cache
    prefix_cache._settle()
    return [*prefix_cache._idle, *prefix_cache._in_use]


def enter(chat: ChatSession, line: str) -> None:
    """Give a line to a chat as if it had been typed."""
    chat._handle_input(line)
