"""File names of the shards of a split GGUF file, as llama.cpp writes them."""

import re

_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})\.gguf", re.ASCII | re.DOTALL)


def list_shard_names(name: str) -> list[str]:
    """Return the file names of all shards of a split GGUF model from the name of one shard, in order; [name] for another file."""
    match = _SHARD_NAME.fullmatch(name)
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))] if match else [name]
