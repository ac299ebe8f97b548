"""Golden outputs: the same bits on every machine. `python -m tests.tools.golden` writes their table, golden.json, again.

A row is a model in a weight format under a setting. It has the hash of the output that the model generates with its draft (tokens
and numbers of accepted draft tokens), of the logits of that whole sequence, and of a draw from each: probabilities, token and
margin. A new row is a new fixture or a new entry in `CASES`. A changed hash means another output for some seed, and needs a new
`__arithmetic__` in specdec/__init__.py. The table also has the config of each fixture.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import specdec
from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.tree import TreeDrafter
from specdec.events import Step
from specdec.layers.rope import fill_cos_sin
from specdec.layers.weights import Weights
from specdec.loaders import load_checkpoint
from specdec.model import get_architecture
from specdec.model.model import KVFormatName, Model
from specdec.protocols import Drafter, LengthPolicy
from specdec.quant import BF16, FP16, FP32, INT3, INT4, INT8, PACKED_BF16, gguf_repacking
from specdec.quant.int8 import NATIVE_INT8, PORTABLE_INT8
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.elementary import log
from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.verification import VERIFIERS
from tests.tools.block_tensors import ROWS, N, RandomBlockTensor, run_matmul
from tests.tools.checkpoint_files import ROOT
from tests.tools.configs import describe_config
from tests.tools.decode import decode
from tests.tools.half_precision import to_half, widen_tensors
from tests.tools.hf_folders import CONFIGS, FIXTURES, TABLE, read_all_tensors
from tests.tools.random_models import run_in_blocks

FLOAT_FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
WEIGHT_FORMATS = FLOAT_FORMATS | {
    "int3": INT3,
    "int4": INT4,
    "int8": INT8,
    "native int8": NATIVE_INT8,
    "portable int8": PORTABLE_INT8,
    "packed bf16": PACKED_BF16,
}
PROMPT, SEED = [1, 7, 9], 1
N_TOKENS = 45  # after the prompt
PAIR = "stories6M.bin", "stories650K.bin"


class Setting(NamedTuple):
    """Verification mode, the numbers of `Sampling`, gamma, and the draft: "self", "lookup", "none" or a file of `models/`."""

    verify: str
    temperature: float
    top_k: int
    top_p: float
    gamma: int
    draft: str


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        model: A folder of `tests/fixtures` or a file of `models/`.
        weight_format: A key of `WEIGHT_FORMATS`.
        setting: How it is sampled and drafted.
        n_tokens: Length of the output.
        is_tree: Whether the drafts are trees.
        kv: Format of the KV cache.
    """

    model: str
    weight_format: str
    setting: Setting
    n_tokens: int = N_TOKENS
    is_tree: bool = False
    kv: KVFormatName = "auto"

    @property
    def name(self) -> str:
        more = [*["tree"][: self.is_tree], *[self.kv][: self.kv != "auto"]]
        return " ".join(map(str, (self.model, self.weight_format, *self.setting, self.n_tokens, *more)))


