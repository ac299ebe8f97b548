"""The names of the files that a GGUF file is split into, as llama.cpp has them. Knows nothing of what is in them."""

import re

_PART = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})\.gguf", re.ASCII | re.DOTALL)


def parts_of(name: str) -> list[str]:
    """The names of all files that are one model with that one, in order; that one alone where it names itself no part."""
    part = _PART.fullmatch(name)
    return [f"{part[1]}-{i + 1:05}-of-{part[3]}.gguf" for i in range(int(part[3]))] if part else [name]
