"""Names are the field's: no identifier and no file name has a word that docs/glossary.md replaced."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.package import ROOT

# Private words of earlier versions. Each stood for one of the terms of docs/glossary.md.
RETIRED_WORDS = {
    "asked", "beside", "flaw", "flaws", "judge", "odds", "quads", "said", "seat", "seats", "shelf", "slips", "spelled",
    "strangers", "strips", "talk", "talks", "team", "tell", "telling", "tells", "told", "wants", "whoever", "whose",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FILES = sorted(path for folder in ("specdec", "tests", "models", "docs") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_BYTES = 1_000_000


def words_of(name: str) -> set[str]:
    """Return the words of a name, split at underscores and capitals."""
    return {word.lower() for word in WORD.findall(name)}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module defines: functions, classes, parameters, variables, attributes and aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_has_a_retired_word(path: Path) -> None:
    names = {*defined_names(ast.parse(path.read_text(encoding="utf-8"))), *path.relative_to(ROOT).with_suffix("").parts}
    assert {name for name in names if words_of(name) & RETIRED_WORDS} == set()


def test_a_retired_word_is_found_wherever_it_is_defined() -> None:
    source = "class TellSeat:\n    def f(self, whose=1):\n        self.odds = 1\nfor told in (): pass\nimport os as team\n"
    found = {name for name in defined_names(ast.parse(source)) if words_of(name) & RETIRED_WORDS}
    assert found == {"TellSeat", "whose", "odds", "told", "team"}


def test_no_tracked_file_is_large_outside_the_models() -> None:
    """The history keeps every file that was ever committed: a wheel of 53 MB weighs on each full clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name and not name.startswith("models/")]
    assert {str(path) for path in paths if path.is_file() and path.stat().st_size > MAX_FILE_BYTES} == set()


# Words of earlier prose; docs/glossary.md and plain English have better ones.
RETIRED_PROSE = re.compile(r"\b(beside|told|tells|whoever|seats?|so many|of which|not done here)\b", re.IGNORECASE)
PROSE = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "models/*.md", "specdec/**/*.py", "models/*.py", "docs/*.py", "examples/*.py")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_has_a_retired_word(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    stories = "**Temperature"  # outputs of the embedded pair
    assert [line for line in lines if RETIRED_PROSE.search(line) and not line.startswith(stories)] == []


def test_a_retired_word_in_a_sentence_is_found() -> None:
    assert RETIRED_PROSE.search("Beside it lies another.") and not RETIRED_PROSE.search("besides, a teller")
