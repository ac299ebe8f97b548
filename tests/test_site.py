"""The documentation's site: every page is in its navigation, and links to source files lead to the repository."""

import importlib.util
import re
from types import ModuleType

import pytest

import specdec
from tests.tools.package import ROOT

REPO = "https://example.com/owner/specdec"


def load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()


def test_navigation_has_every_page() -> None:
    listed = re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted({*pages, *HOOKS.GENERATED_PAGES})
    assert all((ROOT / source).exists() for source in HOOKS.GENERATED_PAGES.values())


@pytest.mark.parametrize(
    ("path", "source", "link", "expected"),
    [
        ("why.md", "docs/why.md", "../specdec/kernels.py", f"{REPO}/blob/HEAD/specdec/kernels.py"),
        ("why.md", "docs/why.md", "../specdec", f"{REPO}/tree/HEAD/specdec"),
        ("why.md", "docs/why.md", "options.py", f"{REPO}/blob/HEAD/docs/options.py"),
        ("why.md", "docs/why.md", "chat.md#models", "chat.md#models"),
        ("why.md", "docs/why.md", "../README.md#the-code", "index.md#the-code"),
        ("why.md", "docs/why.md", "#here", "#here"),
        ("experiments/heads.md", "docs/experiments/heads.md", "../../models/README.md", "../embedded-pair.md"),
        ("index.md", "README.md", "docs/chat.md", "chat.md"),
        ("index.md", "README.md", "docs/race.svg", "race.svg"),
        ("index.md", "README.md", "LICENSE", f"{REPO}/blob/HEAD/LICENSE"),
        ("index.md", "README.md", "https://example.com/a", "https://example.com/a"),
        ("embedded-pair.md", "models/README.md", "../docs/heads.md", "heads.md"),
        ("embedded-pair.md", "models/README.md", "train.py", f"{REPO}/blob/HEAD/models/train.py"),
        ("index.md", "README.md", "../../issues", None),
    ],
)
def test_link_leads_to_page_or_repository(path: str, source: str, link: str, expected: str | None) -> None:
    assert HOOKS.resolve_link(link, path, source, REPO) == expected


def test_link_to_source_file_becomes_its_text_without_repository() -> None:
    page = "See [`a.py`](../specdec/a.py), [chat](chat.md) and ![x](panel.svg).\n"
    assert HOOKS.rewrite_links(page, "why.md", "docs/why.md", "") == "See `a.py`, [chat](chat.md) and ![x](panel.svg).\n"


def test_links_in_code_stay_and_images_in_links_are_rewritten() -> None:
    code = "`[a](../b.py)`\n```sh\n[a](../b.py)\n```\n"
    assert HOOKS.rewrite_links(code, "why.md", "docs/why.md", REPO) == code
    badge = '[![race](docs/race.svg)](docs/chat.md) <img src="docs/race.svg">'
    expected = '[![race](race.svg)](chat.md) <img src="race.svg">'
    assert HOOKS.rewrite_links(badge, "index.md", "README.md", REPO) == expected


def test_api_page_has_every_public_class() -> None:
    listed = re.findall(r"^::: specdec\.(\w+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(specdec.__all__)


def test_citation_has_the_version() -> None:
    assert f"\nversion: {specdec.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_links_of_llms_txt_resolve() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["AGENTS.md", "CONTRIBUTING.md"])
def test_paths_in_instructions_exist(name: str) -> None:
    paths = re.findall(r"`((?:specdec|tests|docs|models)/[\w/.]*)`", (ROOT / name).read_text(encoding="utf-8"))
    assert paths and [path for path in paths if not (ROOT / path).exists() and "a/" not in path] == []
