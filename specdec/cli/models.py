"""`specdec models`: the models that are there, and which drafts fit. Knows no arrays and no formats."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.cli.exits import writing
from specdec.cli.model_resolver import find_model
from specdec.cli.options import argument, flag
from specdec.cli.request import Request
from specdec.draft.resolver import NGRAM, SELF
from specdec.loaders import CheckpointError, optional_dependencies
from specdec.loaders.model_aliases import name_model, short_names
from specdec.loaders.model_lookup import here, needs
from specdec.loaders.model_removal import files_of, remove, size_of
from specdec.ui.output import on_one_line
from specdec.ui.progress import loading

NONE_THERE = "no models in models/ or in the hub's cache; specdec models pull org/name downloads one"

WIDEST = 10_000  # of a table that goes into a pipe, where names are not to be cut


@dataclass(frozen=True, kw_only=True)
class ListRequest(Request):
    """Of `specdec models`."""

    offers = "what yes as_json"
    what: list[str] | None = argument(
        None, metavar="WHAT",
        help="A folder to look into instead, or a model. Or what to do: pull NAME, rm NAME, name SHORT NAME.",
    )  # fmt: skip
    yes: bool = flag("-y", "--yes", group="Output", help="Remove without a question.")


def run(request: ListRequest) -> None:
    """List the models in models/ and in the hub's cache, or in a folder: shapes, sizes, vocabularies and drafts.

    specdec models pull org/name:Q4_K_M downloads one, and rm NAME removes one.

    specdec models name SHORT NAME lets a short name stand for one, wherever a model is named; rm SHORT ends that.

    A draft fits a target of the same vocabulary that is at least twice as large; a head, the models of its width and vocabulary.
    Of a model with experts it is told, too, how many weights a token reads.
    """
    what, *names = request.what or [""]
    with writing():
        if what in DEEDS:
            DEEDS[what](request, names)
        elif what in LIST and not (names or os.path.exists(what)):
            list_all(request, "")
        elif names:
            raise ValueError(f"{names[0]!r} is one word too many; expected FOLDER, or pull NAME, rm NAME, name SHORT NAME")
        else:
            list_all(request, what)


def pull(request: ListRequest, names: list[str]) -> None:
    """Download models that are not there yet."""
    if not names:
        raise ValueError("pull what? expected a name on the hub: pull org/name, or org/name:Q4_K_M")
    if lacking := optional_dependencies.missing(needs(names)):
        raise CheckpointError(lacking)
    for name in names:
        path = find_model(name)
        print(f"{on_one_line(name)} is in {on_one_line(str(path))} ({_count(size_of([path]))}B)")


def rm(request: ListRequest, names: list[str]) -> None:
    """Remove models, or short names, once the person at the keys has said so."""
    from specdec.cli.model_catalog import places

    if not names:
        raise ValueError("rm what? expected a name that specdec models lists")
    there = dict(reversed([*places()]))
    for name in names:
        if name in short_names():
            print(f"{on_one_line(name)} stands for nothing any more ({name_model(name, '')})")
            continue
        path = None if name in there else here(name)  # by a name without its ending
        name = next((listed for listed, at in there.items() if at == path and listed.startswith(Path(name).name)), name)
        if name not in there:
            raise CheckpointError(f"there is no {on_one_line(name)} here; specdec models lists what there is")
        files = files_of(there[name])
        told = f"{on_one_line(name)} ({_count(size_of(files))}B, {on_one_line(str(files[0]))})"
        if not request.yes and not typer.confirm(f"remove {told}?", err=True):
            raise typer.Exit(1)
        remove(files)
        print(f"removed {told}")


def name(request: ListRequest, names: list[str]) -> None:
    """Let a short name stand for a model."""
    if len(names) != 2:
        raise ValueError("name takes a short name and the model that it is: name small org/name:Q4_K_M")
    print(f"{names[0]} stands for {on_one_line(names[1])} ({name_model(*names)})")


def list_all(request: ListRequest, folder: str) -> None:
    """What is there."""
    from specdec.cli.model_catalog import entries, row_of  # which nothing else needs

    with loading("looking at models"):
        found = entries((here(folder) or Path(folder)) if folder else None)
        rows = [row_of(entry, found) for entry in found if entry.config]
    broken = [entry for entry in found if entry.flaw]
    short = {} if folder else short_names()
    if request.as_json:
        unreadable = [{"name": entry.name, "flaw": entry.flaw} for entry in broken]
        print(json.dumps({"models": rows, "unreadable": unreadable, "names": short}))
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
            _count(row["parameters"])
            + (f", {_count(row['parameters_read'])} read" if row["parameters_read"] < row["parameters"] else ""),
            f"{_count(row['bytes'])}B",
            str(row["vocabulary"]),
            _of_head(row["head"], told) if row["head"] else told(*(row["drafts"] or (*[SELF][: row["self"]], NGRAM))),
        )
    console = Console()
    console = console if console.is_terminal else Console(width=WIDEST)
    if rows:
        console.print(table)
    for entry in broken:
        console.print(Text(on_one_line(f"cannot be used: {entry.flaw}")), soft_wrap=True)
    for each, meant in short.items():
        console.print(Text(on_one_line(f"{each} stands for {meant}")), soft_wrap=True)


DEEDS = {"pull": pull, "rm": rm, "name": name}
LIST = ("list", "ls")  # as other programs have it


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
