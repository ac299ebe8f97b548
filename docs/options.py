"""Writes the tables of docs/options.md from the options themselves: python docs/options.py [FILE]"""

import re
import sys
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec.cli.main import app

PAGE = Path(__file__).with_name("options.md")
BEGIN, END = "<!-- made by docs/options.py -->\n", "<!-- end of what is made -->\n"
BLANK = "\n\n"


def main(file: str = str(PAGE)) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    Path(file).write_text(before + BEGIN + tables() + "\n" + END + rest.split(END)[1], encoding="utf-8")


def tables() -> str:
    """A section for each command, the one without a name first; what the others share with it stands there once."""
    command: Any = typer.main.get_command(app)
    parts = [section(f"specdec {name}", found, rows(command)) for name, found in command.commands.items()]
    return section("specdec", command, {}) + "".join(parts)


def section(name: str, command: Any, above: dict[str, str]) -> str:
    told = rows(command)
    shared = [option for option, line in told.items() if above.get(option) == line]
    own = "".join(line for option, line in told.items() if option not in shared)
    text = f"\n## {name}\n\n{' '.join(command.help.split(BLANK)[0].split())}\n"
    if own:
        text += f"\n| option | meaning | default |\n| --- | --- | --- |\n{own}"
    return text + (f"\nAs for `specdec`: {', '.join(f'`{option}`' for option in shared)}.\n" if shared else "")


def rows(command: Any) -> dict[str, str]:
    """By their first names; without those that every Typer program has."""
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    return {param.opts[0]: row(param) for param in params if "completion" not in param.name}


def row(param: Any) -> str:
    """A line of the table; a default that the help names itself goes into its column."""
    told = Text.from_markup(param.help or "").plain
    meaning, given = re.fullmatch(r"(.*?)(?: \[default: (.*)\])?", told, re.DOTALL).groups()  # type: ignore[union-attr]
    is_told = param.show_default and param.default not in (None, "") and param.default is not False
    default = given or (str(param.default) if is_told else "")
    cells = ", ".join(names(param)), meaning, f"`{default}`" if default else ""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |\n"


def names(param: Any) -> list[str]:
    """As a command line has them; what an option takes stands behind its last name."""
    if param.param_type_name == "argument":
        return [f"`{param.metavar}`"]
    *others, last = param.opts
    return [*(f"`{name}`" for name in others), f"`{last} {param.metavar or ''}".rstrip() + "`"]


if __name__ == "__main__":
    main(*sys.argv[1:])
