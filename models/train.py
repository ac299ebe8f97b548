"""Train the embedded pair: a tokenizer, a small target and a draft distilled from it.

    python models/train.py tokenizer --text TEXT --out OUT    # tokenizer.bin
    python models/train.py target    --text TEXT --out OUT    # target.pt (resumes), target.bin
    python models/train.py write     --text TEXT --out OUT    # written.npy: stories that the target wrote
    python models/train.py draft     --text TEXT --out OUT    # draft.pt (resumes), draft.bin
    python models/train.py evaluate  --text TEXT --out OUT    # held-out losses, acceptance, speed
    python models/train.py head --target TARGET --out OUT     # a head that drafts for any target: head.pt (resumes), head/

TEXT holds `tinystories_cased_train.txt` and `tinystories_cased_valid_split.txt` (TinyStories, stories separated by
`<|endoftext|>`). The last 350 stories of the second file are never trained on; the 100 before them only steer. The
files written are llama2.c's: checkpoints of version 0 (fp32) and `tokenizer.bin`. torch trains; whatever else is asked of a
model is the library's to do, with the file that was written.

All trainings use a warmup-stable-decay schedule that depends on the step alone, and resume from their checkpoint: stop
one at any moment and start it again with a smaller or larger `--steps`, and the decay ends there.

Shapes: B rows, T tokens, N rows of a data set, D dim, H query heads, G kv heads, K head_dim, V vocab_size.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from specdec import (  # before torch, which loads the OpenMP whose threads are told here how to wait
    Sampling,
    SpeculativeDecoder,
    Tokenizer,
)

sys.path.pop(0)  # nobody else is to find our `kernels` or `tokenizer`
import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import evaluate, heads
from models.features import Features, can_chat, default_layers, held_out_texts, written_by
from models.stories import Stories, batches, encode_stories, pack_rows, write_rows
from models.training import Trainer, as_batch, bf16, rms_norm, rope_table, rotate, total_variation
from specdec.config import Config
from specdec.loaders import load_checkpoint
from specdec.loaders.llama2c import FIELDS, ROPE, V0_ORDER
from specdec.loaders.loader import load_model
from specdec.model.llama import LLAMA
from specdec.tokenizer import BOS, EOS

VOCAB_SIZE = 1024
TARGET = Config(dim=288, hidden_dim=768, n_layers=7, n_heads=6, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=512)
DRAFT = Config(dim=128, hidden_dim=320, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=128)
QUERY_BLOCK = 128  # queries per block of the attention
BLIND_TOKENS = 16  # of a draft's window that starts in the middle of a story

# ----------------------------------------------------------------------------------------------------------- tokenizer


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


def tokenizer_command(args: argparse.Namespace) -> None:
    stories = Stories.read(args.text)
    processor = train_tokenizer(stories.train, args.vocab_size)
    export_tokenizer(processor, args.out / "tokenizer.bin")

    tokenizer = Tokenizer(args.out / "tokenizer.bin")
    held_out = stories.held_out
    expected = [[BOS, *ids] for ids in processor.encode([" " + story for story in held_out])]
    same = sum(tokenizer.encode(story) == ids for story, ids in zip(held_out, expected, strict=True))
    whole = sum(tokenizer.decode(ids) == story for story, ids in zip(held_out, expected, strict=True))
    n_bytes = sum(len(story.encode()) for story in held_out)
    print(f"{same} of {len(expected)} held-out stories have SentencePiece's ids, {whole} come back byte for byte")
    print(f"{n_bytes / sum(map(len, expected)):.3f} bytes per token, {tokenizer.vocab_size} tokens")


# --------------------------------------------------------------------------------------------------------------- model

OF_LAYERS = ("rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")
RESIDUAL = ("wo", "w2")  # whose products are added to the residual stream


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, T, H, K) over k, v (B, T, G, K) -> (B, T, H, K).

    In blocks of queries that skip what lies ahead, a group's query heads in one product: compiled, a third of the time
    of torch's own kernel on a CPU, forward and backward (27 against 85 ms, 2 cores of an EPYC with avx512_bf16).
    """
    n_rows, n_tokens, n_heads, head_dim = q.shape
    group = n_heads // k.shape[2]
    q = (q * head_dim**-0.5).transpose(1, 2).reshape(-1, group, n_tokens, head_dim)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    blocks = []
    for start in range(0, n_tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n_tokens)
        scores = torch.bmm(q[:, :, start:stop].flatten(1, 2), k[:, :stop].transpose(1, 2))
        scores = scores.view(-1, group, stop - start, stop)
        ahead = torch.arange(stop) > torch.arange(start, stop)[:, None]
        probs = torch.softmax(scores.float().masked_fill(ahead, -1e9), -1).to(v.dtype)
        blocks.append(torch.bmm(probs.flatten(1, 2), v[:, :stop]).view(-1, group, stop - start, head_dim))
    return torch.cat(blocks, 2).view(n_rows, n_heads, n_tokens, head_dim).transpose(1, 2)


