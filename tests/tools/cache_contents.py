"""Read what KV caches and prefix caches hold."""

from specdec import SpeculativeDecoder
from specdec.engine.prefix_cache import KVSlot, PrefixCache
from specdec.engine.scheduler import Scheduler
from specdec.layers.buffers import Buffers
from specdec.model.kv_cache import KVCache
from specdec.model.state_snapshots import Snapshot


def get_buffers(cache: KVCache) -> Buffers:
    return cache.export_kv(lambda buffers, tokens, snapshots: buffers)


def get_cached_tokens(cache: KVCache) -> list[int]:
    return cache.export_kv(lambda buffers, tokens, snapshots: [*tokens])


def get_snapshots(cache: KVCache) -> list[Snapshot]:
    return cache.export_kv(lambda buffers, tokens, snapshots: [*snapshots])


def get_idle_and_used_slots(owner: PrefixCache | SpeculativeDecoder | Scheduler) -> tuple[list[KVSlot], list[KVSlot]]:
    """Return the slots of a prefix cache, or of that of a decoder or scheduler, without and with a running sequence."""
    if isinstance(owner, SpeculativeDecoder):
        prefix_cache = owner._prefix_cache
    else:
        prefix_cache = owner if isinstance(owner, PrefixCache) else owner.prefix_cache
    prefix_cache.settle()
    return [*prefix_cache.idle], [*prefix_cache.in_use]
