"""The packages of the extra `hub`, which may be missing: looked for by name before anything is loaded or downloaded."""

import importlib.util
from collections.abc import Mapping

INSTALL = 'pip install ".[hub]"'  # in the checkout; brings all three
TOKENIZERS, HUB, JINJA = "tokenizers", "huggingface_hub", "jinja2"


def has(package: str) -> bool:
    """Whether it is installed; nothing is loaded."""
    return importlib.util.find_spec(package) is not None


def missing(needs: Mapping[str, str]) -> str:
    """What to say of the packages that are not installed; "" where all are. needs: what each is for, as in "to fetch X"."""
    gone = [f"{package}, {purpose}" for package, purpose in needs.items() if not has(package)]
    plural = "a package is" if len(gone) == 1 else "packages are"
    return f"{plural} missing: {'; '.join(gone)}; {INSTALL}" if gone else ""