SETTINGS = [
    Setting("coupled", 0.0, 0, 0.0, 4, "self"),
    Setting("coupled", 0.8, 0, 0.9, 4, "self"),
    Setting("rejection", 1.0, 0, 0.9, 4, "self"),
    Setting("coupled", 1.0, 0, 1.0, 7, "lookup"),
    Setting("block", 1.0, 0, 0.95, 5, "self"),
    Setting("coupled", 1.3, 20, 0.0, 2, "self"),
    Setting("rejection", 0.7, 10, 0.8, 3, "self"),
    Setting("coupled", 1.0, 5, 0.0, 1, "none"),
    Setting("block", 1.3, 0, 0.0, 8, "self"),
    Setting("rejection", 1.0, 0, 0.0, 5, "lookup"),
]
CASES = [
    *(
        Case(model, weight_format, SETTINGS[(i + 3 * j) % len(SETTINGS)])
        for j, weight_format in enumerate(("fp32", "bf16", "fp16", "int8"))
        for i, model in enumerate(CONFIGS)
    ),
    Case(PAIR[0], "fp32", Setting("coupled", 0.0, 0, 0.0, 4, PAIR[1]), 150),
    Case(PAIR[0], "fp32", Setting("coupled", 1.0, 0, 0.9, 5, PAIR[1]), 150),
    Case(PAIR[0], "int8", Setting("rejection", 0.8, 0, 0.9, 4, PAIR[1]), 150),
    *(Case(model, "int4", SETTINGS[i]) for model, i in (("llama3", 3), ("gpt2", 9), ("qwen3", 7))),
    Case("llama3", "int3", SETTINGS[3]),
    *(Case(PAIR[0], "fp32", Setting(verify, 1.0, 0, 0.9, 5, PAIR[1]), 150, True) for verify in ("coupled", "rejection")),
    *(Case(model, "bf16", SETTINGS[i], is_tree=True) for model, i in (("llama3", 1), ("gpt2", 2), ("gemma3", 1))),
    Case(PAIR[0], "fp32", SETTINGS[1], 150, kv="f16"),
    Case("qwen3", "int8", SETTINGS[3], kv="f32"),
    Case("gpt2", "bf16", SETTINGS[5], kv="f32"),
    *(
        Case(model, weight_format, SETTINGS[i], kv="q8")
        for model, weight_format, i in (
            ("llama3", "bf16", 3),
            ("gpt2", "fp32", 2),
            ("lfm2", "int8", 5),
            ("deepseek_v2", "bf16", 7),
            ("falcon_h1", "bf16", 3),
        )
    ),
    Case(PAIR[0], "fp32", Setting("coupled", 1.0, 0, 0.9, 5, PAIR[1]), 150, True, kv="q8"),
]


@cache
def load_tensors(model: str) -> tuple[Any, dict[str, Any]]:
    """Return a model's config, and its tensors in float32."""
    checkpoint = load_checkpoint((ROOT / "models" if model.endswith(".bin") else FIXTURES) / model)
    tensors = read_all_tensors(checkpoint)
    return checkpoint.config, widen_tensors(tensors)


def pack_weights(model: str, weight_format: str) -> tuple[Any, Weights]:
    config, tensors = load_tensors(model)
    numbers = {name: to_half(tensor, weight_format) for name, tensor in tensors.items()}
    return config, get_architecture(config).plan_weights(config, numbers, WEIGHT_FORMATS[weight_format]).pack()


def generate_tokens(case: Case, target: Model, draft: Model | None) -> tuple[list[int], list[int]]:
    """Return the prompt and output of a case, and the number of accepted draft tokens of each step."""
    s = case.setting
    size, sampling = target.config.vocab_size, Sampling(s.temperature, s.top_k, s.top_p, SEED)
    verifier = VERIFIERS[s.verify](size, sampling)
    drafter: Drafter | None = LookupDrafter(()) if s.draft == "lookup" else None
    policy: LengthPolicy = FixedLength(s.gamma)
    if draft and case.is_tree:
        drafter = TreeDrafter(draft.new_cache(), Sampler(size, sampling), verifier.get_draft_stream, ())
    elif draft:
        drafter = ModelDrafter(draft.new_cache(), Sampler(size, sampling), verifier.get_draft_stream, ())
    tokens, accepted = [*PROMPT], []
    for event in decode(target.new_cache(), drafter, verifier, PROMPT, case.n_tokens, policy, {}):
        if isinstance(event, Step):
            tokens += event.tokens
            accepted.append(event.n_accepted)
    return tokens, accepted


def hash_arrays(*arrays: Any) -> str:
    """Return a short hash of numbers as a little-endian machine stores them."""
    data = b"".join(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays)
    return hashlib.sha256(data).hexdigest()[:16]


def compute_row(case: Case) -> dict[str, str]:
    """Return the row of a case."""
    config, weights = pack_weights(case.model, case.weight_format)
    target, draft = Model(config, weights, 1, kv=case.kv), None
    if case.setting.draft == "self":
        draft = Model(config, weights.convert(INT8), 1, kv=target.kv)
    elif case.setting.draft == PAIR[1]:
        draft = Model(*pack_weights(PAIR[1], "int8"), 1, config.seq_len, target.kv)
    tokens, accepted = generate_tokens(case, target, draft)
    logits = run_in_blocks(target, tokens[:-1], 7)
    s = case.setting
    sampler = Sampler(config.vocab_size, Sampling(s.temperature, s.top_k, s.top_p, SEED))
    probs, draws = sampler.new_probs(), []
    for position, row in enumerate(logits):
        drawn = sampler.draw_with_margin(probs, row, TARGET_NOISE, position)
        draws += [probs[0, : config.vocab_size].copy(), np.array(drawn)]
    return {
        "text": hash_arrays(np.array(tokens), np.array(accepted)),
        "logits": hash_arrays(logits),
        "draws": hash_arrays(*draws),
    }