class Model(nn.Module):
    """llama2.c's architecture with a shared classifier, to be trained: its parameters are a checkpoint's tensors."""

    rope: Tensor

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("rope", rope_table(config), persistent=False)
        for name, shape in LLAMA.shapes(config).items():
            if name.startswith("rms"):
                weight = torch.ones(shape)
            else:
                weight = torch.randn(shape) * (0.02 / math.sqrt(2 * config.n_layers) if name in RESIDUAL else 0.02)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        eps, heads = self.config.norm_eps, (-1, self.config.head_dim)
        rope = self.rope[:, : tokens.shape[1]]
        x = self.dropout(F.embedding(tokens, self.tok_emb))
        # unbound at once, since the gradient of one layer picked out of a tensor is as large as all of them
        layers = zip(*[getattr(self, name).unbind() for name in OF_LAYERS], strict=True)
        for rms_att, wq, wk, wv, wo, rms_ffn, w1, w2, w3 in layers:
            h = rms_norm(x, rms_att, eps)
            q, k, v = (F.linear(h, w).unflatten(-1, heads) for w in (wq, wk, wv))
            x = x + self.dropout(F.linear(attention(rotate(q, rope), rotate(k, rope), v).flatten(2), wo))
            h = rms_norm(x, rms_ffn, eps)
            x = x + self.dropout(F.linear(F.silu(F.linear(h, w1)) * F.linear(h, w3), w2))
        return F.linear(rms_norm(x, self.rms_final, eps), self.tok_emb)

    def export(self, path: Path) -> None:
        """Write a llama2.c checkpoint of version 0, fp32."""
        tensors = dict(self.named_parameters()) | {ROPE: self.rope}
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(struct.pack("<7i", *(getattr(self.config, field) for field in FIELDS)))
            for name in V0_ORDER:
                if name in tensors:
                    file.write(tensors[name].detach().numpy().astype("<f4").tobytes())
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Model:
        """Of a fp32 checkpoint with a shared classifier."""
        checkpoint = load_checkpoint(path)
        model = cls(checkpoint.config)
        model.load_state_dict({name: torch.from_numpy(tensor[:]) for name, tensor in checkpoint.tensors.items()})
        return model.eval()


# -------------------------------------------------------------------------------------------------------------- target


