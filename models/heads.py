"""A head that drafts from its target's hidden states, to be trained: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

A start s is a pair, the target's states at position s and the token of s + 1, which tells the token of s + 2. From there the
head goes on with its own outputs and the text's tokens, as it will when it drafts ("training-time test"): depth k tells the token
of s + 2 + k, and sees the true pairs up to s and its own ones of that start.

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
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from models.features import Features, default_layers, lesson
from models.stories import Tokens
from models.training import rms_norm, rope_table, rotate
from specdec.config import Config, HeadConfig
from specdec.heads.eagle3 import EAGLE3
from specdec.loaders import Checkpoint
from specdec.model.transformer import Transformer

DEPTH_WEIGHT = 0.8  # of a depth's loss beside the one before it, as EAGLE-3 has it
JUDGED_DEPTHS = 5


class Window(NamedTuple):
    """Of B texts: tokens (B, T + 1), the target's states (B, T, L H), what it says next: ids, log_probs (B, T, TAUGHT)."""

    tokens: Tensor
    states: Tensor
    ids: Tensor
    log_probs: Tensor


class Head(nn.Module):
    """One llama layer over pairs of a feature and an embedding; its parameters are those of `EAGLE3`.

    target_ids (R,): which of the target's ids the rows of the classifier are, ascending. embedding: the target's, unless the head
    has its own.
    """

    rope: Tensor
    row_of: Tensor
    embedding: Tensor

    def __init__(self, config: Config, target_ids: Tensor, embedding: Tensor | None = None) -> None:
        super().__init__()
        assert config.head is not None
        self.config, self.head, self.target_ids = config, config.head, target_ids
        for name, shape in EAGLE3.shapes(config).items():
            is_norm = "norm" in name or "rms" in name
            self.register_parameter(name, nn.Parameter(torch.ones(shape) if is_norm else torch.randn(shape) * 0.02))
        row_of = torch.full((config.vocab_size,), -1)
        row_of[target_ids] = torch.arange(len(target_ids))
        for name, table in (("rope", rope_table(config)), ("row_of", row_of), ("embedding", embedding)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, states: Tensor, tokens: Tensor, depths: int) -> list[Tensor]:
        """Logits (B, S, R) of each depth, for S = T - depths starts: those of which all depths lie in the text."""
        n, eps = states.shape[1] - depths, self.config.norm_eps
        parts = states[:, :n].float().unflatten(-1, (-1, self.head.target_dim))
        output = F.linear(rms_norm(parts, self.fc_norm, eps).flatten(2), self.fc)
        table = self.tok_emb if self.head.own_embedding else self.embedding
        is_short = states.shape[1] <= self.config.seq_len
        angles = self.rope if is_short else rope_table(replace(self.config, seq_len=states.shape[1]))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(depths):
            feature = rms_norm(output, self.rms_hidden, eps)
            embedded = rms_norm(F.embedding(tokens[:, 1 + depth : 1 + depth + n], table), self.rms_emb, eps)
            pair = torch.cat([embedded, feature], -1)
            q, k, v = (F.linear(pair, w).unflatten(-1, (-1, self.config.head_dim)) for w in (self.wq, self.wk, self.wv))
            rope = angles[:, depth : depth + n]
            keys.append(rotate(k, rope))
            values.append(v)
            x = feature + F.linear(attention(rotate(q, rope), keys, values, self.config.n_seen).flatten(2), self.wo)
            normed = rms_norm(x, self.rms_ffn, eps)
            x = x + F.linear(F.silu(F.linear(normed, self.w1)) * F.linear(normed, self.w3), self.w2)
            output = rms_norm(x, self.rms_final, eps)
            logits.append(F.linear(output, self.wcls))
        return logits

    def export(self, folder: Path) -> None:
        """Write a head as `speculators` has it, bf16: config.json and model.safetensors."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(speculators_config(self.config), indent=2) + "\n", encoding="utf-8")
        parameters = {name: tensor.detach() for name, tensor in self.named_parameters()}
        part = folder / "model.part"
        save_file(speculators_tensors(self.config, parameters, self.target_ids), part)
        os.replace(part, folder / "model.safetensors")


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor], n_seen: int) -> Tensor:
    """Of q (B, S, H, K) at the last depth: causal over the keys and values (B, S, G, K) of the true pairs, the first, and over
    each start's own pair of every later depth, the n_seen newest of them all -> (B, S, H, K).
    """
    group = q.shape[2] // keys[0].shape[2]
    q = (q * q.shape[-1] ** -0.5).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # (B, G, group, S, K)
    keys, values = ([x.transpose(1, 2)[:, :, None] for x in part] for part in (keys, values))  # (B, G, 1, S, K)
    scores = (q @ keys[0].transpose(-1, -2)).float()
    own = [(q * key).sum(-1, keepdim=True).float() for key in keys[1:]]
    whole = torch.ones(scores.shape[-2:], dtype=torch.bool)
    unseen = whole.triu(1) | whole.tril(len(own) - n_seen)
    probs = torch.softmax(torch.cat([scores.masked_fill(unseen, -1e9), *own], -1), -1).to(values[0].dtype)
    n = q.shape[-2]
    mixed = probs[..., :n] @ values[0].expand(*probs.shape[:3], -1, -1)
    for i, value in enumerate(values[1:]):
        mixed = mixed + probs[..., n + i, None] * value
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def losses(head: Head, window: Window, depths: int, tv: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over the depths of forward KL of the target and tv times the total variation, each DEPTH_WEIGHT of the one before;
    and of depths 1 and the last how much of the target's probability the head's overlaps.

    Of the target's distribution the tokens count that it was taught and that the head has.
    """
    total, overlaps = torch.zeros(()), []
    for depth, logits in enumerate(head(window.states, window.tokens, depths)):
        said = slice(1 + depth, 1 + depth + logits.shape[1])
        rows = head.row_of[window.ids[:, said]]
        log_p = window.log_probs[:, said].float()
        p = log_p.exp() * (rows >= 0)
        logits = logits.float()
        log_q = logits.gather(-1, rows.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        kl = (p * (log_p - log_q)).sum(-1).mean()
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        total = total + DEPTH_WEIGHT**depth * (kl + tv * (1 - overlap))
        overlaps.append(overlap)
    return total, {"loss": total, "accepted": overlaps[0], "accepted_last": overlaps[-1]}


def windows(features: Features, length: int, batch: int, step: int, seed: int) -> Iterator[Window]:
    """Endless windows of `length` tokens, from anywhere in the rows."""
    n_rows, n_tokens = features.ids.shape[:2]
    length = min(length, n_tokens)
    while True:
        rng = np.random.default_rng([seed, step])
        places = [(i, slice(s, s + length)) for i, s in rng.integers(0, (n_rows, n_tokens - length + 1), (batch, 2)).tolist()]
        tokens = np.stack([features.rows[i, at.start : at.stop + 1] for i, at in places])
        states, ids, log_probs = (
            np.stack([x[i, at] for i, at in places]) for x in (features.states, features.ids, features.log_probs)
        )
        yield Window(*(torch.from_numpy(x) for x in (tokens.astype(np.int64), states, ids.astype(np.int64), log_probs)))
        step += 1


@torch.no_grad()
def acceptance(head: Head, target: Transformer, texts: Iterable[tuple[list[int], int]]) -> list[tuple[float, float]]:
    """Of the depths 1 to JUDGED_DEPTHS, along texts that the target wrote at temperature 0 behind so many tokens of a prompt: in
    which share of the starts it and all before it say the text's token, and in which of those where all before it do.
    """
    standing = []
    for text, n_prompt in texts:
        told = torch.tensor(text)
        states = torch.from_numpy(lesson(target, text).states)[None]
        said = [head.target_ids[logits[0].argmax(-1)] for logits in head(states[:, :-1], told[None], JUDGED_DEPTHS)]
        n = len(said[0])
        agree = torch.stack([ids == told[2 + depth : 2 + depth + n] for depth, ids in enumerate(said)])
        standing.append(agree.cumprod(0)[:, n_prompt - 2 :].float())
    shares = torch.cat(standing, 1).mean(1).tolist()
    return [(share, share / max(before, 1e-9)) for before, share in zip([1.0, *shares], shares, strict=False)]


# ---------------------------------------------------------------------------------------------------------------- made


def frequent(rows: Tokens, vocab_size: int, n: int) -> Tensor:
    """The n ids that are most frequent in rows (N, T), ascending."""
    counts = np.bincount(rows.ravel(), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:n]))


