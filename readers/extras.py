"""The packages of the extras, which may be missing: looked for by name before anything is loaded or downloaded."""

import importlib.util
from collections.abc import Iterable, Mapping

TOKENIZERS, HUB, JINJA, GUIDANCE = "tokenizers", "huggingface_hub", "jinja2", "llguidance"
STARLETTE, UVICORN = "starlette", "uvicorn"
_EXTRAS = {GUIDANCE: "shape", STARLETTE: "serve", UVICORN: "serve"}  # that bring them; all others come with "hub"


def has(package: str) -> bool:
    """Whether it is installed; nothing is loaded."""
    return importlib.util.find_spec(package) is not None


def install(packages: Iterable[str]) -> str:
    """What to type in the checkout for packages that are missing."""
    return f'pip install ".[{",".join(sorted({_EXTRAS.get(package, "hub") for package in packages}))}]"'


INSTALL = install([HUB])  # brings all three


def missing(needs: Mapping[str, str]) -> str:
    """What to say of the packages that are not installed; "" where all are. needs: what each is for, as in "to fetch X"."""
    gone = {package: purpose for package, purpose in needs.items() if not has(package)}
    told = "; ".join(f"{package}, {purpose}" for package, purpose in gone.items())
    return f"{'a package is' if len(gone) == 1 else 'packages are'} missing: {told}; {install(gone)}" if gone else ""
