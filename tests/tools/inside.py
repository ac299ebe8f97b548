"""The private parts of the package that tests read, in one place: a change inside the package changes this file alone."""

from typing import TYPE_CHECKING, Any

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import CostCurve
from specdec.engine.autotuner import Autotuner
from specdec.engine.prefix_cache import KVSlot
from specdec.text.chat_template import Message
from specdec.text.conversation import Conversation

if TYPE_CHECKING:  # tests of the engine read this file without specdec.ui
    from specdec.ui.chat import ChatSession


def get_decoder(conversation: Conversation) -> SpeculativeDecoder:
    return conversation._decoder


def get_visible_messages(conversation: Conversation) -> list[Message]:
    """Return the messages that the next prompt renders, with the system prompt and without dropped turns."""
    return conversation._get_visible_messages()


def enter(chat: "ChatSession", line: str) -> None:
    """Give a line to a chat as if it had been typed."""
    chat._handle_input(line)


def get_idle_and_used_slots(owner: Any) -> tuple[list[KVSlot], list[KVSlot]]:
    """Return the slots of a prefix cache, or of that of a decoder or scheduler, without and with a running sequence."""
    prefix_cache = getattr(owner, "_prefix_cache", owner)
    prefix_cache._settle()
    return [*prefix_cache._idle], [*prefix_cache._in_use]


def get_seconds_of_clients(engine: Any) -> dict[str, float]:
    """Return the time that an engine's passes took by client, of clients with requests or a returning one's."""
    return engine._scheduler._shares._seconds


def get_running(engine: Any) -> Any:
    """Return the running sequences of an engine."""
    return engine._scheduler.running


def get_cached_tokens(cache: Any) -> list[int]:
    """Return the tokens that a KV cache holds."""
    return [*cache._tokens]


def get_buffers(cache: Any) -> Any:
    return cache._buffers


def get_executor(cache: Any) -> Any:
    return cache._executor


def get_ops(cache: Any) -> Any:
    """Return the rows of a cache's forward program."""
    return get_executor(cache)._ops


def get_curve(autotuner: Autotuner) -> CostCurve | None:
    """Return the measured costs."""
    return autotuner._curve
