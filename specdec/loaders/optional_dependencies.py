"""The packages of the extras, which may be missing: looked for by name before anything is loaded or downloaded."""

import importlib.util
from collections.abc import Iterable, Mapping

TOKENIZERS, HUB, JINJA, GUIDANCE = "tokenizers", "huggingface_hub", "jinja2", "llguidance"
STARLETTE, UVICORN = "starlette", "uvicorn"
OLDEST = {JINJA: "3.1.6"}  # whose sandbox holds


def has(package: str) -> bool:
    """Whether it is installed; nothing is loaded."""
    return importlib.util.find_spec(package) is not None


def install(packages: Iterable[str]) -> str:
    """What to type for packages that are missing, wherever the program was installed from."""
    named = [f"'{name}>={OLDEST[name]}'" if name in OLDEST else name for name in packages]
    return f"pip install {' '.join(named)}"


def missing(needs: Mapping[str, str]) -> str:
    """What to say of the packages that are not installed; "" where all are. needs: what each is for, as in "to fetch X"."""
    gone = {package: purpose for package, purpose in needs.items() if not has(package)}
    told = "; ".join(f"{package}, {purpose}" for package, purpose in gone.items())
    return f"{'a package is' if len(gone) == 1 else 'packages are'} missing: {told}; {install(gone)}" if gone else ""
