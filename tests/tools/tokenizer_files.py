"""Texts for tokenizers, and tokenizers of the library."""

from pathlib import Path
from typing import Any

from tests.tools.checkpoint_files import ROOT

FOLDER = ROOT / "tests" / "fixtures" / "tokenizers"


def get_path(kind: str) -> Path:
    return FOLDER / f"{kind}.json"


def load_library_tokenizer(kind: str) -> Any:
    """Load the library's own tokenizer, without truncation and padding."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(get_path(kind)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


TEXTS = [
    "Once upon a time",
    "the then other in the end",
    " ",
    "  two spaces lead",
    "a\nb\n\nc\n",
    "tab\tand\r\n",
    "é日🙂 mé日日 café",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ñandú Ωμέγα 漢字 𝄞",
    "[bold]x[/bold] [brackets] [/red]",
    "\x00\x1b[31m\x7f",
    "<s></s><unk><0x41>",
]
