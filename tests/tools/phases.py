"""KV caches whose passes have more phases than small models need."""

from specdec.model.kv_cache import KVCache
from specdec.runtime.op_program import N_OPS_WORD, TOKEN_BYTES_WORD

MAX_WORK = 1 << 40  # bytes that give the maximum number of chunks


def split_phases(cache: KVCache, work: int = MAX_WORK) -> None:
    """Split every phase of a cache's program into the maximum number of chunks."""
    ops = cache.executor.ops
    ops[ops[:, N_OPS_WORD] > 0, TOKEN_BYTES_WORD] = work
