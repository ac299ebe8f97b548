"""Random Qwen3-Rerankers. `python -m tests.tools.rerankers` prints the scores of transformers, with the published prompt."""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.tools.gguf_files import convert_random_folder, gguf_bytes, make_tokenizer_keys
from tests.tools.half_precision import widen_exactly
from tests.tools.hf_folders import read_folder_tensors
from tests.tools.model_folders import TOKENIZERS, llama_config, llama_shapes, write_random_model

QUERY = "Where did the robin go?"
DOCUMENTS = ["The robin went home.", "no", "It is a day. " * 25, "", "The sun <|im_end|> is red\n"]
INSTRUCTION = "Find birds"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def make_reranker(path: Path, seed: int = 0, positions: int = 640) -> Path:
    """Create a random Qwen3 with the tokens of a Qwen3-Reranker; its name must say that it is one."""
    path.mkdir()
    tokenizer = json.loads((TOKENIZERS / "qwen2.json").read_text())
    added, model = tokenizer["added_tokens"], tokenizer["model"]
    n = len(model["vocab"])
    model["vocab"] |= {"ye": n, "yes": n + 1, "no": n + 2}
    model["merges"] += [["y", "e"], ["ye", "s"], ["n", "o"]]
    added += [added[0] | {"content": name, "special": False} for name in ("<think>", "</think>")]
    tokenizer["added_tokens"] = [token | {"id": n + 3 + i} for i, token in enumerate(added)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = n + 3 + len(added)
    config = llama_config(rows, positions) | {"model_type": "qwen3", "head_dim": 12, "architectures": ["Qwen3ForCausalLM"]}
    norms = {f"model.layers.{i}.self_attn.{name}_norm.weight": (12,) for i in range(2) for name in "qk"}
    write_random_model(path, config, llama_shapes(rows, positions) | norms, seed)
    return path


def read_answer_rows(folder: Path) -> Any:
    """Return the rows of "yes" and "no" of a reranker's classifier, in float32."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    table = read_folder_tensors(folder)["model.embed_tokens.weight"][1]
    return widen_exactly(table[[vocabulary["yes"], vocabulary["no"]]])


def make_reranker_gguf(folder: Path, path: Path, template: str | None, head: Any = None) -> Path:
    """Write a reranker's folder as a GGUF file, with a template for reranking and a head, as llama.cpp's converter does."""
    keys, tensors = convert_random_folder(folder)
    if template is not None:
        keys["tokenizer.chat_template.rerank"] = template
    if head is not None:
        tensors["cls.output.weight"] = head
    path.write_bytes(gguf_bytes(keys | make_tokenizer_keys("qwen2", folder / "tokenizer.json"), tensors))
    return path


def score_with_transformers(path: Path, query: str, documents: list[str], instruction: str) -> list[float]:
    """Return the scores as the page of Qwen3-Reranker-0.6B computes them; special tokens in the texts are text."""
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    scores = []
    for document in documents:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer.encode(PREFIX).ids + encode_as_text(tokenizer, text) + tokenizer.encode(SUFFIX).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        pair = torch.stack([logits[tokenizer.token_to_id("no")], logits[tokenizer.token_to_id("yes")]])
        scores.append(float(torch.softmax(pair, 0)[1]))
    return scores


def encode_as_text(tokenizer: object, text: str) -> list[int]:
    tokenizer.encode_special_tokens = True  # type: ignore[attr-defined]
    ids = tokenizer.encode(text).ids  # type: ignore[attr-defined]
    tokenizer.encode_special_tokens = False  # type: ignore[attr-defined]
    return list(ids)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            print(score_with_transformers(make_reranker(Path(folder) / f"{seed}", seed), QUERY, DOCUMENTS, INSTRUCTION))
