"""The documents: what they link to is there, the options they list are the program's, and the first one stays short."""

import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.test_package import MAY_IMPORT, ROOT

README_BYTES = 9_000
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "models/README.md"]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@functools.cache
def anchors(text: str) -> list[str]:
    """Of a document's headings, as GitHub makes them: in lower case, without punctuation, doubles with a number."""
    found, seen = list[str](), Counter[str]()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.append(f"{words}-{seen[words]}" if seen[words] else words)
        seen[words] += 1
    return found


def broken_links(document: Path) -> list[str]:
    """What a document links to in this repository and nobody finds: files, and headings in them."""
    text, broken = document.read_text(encoding="utf-8"), list[str]()
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `thing`, two\n## Again\n## Again\n[a](page.md#one-thing-two) [b](#again-1) [c](#three) [d](gone.md)\n")
    assert broken_links(page) == ["#three", "gone.md"]


def test_every_page_is_reached_from_the_first_one() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in names(DOCUMENTS) if f"]({name}" not in readme and name != "README.md"] == []


def test_every_note_stands_in_the_index_and_the_newest_is_last() -> None:
    index, *notes = re.split(r"^## (?=\d)", (ROOT / "NOTES.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = [note.splitlines()[0] for note in notes]
    missing = [line for line in map(as_in_the_index, titles) if line not in index]
    assert not missing, f"the index of NOTES.md lacks {'; '.join(missing)}"
    assert titles == sorted(titles, key=lambda title: title.split(":")[0])


def as_in_the_index(title: str) -> str:
    return f"[{title.partition(': ')[2]}](#{anchors(f'# {title}')[0]})"


def test_the_first_page_has_a_row_for_every_folder() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = [f"`{name}/`" if (ROOT / "specdec" / name).is_dir() else f"`{name}.py`" for name in MAY_IMPORT if name != "specdec"]
    assert [path for path in paths if path not in readme] == []


def test_what_the_map_of_the_house_points_to_is_there() -> None:
    rows = re.findall(
        r"^\|.*\| `(\w+)` \| .*\]\(\.\./(.*)\) \|$", (ROOT / "docs/house.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) >= 10
    for name, path in rows:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def {name}\(|class {name}\b|{name}\b.*=)", text, re.MULTILINE), f"{path} has no {name}"


def test_the_first_page_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


def test_the_page_of_options_is_made_of_the_options(tmp_path: Path) -> None:
    made = tmp_path / "options.md"
    subprocess.run([sys.executable, ROOT / "docs/options.py", made], check=True)
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert made.read_text(encoding="utf-8") == page, "an option has changed: python docs/options.py writes the page anew"
