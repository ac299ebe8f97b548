"""Compile untrusted grammars, first in a worker process, because a schema of a few kilobytes can take minutes to build.

The caller imports `make_matcher`; run as a program, the module is a worker process of `worker_process`. Imports are lazy.
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
    """Compile a grammar and return an llguidance matcher at its start.

    Args:
        vocabulary: An llguidance LLTokenizer.
        grammar: The grammar, as llguidance takes it.

    Raises:
        ValueError: llguidance rejects the grammar, or the grammar allows only the empty text.
    """
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=llguidance.LLParserLimits(**PARSER_LIMITS))
    n_allowed = int.from_bytes(matcher.compute_bitmask(), "little").bit_count()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if matcher.is_accepting() and n_allowed == len(vocabulary.eos_tokens):
        raise ValueError("it allows only the empty text")
    return matcher


class _ByteVocabulary:
    """A stand-in vocabulary of n ids, in which the first 256 are the bytes, with the attribute names that llguidance expects."""

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
    """Try to compile the grammar of a request and return its CPU time as "seconds", and an "error" if it cannot be used.

    Args:
        request: An object with "grammar", and with "n", the number of ids in the vocabulary.
    """
    vocabulary, answer = _get_byte_tokenizer(request["n"]), dict[str, Any]()
    begin = time.process_time()
    try:
        make_matcher(vocabulary, request["grammar"])
    except ValueError as error:
        answer["error"] = str(error)
    return answer | {"seconds": time.process_time() - begin}


def main() -> None:
    """Run the worker process: read requests as JSON lines from stdin and write a JSON line for each until stdin ends.

    An answer has an "error" if the request failed. The first argument is the parent's sys.path as JSON. Memory is limited for the
    process, CPU time for each request.
    """
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
    """Set a soft resource limit of this process, such as RLIMIT_AS, or do nothing if the system does not support it.

    A lower hard limit stays as it is.
    """
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        resource.setrlimit(getattr(resource, name), (limit, resource.getrlimit(getattr(resource, name))[1]))


if __name__ == "__main__":
    main()
