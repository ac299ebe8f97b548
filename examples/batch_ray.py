"""Divide a batch job among machines: python examples/batch_ray.py IN.jsonl OUT.jsonl [TARGET [WORKERS]].

Needs `pip install ".[ray]"`. The results are those of `specdec batch` on one machine, in another order.
"""

import sys
from pathlib import Path
from typing import Any

import ray

LINES_PER_BATCH = 64  # enough for full passes; a result is written once its batch is done


class Worker:
    """A decoder, which generates the results of batches of lines."""

    def __init__(self, target: str) -> None:
        """Load the models: the target, and its default draft."""
        from specdec import SpeculativeDecoder
        from specdec.server.batch import BatchRunner
        from specdec.server.generation_fields import ServedModel

        name = Path(target).stem if Path(target).exists() else target  # as `specdec batch` names it
        self.runner = BatchRunner(ServedModel.from_decoder(name, SpeculativeDecoder(target)))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the result of each line."""
        from specdec.server.batch import parse_line

        lines = [parse_line(int(number), data) for number, data in zip(batch["number"], batch["data"], strict=True)]
        return {"result": [result.decode() for result in self.runner.run(lines) if result]}


def main(source: str, results: str, target: str = "stories6M.bin", n_workers: str = "1") -> None:
    """Write the results, one line each."""
    rows = [{"number": i, "data": data} for i, data in enumerate(Path(source).read_bytes().splitlines(), 1) if data.strip()]
    size = min(LINES_PER_BATCH, -(-len(rows) // int(n_workers)))
    workers = ray.data.ActorPoolStrategy(size=int(n_workers))
    done = ray.data.from_items(rows).map_batches(Worker, fn_constructor_args=[target], batch_size=size, compute=workers)
    with open(results, "w", encoding="utf-8") as file:
        file.writelines(row["result"] for row in done.iter_rows())


if __name__ == "__main__":
    main(*sys.argv[1:])
