"""Hooks of mkdocs: pages from files outside docs/, and links from a page to the repository.

A page of docs/ links to source files (`../specdec/kernels.py`), which the site does not have. On the site such a link leads to
the repository, if `repo_url` is set, or else becomes its text. The pages themselves stay readable in a checkout.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the site that are files elsewhere in the repository, by their path on the site.
GENERATED_PAGES = {
    "index.md": "README.md",
    "embedded-pair.md": "models/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
PAGE_SUFFIXES = (".md", ".svg", ".png", ".gif", ".webp", ".cast")
EXTERNAL = re.compile(r"[a-z][a-z+.-]*:|//|#", re.IGNORECASE)
# Code first, so that what looks like a link in it stays. Text of a link may hold an image, which is a link in brackets too.
TEXT = r"(?:[^\[\]`]|`[^`]*`|\\.|!?\[[^\[\]]*\](?:\([^()\s]*\))?)*"
LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```+|~~~+).*?^ *(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    rf"|(?P<image>!?)\[(?P<text>{TEXT})\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)"
    r"|(?P<attribute>\b(?:src|srcset|href)=\")(?P<value>[^\"\s]+)\"",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages of GENERATED_PAGES that docs/ does not have itself."""
    from mkdocs.structure.files import File

    for path, source in GENERATED_PAGES.items():
        if (ROOT / source).exists() and files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Return the page with its links as the site needs them."""
    path = page.file.src_uri
    source = GENERATED_PAGES.get(path, f"docs/{path}") if page.file.generated_by else f"docs/{path}"
    return rewrite_links(markdown, path, source, config.repo_url or os.environ.get("REPO_URL", ""))


def rewrite_links(markdown: str, path: str, source: str, repo_url: str) -> str:
    """Return a page with the links of its source file turned into links of the site.

    Args:
        markdown: The text of the source file.
        path: The page's path on the site, such as "index.md".
        source: The source file's path in the repository, such as "README.md".
        repo_url: The address of the repository, or "": then links to its files become plain text.
    """

    def replace(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if match["attribute"]:
            value = resolve_link(match["value"], path, source, repo_url)
            return f'{match["attribute"]}{value or match["value"]}"'
        text = LINK.sub(replace, match["text"])
        target = resolve_link(match["target"], path, source, repo_url)
        return f"{match['image']}[{text}]({target}{match['title'] or ''})" if target else text

    return LINK.sub(replace, markdown)


def resolve_link(link: str, path: str, source: str, repo_url: str) -> str | None:
    """Return a link of a source file as the site's page needs it, or None if it leads nowhere from there."""
    if EXTERNAL.match(link):
        return link
    name, _, anchor = link.partition("#")
    anchor = anchor and f"#{anchor}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    pages = {origin: page for page, origin in GENERATED_PAGES.items()}
    on_site = pages.get(target) or (target.removeprefix("docs/") if is_on_site(target) else None)
    if on_site:
        return posixpath.relpath(on_site, posixpath.dirname(path) or ".") + anchor
    if target.startswith("..") or not repo_url:
        return None
    return f"{repo_url.rstrip('/')}/{'tree' if (ROOT / target).is_dir() else 'blob'}/HEAD/{target}{anchor}"


def is_on_site(target: str) -> bool:
    """Return whether mkdocs copies a file of the repository to the site."""
    return target.startswith("docs/") and target.endswith(PAGE_SUFFIXES)