def new_head(target: Checkpoint, target_ids: Tensor, length: int, dim: int | None = None, hidden_dim: int | None = None) -> Head:
    """An untrained head for a target, that sees `length` positions and may say those ids.

    Of the target's width it takes the target's embedding and begins with the classifier; narrower, it has its own of both, and as
    many of the target's heads as fit.
    """
    config = target.config
    dim = dim or config.dim
    is_narrow = dim != config.dim
    n_heads = config.n_heads if not is_narrow else max(dim // config.head_dim, 1)
    head = Head(
        Config(
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
                layers=default_layers(config.n_layers),
                n_rows=len(target_ids),
                own_embedding=is_narrow,
                own_classifier=True,
                norm_before_residual=True,
                fc_norm="each",
                norm_output=True,
            ),
        ),
        target_ids,
        None if is_narrow else numbers(target.tensors["tok_emb"]),
    )
    if not is_narrow:
        classifier = numbers(target.tensors["wcls"]) if "wcls" in target.tensors else head.embedding
        head.wcls.data.copy_(classifier[target_ids])
    return head


def numbers(tensor: Any) -> Tensor:
    """A matrix of a checkpoint in fp32."""
    rows = np.asarray(tensor[: tensor.shape[0]])
    bits = rows.astype(np.uint32) << 16
    return torch.from_numpy(bits.view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32))


