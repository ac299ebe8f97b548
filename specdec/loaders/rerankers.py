"""Recognize rerankers: models that answer "yes" or "no" to the question whether a document fits a query (arXiv:2506.05176)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.loaders.tensor_assembly import TensorIndex
from specdec.quant.packed_matrix import to_float32
from specdec.runtime.simd import Float64

TEMPLATE_KEY = "tokenizer.chat_template.rerank"  # of GGUF files
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
INSTRUCTION_FIELD = "{instruction}"
NAME = "reranker"  # part of the names of all published ones
# the prompt that Qwen3-Reranker was trained with: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def find_rerank_template(path: Path, family: str, metadata: Mapping[str, Any]) -> str:
    """Return a reranker's prompt with {instruction}, {query} and {document} in the places of the three; "" for another model.

    A GGUF file may hold its template, without a place for the instruction if it has one of its own. A Qwen3-Reranker is known by
    its name: that of the file, of one of the two folders around it, or in the metadata.

    Args:
        path: The model's file or folder.
        family: Name of its family.
        metadata: Keys of its GGUF file, or of its config.json.
    """
    template = metadata.get(TEMPLATE_KEY)
    if isinstance(template, str):
        return template.replace(INSTRUCTION, INSTRUCTION_FIELD)
    names = [*path.parts[-3:], metadata.get("general.name"), metadata.get("_name_or_path")]
    return QWEN3_TEMPLATE if family == "qwen3" and NAME in " ".join(map(str, names)).lower() else ""


def read_rerank_head(model: TensorIndex[Any], name: str, dim: int) -> Float64 | None:
    """Read the weights of a reranker's score, (dim,), and mark their tensor as used; None if the model has no such tensor.

    Args:
        model: The model's tensors.
        name: Name of the tensor: one row for the score, or the rows of "yes" and "no", whose difference gives it.
        dim: Width of the model.

    Raises:
        CheckpointError: The tensor has another shape.
    """
    if name not in model:
        return None
    n_rows = 1 if model.get_shape(name)[0] == 1 else 2
    rows = to_float32(model.get_tensor(name, (n_rows, dim))[:]).astype(np.float64)
    difference: Float64 = rows[0] - rows[1] if n_rows == 2 else rows[0]
    return difference
