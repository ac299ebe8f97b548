"""What a grammar becomes, and whether it becomes anything: asked first of a process of its own, since it comes from strangers.

A schema of a few kilobytes can take minutes to build. Here is what both sides do; nothing is imported before it is needed.
As a program this is a process of `workers`.
"""

import functools
import json
import math
import sys
import time
from contextlib import suppress
from typing import Any

MOST_BYTES = 2 << 30
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # of which each takes 1 to 2 kB


def matcher_of(vocabulary: Any, grammar: str) -> Any:
    """llguidance's matcher of a grammar at its beginning. Raises ValueError with what it says where there is none."""
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    n_allowed = int.from_bytes(matcher.compute_bitmask(), "little").bit_count()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if matcher.is_accepting() and n_allowed == len(vocabulary.eos_tokens):
        raise ValueError("it allows the empty text alone")
    return matcher


class _Bytes:
    """A vocabulary of all bytes and n ids in all, as llguidance takes one: by these names."""

    is_tokenizer_wrapper, bos_token_id, eos_token_id, special_token_ids = True, None, 256, ()

    def __init__(self, n: int) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), *[b""] * max(n - 256, 1)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@functools.lru_cache(4)
def _vocabulary(n: int) -> Any:
    import llguidance

    return llguidance.LLTokenizer(_Bytes(n))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return an "error" where a "grammar" of tokens below "n" cannot be used, and the CPU "seconds" that finding out took."""
    vocabulary, told = _vocabulary(request["n"]), dict[str, Any]()
    begin = time.process_time()
    try:
        matcher_of(vocabulary, request["grammar"])
    except ValueError as error:
        told["error"] = str(error)
    return told | {"seconds": time.process_time() - begin}


def main() -> None:
    """Answer requests with another process's packages until the pipe ends, with an "error" where there is no answer."""
    sys.path[:] = json.loads(sys.argv[1])
    _limit("RLIMIT_AS", MOST_BYTES)
    _limit("RLIMIT_CORE", 0)
    for line in sys.stdin:
        request = json.loads(line)
        _limit("RLIMIT_CPU", math.ceil(time.process_time() + request["seconds"]))
        try:
            told = answer(request)
        except BaseException as error:  # a panic of a library is no Exception
            told = {"error": str(error) or type(error).__name__}
        print(json.dumps(told), flush=True)


def _limit(name: str, limit: int) -> None:
    """Limit what this process may use, unless its limit is lower already or the system knows no such limit."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        resource.setrlimit(getattr(resource, name), (limit, resource.getrlimit(getattr(resource, name))[1]))


if __name__ == "__main__":
    main()