# ------------------------------------------------------------------------------------------------------------- written

OF_LAYER = {
    "rms_emb": "input_layernorm", "rms_hidden": "hidden_norm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "rms_ffn": "post_attention_layernorm", "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj", "w3": "mlp.up_proj",
}  # fmt: skip
BESIDE_IT = {"fc": "fc", "rms_final": "norm", "wcls": "lm_head", "tok_emb": "embed_tokens"}


def speculators_config(config: Config) -> dict[str, Any]:
    """config.json of a head."""
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
        "transformer_layer_config": layer, "draft_vocab_size": head.n_rows, "target_hidden_size": head.target_dim,
        "eagle_aux_hidden_state_layer_ids": list(head.layers), "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": False, "fc_norm": head.fc_norm == "each", "norm_output": head.norm_output,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def speculators_tensors(config: Config, parameters: dict[str, Tensor], target_ids: Tensor) -> dict[str, Tensor]:
    """The tensors by their names there, bf16; rows of queries and keys in halves; d2t (R,), what to add to a row for its id."""
    tensors = {f"layers.0.{OF_LAYER[name]}.weight": tensor for name, tensor in parameters.items() if name in OF_LAYER}
    for name in ("wq", "wk"):
        heads = parameters[name].unflatten(0, (-1, config.head_dim // 2, 2))
        tensors[f"layers.0.{OF_LAYER[name]}.weight"] = heads.transpose(1, 2).flatten(0, 2)
    tensors |= {f"{BESIDE_IT[name]}.weight": tensor for name, tensor in parameters.items() if name in BESIDE_IT}
    tensors |= {f"fc_norm.{i}.weight": weight for i, weight in enumerate(parameters["fc_norm"])}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    has = torch.zeros(config.vocab_size, dtype=torch.bool)
    has[target_ids] = True
    return tensors | {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": has}
