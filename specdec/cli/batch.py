"""`specdec batch`: generates the results of a file of requests, and goes on where an earlier run stopped."""

import time
from dataclasses import dataclass
from pathlib import Path

from specdec.cli.common_options import with_models
from specdec.cli.model_loading import load_models, resolve_model_paths
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import print_message
from specdec.cli.serve import ServedRequest, describe_model
from specdec.draft.settings import AUTO
from specdec.ui.plain_views import format_time_left
from specdec.ui.progress import ProgressBar, show_status
from specdec.ui.signals import signals


@dataclass(frozen=True, kw_only=True)
class BatchJobRequest(ServedRequest):
    """The options of `specdec batch`."""

    files: list[str] | None = argument("IN OUT", "The file of requests, and the file to which their results are added.")
    shard: str = option("1/1", "--shard I/N", "Generation", "Take every N-th line, from line I: one of N parts of the job.")


def run(request: BatchJobRequest) -> None:
    """Generate the results of a file of requests in OpenAI's batch format, many at once, without a server.

    specdec batch IN.jsonl OUT.jsonl -m MODEL

    Each line of IN has custom_id, method, url and body. Results are added to OUT as they end. The same command goes on.
    """
    from specdec.server import batch  # imported here, since no other command needs it

    files = [Path(name) for name in request.files or ()]
    if len(files) != 2:
        raise ValueError("expected two files: specdec batch IN.jsonl OUT.jsonl -m MODEL")
    source, target = files
    lines = batch.read_lines(source)
    done = batch.read_done(target, lines)
    pending = [line for line in batch.select_shard(lines, request.shard) if line.id not in done]
    if not pending:
        print_message(f"nothing is left: {target} has a result of each of the {len(done)} requests")
        return
    request = with_models(request, AUTO)
    with load_models(request, resolve_model_paths(request, batch.find_required_packages(pending))) as models:
        pass
    model = describe_model(request, models.decoder, request.name)
    runner = batch.BatchRunner(model, cache_bytes=model.get_cache_bytes(request.cache * 10**6))
    signals.begin_output()
    begin, n_done = time.perf_counter(), 0
    with show_status() as show:
        for result in runner.run(pending):
            if result:
                n_done += 1
                batch.append_line(target, result)
            seconds, share = time.perf_counter() - begin, n_done / len(pending)
            speed = runner.metrics.generated_tokens / seconds
            suffix = f" of {len(pending)}, {speed:.0f} tok/s{format_time_left(seconds, share)}"
            show(ProgressBar("generating", share, suffix))
            if signals.end_signal:
                break
    print_message(runner.format_summary(n_done, time.perf_counter() - begin, models.request.labels.draft_label))
    if n_done < len(pending):
        print_message(f"{len(pending) - n_done} requests are left; the same command goes on with them")
