"""What a hub or a mirror says, before it is believed: words that become parts of paths here, names of files, addresses."""

import os
import re
from urllib.parse import urlsplit

from . import CheckpointError

HUGGING_FACE = "https://huggingface.co"
ETAG = re.compile(r"[\w-]{1,128}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
LONGEST_PART = 255  # bytes of a file's name
_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")  # with the name before it


def named(what: str, value: object, form: re.Pattern[str], whose: str) -> str:
    """A word that becomes a part of a path. Raises CheckpointError for one that no hub would say."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise CheckpointError(f"{whose} has the {what} {str(value)[:40]!r}; expected that of a Hugging Face hub")
    return value


def may_be_a_file(name: str) -> bool:
    """Whether a file's name leads into its repository on every system, and a terminal shows it as it is."""
    is_plain = name.isprintable() and not set(name) & set("\\:")
    return is_plain and all(part.strip(". ") and len(part.encode()) <= LONGEST_PART for part in name.split("/"))


def endpoint() -> str:
    """The hub's address. Raises CheckpointError for a setting that is none."""
    given = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or HUGGING_FACE
    try:
        parts = urlsplit(given)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_one = False
    if not is_one:
        raise CheckpointError(f"HF_ENDPOINT is {without_password(given)!r}; expected an address such as {HUGGING_FACE}")
    return given


def without_password(text: str) -> str:
    """A text whose addresses tell nobody's name and password."""
    return _PASSWORD.sub("", text)


def are_of_one_server(one: str, other: str) -> bool:
    """Whether what one address may be told may go to the other."""
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.hostname, first.port) == (second.scheme, second.hostname, second.port)
