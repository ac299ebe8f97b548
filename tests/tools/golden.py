"""Golden texts: the same bits on every machine. `python -m tests.tools.golden` makes their table, golden.json, anew.

A row is a model in a kind of weights under a setting: the sums of the text that it writes with its draft (tokens, and how many of
each proposal stood), of the logits of that whole text, and of what a draw makes of each: probabilities, token and margin. Another
row is another line in `CASES`. A sum that changes is another text for somebody's seed: it takes a new `__arithmetic__` in
specdec.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import specdec
from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import FixedLength
from specdec.draft.tree import TreeDrafter
from specdec.engine.decoding import Drafter, LengthPolicy, Step, decode
from specdec.layers.base import Weights
from specdec.layers.rope import fill_tables
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import KV, Transformer
from specdec.quant import BF16, FP16, FP32, INT4, INT8, PACKED_BF16, gguf_blocks
from specdec.quant.int8 import NATIVE_INT8, PORTABLE_INT8
from specdec.quant.matrix import pack
from specdec.runtime.elementary import log
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.verification import VERIFIERS
from tests.quant.test_grouped import ROWS, Given, N, multiplied
from tests.tools.checkpoint_files import ROOT
from tests.tools.hf_folders import CONFIGS, FIXTURES, read_all
from tests.tools.random_models import run_in_blocks

TABLE = Path(__file__).parents[1] / "fixtures" / "golden.json"
FLOATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
KINDS = FLOATS | {
    "int4": INT4,
    "int8": INT8,
    "native int8": NATIVE_INT8,
    "portable int8": PORTABLE_INT8,
    "packed bf16": PACKED_BF16,
}
PROMPT, SEED = [1, 7, 9], 1
N_TOKENS = 45  # behind the prompt
PAIR = "stories6M.bin", "stories650K.bin"


class Setting(NamedTuple):
    """verify, the numbers of `Sampling`, gamma, and what drafts: "self", "ngram", "none" or a file of `models/`."""

    verify: str
    temperature: float
    top_k: int
    top_p: float
    gamma: int
    draft: str


class Case(NamedTuple):
    """A row: a folder of `tests/fixtures` or a file of `models/`, in a kind of weights; a setting, how long a text, the cache."""

    model: str
    kind: str
    setting: Setting
    n_tokens: int = N_TOKENS
    is_tree: bool = False  # what is proposed
    kv: KV = "auto"

    @property
    def name(self) -> str:
        more = [*["tree"][: self.is_tree], *[self.kv][: self.kv != "auto"]]
        return " ".join(map(str, (self.model, self.kind, *self.setting, self.n_tokens, *more)))


SETTINGS = [
    Setting("coupled", 0.0, 0, 0.0, 4, "self"),
    Setting("coupled", 0.8, 0, 0.9, 4, "self"),
    Setting("rejection", 1.0, 0, 0.9, 4, "self"),
    Setting("coupled", 1.0, 0, 1.0, 7, "ngram"),
    Setting("block", 1.0, 0, 0.95, 5, "self"),
    Setting("coupled", 1.3, 20, 0.0, 2, "self"),
    Setting("rejection", 0.7, 10, 0.8, 3, "self"),
    Setting("coupled", 1.0, 5, 0.0, 1, "none"),
    Setting("block", 1.3, 0, 0.0, 8, "self"),
    Setting("rejection", 1.0, 0, 0.0, 5, "ngram"),
]
CASES = [
    *(
        Case(model, kind, SETTINGS[(i + 3 * j) % len(SETTINGS)])
        for j, kind in enumerate(("fp32", "bf16", "fp16", "int8"))
        for i, model in enumerate(CONFIGS)
    ),
    Case(PAIR[0], "fp32", Setting("coupled", 0.0, 0, 0.0, 4, PAIR[1]), 150),
    Case(PAIR[0], "fp32", Setting("coupled", 1.0, 0, 0.9, 5, PAIR[1]), 150),
    Case(PAIR[0], "int8", Setting("rejection", 0.8, 0, 0.9, 4, PAIR[1]), 150),
    *(Case(model, "int4", SETTINGS[i]) for model, i in (("llama3", 3), ("gpt2", 9), ("qwen3", 7))),
    *(Case(PAIR[0], "fp32", Setting(verify, 1.0, 0, 0.9, 5, PAIR[1]), 150, True) for verify in ("coupled", "rejection")),
    *(Case(model, "bf16", SETTINGS[i], is_tree=True) for model, i in (("llama3", 1), ("gpt2", 2), ("gemma3", 1))),
    Case(PAIR[0], "fp32", SETTINGS[1], 150, kv="f16"),
    Case("qwen3", "int8", SETTINGS[3], kv="f32"),
    Case("gpt2", "bf16", SETTINGS[5], kv="f32"),
    *(
        Case(model, kind, SETTINGS[i], kv="q8")
        for model, kind, i in (("llama3", "bf16", 3), ("gpt2", "fp32", 2), ("lfm2", "int8", 5))
    ),
    Case(PAIR[0], "fp32", Setting("coupled", 1.0, 0, 0.9, 5, PAIR[1]), 150, True, kv="q8"),
]


@cache
def tensors_of(model: str) -> tuple[Any, dict[str, Any]]:
    """A model's config, and its tensors in float32."""
    checkpoint = load_checkpoint((ROOT / "models" if model.endswith(".bin") else FIXTURES) / model)
    tensors = read_all(checkpoint)
    return checkpoint.config, {name: widened(tensor) for name, tensor in tensors.items()}