def target_losses(model: Model, draft: Model | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean nats per token of rows (B, T + 1), and the total variation from a draft where it has seen enough.

    The second as a penalty spends what little the target gains by disagreeing with its draft where text is a toss-up. The
    draft's window starts anew every seq_len tokens.
    """
    logits = model(rows[:, :-1]).float()
    nats = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    if draft is None:
        return nats, torch.zeros(())
    length = draft.config.seq_len
    with torch.no_grad():
        draft_probs = torch.softmax(draft(rows[:, :-1].reshape(-1, length)).float(), -1).view_as(logits)
    seen = torch.ones(logits.shape[1] // length, length)
    seen[1:, :BLIND_TOKENS] = 0.0
    tv = total_variation(torch.softmax(logits, -1), draft_probs)
    return nats, (tv * seen.flatten()).sum() / (seen.sum() * len(rows))


@torch.no_grad()
def dev_losses(model: Model, draft: Model | None, rows: Tensor) -> dict[str, float]:
    """`target_losses` over rows (N, T + 1), without dropout."""
    model.eval()
    sums = torch.zeros(2)
    with bf16():
        for part in rows.split(8):
            sums += len(part) * torch.stack(target_losses(model, draft, part))
    model.train()
    nats, tv = (sums / len(rows)).tolist()
    return {"dev": nats} if draft is None else {"dev": nats, "dev_accepted": 1 - tv}


def target_command(args: argparse.Namespace) -> None:
    stories, tokenizer = Stories.read(args.text), Tokenizer(args.out / "tokenizer.bin")
    length = TARGET.seq_len + 1
    dev = as_batch(pack_rows(encode_stories(tokenizer, stories.dev), length, np.random.default_rng(0)))
    torch.manual_seed(args.seed)
    trainer = Trainer(Model(TARGET, args.dropout), "target", args, args.out / "target.bin")
    draft = Model.load(args.draft) if args.draft else None
    losses_of = torch.compile(target_losses) if args.compile else target_losses

    def losses(rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        nats, tv = losses_of(trainer.model, draft, as_batch(rows))
        return nats + args.tv * tv, {"train": nats}

    train = batches(encode_stories(tokenizer, stories.train), length, args.batch, trainer.step, args.seed)
    trainer.train(train, losses, lambda: dev_losses(trainer.model, draft, dev))


# --------------------------------------------------------------------------------------------------------------- write


def write_command(args: argparse.Namespace) -> None:
    """Rows that the target writes from the first tokens of training stories, at temperatures from 0.3 to 1."""
    tokenizer = Tokenizer(args.out / "tokenizer.bin")
    stories = [story for story in encode_stories(tokenizer, Stories.read(args.text).train) if len(story) >= 24]
    target = load_model(args.out / "target.bin")
    draft_path = args.out / "draft.bin"
    draft = load_model(draft_path, int8=True, n_positions=target.n_positions) if draft_path.exists() else None
    rng = np.random.default_rng(args.seed)
    written: list[list[int]] = []
    while len(written) < args.rows:
        for _ in range(args.batch):
            prompt = stories[rng.integers(len(stories))][: rng.integers(1, 25)].tolist()
            sampling = Sampling(rng.uniform(0.3, 1.0), top_p=0.0, seed=int(rng.integers(2**63)))
            room = target.n_positions + 1 - len(prompt)
            # no end marks: behind the end of a story the target begins the next, as in the rows that it was trained on
            written.append(prompt + evaluate.continuation(target, draft, prompt, room, sampling, {}))
        np.save(args.out / "written.npy", np.array(written, np.int32))
        print(f"{len(written)} rows, {time.process_time():.0f} CPU seconds", flush=True)


# --------------------------------------------------------------------------------------------------------------- draft


def teach(target: Path, rows: np.ndarray, path: Path) -> None:
    """Write the target's log-probabilities after every token of rows (N, T + 1): (N, T, V) float16."""
    model = load_model(target)
    log_probs = (evaluate.log_probs_after(model, row.tolist()).astype(np.float16) for row in rows[:, :-1])
    write_rows([path], len(rows), ([each] for each in log_probs))


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
        of_text = rng.choice(len(rows) - n_written, batch - own, replace=False)
        chosen = np.concatenate([of_text, len(rows) - n_written + rng.choice(n_written, own, replace=False)])
        starts = rng.integers(0, rows.shape[1] - length, batch) * rng.integers(0, 2, batch)
        tokens = np.stack([rows[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        log_probs = np.stack([taught[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        counts = (np.arange(length) >= BLIND_TOKENS) | (starts == 0)[:, None]
        yield as_batch(tokens), torch.from_numpy(log_probs), torch.from_numpy(counts)
        step += 1


def distillation(model: Model, tokens: Tensor, taught: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL of the target from the draft, and their total variation."""
    logits = model(tokens)
    log_p, log_q = taught.float(), F.log_softmax(logits.float(), -1)
    p = log_p.exp()
    kl = (p * (log_p.clamp(min=-30.0) - log_q)).sum(-1)
    tv = total_variation(p, log_q.exp())
    weight = counts / counts.sum()
    return (kl * weight).sum(), (tv * weight).sum()


def draft_command(args: argparse.Namespace) -> None:
    stories = encode_stories(Tokenizer(args.out / "tokenizer.bin"), Stories.read(args.text).train)
    rows = pack_rows(stories, TARGET.seq_len + 1, np.random.default_rng(args.seed))[: args.text_rows]
    written = np.load(args.out / "written.npy")
    rows = np.concatenate([rows, written])
    target, taught = args.out / "target.bin", args.out / "taught.npy"
    sources = [path.stat().st_mtime for path in (target, args.out / "written.npy")]
    if not taught.exists() or taught.stat().st_mtime < max(sources):
        teach(target, rows, taught)
        print(f"taught {len(rows)} rows, {time.process_time():.0f} CPU seconds", flush=True)

    torch.manual_seed(args.seed)
    trainer = Trainer(Model(DRAFT), "draft", args, args.out / "draft.bin")
    losses_of = torch.compile(distillation) if args.compile else distillation

    def losses(window: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        kl, tv = losses_of(trainer.model, *window)
        return kl + args.tv * tv, {"kl": kl, "accepted": 1 - tv}

    log_probs = np.load(taught, mmap_mode="r")
    trainer.train(draft_windows(rows, log_probs, len(written), DRAFT.seq_len, args.batch, trainer.step, args.seed), losses)


# ---------------------------------------------------------------------------------------------------------------- head


def head_command(args: argparse.Namespace) -> None:
    """A head for the target, of its own text: what it wrote, what its layers and it thought of that, then the training."""
    checkpoint, decoder = load_checkpoint(args.target), SpeculativeDecoder(args.target)
    path = args.out / "written.npy"
    if not path.exists():
        if not can_chat(decoder):
            sys.exit(f"{path} is not there, and {args.target} has no chat template to ask it by; let it `write` first")
        np.save(path, written_by(decoder, args.rows, args.row_tokens + 1, args.seed))
        print(f"wrote {args.rows} rows, {time.process_time():.0f} CPU seconds", flush=True)
    rows = np.load(path)
    decoder.target.hidden_layers = default_layers(checkpoint.config.n_layers)
    features = Features.of(decoder.target, rows, args.out)
    torch.manual_seed(args.seed)
    ids = heads.frequent(rows, checkpoint.config.vocab_size, args.draft_vocab)
    head = heads.new_head(checkpoint, ids, args.length, args.dim, args.hidden_dim)
    trainer = Trainer(head, "head", args, args.out / "head")
    losses_of = torch.compile(heads.losses) if args.compile else heads.losses

    def losses(window: heads.Window) -> tuple[Tensor, dict[str, Tensor]]:
        return losses_of(head, window, args.depths, args.tv)

    trainer.train(heads.windows(features, args.length, args.batch, trainer.step, args.seed), losses)
    texts = held_out_texts(decoder, rows, args.held_out, args.held_out_tokens)
    for depth, (standing, agreeing) in enumerate(heads.acceptance(head, decoder.target, texts), 1):
        print(
            f"depth {depth}: {agreeing:.3f} of the tokens are the target's own, {standing:.3f} with all before them", flush=True
        )


# ---------------------------------------------------------------------------------------------------------------- main


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = root.add_subparsers(required=True)

    def command(name: str, function: object, description: str, of_stories: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(function=function)
        if of_stories:
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
    sub.add_argument("--batch", type=int, default=256, help="rows between one save and the next")
    sub.add_argument("--seed", type=int, default=0)
    sub = command("draft", draft_command, "distil the draft")
    schedule(sub, steps=8000, decay_steps=5000, lr=3e-3, batch=32)
    sub.add_argument("--text-rows", type=int, default=2560, help="of 513 tokens, beside all written ones")
    sub.add_argument("--tv", type=float, default=1.0, help="weight of the total variation beside the KL")
    sub = command("evaluate", evaluate.command, "held-out losses, acceptance, speed")
    evaluate.add_options(sub)
    sub = command("head", head_command, "train a head that drafts for a target", of_stories=False)
    schedule(sub, steps=4000, decay_steps=2000, lr=1e-3, batch=16)
    sub.add_argument("--target", type=Path, required=True, help="a folder or a file that the library reads")
    sub.add_argument("--rows", type=int, default=2048, help="that it writes, where OUT has no written.npy")
    sub.add_argument("--row-tokens", type=int, default=512)
    sub.add_argument("--length", type=int, default=256, help="tokens of a window, and how many positions the head then sees")
    sub.add_argument("--depths", type=int, default=4, help="that it is trained at, on its own outputs")
    sub.add_argument("--tv", type=float, default=1.0, help="weight of the total variation beside the KL")
    sub.add_argument("--dim", type=int, help="its width; the target's by default, and then the target's embedding")
    sub.add_argument("--hidden-dim", type=int, help="of its MLP; in the target's proportion by default")
    sub.add_argument("--draft-vocab", type=int, default=8192, help="ids that it may say: those most frequent in what was written")
    sub.add_argument("--held-out", type=int, default=20, help="texts that its acceptance is measured along")
    sub.add_argument("--held-out-tokens", type=int, default=128, help="of each, behind the prompt")
    return root


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    args.function(args)


if __name__ == "__main__":
    main()
