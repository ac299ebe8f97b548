"""Find keys of config.json that change transformers' logits but not ours: `python tests/tools/config_keys.py [FIXTURE ...]`.

Do not run it with -m: transformers would take our kernels.py for a package. It needs torch and transformers; no test needs them.

For each fixture it takes the keys of transformers' config class, those that `modeling_*.py` and `configuration_*.py` read, and
the keys of RoPE. It gives each of them other values, one at a time. A file with such a value must be rejected or give
transformers' logits. It prints each file that does neither, and exits with 1 if there is any.
"""

import ast
import contextlib
import copy
import inspect
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, logging

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from specdec.argument_checks import CheckpointError  # noqa: E402
from specdec.loaders.hf_checkpoint import read_config  # noqa: E402
from specdec.loaders.model_loader import load_model  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
NOT_IN_TRANSFORMERS = ("bailing_moe_v2", "minicpm", "gpt_oss_mxfp4", "granite_hybrid")  # it does not run their configs here
# Keys of other things than the logits of a text
IGNORED = {
    "_attn_implementation", "_experts_implementation", "_name_or_path", "architectures", "audio_config", "base_model_pp_plan",
    "base_model_tp_plan", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "image_token_id",
    "initializer_range", "keys_to_ignore_at_inference", "label2id", "loss_type", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type", "quantization_config", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "video_token_id", "vision_config",
    "vision_end_token_id", "vision_start_token_id",
}  # fmt: skip
ROPE_KEYS = (
    "rope_type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor",
    "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor", "short_mscale", "long_mscale", "alpha", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta",
)  # fmt: skip
ROPE_OBJECTS = {"rope_parameters", "rope_scaling"}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2", "sigmoid")
N_COMPARED = 20  # last tokens; with LongRoPE our logits before them may be those of a shorter sequence
TOLERANCE = 2e-3  # of the largest logit


def find_names(config, model):
    """Return the attributes of configs that a model's source reads, and the strings that it compares values with."""
    keys, strings = set(), set()
    for module in {inspect.getmodule(type(config)), inspect.getmodule(type(model))}:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
                keys.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
                keys.add(node.args[1].value)
            if isinstance(node, ast.Compare):
                strings |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and type(each.value) is str}
    methods = {name for name, _ in inspect.getmembers(type(config), callable)}
    return keys - methods, strings


def list_other_values(key, value, strings):
    """Return values that a key may have instead of its own."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(value // 2, 1), value - 1, 0, None]
    if isinstance(value, float):
        return [2 * value, value / 2, 0.5, 2.0, 0.0, None]
    if isinstance(value, str):
        known = ACTIVATIONS if value in (*ACTIVATIONS, "swish", "gelu_new", "xielu", "relu") else strings
        return [*known, None]
    if isinstance(value, list) and value:
        kinds = [*dict.fromkeys(map(str, value))]
        rotated = value[1:] + value[:1] if len(kinds) > 1 else []
        numbers = [2 * x for x in value] if all(type(x) in (int, float) for x in value) else []
        return [each for each in (rotated, numbers, value[:1] * len(value), value[-1:] * len(value), None) if each != []]
    if "activation" in key or key.endswith("_act"):
        return [*ACTIVATIONS]
    return [True, False, 1, 2, 3, 0.5, 2.0, [1], [0, 1]]


def list_changes(values, class_values, keys, strings, path=()):
    """Return (path of a key, value) of all files to try: each key of an object, and of the objects in it, changed alone."""
    changes = []
    for key in sorted(({*values} | {*class_values} | keys) - IGNORED):
        value = values.get(key, class_values.get(key))
        if isinstance(value, dict) and value:
            more = {*ROPE_KEYS} if path or key in ROPE_OBJECTS else set()
            if any(isinstance(each, dict) for each in value.values()):
                more = set()
            changes += list_changes(value, {}, more, strings | {"linear", "dynamic", "yarn", "llama3"}, (*path, key))
        else:
            changes += [((*path, key), other) for other in list_other_values(key, value, strings)]
    return changes


def apply_change(values, path, value):
    """Return the keys of a config.json with one changed, which may be in nested objects."""
    changed = copy.deepcopy(values)
    place = changed
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return changed


class Reference:
    """Transformers' model of a fixture, whose weights serve for all changes of its config.

    Attributes:
        changes: Pairs of the path of a key and a value to try.
    """

    def __init__(self, folder):
        """Load the fixture."""
        self.values = json.loads((folder / "config.json").read_text())
        self.config = AutoConfig.from_pretrained(folder)
        self.auto_class = AutoModelForImageTextToText if hasattr(self.config, "vision_config") else AutoModelForCausalLM
        model = self.auto_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.state = model.state_dict()
        self.shapes = {name: tensor.shape for name, tensor in self.state.items()}
        text = self.config.get_text_config()
        keys, strings = find_names(text, model)
        prefix = ("text_config",) if "text_config" in self.values else ()
        text_values = self.values[prefix[0]] if prefix else self.values
        synonyms = {name for name, key in text.attribute_map.items() if key in text_values}
        self.changes = list_changes(text_values, text.to_dict(), keys - synonyms, strings, prefix)
        self.tokens = np.load(folder / "expected.npz")["tokens"].tolist()

    def compute_logits(self, values):
        """Return the logits (T, V) with a config; None if it cannot run or needs other tensors."""
        with contextlib.suppress(Exception), torch.no_grad():
            config = type(self.config).from_dict(copy.deepcopy(values))
            model = self.auto_class.from_config(config, dtype=torch.float32).eval()
            if {name: tensor.shape for name, tensor in model.state_dict().items()} != self.shapes:
                return None
            model.load_state_dict(self.state)
            logits = model(torch.tensor([self.tokens]), use_cache=False).logits[0].numpy()
            return logits if np.isfinite(logits).all() else None
        return None


def check_fixture(name):
    """Return one line for each change of a fixture's config that is accepted and gives other logits than transformers'."""
    reference, found = Reference(FIXTURES / name), []
    expected = reference.compute_logits(reference.values)
    assert expected is not None, f"transformers does not run {name}"
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for file in (FIXTURES / name).iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "config.json").unlink()

        def read(values):
            (folder / "config.json").write_text(json.dumps(values))
            return repr(read_config(folder)[1])

        def compute(values):
            read(values)
            return load_model(folder, n_threads=1, kv="f32").new_cache().forward(reference.tokens, len(reference.tokens)).copy()

        own = read(reference.values)
        for path, value in reference.changes:
            values = apply_change(reference.values, path, value)
            try:
                config = read(values)
            except CheckpointError:
                continue
            logits = reference.compute_logits(values)
            if logits is None or (config == own and is_equal(logits, expected)):
                continue
            with contextlib.suppress(CheckpointError):
                if not is_equal(compute(values), logits):
                    what = "is ignored" if config == own else "gives other logits"
                    found.append(f"{name}: {'.'.join(path)} = {json.dumps(value)} {what}")
    return found, len(reference.changes)


def is_equal(logits, others):
    """Return whether two arrays of logits differ by rounding only, at the last tokens."""
    logits, others = logits[-N_COMPARED:], others[-N_COMPARED:]
    return np.abs(logits - others).max() <= TOLERANCE * np.abs(others).max()


def main(names):
    """Check fixtures, all by default, and print what was found."""
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    folders = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
    n_found = 0
    for name in names or [folder for folder in folders if folder not in NOT_IN_TRANSFORMERS]:
        found, n_changes = check_fixture(name)
        print(f"{name}: {n_changes} changes, {len(found)} accepted with other logits", *found, sep="\n  ", flush=True)
        n_found += len(found)
    return n_found > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
