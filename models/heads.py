"""Training of a head that drafts from its target's hidden states: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

A start s is a pair: the target's states at position s and the token of s + 1. It predicts the token of s + 2. From there the head
continues with its own outputs and the text's tokens, as it does when it drafts ("training-time test"): depth k predicts the token
of s + 2 + k. It sees the true pairs up to s, and its own pairs of that start.

Shapes: B rows, T tokens, S starts, D depths, h dim of the head, H heads, G kv heads, K head_dim, R rows of its classifier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from models.features import Features, compute_teacher_outputs, default_layers
from models.stories import Tokens
from models.training import make_rope_table, rms_norm, rotate
from specdec.head_config import HeadConfig
from specdec.heads.eagle3 import EAGLE3
from specdec.loaders import Checkpoint
from specdec.model.kv_cache import KVCache
from specdec.model_config import ModelConfig

DEPTH_WEIGHT = 0.8  # weight of a depth's loss relative to the previous depth, as in EAGLE-3
EVAL_DEPTHS = 5


class Window(NamedTuple):
    """A batch of B training windows.

    Attributes:
        tokens: Tokens (B, T + 1).
        states: The target's hidden states (B, T, L H).
        ids: The target's top next tokens (B, T, N_TEACHER_TOKENS).
        log_probs: Their log-probabilities.
    """

    tokens: Tensor
    states: Tensor
    ids: Tensor
    log_probs: Tensor


class Head(nn.Module):
    """One llama layer over pairs of a feature and an embedding; its parameters are those of `EAGLE3`.

    Args:
        config: Config of the head.
        target_ids: Target id (R,) of each row of the classifier, ascending.
        embedding: The target's embedding, unless the head has its own.
    """

    rope: Tensor
    row_by_id: Tensor
    embedding: Tensor

    def __init__(self, config: ModelConfig, target_ids: Tensor, embedding: Tensor | None = None) -> None:
        """Create the parameters: norms of 1, matrices with small random weights."""
        super().__init__()
        assert config.head is not None
        self.config, self.head, self.target_ids = config, config.head, target_ids
        for name, shape in EAGLE3.shapes(config).items():
            is_norm = "norm" in name or "rms" in name
            self.register_parameter(name, nn.Parameter(torch.ones(shape) if is_norm else torch.randn(shape) * 0.02))
        row_by_id = torch.full((config.vocab_size,), -1)
        row_by_id[target_ids] = torch.arange(len(target_ids))
        for name, table in (("rope", make_rope_table(config)), ("row_by_id", row_by_id), ("embedding", embedding)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, states: Tensor, tokens: Tensor, depths: int) -> list[Tensor]:
        """Return the logits (B, S, R) of each depth, for S = T - depths starts: those with all depths within the text."""
        n, eps = states.shape[1] - depths, self.config.norm_eps
        parts = states[:, :n].float().unflatten(-1, (-1, self.head.target_dim))
        output = functional.linear(rms_norm(parts, self.fc_norm, eps).flatten(2), self.fc)
        table = self.tok_emb if self.head.own_embedding else self.embedding
        is_short = states.shape[1] <= self.config.seq_len
        angles = self.rope if is_short else make_rope_table(replace(self.config, seq_len=states.shape[1]))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(depths):
            feature = rms_norm(output, self.rms_hidden, eps)
            embedded = rms_norm(functional.embedding(tokens[:, 1 + depth : 1 + depth + n], table), self.rms_emb, eps)
            pair = torch.cat([embedded, feature], -1)
            q, k, v = (functional.linear(pair, w).unflatten(-1, (-1, self.config.head_dim)) for w in (self.wq, self.wk, self.wv))
            rope = angles[:, depth : depth + n]
            keys.append(rotate(k, rope))
            values.append(v)
            x = feature + functional.linear(
                attention(rotate(q, rope), keys, values, self.config.attention_window).flatten(2), self.wo
            )
            normed = rms_norm(x, self.rms_ffn, eps)
            x = x + functional.linear(
                functional.silu(functional.linear(normed, self.w1)) * functional.linear(normed, self.w3), self.w2
            )
            output = rms_norm(x, self.rms_final, eps)
            logits.append(functional.linear(output, self.wcls))
        return logits

    def export(self, folder: Path) -> None:
        """Write the head in bf16 in the format of `speculators`: config.json and model.safetensors."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(make_speculators_config(self.config), indent=2) + "\n", encoding="utf-8")
        parameters = {name: tensor.detach() for name, tensor in self.named_parameters()}
        part = folder / "model.part"
        save_file(make_speculators_tensors(self.config, parameters, self.target_ids), part)
        os.replace(part, folder / "model.safetensors")


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor], n_seen: int) -> Tensor:
    """Return the attention (B, S, H, K) of q (B, S, H, K) at the last depth.

    It is causal over the keys and values (B, S, G, K) of the true pairs, which come first, and covers each start's own pair of
    every later depth; n_seen limits it to the newest of them all.
    """
    group = q.shape[2] // keys[0].shape[2]
    q = (q * q.shape[-1] ** -0.5).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # (B, G, group, S, K)
    keys, values = ([x.transpose(1, 2)[:, :, None] for x in part] for part in (keys, values))  # (B, G, 1, S, K)
    scores = (q @ keys[0].transpose(-1, -2)).float()
    own_scores = [(q * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool)
    unseen = mask.triu(1) | mask.tril(len(own_scores) - n_seen)
    probs = torch.softmax(torch.cat([scores.masked_fill(unseen, -1e9), *own_scores], -1), -1).to(values[0].dtype)
    n = q.shape[-2]
    mixed = probs[..., :n] @ values[0].expand(*probs.shape[:3], -1, -1)
    for i, value in enumerate(values[1:]):
        mixed = mixed + probs[..., n + i, None] * value
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def compute_losses(head: Head, window: Window, depths: int, tv: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and the overlap of the target's and the head's probabilities at the first and the last depth.

    The loss sums forward KL + tv * total variation over the depths, each with DEPTH_WEIGHT times the weight of the one before.
    Only the target's top tokens count, and of those only the ones in the head's vocabulary.
    """
    total, overlaps = torch.zeros(()), []
    for depth, logits in enumerate(head(window.states, window.tokens, depths)):
        predicted = slice(1 + depth, 1 + depth + logits.shape[1])
        rows = head.row_by_id[window.ids[:, predicted]]
        log_p = window.log_probs[:, predicted].float()
        p = log_p.exp() * (rows >= 0)
        logits = logits.float()
        log_q = logits.gather(-1, rows.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        kl = (p * (log_p - log_q)).sum(-1).mean()
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        total = total + DEPTH_WEIGHT**depth * (kl + tv * (1 - overlap))
        overlaps.append(overlap)
    return total, {"loss": total, "accepted": overlaps[0], "accepted_last": overlaps[-1]}


def sample_windows(features: Features, length: int, batch: int, step: int, seed: int) -> Iterator[Window]:
    """Yield windows of `length` tokens from random positions of the rows, without end."""
    n_rows, n_tokens = features.ids.shape[:2]
    length = min(length, n_tokens)
    while True:
        rng = np.random.default_rng([seed, step])
        slices = [(i, slice(s, s + length)) for i, s in rng.integers(0, (n_rows, n_tokens - length + 1), (batch, 2)).tolist()]
        tokens = np.stack([features.rows[i, at.start : at.stop + 1] for i, at in slices])
        states, ids, log_probs = (
            np.stack([x[i, at] for i, at in slices]) for x in (features.states, features.ids, features.log_probs)
        )
        yield Window(*(torch.from_numpy(x) for x in (tokens.astype(np.int64), states, ids.astype(np.int64), log_probs)))
        step += 1


@torch.no_grad()
def measure_acceptance(head: Head, cache: KVCache, texts: Iterable[tuple[list[int], int]]) -> list[tuple[float, float]]:
    """Return for depths 1 to EVAL_DEPTHS the share of starts accepted with all depths before, and that share given those before.

    Args:
        head: The head.
        cache: A cache of its target that keeps the hidden states of a feature.
        texts: Texts that the target generated at temperature 0, each with its number of prompt tokens.
    """
    accepted = []
    for text, n_prompt in texts:
        tokens = torch.tensor(text)
        states = torch.from_numpy(compute_teacher_outputs(cache, text).states)[None]
        proposals = [head.target_ids[logits[0].argmax(-1)] for logits in head(states[:, :-1], tokens[None], EVAL_DEPTHS)]
        n = len(proposals[0])
        agree = torch.stack([ids == tokens[2 + depth : 2 + depth + n] for depth, ids in enumerate(proposals)])
        accepted.append(agree.cumprod(0)[:, n_prompt - 2 :].float())
    shares = torch.cat(accepted, 1).mean(1).tolist()
    return [(share, share / max(before, 1e-9)) for before, share in zip([1.0, *shares], shares, strict=False)]


# ---------------------------------------------------------------------------------------------------------------- init


def find_frequent_ids(rows: Tokens, vocab_size: int, n: int) -> Tensor:
    """Return the n most frequent ids in rows (N, T), ascending."""
    counts = np.bincount(rows.ravel(), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:n]))


def make_head(target: Checkpoint, target_ids: Tensor, length: int, dim: int | None = None, hidden_dim: int | None = None) -> Head:
    """Return an untrained head for a target, with `length` positions and the given ids as its vocabulary.

    At the target's width it shares the target's embedding and starts from the target's classifier. A narrower head has its own of
    both, and as many of the target's attention heads as fit.
    """
    config = target.config
    dim = dim or config.dim
    is_narrow = dim != config.dim
    n_heads = config.n_heads if not is_narrow else max(dim // config.head_dim, 1)
    head = Head(
        ModelConfig(
            dim=dim,
            hidden_dim=hidden_dim or config.hidden_dim * dim // config.dim,
            n_layers=1,
            n_heads=n_heads,
            n_kv_heads=config.n_kv_heads if n_heads % config.n_kv_heads == 0 else n_heads,
            vocab_size=config.vocab_size,
            seq_len=length,
            shared_classifier=False,
            architecture="eagle3",
            norm_eps=config.norm_eps,
            head_dim=config.head_dim,
            head=HeadConfig(
                target_dim=config.dim,
                target_layers=default_layers(config.n_layers),
                draft_vocab_size=len(target_ids),
                own_embedding=is_narrow,
                own_classifier=True,
                norm_before_residual=True,
                fc_norm="each",
                norm_output=True,
            ),
        ),
        target_ids,
        None if is_narrow else to_fp32(target.tensors["tok_emb"]),
    )
    if not is_narrow:
        classifier = to_fp32(target.tensors["wcls"]) if "wcls" in target.tensors else head.embedding
        head.wcls.data.copy_(classifier[target_ids])
    return head


def to_fp32(tensor: Any) -> Tensor:
    """Return a matrix of a checkpoint in fp32."""
    rows = np.asarray(tensor[: tensor.shape[0]])
    bits = rows.astype(np.uint32) << 16
    return torch.from_numpy(bits.view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32))


# -------------------------------------------------------------------------------------------------------------- export

LAYER_NAMES = {
    "rms_emb": "input_layernorm", "rms_hidden": "hidden_norm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "rms_ffn": "post_attention_layernorm", "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj", "w3": "mlp.up_proj",
}  # fmt: skip
OUTER_NAMES = {"fc": "fc", "rms_final": "norm", "wcls": "lm_head", "tok_emb": "embed_tokens"}


def make_speculators_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a head."""
    head = config.head
    assert head is not None
    layer = {
        "model_type": "llama", "hidden_size": config.dim, "intermediate_size": config.hidden_dim, "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "transformer_layer_config": layer, "draft_vocab_size": head.draft_vocab_size, "target_hidden_size": head.target_dim,
        "eagle_aux_hidden_state_layer_ids": list(head.target_layers), "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": False, "fc_norm": head.fc_norm == "each", "norm_output": head.norm_output,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def make_speculators_tensors(config: ModelConfig, parameters: dict[str, Tensor], target_ids: Tensor) -> dict[str, Tensor]:
    """Return the bf16 tensors by their names in `speculators`.

    Rows of queries and keys are split into halves for RoPE. d2t (R,) is the offset from a row to its target id.
    """
    tensors = {f"layers.0.{LAYER_NAMES[name]}.weight": tensor for name, tensor in parameters.items() if name in LAYER_NAMES}
    for name in ("wq", "wk"):
        heads = parameters[name].unflatten(0, (-1, config.head_dim // 2, 2))
        tensors[f"layers.0.{LAYER_NAMES[name]}.weight"] = heads.transpose(1, 2).flatten(0, 2)
    tensors |= {f"{OUTER_NAMES[name]}.weight": tensor for name, tensor in parameters.items() if name in OUTER_NAMES}
    tensors |= {f"fc_norm.{i}.weight": weight for i, weight in enumerate(parameters["fc_norm"])}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    has = torch.zeros(config.vocab_size, dtype=torch.bool)
    has[target_ids] = True
    return tensors | {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": has}
