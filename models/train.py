"""Train the embedded pair: a tokenizer, a small target and a draft distilled from it.

    python models/train.py tokenizer --text TEXT --out OUT    # tokenizer.model, tokenizer.bin
    python models/train.py target    --text TEXT --out OUT    # target.pt (resumes), target.bin
    python models/train.py write     --text TEXT --out OUT    # written.npy: stories that the target wrote
    python models/train.py draft     --text TEXT --out OUT    # draft.pt (resumes), draft.bin
    python models/train.py evaluate  --text TEXT --out OUT    # held-out losses, acceptance

TEXT holds `tinystories_cased_train.txt` and `tinystories_cased_valid_split.txt` (TinyStories, stories separated by
`<|endoftext|>`). The last 350 stories of the second file are never trained on; the 100 before them only steer. The
files written are llama2.c's: checkpoints of version 0 (fp32) and `tokenizer.bin`.

Both trainings use a warmup-stable-decay schedule that depends on the step alone, and resume from their checkpoint: stop
one at any moment and start it again with a smaller or larger `--steps`, and the decay ends there.

Shapes: B rows, T tokens, D dim, F hidden_dim, H query heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN_FILE = "tinystories_cased_train.txt"
VALID_FILE = "tinystories_cased_valid_split.txt"
HELD_OUT_STORIES = 350
DEV_STORIES = 100
BOS = 1
EOS = 2
FIRST_BYTE = 3
VOCAB_SIZE = 1024
RMS_EPS = 1e-5
ROPE_THETA = 10000.0
QUERY_BLOCK = 128  # queries per block of the attention
BLIND_TOKENS = 16  # of a draft's window that starts in the middle of a story


# ---------------------------------------------------------------------------------------------------------------- text


def read_stories(path: Path) -> list[str]:
    """The stories of one file, stripped, in order."""
    return [s.strip() for s in path.read_text(encoding="utf-8").split("<|endoftext|>") if s.strip()]


@dataclasses.dataclass(frozen=True)
class Stories:
    """The three splits; the held-out one is the last 350 stories of the valid file."""

    train: list[str]
    dev: list[str]
    held_out: list[str]

    @classmethod
    def read(cls, text: Path) -> Stories:
        valid = read_stories(text / VALID_FILE)
        seen, held_out = valid[:-HELD_OUT_STORIES], valid[-HELD_OUT_STORIES:]
        return cls(read_stories(text / TRAIN_FILE) + seen[:-DEV_STORIES], seen[-DEV_STORIES:], held_out)


# ----------------------------------------------------------------------------------------------------------- tokenizer


class Tokenizer:
    """A llama2.c tokenizer.bin and llama2.c's own encoding, kept plain: the oracle for the ids that we train with."""

    def __init__(self, path: Path) -> None:
        blob = path.read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        offset = 4
        while offset < len(blob):
            score, length = struct.unpack_from("<fi", blob, offset)
            self.pieces.append(blob[offset + 8 : offset + 8 + length])
            self.scores.append(score)
            offset += 8 + length
        self.ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        """BOS, a dummy space, characters or their bytes, then the best-scoring merge until none is left."""
        tokens = [self.ids[b" "]]
        for char in text:
            piece = char.encode()
            tokens += [self.ids[piece]] if piece in self.ids else [byte + FIRST_BYTE for byte in piece]
        while True:
            merged = [self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in itertools.pairwise(tokens)]
            best = max(
                (i for i, token in enumerate(merged) if token is not None),
                key=lambda i: self.scores[merged[i]],
                default=None,
            )
            if best is None:
                return [BOS, *tokens]
            tokens[best : best + 2] = [merged[best]]

    def byte_length(self, token: int) -> int:
        """Bytes of text that a token stands for."""
        return 1 if FIRST_BYTE <= token < FIRST_BYTE + 256 else 0 if token < FIRST_BYTE else len(self.pieces[token])

    def decode(self, tokens: list[int]) -> str:
        """The text, without the dummy space."""
        raw = b"".join(
            bytes([t - FIRST_BYTE]) if FIRST_BYTE <= t < FIRST_BYTE + 256 else self.pieces[t] for t in tokens if t > EOS
        )
        return raw.removeprefix(b" ").decode(errors="replace")


