"""The documentation: links resolve, the options page matches the program, and the README stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.documentation import find_broken_links
from tests.tools.package import MODULES, ROOT, get_folder

README_BYTES = 8_000
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "models/README.md"]
EXPERIMENTS = ROOT / "docs/experiments"


def relative_names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_names(DOCUMENTS))
def test_links_resolve(document: Path) -> None:
    assert find_broken_links(document) == []


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `thing`, two\n## Again\n## Again\n[a](page.md#one-thing-two) [b](#again-1) [c](#three) [d](gone.md)\n")
    assert find_broken_links(page) == ["#three", "gone.md"]


def test_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [document for document in DOCUMENTS if document.parent != EXPERIMENTS or document.name == "README.md"]
    assert [name for name in relative_names(pages) if f"]({name}" not in readme and name != "README.md"] == []


def test_every_experiment_is_in_the_index_with_its_title() -> None:
    index = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in EXPERIMENTS.glob("*.md")}
    del titles["README.md"]
    missing = [entry for entry in (f"[{title}]({name})" for name, title in titles.items()) if entry not in index]
    assert titles and not missing, f"docs/experiments/README.md lacks {'; '.join(missing)}"


def test_architecture_has_row_for_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = {get_folder(module) for module in MODULES} - {"specdec"}
    paths = [f"`{name}/`" if (ROOT / "specdec" / name).is_dir() else f"`{name}.py`" for name in folders]
    assert [path for path in paths if path not in page] == []


def test_architecture_map_points_to_existing_names() -> None:
    rows = re.findall(
        r"^\|.*\| `(\w+)` \| .*\]\(\.\./(.*)\) \|$", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) >= 10
    for name, path in rows:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def {name}\(|class {name}\b|{name}\b.*=)", text, re.MULTILINE), f"{path} has no {name}"


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


def test_options_page_is_generated_from_options(tmp_path: Path) -> None:
    generated = tmp_path / "options.md"
    subprocess.run([sys.executable, ROOT / "docs/options.py", generated], check=True)
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert generated.read_text(encoding="utf-8") == page, "an option has changed; run python docs/options.py"


def test_other_machines_run_tests_that_exist() -> None:
    """A file or a word that a test was once called by would select nothing there, and nobody would see it here."""
    script = (ROOT / "tests/tools/other_machines.sh").read_text()
    paths = [re.sub(r"{.*}", name, path) for path in re.findall(r"tests/(?!tools)\S+", script) for name in get_brace_names(path)]
    files = [path for path in paths if (ROOT / path).is_file()]
    assert {*paths} - {*files} == {"tests/quant"}
    texts = " ".join(path + (ROOT / path).read_text() for path in files)
    words = {word for line in re.findall(r'-k "(.*)"', script) for word in re.findall(r"\w+", line)} - {"and", "or"}
    assert len(words) > 5 and [word for word in words if word not in texts] == []


def get_brace_names(path: str) -> list[str]:
    """Return the alternatives of a shell path like test_{a,b}.py; one empty string if there are none."""
    return (re.findall(r"{(.*)}", path) or [""])[0].split(",")
