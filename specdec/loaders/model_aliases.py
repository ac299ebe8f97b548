"""Short names of one's own for models, in a file of a line each: `small HuggingFaceTB/SmolLM2-135M-Instruct`."""

import os
from pathlib import Path

from specdec.families.config_values import CheckpointError
from specdec.loaders.json_file import replace_text

MOST_BYTES = 100_000


def names_file() -> Path:
    """Where they are kept."""
    if os.name == "nt":
        return Path(os.environ.get("APPDATA") or os.path.expanduser("~"), "specdec", "names")
    config = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(config if os.path.isabs(config) else os.path.expanduser("~/.config"), "specdec", "names")


def short_names() -> dict[str, str]:
    """The names, and what they stand for; empty lines and those that begin with # are passed over. Raises CheckpointError."""
    names = dict[str, str]()
    for i, line in enumerate(_lines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            short, _, model = line.strip().partition(" ")
            if not model.strip():
                raise CheckpointError(
                    f"{names_file()}:{i}: {short[:80]!r} stands for nothing; expected a name and the model that it is"
                )
            names[short] = model.strip()
    return names


def name_model(short: str, model: str) -> Path:
    """Let a name stand for a model, "" for none any more. The file, of which other lines stay. Raises CheckpointError."""
    if not short or not short.isprintable() or any(letter.isspace() or letter in "/\\:#" for letter in short):
        raise CheckpointError(f"{short[:80]!r} can be no short name; expected letters and digits, without / and :")
    path = names_file()
    lines = [line for line in _lines() if line.strip().partition(" ")[0] != short] + ([f"{short} {model}"] if model else [])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
    return path


def _lines() -> list[str]:
    path = names_file()
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8'}") from None