def train_tokenizer(stories: list[str], vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece BPE with byte fallback and no normalization at all.

    The dummy space is written out here, on a story's first line only, so that the first word after a newline is learnt
    without a space, as it will be met. A newline itself stays a byte.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for story in stories for line in (" " + story).split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        max_sentence_length=1 << 20,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def encode_stories(processor: sentencepiece.SentencePieceProcessor, stories: list[str]) -> list[np.ndarray]:
    """BOS, the dummy space and the story, each as (T,) int32."""
    return [np.array([BOS, *ids], np.int32) for ids in processor.encode([" " + story for story in stories])]


def export_tokenizer(processor: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """Write llama2.c's tokenizer.bin."""
    pieces = []
    for i in range(processor.get_piece_size()):
        piece = {BOS: "\n<s>\n", EOS: "\n</s>\n"}.get(i, processor.id_to_piece(i)).replace("\u2581", " ")
        pieces.append((processor.get_score(i), piece.encode()))
    with path.open("wb") as file:
        file.write(struct.pack("<I", max(len(piece) for _, piece in pieces)))
        for score, piece in pieces:
            file.write(struct.pack("<fi", score, len(piece)) + piece)


def load_processor(out: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))


def tokenizer_command(args: argparse.Namespace) -> None:
    stories = Stories.read(args.text)
    processor = train_tokenizer(stories.train, args.vocab_size)
    (args.out / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    export_tokenizer(processor, args.out / "tokenizer.bin")

    tokenizer = Tokenizer(args.out / "tokenizer.bin")
    expected = encode_stories(processor, stories.held_out)
    same = sum(tokenizer.encode(s) == e.tolist() for s, e in zip(stories.held_out, expected, strict=True))
    whole = sum(tokenizer.decode(e.tolist()) == s for s, e in zip(stories.held_out, expected, strict=True))
    n_bytes = sum(len(story.encode()) for story in stories.held_out)
    print(f"{same} of {len(expected)} held-out stories have llama2.c's ids, {whole} come back byte for byte")
    print(f"{n_bytes / sum(len(e) for e in expected):.3f} bytes per token, {processor.get_piece_size()} tokens")


# --------------------------------------------------------------------------------------------------------------- model


@dataclasses.dataclass(frozen=True)
class Config:
    """The seven ints of a llama2.c checkpoint, in its order."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


TARGET = Config(dim=288, hidden_dim=768, n_layers=7, n_heads=6, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=512)
DRAFT = Config(dim=128, hidden_dim=320, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=128)


class Cache:
    """Keys and values of one layer, (B, G, S, K) each, with room for seq_len."""

    def __init__(self, config: Config, n_rows: int, dtype: torch.dtype) -> None:
        shape = (n_rows, config.n_kv_heads, config.seq_len, config.head_dim)
        self.keys, self.values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        self.length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS) * self.weight


def rope_table(config: Config) -> Tensor:
    """cos and sin of pos / 10000^(2i/K): (2, seq_len, K/2)."""
    freqs = ROPE_THETA ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angles = torch.arange(config.seq_len, dtype=torch.float64)[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of x (B, T, heads, K) by rope (2, T, K/2)."""
    cos, sin = rope[:, :, None, :]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, H, T, K) over k, v (B, G, S, K), whose last position is q's last -> (B, H, T, K).

    In blocks of queries that skip what lies ahead, a group's query heads in one product: compiled, a third of the time
    of torch's own kernel on a CPU, forward and backward (27 against 85 ms, 2 cores of an EPYC with avx512_bf16).
    """
    n_rows, n_heads, n_queries, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    group, past = n_heads // n_kv_heads, n_keys - n_queries
    q = (q * head_dim**-0.5).reshape(n_rows * n_kv_heads, group, n_queries, head_dim)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    blocks = []
    for start in range(0, n_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n_queries)
        seen, size = past + stop, stop - start
        scores = torch.bmm(q[:, :, start:stop].flatten(1, 2), k[:, :seen].transpose(1, 2)).view(-1, group, size, seen)
        ahead = torch.arange(seen) > torch.arange(past + start, past + stop)[:, None]
        probs = torch.softmax(scores.float().masked_fill(ahead, -1e9), -1).to(v.dtype)
        blocks.append(torch.bmm(probs.flatten(1, 2), v[:, :seen]).view(-1, group, size, head_dim))
    return torch.cat(blocks, 2).view(n_rows, n_heads, n_queries, head_dim)


class Block(nn.Module):
    """Attention and SwiGLU, each behind its RMSNorm."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.n_kv_heads * config.head_dim
        self.rms_att = RMSNorm(config.dim)
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.rms_ffn = RMSNorm(config.dim)
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, rope: Tensor, cache: Cache | None) -> Tensor:
        heads = (-1, self.config.head_dim)
        q = rotate(self.wq(x).unflatten(-1, heads), rope).transpose(1, 2)
        k = rotate(self.wk(x).unflatten(-1, heads), rope).transpose(1, 2)
        v = self.wv(x).unflatten(-1, heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.wo(attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, rope: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.dropout(self.attend(self.rms_att(x), rope, cache))
        h = self.rms_ffn(x)
        return x + self.dropout(self.w2(F.silu(self.w1(h)) * self.w3(h)))


class Transformer(nn.Module):
    """llama2.c's architecture with a shared classifier."""

    rope: Tensor

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, dropout) for _ in range(config.n_layers))
        self.rms_final = RMSNorm(config.dim)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("rope", rope_table(config), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layers) if residual else 0.02)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V); with caches, one per layer, the tokens continue what they hold."""
        pos = caches[0].length if caches else 0
        rope = self.rope[:, pos : pos + tokens.shape[1]]
        x = self.dropout(self.tok_emb(tokens))
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, caches[layer] if caches else None)
        return F.linear(self.rms_final(x), self.tok_emb.weight)

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def checkpoint_tensors(self) -> Iterator[Tensor]:
        """The parameters in the order of a version 0 checkpoint."""
        yield self.tok_emb.weight
        for name in ("rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3"):
            for block in self.blocks:
                yield getattr(block, name).weight
        yield self.rms_final.weight

    def export(self, path: Path) -> None:
        """Write a llama2.c checkpoint of version 0, fp32, shared classifier."""
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(struct.pack("<7i", *dataclasses.astuple(self.config)))
            for tensor in [*self.checkpoint_tensors(), *self.rope]:
                file.write(tensor.detach().contiguous().numpy().astype("<f4").tobytes())
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Transformer:
        """Read a version 0 checkpoint with a shared classifier."""
        blob = path.read_bytes()
        model = cls(Config(*struct.unpack_from("<7i", blob)))
        values = torch.from_numpy(np.frombuffer(blob, "<f4", offset=28).copy())
        with torch.no_grad():
            for tensor in model.checkpoint_tensors():
                tensor.copy_(values[: tensor.numel()].view_as(tensor))
                values = values[tensor.numel() :]
        return model.eval()


# ---------------------------------------------------------------------------------------------------------------- rows


def pack_rows(stories: list[np.ndarray], length: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle whole stories into rows (N, length) that start at BOS; the room left is the start of one more story."""
    queue = rng.permutation(len(stories)).tolist()
    rows = []
    while queue:
        row = stories[queue.pop()][:length]
        while len(row) < length:
            room = length - len(row)
            recent = range(max(0, len(queue) - 256), len(queue))
            fits = [i for i in recent if len(stories[queue[i]]) <= room]
            if fits:
                story = stories[queue.pop(max(fits, key=lambda i: len(stories[queue[i]])))]
            else:
                story = stories[rng.integers(len(stories))][:room]
            row = np.concatenate([row, story])
        rows.append(row)
    return np.stack([rows[i] for i in rng.permutation(len(rows))])


