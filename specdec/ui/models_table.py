"""The table of `specdec models`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.loaders.model_paths import find_local
from specdec.loaders.packed_weights import PackedModel
from specdec.ui.plain_views import sanitize_line
from specdec.ui.text_layout import cell_width, format_count

# Columns in the order in which a narrow terminal leaves them out.
OPTIONAL_COLUMNS = "KV/token", "vocabulary", "memory", "read/token", "as draft", "weights", "shape", "drafts that fit"
COLUMN_GAP = "  "


def make_table(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """Return a heading and one line for each row, with as many columns as fit; names stay whole, to be copied.

    Args:
        rows: The cells of each model by column; the first column is always shown.
        width: Cells of a line; None for any number.
    """
    if not rows:
        return []
    for n_left_out in range(len(OPTIONAL_COLUMNS) + 1):
        columns = [name for name in rows[0] if name not in OPTIONAL_COLUMNS[:n_left_out]]
        cells = [columns, *([row[name] for name in columns] for row in rows)]
        widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
        if width is None or sum(widths) + len(COLUMN_GAP) * (len(widths) - 1) <= width:
            break
    lines = list[str]()
    for line in cells:
        padded = [text + " " * (n - cell_width(text)) for text, n in zip(line, widths, strict=True)]
        lines.append(COLUMN_GAP.join(padded).rstrip())
    if n_left_out:
        lines.append("a wider terminal shows more columns, --json shows all")
    return lines


def make_cells(row: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the texts of a model's row by column.

    Args:
        row: The dict of `make_row`.
        prefix: Path in front of names, which is left out.
    """

    def join(names: Sequence[str]) -> str:
        return ", ".join(name.removeprefix(prefix) for name in names)

    read = f", {format_count(row['parameters_read'])} read" if row["parameters_read"] < row["parameters"] else ""
    if head := row["head"]:
        min_layers = f", of {max(head['layers'])} layers or more" if head["layers"] else ""
        targets = head["targets"] or [f"models {head['width']} wide{min_layers}"]
        drafts = f"for {join(targets)}"
    else:
        drafts = join(row["drafts"] or [*["self"][: row["self"]], "lookup"])
    as_draft = row["as_draft"]
    memory = format_count(as_draft["memory_bytes"])
    cells = {
        "model": join([row["name"]]),
        "shape": f"{row['family']} {row['layers']} x {row['dim']}",
        "weights": format_count(row["parameters"]) + read,
        "file": f"{format_count(row['bytes'])}B",
        "memory": f"{format_count(row['memory_bytes'])}B",
        "read/token": f"{format_count(row['bytes_per_token'])}B",
        "KV/token": f"{format_count(row['kv_bytes_per_token'])}B",
        "vocabulary": str(row["vocabulary"]),
        "as draft": f"{as_draft['weights']}, {memory}B, {as_draft['load_seconds']:.1f} s" if as_draft["fits"] else "",
        "drafts that fit": drafts,
    }
    return {name: sanitize_line(text) for name, text in cells.items()}


def format_notes(aliases: Mapping[str, str], packed: Sequence[PackedModel]) -> list[str]:
    """Return the lines below the table, on aliases and on the packed weights on disk.

    Args:
        aliases: The name of the model of each alias.
        packed: The files of packed weights.
    """
    notes = list[str]()
    for alias, name in aliases.items():
        notes.append(f"{alias} is an alias of {name}{'' if find_local(name) else ', which is not on this machine'}")
    if packed:
        names = ", ".join(sorted({Path(each.model).name or "an unknown model" for each in packed}))
        notes.append(f"packed weights ({format_total_bytes(packed)}): {names}; specdec models clean removes them")
    return notes


def format_total_bytes(packed: Sequence[PackedModel]) -> str:
    """Return the size of files of packed weights as text, such as "1.2 GB"."""
    return f"{format_count(sum(each.n_bytes for each in packed))}B"
