"""`specdec batch`: generates the results of a file of requests, and goes on where an earlier run stopped."""

import codecs
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.argument_checks import wrap_read_errors
from specdec.cli.common_options import with_models
from specdec.cli.model_loading import load_models, resolve_model_paths
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import print_message
from specdec.cli.serve import ServedRequest, describe_model
from specdec.draft.settings import AUTO
from specdec.engine.metrics import Metrics
from specdec.loaders.model_file import write_text_atomically
from specdec.ui.plain_views import format_time_left
from specdec.ui.progress import ProgressBar, show_status
from specdec.ui.signals import signals

if TYPE_CHECKING:
    from specdec.server.batch import BatchLine

SHARD_PATTERN = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True, kw_only=True)
class BatchJobRequest(ServedRequest):
    """The options of `specdec batch`."""

    files: list[str] | None = argument("IN OUT", "The file of requests, and the file to which their results are added.")
    shard: str = option("1/1", "--shard I/N", "Generation", "Take every N-th line, from line I: one of N parts of the job.")

    def select(self, lines: Sequence["BatchLine"]) -> list["BatchLine"]:
        """Return the lines of the shard.

        Raises:
            ValueError: --shard is not valid.
        """
        match = SHARD_PATTERN.fullmatch(self.shard)
        if not match or int(match[1]) > int(match[2]):
            raise ValueError(f"--shard is {self.shard!r}; expected I/N with I from 1 to N, such as 1/4")
        first, n_shards = int(match[1]), int(match[2])
        return [line for line in lines if (line.number - first) % n_shards == 0]


def run(request: BatchJobRequest) -> None:
    """Generate the results of a file of requests in OpenAI's batch format, many at once, without a server.

    specdec batch IN.jsonl OUT.jsonl -m MODEL

    Each line of IN has custom_id, method, url and body. Results are added to OUT as they end. The same command goes on.
    """
    from specdec.server.batch import BatchRunner, find_required_packages, parse_lines  # imported here: no other command needs it

    files = [Path(name) for name in request.files or ()]
    if len(files) != 2:
        raise ValueError("expected two files: specdec batch IN.jsonl OUT.jsonl -m MODEL")
    source, target = files
    with wrap_read_errors(source, ValueError):
        lines = parse_lines(source.read_bytes().removeprefix(codecs.BOM_UTF8))
    done = read_done(target, lines)
    pending = [line for line in request.select(lines) if line.id not in done]
    if not pending:
        print_message(f"nothing is left: {target} has a result of each of the {len(done)} requests")
        return
    request = with_models(request, AUTO)
    with load_models(request, resolve_model_paths(request, find_required_packages(pending))) as models:
        pass
    request = models.resolve_draft(request)
    model = describe_model(request, models.decoder, request.name)
    runner = BatchRunner(model, cache_bytes=request.get_cache_bytes(models.decoder))
    signals.begin_output()
    begin, n_done = time.perf_counter(), 0
    with show_status() as show:
        for result in runner.run(pending):
            if result:
                n_done += 1
                append_line(target, result)
            seconds, share = time.perf_counter() - begin, n_done / len(pending)
            speed = runner.metrics.generated_tokens / seconds
            suffix = f" of {len(pending)}, {speed:.0f} tok/s{format_time_left(seconds, share)}"
            show(ProgressBar("generating", share, suffix))
            if signals.end_signal:
                break
    seconds = time.perf_counter() - begin
    print_message(format_summary(runner.metrics, n_done, runner.n_errors, seconds, request.labels.draft_label))
    if n_done < len(pending):
        print_message(f"{len(pending) - n_done} requests are left; the same command goes on with them")


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file; raise ValueError if the file cannot be written."""
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def read_done(path: Path, lines: Sequence["BatchLine"]) -> set[str]:
    """Return the ids of the results in a file; empty if there is no file.

    Removes a last line that was cut off, and errors of the machine (status 500 and up), whose requests are tried again.

    Raises:
        ValueError: The file has something else than results of these lines.
    """
    from specdec.server.batch import find_done

    if not path.exists():
        return set()
    with wrap_read_errors(path, ValueError):
        data = path.read_bytes()
    kept, done = find_done(str(path), data, lines)
    if kept != data:
        write_text_atomically(path, kept.decode())
    return done


def format_summary(metrics: Metrics, n_done: int, n_errors: int, seconds: float, draft_label: str) -> str:
    """Return how much was generated in which time, and what the draft brought."""
    n = metrics.generated_tokens
    text = f"{n_done} results, {n_errors} of them errors; {n:,} tokens in {seconds:.1f} s ({n / seconds:.0f} tok/s)"
    if not metrics.drafted_tokens:
        return text
    per_pass = n / max(n - metrics.accepted_tokens, 1)
    share = metrics.accepted_tokens / metrics.drafted_tokens
    drafts = f"{share:.0%} of {metrics.drafted_tokens:,} tokens guessed {draft_label} accepted"
    return f"{text}; {drafts}, {per_pass:.1f} tokens per pass of a sequence instead of 1"
