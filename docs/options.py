"""Write the tables of docs/options.md from the command-line options: python docs/options.py [FILE]."""

import re
import sys
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec.cli.app import app

PAGE = Path(__file__).with_name("options.md")
BEGIN, END = "<!-- made by docs/options.py -->\n", "<!-- end of what is made -->\n"
PARAGRAPH_BREAK = "\n\n"


def main(file: str = str(PAGE)) -> None:
    """Write the page with new tables to a file."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    Path(file).write_text(before + BEGIN + make_tables() + "\n" + END + rest.split(END)[1], encoding="utf-8")


def make_tables() -> str:
    """Return a section for each command, the one without a name first; shared options are listed once, there."""
    command: Any = typer.main.get_command(app)
    parts = [make_section(f"specdec {name}", subcommand, make_rows(command)) for name, subcommand in command.commands.items()]
    return make_section("specdec", command, {}) + "".join(parts)


def make_section(name: str, command: Any, above: dict[str, str]) -> str:
    """Return the section of a command: its help, a table of its own options, and the options it shares with the table above."""
    rows = make_rows(command)
    shared = [option for option, line in rows.items() if above.get(option) == line]
    own = "".join(line for option, line in rows.items() if option not in shared)
    text = f"\n## {name}\n\n{' '.join(command.help.split(PARAGRAPH_BREAK)[0].split())}\n"
    if own:
        text += f"\n| option | meaning | default |\n| --- | --- | --- |\n{own}"
    return text + (f"\nAs for `specdec`: {', '.join(f'`{option}`' for option in shared)}.\n" if shared else "")


def make_rows(command: Any) -> dict[str, str]:
    """Return the table rows by first option name, without the options that every Typer program has."""
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    return {param.opts[0]: make_row(param) for param in params if "completion" not in param.name}


def make_row(param: Any) -> str:
    """Return a table row; a default named in the help goes into its column."""
    help_text = Text.from_markup(param.help or "").plain
    meaning, named_default = re.fullmatch(r"(.*?)(?: \[default: (.*)\])?", help_text, re.DOTALL).groups()  # type: ignore[union-attr]
    shows_default = param.show_default and param.default not in (None, "") and param.default is not False
    default = named_default or (str(param.default) if shows_default else "")
    cells = ", ".join(format_names(param)), meaning, f"`{default}`" if default else ""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |\n"


def format_names(param: Any) -> list[str]:
    """Return the option names as on a command line, with the metavar behind the last one."""
    if param.param_type_name == "argument":
        return [f"`{param.metavar}`"]
    *others, last = param.opts
    return [*(f"`{name}`" for name in others), f"`{last} {param.metavar or ''}".rstrip() + "`"]


if __name__ == "__main__":
    main(*sys.argv[1:])