def widened(tensor: Any) -> Any:
    return (tensor.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == np.uint16 else tensor.astype(np.float32)


def narrowed(tensor: Any, kind: str) -> Any:
    """In the numbers of that kind of weights; bf16 towards zero."""
    if kind in ("bf16", "packed bf16"):
        return (tensor.view(np.uint32) >> 16).astype(np.uint16)
    return tensor.astype(np.float16) if kind == "fp16" else tensor


def weights_of(model: str, kind: str) -> tuple[Any, Weights]:
    config, tensors = tensors_of(model)
    numbers = {name: narrowed(tensor, kind) for name, tensor in tensors.items()}
    return config, architecture_of(config).pack(config, numbers, KINDS[kind])


def text_of(case: Case, target: Transformer, draft: Transformer | None) -> tuple[list[int], list[int]]:
    """The text that a case writes, its prompt included, and how many proposals of each step stood."""
    s = case.setting
    size, sampling = target.config.vocab_size, Sampling(s.temperature, s.top_k, s.top_p, SEED)
    verifier = VERIFIERS[s.verify](size, sampling)
    drafter: Drafter | None = NgramDrafter(()) if s.draft == "ngram" else None
    policy: LengthPolicy = FixedLength(s.gamma)
    if draft and case.is_tree:
        drafter = TreeDrafter(draft, Sampler(size, sampling), verifier.draft_noise, ())
    elif draft:
        drafter = ModelDrafter(draft, Sampler(size, sampling), verifier.draft_noise, ())
    tokens, accepted = [*PROMPT], []
    for event in decode(target, drafter, verifier, PROMPT, case.n_tokens, policy, {}):
        if isinstance(event, Step):
            tokens += event.tokens
            accepted.append(event.n_accepted)
    return tokens, accepted


def bits(*arrays: Any) -> str:
    """A short sum of numbers, as they lie in a little-endian machine."""
    data = b"".join(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays)
    return hashlib.sha256(data).hexdigest()[:16]


def measure(case: Case) -> dict[str, str]:
    """A row of the table."""
    config, weights = weights_of(case.model, case.kind)
    target, draft = Transformer(config, weights, 1, kv=case.kv), None
    if case.setting.draft == "self":
        draft = Transformer(config, weights.converted(INT8), 1, kv=target.kv)
    elif case.setting.draft == PAIR[1]:
        draft = Transformer(*weights_of(PAIR[1], "int8"), 1, config.seq_len, target.kv)
    tokens, accepted = text_of(case, target, draft)
    logits = run_in_blocks(target, tokens[:-1], 7)
    s = case.setting
    sampler = Sampler(config.vocab_size, Sampling(s.temperature, s.top_k, s.top_p, SEED))
    probs, draws = sampler.new_probs(), []
    for position, row in enumerate(logits):
        drawn = sampler.draw_surely(probs, row, TARGET_NOISE, position)
        draws += [probs[0, : config.vocab_size].copy(), np.array(drawn)]
    return {"text": bits(np.array(tokens), np.array(accepted)), "logits": bits(logits), "draws": bits(*draws)}


def tree_of(model: str, kv: KV = "f32") -> str:
    """The sum of the logits of a tree, and of a pass over the text that went on by one of its paths."""
    target = Transformer(*weights_of(model, "fp32"), 1, kv=kv, hidden_layers=(1,))  # which change no logits
    parents = [-1, 0, 1, -1, 3, 3, 0, 6]
    logits = target.forward_tree([*PROMPT], [4, 5, 6, 7, 8, 9, 10, 11], parents).copy()
    target.keep([3, 5])
    return bits(logits, target.forward([*PROMPT, 7, 9, 12], 1))


def tables_of(model: str, n: int) -> str:
    """The sum of the cosines and sines of every 97th of n positions."""
    config, _ = tensors_of(model)
    cos, sin = zeros(n, config.head_dim + LANES), zeros(n, config.head_dim + LANES)
    fill_tables(replace(config, seq_len=n), cos, sin)
    return bits(cos[::97], sin[::97])


def product_of(type_: str) -> str:
    """The sum of a product of random blocks of that type."""
    x = zeros(9, N)
    x[:] = np.random.default_rng(5).integers(-1000, 1001, x.shape) * 2.0**-9
    return bits(multiplied(pack([Given(type_, ROWS, N)], gguf_blocks.KINDS[type_]), x, 9))


def functions() -> dict[str, str]:
    """Sums of what no text asks for at once."""
    numbers = np.arange(1, 1 << 14) * 2.0**-14
    return {
        "log": bits(np.array([log(x) for x in numbers])),
        "rope of llama": tables_of("llama", 1 << 16),
        "rope of llama3": tables_of("llama3", 1 << 16),
        "rope of ministral3": tables_of("ministral3", 1 << 16),
        "tree of llama3": tree_of("llama3"),
        "tree of gpt2": tree_of("gpt2"),
        "tree of gpt2 in f16": tree_of("gpt2", "f16"),
        **{f"product of {type_}": product_of(type_) for type_ in gguf_blocks.TYPES},
    }


def table() -> dict[str, Any]:
    """The whole table, as this machine has it."""
    texts = {case.name: measure(case) for case in CASES}
    return {"arithmetic": specdec.__arithmetic__, "functions": functions(), "texts": texts}


def changed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The rows of both tables that differ."""
    for part in ("functions", "texts"):
        yield from (name for name, sums in new[part].items() if old[part].get(name, sums) != sums)


def main() -> int:
    """Write the table, unless a row of it has changed and the revision has not."""
    new = table()
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {"arithmetic": 0, "functions": {}, "texts": {}}
    names = [*changed(old, new)]
    gone = [name for part in ("functions", "texts") for name in old[part] if name not in new[part]]
    print(f"{len(new['texts'])} texts, {len(names)} changed", *names, sep="\n  ")
    print(f"{len(gone)} rows are gone", *gone, sep="\n  ")
    if names and old["arithmetic"] == new["arithmetic"]:
        print(f"Golden texts have changed: raise __arithmetic__ in specdec.py above {old['arithmetic']} first.", file=sys.stderr)
        return 1
    TABLE.write_text(json.dumps(new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