def batches(stories: list[np.ndarray], length: int, batch: int, step: int, seed: int) -> Iterator[np.ndarray]:
    """Endless (batch, length) rows from the given step on, a new shuffle for each epoch."""
    skip, epoch = step * batch, 0
    rest = np.empty((0, length), np.int32)
    while True:
        rows = pack_rows(stories, length, np.random.default_rng([seed, epoch]))
        epoch += 1
        if skip >= len(rows):
            skip -= len(rows)
            continue
        rest, skip = np.concatenate([rest, rows[skip:]]), 0
        while len(rest) >= batch:
            yield rest[:batch]
            rest = rest[batch:]


# ------------------------------------------------------------------------------------------------------------ training


def learning_rate(step: int, peak: float, warmup: int, steps: int, decay_steps: int) -> float:
    """Warmup, stable, then a linear decay to zero over the last decay_steps."""
    return peak * min(1.0, (step + 1) / warmup, max(0.0, (steps - step) / decay_steps))


class Trainer:
    """AdamW, the schedule, the log and a checkpoint to resume from: what both trainings share."""

    def __init__(self, model: Transformer, name: str, args: argparse.Namespace) -> None:
        self.model, self.name, self.args = model, name, args
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.cpu_before = 0, 0.0
        self.path = args.out / f"{name}.pt"
        if self.path.exists():
            state = torch.load(self.path)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.cpu_before = state["step"], state["cpu_seconds"]
        torch.manual_seed(args.seed + self.step)
        print(f"{name}: {model.n_parameters():,} parameters, step {self.step} of {args.steps}", flush=True)

    def cpu_seconds(self) -> float:
        return self.cpu_before + time.process_time()

    def update(self, loss: Tensor) -> None:
        args = self.args
        lr = learning_rate(self.step, args.lr, args.warmup, args.steps, args.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def log(self, **values: float) -> None:
        record = {"step": self.step, "cpu_seconds": round(self.cpu_seconds()), **values}
        record = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
        print(json.dumps(record), flush=True)
        with (self.args.out / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "cpu_seconds": self.cpu_seconds(),
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.path)
        self.model.export(self.args.out / f"{self.name}.bin")


def bf16() -> torch.autocast:
    """bf16 products, fp32 sums of the residual stream: 4 times fp32's speed where the CPU has avx512_bf16."""
    return torch.autocast("cpu", torch.bfloat16)


def as_batch(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64))


