"""`specdec models`: lists the installed models and the drafts that fit, and downloads, removes or aliases models."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from specdec.cli.common_options import AS_JSON, Request
from specdec.cli.model_loading import find_model
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import guard_output
from specdec.loaders import CheckpointError, hf_hub, optional_dependencies
from specdec.loaders.model_aliases import read_aliases, set_alias
from specdec.loaders.model_paths import OPTIONAL_SUFFIXES, find_local, find_required_packages
from specdec.loaders.model_removal import compute_total_bytes, delete_files, list_model_files
from specdec.loaders.packed_weights import ON, delete_packed, open_packed_weights
from specdec.ui.models_table import format_notes, format_total_bytes, make_cells, make_table
from specdec.ui.plain_views import sanitize_line
from specdec.ui.progress import show_status
from specdec.ui.text_layout import format_count

ACTIONS_HELP = "pull NAME, rm NAME, name SHORT NAME, clean"
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
        print(f"{sanitize_line(name)} is in {sanitize_line(str(path))} ({format_count(compute_total_bytes([path]))}B)")


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
        full_name = next((name + suffix for suffix in ("", *OPTIONAL_SUFFIXES) if name + suffix in installed), "")
        if not full_name:
            raise CheckpointError(f"model {name!r} not found; specdec models lists the installed ones")
        path = installed[full_name]
        files = list_model_files(path)
        description = sanitize_line(f"{full_name} ({format_count(compute_total_bytes(files))}B, {files[0]})")
        if not request.yes and not typer.confirm(f"remove {description}?", err=True):
            raise typer.Exit(1)
        delete_files(files)
        delete_packed(path, path.resolve())
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
        raise CheckpointError(f"model {model!r} not found; expected a path, an installed model or org/name")
    print(f"{alias} is an alias of {sanitize_line(model)} ({set_alias(alias, model)})")


def clean_packed_weights(request: ModelsRequest, names: list[str]) -> None:
    """Delete the packed weights in the default folder, and print how much that frees.

    Raises:
        ValueError: A name is given.
    """
    if names:
        raise ValueError(f"clean takes no name, got {names[0]!r}; rm NAME removes a model with its packed weights")
    files = delete_packed()
    n_models = len({each.model for each in files})
    print(f"removed the packed weights of {n_models} model{'s' * (n_models != 1)} ({format_total_bytes(files)})")


def list_models(request: ModelsRequest, folder: str) -> None:
    """Print the installed models and aliases, or the models of a folder, with the drafts that fit, as a table or JSON."""
    from specdec.draft.installed_models import list_entries, make_row  # imported here, since no other action needs it

    with show_status("reading models"):
        found = list_entries((find_local(folder) or Path(folder)) if folder else None)
        rows = [make_row(entry, found) for entry in found if entry.config]
    broken = [entry for entry in found if entry.error]
    aliases = {} if folder else read_aliases()
    cache = None if folder else open_packed_weights(ON)
    packed = cache.list_models() if cache else []
    if request.as_json:
        unreadable = [{"name": entry.name, "flaw": entry.error} for entry in broken]
        kept = [{"model": each.model, "path": str(each.path), "bytes": each.n_bytes} for each in packed]
        print(json.dumps({"models": rows, "unreadable": unreadable, "names": aliases, "packed": kept}))
        return
    notes = [f"cannot be used: {entry.error}" for entry in broken]
    if not (rows or broken):
        notes.append(f"no models in {folder}" if folder else NO_MODELS_MESSAGE)
    notes += format_notes(aliases, packed)
    console = Console()
    prefix = f"{Path(folder)}{os.sep}" if folder else ""
    table = make_table([make_cells(row, prefix) for row in rows], console.width if console.is_terminal else None)
    print(*table, *map(sanitize_line, notes), sep="\n")


ACTIONS = {"pull": pull_models, "rm": remove_models, "name": add_alias, "clean": clean_packed_weights}