def hash_tree(model: str, kv: KVFormatName = "f32") -> str:
    """Return the hash of the logits of a tree, and of a pass that continues the sequence on one of its paths."""
    cache = Model(*pack_weights(model, "fp32"), 1, kv=kv).new_cache((1,))  # hidden layers must not change logits
    parents = [-1, 0, 1, -1, 3, 3, 0, 6]
    logits = cache.forward_tree([*PROMPT], [4, 5, 6, 7, 8, 9, 10, 11], parents).copy()
    cache.commit_path([3, 5])
    return hash_arrays(logits, cache.forward([*PROMPT, 7, 9, 12], 1))


def hash_rope_tables(model: str, n: int) -> str:
    """Return the hash of the cosines and sines of every 97th of n positions."""
    config, _ = load_tensors(model)
    cos, sin = zeros(n, config.head_dim + LANES), zeros(n, config.head_dim + LANES)
    fill_cos_sin(replace(config, seq_len=n), cos, sin)
    return hash_arrays(cos[::97], sin[::97])


def hash_matmul(type_: str) -> str:
    """Return the hash of a matmul of random blocks of that type."""
    x = zeros(9, N)
    x[:] = np.random.default_rng(5).integers(-1000, 1001, x.shape) * 2.0**-9
    return hash_arrays(run_matmul(pack_matrix([RandomBlockTensor(type_, ROWS, N)], gguf_repacking.WEIGHT_FORMATS[type_]), x, 9))


def compute_function_hashes() -> dict[str, str]:
    """Return hashes of functions that the outputs cover only in part."""
    numbers = np.arange(1, 1 << 14) * 2.0**-14
    return {
        "log": hash_arrays(np.array([log(x) for x in numbers])),
        "rope of llama": hash_rope_tables("llama", 1 << 16),
        "rope of llama3": hash_rope_tables("llama3", 1 << 16),
        "rope of ministral3": hash_rope_tables("ministral3", 1 << 16),
        "tree of llama3": hash_tree("llama3"),
        "tree of gpt2": hash_tree("gpt2"),
        "tree of gpt2 in f16": hash_tree("gpt2", "f16"),
        **{f"product of {type_}": hash_matmul(type_) for type_ in gguf_repacking.BLOCK_TYPES},
    }


def make_table() -> dict[str, Any]:
    """Return the whole table as this machine computes it."""
    texts = {case.name: compute_row(case) for case in CASES}
    configs = {name: describe_config(config) for name, config in CONFIGS.items()}
    return {"arithmetic": specdec.__arithmetic__, "configs": configs, "functions": compute_function_hashes(), "texts": texts}


def find_changed_rows(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the rows in both tables that differ."""
    for section in ("functions", "texts"):
        yield from (name for name, hashes in new[section].items() if old[section].get(name, hashes) != hashes)


def main() -> int:
    """Write the table, unless a row has changed and the revision has not; return the exit code."""
    new = make_table()
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {"arithmetic": 0, "functions": {}, "texts": {}}
    changed = [*find_changed_rows(old, new)]
    removed = [name for section in ("functions", "texts") for name in old[section] if name not in new[section]]
    print(f"{len(new['texts'])} outputs, {len(changed)} changed", *changed, sep="\n  ")
    print(f"{len(removed)} rows removed", *removed, sep="\n  ")
    if changed and old["arithmetic"] == new["arithmetic"]:
        print(
            f"Golden outputs have changed: raise __arithmetic__ in specdec/__init__.py above {old['arithmetic']}.",
            file=sys.stderr,
        )
        return 1
    TABLE.write_text(json.dumps(new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