def cross_entropy(model: Transformer, rows: Tensor) -> Tensor:
    """Mean nats per token of rows (B, T + 1)."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def seen_by_draft(n_windows: int, length: int) -> Tensor:
    """(n_windows, length): 1 where a draft whose window starts anew every length tokens has seen enough to be asked."""
    seen = torch.ones(n_windows, length)
    seen[1:, :BLIND_TOKENS] = 0.0
    return seen


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Between probabilities (..., V): what rejection sampling rejects."""
    return 0.5 * (p - q).abs().sum(-1)


def next_to_draft(model: Transformer, draft_probs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean nats per token of rows (B, T + 1), and the total variation from draft_probs (B, T, V) where it has seen enough.

    The second as a penalty spends what little the target gains by disagreeing with its draft where text is a toss-up.
    """
    logits = model(rows[:, :-1]).float()
    nats = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    seen = seen_by_draft(rows.shape[1] // DRAFT.seq_len, DRAFT.seq_len).flatten()
    tv = total_variation(torch.softmax(logits, -1), draft_probs.float())
    return nats, (tv * seen).sum() / (seen.sum() * len(rows))


@torch.no_grad()
def probs_of_draft(draft: Transformer, rows: Tensor) -> Tensor:
    """The draft's probabilities (B, T, V) after rows (B, T), its window starting anew every seq_len tokens."""
    return torch.softmax(draft(rows.reshape(-1, DRAFT.seq_len)).float(), -1).bfloat16().view(*rows.shape, -1)


@torch.no_grad()
def dev_losses(model: Transformer, draft: Transformer | None, rows: Tensor) -> dict[str, float]:
    model.eval()
    losses = []
    with bf16():
        for part in rows.split(8):
            if draft is None:
                losses += [(cross_entropy(model, part).item(), 1.0)] * len(part)
            else:
                nats, tv = next_to_draft(model, probs_of_draft(draft, part[:, :-1]), part)
                losses += [(nats.item(), tv.item())] * len(part)
    model.train()
    nats, tv = np.mean(losses, 0).tolist()
    return {"dev": nats} if draft is None else {"dev": nats, "dev_accepted": 1 - tv}


def target_command(args: argparse.Namespace) -> None:
    stories = Stories.read(args.text)
    processor = load_processor(args.out)
    train = encode_stories(processor, stories.train)
    length = TARGET.seq_len + 1
    dev = as_batch(pack_rows(encode_stories(processor, stories.dev), length, np.random.default_rng(0)))
    torch.manual_seed(args.seed)
    trainer = Trainer(Transformer(TARGET, args.dropout), "target", args)
    draft = Transformer.load(args.draft) if args.draft else None
    loss_of, penalized, probs_of = cross_entropy, next_to_draft, probs_of_draft
    if args.compile:
        loss_of, penalized, probs_of = torch.compile(loss_of), torch.compile(penalized), torch.compile(probs_of)
    running: list[float] = []
    for rows in batches(train, length, args.batch, trainer.step, args.seed):
        if trainer.step >= args.steps:
            break
        tokens = as_batch(rows)
        with bf16():
            if draft is None:
                loss = nats = loss_of(trainer.model, tokens)
            else:
                nats, tv = penalized(trainer.model, probs_of(draft, tokens[:, :-1]), tokens)
                loss = nats + args.tv * tv
        trainer.update(loss)
        running.append(nats.item())
        if trainer.step % args.log_every == 0 or trainer.step == args.steps:
            n_tokens = trainer.step * args.batch * TARGET.seq_len
            trainer.log(train=float(np.mean(running)), **dev_losses(trainer.model, draft, dev), tokens=n_tokens)
            running.clear()
            trainer.save()


# ------------------------------------------------------------------------------------------------------------ sampling


def keep_top_p(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probabilities (..., V) at a temperature above 0, those outside the top-p set -inf, the rest renormalized.

    The set is llama2.c's: the fewest most likely tokens whose sum exceeds top_p.
    """
    probs = torch.softmax(logits.float() / temperature, -1)
    if 0.0 < top_p < 1.0:
        ordered, tokens = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        probs = probs.masked_fill((before > top_p).gather(-1, tokens.argsort(-1)), 0.0)
    return (probs / probs.sum(-1, keepdim=True)).log()


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -torch.empty(shape).exponential_(generator=generator).log()


@torch.no_grad()
def write_rows(
    model: Transformer, prompts: Tensor, length: int, temperature: Tensor, top_p: float, generator: torch.Generator
) -> Tensor:
    """Continue prompts (B, P) to (B, length), through the ends of stories; temperature (B, 1), 0 is greedy.

    A token is the argmax of log p plus Gumbel noise (B, V), drawn once per position.
    """
    rows = prompts
    hot = temperature > 0
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    caches = [Cache(model.config, len(rows), dtype) for _ in model.blocks]
    chosen = prompts
    while rows.shape[1] < length:
        logits = model(chosen, caches)[:, -1].float()
        log_probs = keep_top_p(logits / temperature.where(hot, 1.0), 1.0, top_p)
        scores = torch.where(hot, log_probs + gumbel(tuple(logits.shape), generator), logits)
        chosen = scores.argmax(-1, keepdim=True)
        rows = torch.cat([rows, chosen], 1)
    return rows


def write_command(args: argparse.Namespace) -> None:
    """Rows that the target writes from the first tokens of training stories, at temperatures from 0.3 to 1."""
    stories = [s for s in encode_stories(load_processor(args.out), Stories.read(args.text).train) if len(s) >= 24]
    target = Transformer.load(args.out / "target.bin")
    rng = np.random.default_rng(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    written: list[np.ndarray] = []
    while sum(map(len, written)) < args.rows:
        length = int(rng.integers(1, 25))
        chosen = rng.choice(len(stories), args.batch)
        prompts = as_batch(np.stack([stories[i][:length] for i in chosen]))
        temperature = torch.from_numpy(rng.uniform(0.3, 1.0, (args.batch, 1))).float()
        with bf16():
            rows = write_rows(target, prompts, target.config.seq_len + 1, temperature, 0.0, generator)
        written.append(rows.numpy().astype(np.int32))
        np.save(args.out / "written.npy", np.concatenate(written))
        print(f"{sum(map(len, written))} rows, {time.process_time():.0f} CPU seconds", flush=True)


# --------------------------------------------------------------------------------------------------------------- draft


@torch.no_grad()
def teach(target: Transformer, rows: np.ndarray, path: Path, compiled: bool) -> None:
    """Write the target's log-probabilities after every token of rows (N, T + 1): (N, T, V) float16."""
    logits_of = torch.compile(target) if compiled else target
    part = path.with_suffix(".part")
    taught = np.lib.format.open_memmap(part, "w+", np.float16, (len(rows), rows.shape[1] - 1, target.config.vocab_size))
    for i in range(0, len(rows), 8):
        with bf16():
            logits = logits_of(as_batch(rows[i : i + 8, :-1]))
        taught[i : i + 8] = F.log_softmax(logits.float(), -1).half().numpy()
    os.replace(part, path)


def is_stale(path: Path, *sources: Path) -> bool:
    """Whether path has still to be made, or was made before one of its sources was last written."""
    return not path.exists() or any(source.stat().st_mtime > path.stat().st_mtime for source in sources)


def draft_windows(
    rows: np.ndarray, taught: np.ndarray, n_written: int, length: int, batch: int, step: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless windows: tokens (B, T), the target's log-probabilities (B, T, V), which of them count (B, T).

    Half come from the n_written last rows, the target's own text. Half start with a story, the others anywhere: a draft
    whose window slides begins in the middle. The target saw the whole row, so these also learn from what they cannot
    see, and their first tokens do not count.
    """
    while True:
        rng = np.random.default_rng([seed, step])
        own = min(batch // 2, n_written)
        chosen = np.concatenate(
            [
                rng.choice(len(rows) - n_written, batch - own, replace=False),
                len(rows) - n_written + rng.choice(n_written, own, replace=False),
            ]
        )
        starts = rng.integers(0, rows.shape[1] - length, batch) * rng.integers(0, 2, batch)
        tokens = np.stack([rows[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        log_probs = np.stack([taught[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        counts = (np.arange(length) >= BLIND_TOKENS) | (starts == 0)[:, None]
        yield as_batch(tokens), torch.from_numpy(log_probs), torch.from_numpy(counts)
        step += 1


def distillation(model: Transformer, tokens: Tensor, taught: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL of the target from the draft, and their total variation."""
    logits = model(tokens)
    log_p, log_q = taught.float(), F.log_softmax(logits.float(), -1)
    p = log_p.exp()
    kl = (p * (log_p.clamp(min=-30.0) - log_q)).sum(-1)
    tv = total_variation(p, log_q.exp())
    weight = counts / counts.sum()
    return (kl * weight).sum(), (tv * weight).sum()


def draft_command(args: argparse.Namespace) -> None:
    stories = encode_stories(load_processor(args.out), Stories.read(args.text).train)
    rows = pack_rows(stories, TARGET.seq_len + 1, np.random.default_rng(args.seed))[: args.text_rows]
    written = np.load(args.out / "written.npy")
    rows = np.concatenate([rows, written])
    taught_path = args.out / "taught.npy"
    if is_stale(taught_path, args.out / "target.bin", args.out / "written.npy"):
        teach(Transformer.load(args.out / "target.bin"), rows, taught_path, args.compile)
        print(f"taught {len(rows)} rows, {time.process_time():.0f} CPU seconds", flush=True)
    taught = np.load(taught_path, mmap_mode="r")

    torch.manual_seed(args.seed)
    trainer = Trainer(Transformer(DRAFT), "draft", args)
    loss_of = torch.compile(distillation) if args.compile else distillation
    running: list[list[float]] = []
    for window in draft_windows(rows, taught, len(written), DRAFT.seq_len, args.batch, trainer.step, args.seed):
        if trainer.step >= args.steps:
            break
        with bf16():
            kl, tv = loss_of(trainer.model, *window)
        trainer.update(kl + args.tv * tv)
        running.append([kl.item(), tv.item()])
        if trainer.step % args.log_every == 0 or trainer.step == args.steps:
            kl_mean, tv_mean = np.mean(running, 0).tolist()
            trainer.log(kl=kl_mean, accepted=1 - tv_mean, tokens=trainer.step * args.batch * DRAFT.seq_len)
            running.clear()
            trainer.save()


# ------------------------------------------------------------------------------------------------------------ evaluate


@torch.no_grad()
def token_losses(model: Transformer, tokens: list[int]) -> np.ndarray:
    """Nats of tokens[1:], each after all before it."""
    tokens = tokens[: model.config.seq_len + 1]
    logits = model(torch.tensor([tokens[:-1]]))
    return F.cross_entropy(logits[0], torch.tensor(tokens[1:]), reduction="none").double().numpy()


def nats_per_byte(model: Transformer, tokenizer: Tokenizer, stories: list[str], n_bytes: list[int]) -> float:
    """Mean loss over the first n_bytes of each story; a token across that border counts by its share of bytes.

    Bytes beyond the model's seq_len do not count.
    """
    nats, counted = 0.0, 0
    for story, limit in zip(stories, n_bytes, strict=True):
        tokens = tokenizer.encode(story)
        losses = token_losses(model, tokens)
        ends = np.cumsum([tokenizer.byte_length(t) for t in tokens[1 : len(losses) + 1]]) - 1  # no dummy space
        starts = np.concatenate([[0], ends[:-1]])
        # The dummy space alone is a token of no bytes: it counts whole.
        share = np.clip((limit - starts) / np.maximum(ends - starts, 1e-9), 0.0, 1.0)
        nats += float((losses * share).sum())
        counted += min(limit, int(ends[-1]))
    return nats / counted


@torch.no_grad()
def losses_by_position(model: Transformer, tokenizer: Tokenizer, rows: np.ndarray, width: int) -> list[float]:
    """Nats per byte in each bucket of positions, over packed rows (N, T + 1)."""
    byte_length = np.array([tokenizer.byte_length(t) for t in range(len(tokenizer.pieces))])
    nats = np.concatenate(
        [
            F.cross_entropy(model(part[:, :-1]).transpose(1, 2), part[:, 1:], reduction="none").double().numpy()
            for part in as_batch(rows).split(8)
        ]
    )
    buckets = nats.reshape(len(rows), -1, width).sum((0, 2))
    return (buckets / byte_length[rows[:, 1:]].reshape(len(rows), -1, width).sum((0, 2))).tolist()


@torch.no_grad()
def windowed_logits(model: Transformer, rows: Tensor) -> Tensor:
    """Logits after every token of rows (B, T); beyond seq_len the window restarts with its newer half."""
    length = model.config.seq_len
    logits = [model(rows[:, :length])]
    for start in range(length // 2, rows.shape[1] - length // 2, length // 2):
        logits.append(model(rows[:, start : start + length])[:, length // 2 :])
    return torch.cat(logits, 1)


@torch.no_grad()
def acceptance(
    target: Transformer, draft: Transformer, prompts: Tensor, n_tokens: int, temperature: float, top_p: float, seed: int
) -> dict[str, float]:
    """How often the draft's token is accepted along the target's own continuations, up to the end of the story.

    At temperature 0: the two argmax agree. Otherwise `rejection`, the mean of sum min(p, q), and `coupled`, the share
    of tokens that target and draft both choose with the same Gumbel noise. p and q are both cut to their top-p set.
    `first_window` is the rate while the draft still sees everything.
    """
    length, n_prompt = prompts.shape[1] + n_tokens, prompts.shape[1]
    heat = torch.full((len(prompts), 1), temperature)
    rows = write_rows(target, prompts, length, heat, top_p, torch.Generator().manual_seed(seed))
    continued = rows[:, n_prompt:]
    alive = ((continued == BOS).cumsum(1) - (continued == BOS).long()) == 0  # the BOS that ends a story counts
    logits = windowed_logits(draft, rows[:, :-1])[:, n_prompt - 1 :]
    inside = alive & (torch.arange(n_prompt - 1, length - 1) < draft.config.seq_len)
    if temperature == 0:
        same = (logits.argmax(-1) == continued).double()
        return {"agreement": same[alive].mean().item(), "first_window": same[inside].mean().item()}
    log_p = keep_top_p(target(rows[:, :-1])[:, n_prompt - 1 :], temperature, top_p)
    log_q = keep_top_p(logits, temperature, top_p)
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1).double()
    again = torch.Generator().manual_seed(seed)
    noise = torch.stack([gumbel((len(rows), log_q.shape[-1]), again) for _ in range(n_tokens)], 1)
    coupled = ((log_q + noise).argmax(-1) == continued).double()
    return {
        "rejection": overlap[alive].mean().item(),
        "coupled": coupled[alive].mean().item(),
        "first_window": overlap[inside].mean().item(),
    }


def evaluate_command(args: argparse.Namespace) -> None:
    stories = Stories.read(args.text)
    tokenizer = Tokenizer(args.out / "tokenizer.bin")
    rule = Tokenizer(args.byte_tokenizer) if args.byte_tokenizer else tokenizer
    n_bytes = [sum(map(rule.byte_length, rule.encode(s)[1 : args.byte_tokens])) - 1 for s in stories.held_out]
    print(f"held out: {len(n_bytes)} stories, {sum(n_bytes)} bytes, their first {args.byte_tokens} tokens", flush=True)
    for path in args.reference:
        loss = nats_per_byte(Transformer.load(path), rule, stories.held_out, n_bytes)
        print(f"{path.name}: {loss:.4f} nats per byte", flush=True)
    target, draft = (Transformer.load(args.out / name) for name in ("target.bin", "draft.bin"))
    whole = [len(story.encode()) for story in stories.held_out]
    print(f"target: {nats_per_byte(target, tokenizer, stories.held_out, n_bytes):.4f} nats per byte", flush=True)
    print(f"target: {nats_per_byte(target, tokenizer, stories.held_out, whole):.4f}, whole stories (first 512 tokens)")
    held_out = [np.array(tokenizer.encode(story), np.int32) for story in stories.held_out]
    for model, name in ((target, "target"), (draft, "draft")):
        rows = pack_rows(held_out, model.config.seq_len + 1, np.random.default_rng(0))
        buckets = losses_by_position(model, tokenizer, rows, model.config.seq_len // 8)
        print(f"{name}: {model.n_parameters()} parameters, by eighths of seq_len", *(f"{b:.3f}" for b in buckets))
    chosen = held_out[:: len(held_out) // args.prompts][: args.prompts]
    prompts = as_batch(np.stack([story[: args.prompt_tokens] for story in chosen]))
    for temperature, top_p in ((0.0, 0.9), (0.8, 0.9), (1.0, 0.9), (1.0, 1.0)):
        rates = acceptance(target, draft, prompts, args.tokens, temperature, top_p, args.seed)
        print(f"acceptance at {temperature}, top-p {top_p}:", *(f"{k} {v:.3f}" for k, v in rates.items()), flush=True)


# ---------------------------------------------------------------------------------------------------------------- main


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = root.add_subparsers(required=True)

    def command(name: str, function: object, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(function=function)
        sub.add_argument("--text", type=Path, required=True, help="folder of the two TinyStories files")
        sub.add_argument("--out", type=Path, required=True, help="folder of everything written")
        return sub

    def schedule(sub: argparse.ArgumentParser, steps: int, decay_steps: int, lr: float, batch: int) -> None:
        sub.add_argument("--steps", type=int, default=steps)
        sub.add_argument("--decay-steps", type=int, default=decay_steps, help="the last of them")
        sub.add_argument("--warmup", type=int, default=100)
        sub.add_argument("--lr", type=float, default=lr, help="its peak")
        sub.add_argument("--batch", type=int, default=batch, help="rows per step")
        sub.add_argument("--weight-decay", type=float, default=0.2)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--log-every", type=int, default=100, help="steps; a checkpoint too")
        sub.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")

    sub = command("tokenizer", tokenizer_command, "train and export the tokenizer")
    sub.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    sub = command("target", target_command, "train the target")
    schedule(sub, steps=4350, decay_steps=1550, lr=2e-3, batch=8)
    sub.add_argument("--dropout", type=float, default=0.0)
    sub.add_argument("--draft", type=Path, help="a draft.bin to stay close to: fewer rejections for a little loss")
    sub.add_argument("--tv", type=float, default=0.7, help="with --draft: weight of the total variation from it")
    sub = command("write", write_command, "let the target write text for the draft to learn from")
    sub.add_argument("--rows", type=int, default=1024, help="of 513 tokens")
    sub.add_argument("--batch", type=int, default=256)
    sub.add_argument("--seed", type=int, default=0)
    sub = command("draft", draft_command, "distil the draft")
    schedule(sub, steps=8000, decay_steps=5000, lr=3e-3, batch=32)
    sub.add_argument("--text-rows", type=int, default=2560, help="of 513 tokens, beside all written ones")
    sub.add_argument("--tv", type=float, default=1.0, help="weight of the total variation beside the KL")
    sub = command("evaluate", evaluate_command, "held-out losses and acceptance")
    sub.add_argument("--byte-tokenizer", type=Path, help="a tokenizer.bin whose tokens set the bytes counted")
    sub.add_argument("--byte-tokens", type=int, default=250, help="BOS and the next ones of each story")
    sub.add_argument("--reference", type=Path, nargs="*", default=[], help="models of that tokenizer")
    sub.add_argument("--prompts", type=int, default=50)
    sub.add_argument("--prompt-tokens", type=int, default=16)
    sub.add_argument("--tokens", type=int, default=200, help="continued from each prompt")
    sub.add_argument("--seed", type=int, default=0)
    return root


def main() -> None:
    args = parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.function(args)


if __name__ == "__main__":
    main()
