"""`specdec models`: the models that are there, and which drafts fit. Knows no arrays and no formats."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..screens.output import on_one_line
from ..screens.progress import loading
from . import options
from .endings import writing
from .request import Request

NONE_THERE = "no models in models/ or in the hub's cache; -m org/name downloads one"

WIDEST = 10_000  # of a table that goes into a pipe, where names are not to be cut


@dataclass(frozen=True, kw_only=True)
class ListRequest(Request):
    """Of `specdec models`."""

    folder: options.Folder = ""
    as_json: options.AsJson = False


def run(request: ListRequest) -> None:
    """List the models in models/ and in the hub's cache, or in a folder: shapes, sizes, vocabularies and drafts.

    A draft fits a target of the same vocabulary that is at least twice as large; a head, the models of its width and vocabulary.
    Of a model with experts it is told, too, how many weights a token reads.
    """
    from .catalog import entries, row_of  # which nothing else needs

    folder = request.folder
    with loading("looking at models"):
        found = entries(Path(folder) if folder else None)
        rows = [row_of(entry, found) for entry in found if entry.config]
    broken = [entry for entry in found if entry.flaw]
    with writing():
        if request.as_json:
            print(json.dumps({"models": rows, "unreadable": [{"name": entry.name, "flaw": entry.flaw} for entry in broken]}))
            return
        if not (rows or broken):
            print(f"no models in {on_one_line(folder)}" if folder else NONE_THERE)
        table = Table("model", "shape", "weights", "size", "vocabulary", "drafts that fit", box=None, pad_edge=False)
        for column in table.columns:
            column.overflow = "fold"  # a name is to be copied

        def told(*names: str) -> Text:
            """Without the folder, which whoever asked knows."""
            return Text(on_one_line(", ".join(name.removeprefix(f"{Path(folder)}{os.sep}") for name in names)))

        for row in rows:
            table.add_row(
                told(row["name"]),
                f"{row['family']} {row['layers']} x {row['dim']}",
                _count(row["parameters"]) + (f", {_count(row['parameters_read'])} read" if _has_experts(row) else ""),
                f"{_count(row['bytes'])}B",
                str(row["vocabulary"]),
                _of_head(row["head"], told) if row["head"] else told(*(row["drafts"] or ("self", "ngram"))),
            )
        console = Console()
        console = console if console.is_terminal else Console(width=WIDEST)
        if rows:
            console.print(table)
        for entry in broken:
            console.print(Text(on_one_line(f"not to be read: {entry.flaw}")), soft_wrap=True)


def _has_experts(row: Mapping[str, Any]) -> bool:
    """Whether a token goes through a part of the weights alone."""
    return bool(row["parameters_read"] < row["parameters"])


def _of_head(head: Mapping[str, Any], told: Callable[..., Text]) -> Text:
    """Which models a head drafts for: those that are there, else what they have to be like."""
    deep = f", of {max(head['layers'])} layers or more" if head["layers"] else ""
    return Text("for ") + told(*head["targets"] or [f"models {head['width']} wide{deep}"])


def _count(n: int) -> str:
    """In thousands, millions or billions, two digits or more."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.1f} {name}" if n < 10 * unit else f"{n / unit:.0f} {name}"
    return f"{n} "
