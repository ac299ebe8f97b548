"""Compile untrusted grammars, first in a worker process that can be killed.

A schema comes from any user of the server. Building it can take minutes and all memory, and Python cannot stop it. So it is
tried in a process first, with limits on memory and CPU seconds, which a busy machine does not shorten. On systems without a CPU
limit, the limit is WALL_CLOCK_FACTOR times as many seconds of wall-clock time. Elsewhere a process that takes so long got no CPU.

The caller imports `make_matcher` and `try_grammar`; run as a program, the module is the worker process. Imports are lazy.
"""

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

WALL_CLOCK_FACTOR = 8
SIGKILL_EXIT_CODE = -getattr(signal, "SIGKILL", 0) or None
SIGXCPU_EXIT_CODE = -getattr(signal, "SIGXCPU", 0) or None  # exit code after the CPU limit; None: no such limit
MAX_MEMORY_BYTES = 2 << 30
TOO_SLOW = "it takes too long to build"
PARSER_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # a lexer state takes 1 to 2 kB


class WorkerLostError(ValueError):
    """An error for a worker process that could not be started or run, without a fault in the grammar."""


def try_grammar(grammar: str, vocab_size: int, max_seconds: float) -> tuple[float, str]:
    """Compile a grammar in a worker process; return the CPU seconds that it took, and why it cannot be used ("": it can).

    Args:
        grammar: The grammar, as llguidance takes it.
        vocab_size: The number of token ids.
        max_seconds: The limit in CPU seconds.

    Raises:
        WorkerLostError: The process could not be started, the system killed it, or it got too little CPU time.
    """
    request = json.dumps({"path": sys.path, "grammar": grammar, "n": vocab_size, "seconds": max_seconds}).encode()
    command, timeout = [sys.executable, "-S", "-E", __file__], WALL_CLOCK_FACTOR * max_seconds
    try:  # in its own session, so that Ctrl-C does not reach it
        process = subprocess.run(command, input=request, capture_output=True, timeout=timeout, start_new_session=True)
    except subprocess.TimeoutExpired:
        if SIGXCPU_EXIT_CODE:
            raise WorkerLostError("the machine is too busy to build it; try again later") from None
        return max_seconds, TOO_SLOW
    except OSError as error:
        raise WorkerLostError(f"cannot start a worker process: {error.strerror or error}") from None
    if process.returncode == SIGKILL_EXIT_CODE:
        raise WorkerLostError("the system has ended the worker process; try again, or free some memory")
    if process.returncode:
        return max_seconds, TOO_SLOW if process.returncode == SIGXCPU_EXIT_CODE else "it needs too much memory"
    seconds, reason = json.loads(process.stdout)
    return float(seconds), str(reason)


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


def main() -> None:
    """Run the worker process: compile the grammar of a JSON request from stdin and write the result as JSON to stdout."""
    request, reason = json.load(sys.stdin), ""
    sys.path[:] = request["path"]
    import llguidance

    vocabulary, begin = llguidance.LLTokenizer(_ByteVocabulary(request["n"])), time.process_time()
    _set_limit("RLIMIT_AS", MAX_MEMORY_BYTES)
    _set_limit("RLIMIT_CORE", 0)
    _set_limit("RLIMIT_CPU", math.ceil(begin + request["seconds"]))
    try:
        make_matcher(vocabulary, request["grammar"])
    except BaseException as error:  # a panic of a library is not an Exception
        reason = str(error) or type(error).__name__
    print(json.dumps([time.process_time() - begin, reason]))


def _set_limit(name: str, limit: int) -> None:
    """Set a soft resource limit of this process, such as RLIMIT_AS, or do nothing if the system does not support it.

    A lower hard limit stays as it is.
    """
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        resource.setrlimit(getattr(resource, name), (limit, resource.getrlimit(getattr(resource, name))[1]))


if __name__ == "__main__":
    main()
