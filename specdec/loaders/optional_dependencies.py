"""Checks for optional packages by name, before anything is loaded or downloaded."""

import importlib.util
from collections.abc import Iterable, Mapping

TOKENIZERS, HUB, JINJA, GUIDANCE = "tokenizers", "huggingface_hub", "jinja2", "llguidance"
STARLETTE, UVICORN = "starlette", "uvicorn"
MIN_VERSIONS = {JINJA: "3.1.6"}  # older versions have sandbox escapes


def is_installed(package: str) -> bool:
    """Return whether an optional Python package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def format_install_command(packages: Iterable[str]) -> str:
    """Return the pip command that installs the given packages, with the minimum versions that specdec needs."""
    requirements = [f"'{name}>={MIN_VERSIONS[name]}'" if name in MIN_VERSIONS else name for name in packages]
    return f"pip install {' '.join(requirements)}"


def format_missing_packages(purposes: Mapping[str, str]) -> str:
    """Return an error message about the given packages that are not installed, with the pip command; "" if all are installed.

    Args:
        purposes: By package, what the package is needed for, such as "to download X".
    """
    missing = {package: purpose for package, purpose in purposes.items() if not is_installed(package)}
    if not missing:
        return ""
    reasons = "; ".join(f"{package}, {purpose}" for package, purpose in missing.items())
    subject = "package" if len(missing) == 1 else "packages"
    return f"{subject} not found: {reasons}; install with: {format_install_command(missing)}"
