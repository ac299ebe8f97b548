"""`specdec models`: lists the installed models and the drafts that fit, and downloads, removes or aliases models."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from specdec.cli.common_options import AS_JSON, Request
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import guard_output
from specdec.cli.resolve_with_progress import find_model
from specdec.draft.model_bundle import LOOKUP, SELF
from specdec.loaders import CheckpointError, hf_hub, optional_dependencies
from specdec.loaders.model_aliases import read_aliases, set_alias
from specdec.loaders.model_paths import find_local, find_required_packages
from specdec.loaders.model_removal import compute_total_bytes, delete_files, list_model_files
from specdec.loaders.packed_weights import ON, PackedModel, open_packed_weights
from specdec.ui.plain_views import sanitize_line
from specdec.ui.progress import show_status
from specdec.ui.text_layout import cell_width

ACTIONS_HELP = "pull NAME, rm NAME, name SHORT NAME, clean"
# Columns in the order in which a narrow terminal leaves them out.
OPTIONAL_COLUMNS = "KV/token", "vocabulary", "memory", "read/token", "as draft", "weights", "shape", "drafts that fit"
COLUMN_GAP = "  "
NO_MODELS_MESSAGE = "no models found in models/ or in the hub's cache; download one with: specdec models pull org/name"


@dataclass(frozen=True, kw_only=True)
class ModelsRequest(Request):
    """The options of `specdec models`."""

    what: list[str] | None = argument("WHAT", f"A folder or a model to list, or an action: {ACTIONS_HELP}.")
    yes: bool = option(False, "-y, --yes", "Output", "Remove without asking.")
    as_json: bool = AS_JSON


def run(request: ModelsRequest) -> None:
    """List installed models with shapes, sizes, vocabularies and matching drafts; download or remove models.

    specdec models lists models/ and the hub cache; specdec models FOLDER lists a folder.

    specdec models pull org/name:Q4_K_M downloads a model; specdec models rm NAME removes one.

    specdec models clean removes the packed weights that --weight-cache keeps; loading a model keeps them again.

    specdec models name SHORT NAME makes SHORT an alias that works in every command; rm SHORT removes it.

    A draft matches a target that has the same vocabulary and at least twice its size.
    A head matches models of its width and vocabulary.
    For a mixture of experts, the table also shows how many weights a token reads.
    memory is the size of the weights in memory, without --quantize; read/token is how much of it a token reads.
    as draft is the weight format of a model that fits as a draft, its memory and about how long loading it takes.
    KV/token is the memory of a token in the KV cache in f16.
    """
    what, *names = request.what or [""]
    with guard_output():
        if what in ACTIONS:
            ACTIONS[what](request, names)
        elif what in LIST_WORDS and not (names or os.path.exists(what)):
            list_models(request, "")
        elif names:
            raise ValueError(f"unexpected argument {names[0]!r}; expected FOLDER, or {ACTIONS_HELP}")
        else:
            list_models(request, what)


def pull_models(request: ModelsRequest, names: list[str]) -> None:
    """Download the named models that are not installed yet, and print the path and size of each.

    Raises:
        ValueError: No name is given.
        CheckpointError: A package is missing, or a model cannot be downloaded.
    """
    if not names:
        raise ValueError("pull needs the name of a model on the hub: specdec models pull org/name, or org/name:Q4_K_M")
    if missing := optional_dependencies.format_missing_packages(find_required_packages(names)):
        raise CheckpointError(missing)
    for name in names:
        path = find_model(name)
        print(f"{sanitize_line(name)} is in {sanitize_line(str(path))} ({_format_count(compute_total_bytes([path]))}B)")


def remove_models(request: ModelsRequest, names: list[str]) -> None:
    """Delete the files of the named models, each after the user confirms, or remove aliases, and print what was removed.

    Raises:
        ValueError: No name is given.
        CheckpointError: A model is not installed.
        typer.Exit: The user declines.
    """
    from specdec.draft.installed_models import list_installed

    if not names:
        raise ValueError("rm needs the name of an installed model; specdec models lists them")
    installed = dict(reversed([*list_installed()]))
    for name in names:
        if name in read_aliases():
            print(f"removed the alias {sanitize_line(name)} ({set_alias(name, '')})")
            continue
        path = None if name in installed else find_local(name)  # by a name without its ending
        name = next(
            (listed for listed, listed_path in installed.items() if listed_path == path and listed.startswith(Path(name).name)),
            name,
        )
        if name not in installed:
            raise CheckpointError(f"model {sanitize_line(name)!r} not found; specdec models lists the installed ones")
        files = list_model_files(installed[name])
        description = f"{sanitize_line(name)} ({_format_count(compute_total_bytes(files))}B, {sanitize_line(str(files[0]))})"
        if not request.yes and not typer.confirm(f"remove {description}?", err=True):
            raise typer.Exit(1)
        delete_files(files)
        delete_packed(installed[name], installed[name].resolve())
        print(f"removed {description}")


def add_alias(request: ModelsRequest, names: list[str]) -> None:
    """Make the first name an alias of the model with the second name, and print it.

    A relative path is stored as an absolute one, so that the alias works in every folder.

    Raises:
        ValueError: The names are not two.
        CheckpointError: The model is not found, the alias is not valid, or its file cannot be written.
    """
    if len(names) != 2:
        raise ValueError("name needs an alias and a model: specdec models name small org/name:Q4_K_M")
    alias, model = names
    if os.path.exists(model):
        model = os.path.abspath(model)
    elif not (find_local(model) or hf_hub.is_repository_name(model)):
        raise CheckpointError(f"model {sanitize_line(model)!r} not found; expected a path, an installed model or org/name")
    print(f"{alias} is an alias of {sanitize_line(model)} ({set_alias(alias, model)})")


def clean_packed_weights(request: ModelsRequest, names: list[str]) -> None:
    """Delete the packed weights in the default folder, and print how much that frees.

    Raises:
        ValueError: A name is given.
    """
    if names:
        raise ValueError(
            f"clean removes the packed weights of all models, got {names[0]!r}; rm NAME removes a model with its own"
        )
    files = delete_packed()
    n_models = len({each.model for each in files})
    print(f"removed the packed weights of {n_models} model{'s' * (n_models != 1)} ({_format_bytes(files)})")


def list_packed() -> list[PackedModel]:
    """Return the packed weights in the default folder."""
    cache = open_packed_weights(ON)
    return cache.list_models() if cache else []


def delete_packed(*models: Path) -> list[PackedModel]:
    """Delete the packed weights of models, or all in the default folder, and return them."""
    cache = open_packed_weights(ON)
    found = [each for each in list_packed() if not models or Path(each.model) in models]
    for each in found:
        if cache:
            cache.delete(each)
    return found


def _format_bytes(files: Sequence[PackedModel]) -> str:
    return f"{_format_count(sum(each.n_bytes for each in files))}B"


def list_models(request: ModelsRequest, folder: str) -> None:
    """Print the installed models and aliases, or the models of a folder, with the drafts that fit, as a table or JSON."""
    from specdec.draft.installed_models import list_entries, make_row  # imported here, since no other action needs it

    with show_status("reading models"):
        found = list_entries((find_local(folder) or Path(folder)) if folder else None)
        rows = [make_row(entry, found) for entry in found if entry.config]
    broken = [entry for entry in found if entry.error]
    aliases = {} if folder else read_aliases()
    packed = [] if folder else list_packed()
    if request.as_json:
        unreadable = [{"name": entry.name, "flaw": entry.error} for entry in broken]
        kept = [{"model": each.model, "path": str(each.path), "bytes": each.n_bytes} for each in packed]
        print(json.dumps({"models": rows, "unreadable": unreadable, "names": aliases, "packed": kept}))
        return
    if not (rows or broken):
        print(f"no models in {sanitize_line(folder)}" if folder else NO_MODELS_MESSAGE)
    console = Console()
    prefix = f"{Path(folder)}{os.sep}" if folder else ""
    for line in make_table([_make_cells(row, prefix) for row in rows], console.width if console.is_terminal else None):
        console.print(Text(line), soft_wrap=True)
    for entry in broken:
        console.print(Text(sanitize_line(f"cannot be used: {entry.error}")), soft_wrap=True)
    for alias, name in aliases.items():
        note = "" if find_local(name) else ", which is not on this machine"
        console.print(Text(sanitize_line(f"{alias} is an alias of {name}{note}")), soft_wrap=True)
    if packed:
        names = ", ".join(sorted({Path(each.model).name or "an unknown model" for each in packed}))
        line = f"packed weights ({_format_bytes(packed)}): {names}; specdec models clean removes them"
        console.print(Text(sanitize_line(line)), soft_wrap=True)


ACTIONS = {"pull": pull_models, "rm": remove_models, "name": add_alias, "clean": clean_packed_weights}
LIST_WORDS = ("list", "ls")  # other programs' names of the same action


def make_table(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """Return a heading and one line for each row, with as many columns as fit; names stay whole, to be copied.

    Args:
        rows: The cells of each model by column; the first column is always shown.
        width: Cells of a line; None for any number.
    """
    for n_left_out in range(len(OPTIONAL_COLUMNS) + 1):
        columns = [name for name in rows[0] if name not in OPTIONAL_COLUMNS[:n_left_out]] if rows else []
        cells = [columns, *([row[name] for name in columns] for row in rows)]
        widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
        if width is None or sum(widths) + len(COLUMN_GAP) * (len(widths) - 1) <= width:
            break
    lines = [
        COLUMN_GAP.join(text + " " * (n - cell_width(text)) for text, n in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    if rows and n_left_out:
        lines.append("a wider terminal shows more columns, --json shows all")
    return lines if rows else []


def _make_cells(row: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the texts of a model's row by column.

    Args:
        row: The dict of `make_row`.
        prefix: Path in front of names, which is left out.
    """

    def join(names: Sequence[str]) -> str:
        return ", ".join(name.removeprefix(prefix) for name in names)

    read = f", {_format_count(row['parameters_read'])} read" if row["parameters_read"] < row["parameters"] else ""
    if head := row["head"]:
        min_layers = f", of {max(head['layers'])} layers or more" if head["layers"] else ""
        targets = head["targets"] or [f"models {head['width']} wide{min_layers}"]
        drafts = f"for {join(targets)}"
    else:
        drafts = join(row["drafts"] or [*[SELF][: row["self"]], LOOKUP])
    as_draft = row["as_draft"]
    memory = _format_count(as_draft["memory_bytes"])
    cells = {
        "model": join([row["name"]]),
        "shape": f"{row['family']} {row['layers']} x {row['dim']}",
        "weights": _format_count(row["parameters"]) + read,
        "file": f"{_format_count(row['bytes'])}B",
        "memory": f"{_format_count(row['memory_bytes'])}B",
        "read/token": f"{_format_count(row['bytes_per_token'])}B",
        "KV/token": f"{_format_count(row['kv_bytes_per_token'])}B",
        "vocabulary": str(row["vocabulary"]),
        "as draft": f"{as_draft['weights']}, {memory}B, {as_draft['load_seconds']:.1f} s" if as_draft["fits"] else "",
        "drafts that fit": drafts,
    }
    return {name: sanitize_line(text) for name, text in cells.items()}


def _format_count(n: int) -> str:
    """Return a number as text in thousands, millions or billions, such as "1.5 G" or "135 M", so that a unit may follow."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.1f} {name}" if n < 10 * unit else f"{n / unit:.0f} {name}"
    return f"{n} "
