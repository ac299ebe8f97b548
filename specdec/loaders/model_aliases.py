"""Aliases of models in the user's config file, one per line: `small HuggingFaceTB/SmolLM2-135M-Instruct`."""

import os
from pathlib import Path

from specdec.argument_checks import CheckpointError, decode_text
from specdec.loaders.model_file import write_text_atomically

MAX_FILE_BYTES = 100_000


def get_alias_file() -> Path:
    """Return the path of the file in the user's config folder that holds model aliases; it may not exist."""
    if os.name == "nt":
        return Path(os.environ.get("APPDATA") or os.path.expanduser("~"), "specdec", "names")
    config = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(config if os.path.isabs(config) else os.path.expanduser("~/.config"), "specdec", "names")


def read_aliases() -> dict[str, str]:
    """Read the user's alias file into a dict from alias to model name; {} if there is no file.

    Empty lines and lines that begin with # are skipped.

    Raises:
        CheckpointError: The file cannot be read, or a line has no model.
    """
    aliases = dict[str, str]()
    for i, line in enumerate(_read_lines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            alias, _, model = line.strip().partition(" ")
            if not model.strip():
                raise CheckpointError(f"{get_alias_file()}:{i}: {alias[:80]!r} has no model; expected an alias and a model")
            aliases[alias] = model.strip()
    return aliases


def set_alias(alias: str, model: str) -> Path:
    """Add, change or remove an alias for a model in the user's alias file, and return the path of the file.

    Other lines of the file stay as they are. Creates the file if there is none.

    Args:
        alias: The alias, without white space, slashes, backslashes, colons and #.
        model: Name or path of the model; "" removes the alias.

    Raises:
        CheckpointError: The alias is not valid, or the file cannot be read or written.
    """
    if not alias or not alias.isprintable() or any(letter.isspace() or letter in "/\\:#" for letter in alias):
        raise CheckpointError(f"{alias[:80]!r} is not a valid alias; expected letters and digits, without / and :")
    path = get_alias_file()
    lines = [line for line in _read_lines() if line.strip().partition(" ")[0] != alias] + ([f"{alias} {model}"] if model else [])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
    return path


def _read_lines() -> list[str]:
    """Return the lines of the alias file, [] if there is none; raise CheckpointError if it cannot be read or is not UTF-8."""
    path = get_alias_file()
    try:
        with path.open("rb") as file:
            return decode_text(file.read(MAX_FILE_BYTES)).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
