"""Print the token ids and pieces of a text: python tokenizer.py MODEL TEXT.

The tokenizers are in specdec/tokenizer.py (llama2.c) and specdec/text/ (tokenizer.json, GGUF).
"""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import CheckpointError, TokenizerError
from specdec.loaders import load_checkpoint
from specdec.loaders.model_paths import resolve_path
from specdec.text.tokenizer_lookup import resolve_tokenizer


def format_piece(piece: bytes | None) -> str:
    """Return a token's bytes in quotes, or in hexadecimal if they are not whole characters."""
    if piece is None:
        return "special"
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in piece)


def main(
    model: Annotated[str, typer.Argument(help="A model's file, folder, short name or name on the Hugging Face hub.")],
    text: Annotated[str, typer.Argument(help="The text to encode.")],
) -> None:
    """Print the ids and pieces of TEXT by the tokenizer of MODEL."""
    try:
        checkpoint = load_checkpoint(resolve_path(model))
        tokenizer = resolve_tokenizer(None, checkpoint, checkpoint.config.vocab_size)
        tokens = tokenizer.encode(text)
    except (CheckpointError, TokenizerError, OSError) as error:
        sys.exit(f"tokenizer.py: {error}")
    table = Table("id", "piece")
    for token in tokens:
        table.add_row(str(token), Text(format_piece(tokenizer.token_to_bytes(token))))
    Console().print(table)
    print(*tokens)


if __name__ == "__main__":
    typer.run(main)
