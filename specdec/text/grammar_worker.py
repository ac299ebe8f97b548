"""Grammar compilation, tried first in a worker process because grammars are untrusted input.

A schema of a few kilobytes can take minutes to build. This module holds the code of both sides; imports are lazy.
Run as a program, it is a process of `worker_process`.
"""

import functools
import json
import math
import sys
import time
from contextlib import suppress
from typing import Any

MAX_MEMORY_BYTES = 2 << 30
PARSER_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # a lexer state takes 1 to 2 kB


def make_matcher(vocabulary: Any, grammar: str) -> Any:
    """Return llguidance's matcher at the start of a grammar; raise ValueError with its message if there is none."""
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=llguidance.LLParserLimits(**PARSER_LIMITS))
    n_allowed = int.from_bytes(matcher.compute_bitmask(), "little").bit_count()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if matcher.is_accepting() and n_allowed == len(vocabulary.eos_tokens):
        raise ValueError("it allows only the empty text")
    return matcher


class _ByteVocabulary:
    """A vocabulary of all bytes and n ids in total, with the attribute names that llguidance expects."""

    is_tokenizer_wrapper, bos_token_id, eos_token_id, special_token_ids = True, None, 256, ()

    def __init__(self, n: int) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), *[b""] * max(n - 256, 1)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@functools.lru_cache(4)
def _get_byte_tokenizer(n: int) -> Any:
    import llguidance

    return llguidance.LLTokenizer(_ByteVocabulary(n))


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU "seconds" that a "grammar" for ids below "n" took, and an "error" if it cannot be used."""
    vocabulary, answer = _get_byte_tokenizer(request["n"]), dict[str, Any]()
    begin = time.process_time()
    try:
        make_matcher(vocabulary, request["grammar"])
    except ValueError as error:
        answer["error"] = str(error)
    return answer | {"seconds": time.process_time() - begin}


def main() -> None:
    """Answer requests until the pipe ends, with an "error" on failure. Packages come from the parent's sys.path."""
    sys.path[:] = json.loads(sys.argv[1])
    _set_limit("RLIMIT_AS", MAX_MEMORY_BYTES)
    _set_limit("RLIMIT_CORE", 0)
    for line in sys.stdin:
        request = json.loads(line)
        _set_limit("RLIMIT_CPU", math.ceil(time.process_time() + request["seconds"]))
        try:
            answer = handle_request(request)
        except BaseException as error:  # a panic of a library is not an Exception
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)


def _set_limit(name: str, limit: int) -> None:
    """Set a resource limit of this process, unless a lower one is set or the system does not support it."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        resource.setrlimit(getattr(resource, name), (limit, resource.getrlimit(getattr(resource, name))[1]))


if __name__ == "__main__":
    main()
