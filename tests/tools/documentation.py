"""Links and examples of the documentation."""

import functools
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from tests.tools.package import ROOT

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@functools.cache
def get_anchors(text: str) -> list[str]:
    """Return the anchors of a document's headings as on GitHub: lower case, no punctuation, duplicates numbered."""
    found, seen = list[str](), Counter[str]()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.append(f"{words}-{seen[words]}" if seen[words] else words)
        seen[words] += 1
    return found


def find_broken_links(document: Path) -> list[str]:
    """Return the links of a document to missing files and headings of this repository."""
    text, broken = document.read_text(encoding="utf-8"), list[str]()
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in get_anchors(path.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def documented_examples() -> str:
    """Return the Python examples of the documentation."""
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/library.md"))
    blocks = re.findall(r"^```python\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    return "\n".join(blocks)
