"""Train the embedded pair: a tokenizer, a small target and a draft distilled from it.

    python models/train.py tokenizer --text TEXT --out OUT    # tokenizer.bin
    python models/train.py target    --text TEXT --out OUT    # target.pt (resumes), target.bin
    python models/train.py write     --text TEXT --out OUT    # written.npy: stories that the target wrote
    python models/train.py draft     --text TEXT --out OUT    # draft.pt (resumes), draft.bin
    python models/train.py evaluate  --text TEXT --out OUT    # held-out losses, acceptance, speed
    python models/train.py head --target TARGET --out OUT     # a head that drafts for any target: head.pt (resumes), head/

TEXT holds `tinystories_cased_train.txt` and `tinystories_cased_valid_split.txt` (TinyStories, stories separated by
`<|endoftext|>`). The last 350 stories of the second file are never trained on; the 100 before them are the dev set. The
output files are llama2.c's: checkpoints of version 0 (fp32) and `tokenizer.bin`. torch trains; all other work of a
model runs in the library, with the exported file.

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
from specdec import (  # before torch: specdec configures OpenMP, which torch loads
    Sampling,
    SpeculativeDecoder,
    Tokenizer,
)

sys.path.pop(0)  # hides our `kernels` and `tokenizer` from other packages
import numpy as np
import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import evaluate, heads
from models.features import Features, can_chat, default_layers, generate_held_out, generate_rows
from models.stories import Stories, encode_stories, iterate_batches, pack_rows, write_rows
from models.training import Trainer, autocast_bf16, make_rope_table, rms_norm, rotate, to_batch, total_variation
from specdec.loaders import load_checkpoint
from specdec.loaders.llama2c import HEADER_FIELDS, ROPE_TABLES, V0_ORDER
from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model_config import ModelConfig
from specdec.tokenizer import BOS, EOS

VOCAB_SIZE = 1024
TARGET = ModelConfig(dim=288, hidden_dim=768, n_layers=7, n_heads=6, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=512)
DRAFT = ModelConfig(dim=128, hidden_dim=320, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, seq_len=128)
QUERY_BLOCK = 128  # queries per block of the attention
UNCOUNTED_TOKENS = 16  # first tokens, without loss, of a window that starts within a story

# ----------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(stories: list[str], vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """Train SentencePiece BPE with byte fallback and no normalization at all.

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
    """Train the tokenizer and compare it with SentencePiece on the held-out stories."""
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

LAYER_TENSORS = ("rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")
RESIDUAL_TENSORS = ("wo", "w2")  # their products are added to the residual stream


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention (B, T, H, K) of q (B, T, H, K) over k, v (B, T, G, K).

    It runs in blocks of queries that skip later positions, with a group's query heads in one product. Compiled, it takes a third
    of the time of torch's own kernel on a CPU, forward and backward (27 against 85 ms, 2 cores of an EPYC with avx512_bf16).
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
    """llama2.c's architecture with a shared classifier, for training; its parameters are a checkpoint's tensors."""

    rope: Tensor

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        """Create the parameters with random weights."""
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("rope", make_rope_table(config), persistent=False)
        for name, shape in LLAMA.shapes(config).items():
            if name.startswith("rms"):
                weight = torch.ones(shape)
            else:
                weight = torch.randn(shape) * (0.02 / math.sqrt(2 * config.n_layers) if name in RESIDUAL_TENSORS else 0.02)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T)."""
        eps, heads = self.config.norm_eps, (-1, self.config.head_dim)
        rope = self.rope[:, : tokens.shape[1]]
        x = self.dropout(functional.embedding(tokens, self.tok_emb))
        # Unbound at once, since the gradient of one layer's slice is as large as the whole tensor.
        layers = zip(*[getattr(self, name).unbind() for name in LAYER_TENSORS], strict=True)
        for rms_att, wq, wk, wv, wo, rms_ffn, w1, w2, w3 in layers:
            h = rms_norm(x, rms_att, eps)
            q, k, v = (functional.linear(h, w).unflatten(-1, heads) for w in (wq, wk, wv))
            x = x + self.dropout(functional.linear(attention(rotate(q, rope), rotate(k, rope), v).flatten(2), wo))
            h = rms_norm(x, rms_ffn, eps)
            x = x + self.dropout(functional.linear(functional.silu(functional.linear(h, w1)) * functional.linear(h, w3), w2))
        return functional.linear(rms_norm(x, self.rms_final, eps), self.tok_emb)

    def export(self, path: Path) -> None:
        """Write a llama2.c checkpoint of version 0, fp32."""
        tensors = dict(self.named_parameters()) | {ROPE_TABLES: self.rope}
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(struct.pack("<7i", *(getattr(self.config, field) for field in HEADER_FIELDS)))
            for name in V0_ORDER:
                if name in tensors:
                    file.write(tensors[name].detach().numpy().astype("<f4").tobytes())
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Model:
        """Load a fp32 checkpoint with a shared classifier."""
        checkpoint = load_checkpoint(path)
        model = cls(checkpoint.config)
        model.load_state_dict({name: torch.from_numpy(tensor[:]) for name, tensor in checkpoint.tensors.items()})
        return model.eval()


# -------------------------------------------------------------------------------------------------------------- target


def compute_target_losses(model: Model, draft: Model | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean nats per token of rows (B, T + 1), and the total variation from a draft where it has enough context.

    As a penalty, the second gives up the little loss that the target gains by disagreeing with its draft where several tokens
    are about equally likely. The draft's window restarts every seq_len tokens.
    """
    logits = model(rows[:, :-1]).float()
    nats = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    if draft is None:
        return nats, torch.zeros(())
    length = draft.config.seq_len
    with torch.no_grad():
        draft_probs = torch.softmax(draft(rows[:, :-1].reshape(-1, length)).float(), -1).view_as(logits)
    seen = torch.ones(logits.shape[1] // length, length)
    seen[1:, :UNCOUNTED_TOKENS] = 0.0
    tv = total_variation(torch.softmax(logits, -1), draft_probs)
    return nats, (tv * seen.flatten()).sum() / (seen.sum() * len(rows))


@torch.no_grad()
def compute_dev_losses(model: Model, draft: Model | None, rows: Tensor) -> dict[str, float]:
    """Return `compute_target_losses` over rows (N, T + 1), without dropout."""
    model.eval()
    sums = torch.zeros(2)
    with autocast_bf16():
        for batch in rows.split(8):
            sums += len(batch) * torch.stack(compute_target_losses(model, draft, batch))
    model.train()
    nats, tv = (sums / len(rows)).tolist()
    return {"dev": nats} if draft is None else {"dev": nats, "dev_accepted": 1 - tv}


def target_command(args: argparse.Namespace) -> None:
    """Train the target, close to a draft if one is given."""
    stories, tokenizer = Stories.read(args.text), Tokenizer(args.out / "tokenizer.bin")
    length = TARGET.seq_len + 1
    dev = to_batch(pack_rows(encode_stories(tokenizer, stories.dev), length, np.random.default_rng(0)))
    torch.manual_seed(args.seed)
    trainer = Trainer(Model(TARGET, args.dropout), "target", args, args.out / "target.bin")
    draft = Model.load(args.draft) if args.draft else None
    losses_of = torch.compile(compute_target_losses) if args.compile else compute_target_losses

    def losses(rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        nats, tv = losses_of(trainer.model, draft, to_batch(rows))
        return nats + args.tv * tv, {"train": nats}

    train = iterate_batches(encode_stories(tokenizer, stories.train), length, args.batch, trainer.step, args.seed)
    trainer.train(train, losses, lambda: compute_dev_losses(trainer.model, draft, dev))


# --------------------------------------------------------------------------------------------------------------- write


def write_command(args: argparse.Namespace) -> None:
    """Generate rows with the target from the first tokens of training stories, at temperatures from 0.3 to 1."""
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
            n_tokens = target.n_positions + 1 - len(prompt)
            # No end tokens: after a story the target begins the next, as in the rows that it was trained on.
            written.append(prompt + evaluate.generate_tokens(target, draft, prompt, n_tokens, sampling, {}))
        np.save(args.out / "written.npy", np.array(written, np.int32))
        print(f"{len(written)} rows, {time.process_time():.0f} CPU seconds", flush=True)


# --------------------------------------------------------------------------------------------------------------- draft


def write_teacher_log_probs(target: Path, rows: np.ndarray, path: Path) -> None:
    """Write the target's log-probabilities after every token of rows (N, T + 1): (N, T, V) float16."""
    model = load_model(target)
    log_probs = (evaluate.compute_log_probs(model, row.tolist()).astype(np.float16) for row in rows[:, :-1])
    write_rows([path], len(rows), ([each] for each in log_probs))


def sample_draft_windows(
    rows: np.ndarray, log_prob_rows: np.ndarray, n_written: int, length: int, batch: int, step: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield windows without end: tokens (B, T), the target's log-probabilities (B, T, V), and the mask of the loss (B, T).

    Half come from the n_written last rows, generated by the target. Half start with a story, the others anywhere, since a
    sliding draft window begins in the middle. The target saw the whole row, so these also learn from context outside the window;
    their first tokens have no loss.
    """
    while True:
        rng = np.random.default_rng([seed, step])
        n_generated = min(batch // 2, n_written)
        story_rows = rng.choice(len(rows) - n_written, batch - n_generated, replace=False)
        chosen = np.concatenate([story_rows, len(rows) - n_written + rng.choice(n_written, n_generated, replace=False)])
        starts = rng.integers(0, rows.shape[1] - length, batch) * rng.integers(0, 2, batch)
        tokens = np.stack([rows[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        log_probs = np.stack([log_prob_rows[i, s : s + length] for i, s in zip(chosen, starts, strict=True)])
        counts = (np.arange(length) >= UNCOUNTED_TOKENS) | (starts == 0)[:, None]
        yield to_batch(tokens), torch.from_numpy(log_probs), torch.from_numpy(counts)
        step += 1


def compute_distillation_losses(model: Model, tokens: Tensor, target_log_probs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the forward KL of the target from the draft, and their total variation."""
    logits = model(tokens)
    log_p, log_q = target_log_probs.float(), functional.log_softmax(logits.float(), -1)
    p = log_p.exp()
    kl = (p * (log_p.clamp(min=-30.0) - log_q)).sum(-1)
    tv = total_variation(p, log_q.exp())
    weight = counts / counts.sum()
    return (kl * weight).sum(), (tv * weight).sum()


def draft_command(args: argparse.Namespace) -> None:
    """Distil the draft from the target's log-probabilities."""
    stories = encode_stories(Tokenizer(args.out / "tokenizer.bin"), Stories.read(args.text).train)
    rows = pack_rows(stories, TARGET.seq_len + 1, np.random.default_rng(args.seed))[: args.text_rows]
    written = np.load(args.out / "written.npy")
    rows = np.concatenate([rows, written])
    target, log_probs_path = args.out / "target.bin", args.out / "taught.npy"
    sources = [path.stat().st_mtime for path in (target, args.out / "written.npy")]
    if not log_probs_path.exists() or log_probs_path.stat().st_mtime < max(sources):
        write_teacher_log_probs(target, rows, log_probs_path)
        print(f"taught {len(rows)} rows, {time.process_time():.0f} CPU seconds", flush=True)

    torch.manual_seed(args.seed)
    trainer = Trainer(Model(DRAFT), "draft", args, args.out / "draft.bin")
    losses_of = torch.compile(compute_distillation_losses) if args.compile else compute_distillation_losses

    def losses(window: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        kl, tv = losses_of(trainer.model, *window)
        return kl + args.tv * tv, {"kl": kl, "accepted": 1 - tv}

    log_probs = np.load(log_probs_path, mmap_mode="r")
    trainer.train(sample_draft_windows(rows, log_probs, len(written), DRAFT.seq_len, args.batch, trainer.step, args.seed), losses)


# ---------------------------------------------------------------------------------------------------------------- head


def head_command(args: argparse.Namespace) -> None:
    """Train a head for the target on the target's own text, and print its acceptance."""
    checkpoint, decoder = load_checkpoint(args.target), SpeculativeDecoder(args.target)
    path = args.out / "written.npy"
    if not path.exists():
        if not can_chat(decoder):
            sys.exit(f"{path} not found, and {args.target} has no chat template; run `write` first")
        np.save(path, generate_rows(decoder, args.rows, args.row_tokens + 1, args.seed))
        print(f"wrote {args.rows} rows, {time.process_time():.0f} CPU seconds", flush=True)
    rows = np.load(path)
    cache = decoder.target.new_cache(default_layers(checkpoint.config.n_layers))
    features = Features.load_or_compute(cache, rows, args.out)
    torch.manual_seed(args.seed)
    ids = heads.find_frequent_ids(rows, checkpoint.config.vocab_size, args.draft_vocab)
    head = heads.make_head(checkpoint, ids, args.length, args.dim, args.hidden_dim)
    trainer = Trainer(head, "head", args, args.out / "head")
    losses_of = torch.compile(heads.compute_losses) if args.compile else heads.compute_losses

    def losses(window: heads.Window) -> tuple[Tensor, dict[str, Tensor]]:
        return losses_of(head, window, args.depths, args.tv)

    trainer.train(heads.sample_windows(features, args.length, args.batch, trainer.step, args.seed), losses)
    texts = generate_held_out(decoder, rows, args.held_out, args.held_out_tokens)
    for depth, (accepted_with_all, accepted) in enumerate(heads.measure_acceptance(head, cache, texts), 1):
        print(
            f"depth {depth}: {accepted:.3f} of the tokens are the target's own, {accepted_with_all:.3f} with all before them",
            flush=True,
        )


# ---------------------------------------------------------------------------------------------------------------- main


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands."""
    root = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = root.add_subparsers(required=True)

    def command(name: str, function: object, description: str, needs_stories: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(function=function)
        if needs_stories:
            sub.add_argument("--text", type=Path, required=True, help="folder of the two TinyStories files")
        sub.add_argument("--out", type=Path, required=True, help="output folder")
        return sub

    def schedule(sub: argparse.ArgumentParser, steps: int, decay_steps: int, lr: float, batch: int) -> None:
        sub.add_argument("--steps", type=int, default=steps)
        sub.add_argument("--decay-steps", type=int, default=decay_steps, help="steps of the final decay")
        sub.add_argument("--warmup", type=int, default=100)
        sub.add_argument("--lr", type=float, default=lr, help="peak learning rate")
        sub.add_argument("--batch", type=int, default=batch, help="rows per step")
        sub.add_argument("--weight-decay", type=float, default=0.2)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--log-every", type=int, default=100, help="steps between two log lines and checkpoints")
        sub.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")

    sub = command("tokenizer", tokenizer_command, "train and export the tokenizer")
    sub.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    sub = command("target", target_command, "train the target")
    schedule(sub, steps=4350, decay_steps=1550, lr=2e-3, batch=8)
    sub.add_argument("--dropout", type=float, default=0.0)
    sub.add_argument("--draft", type=Path, help="draft.bin to stay close to: fewer rejections for a little loss")
    sub.add_argument("--tv", type=float, default=0.7, help="with --draft: weight of the total variation from it")
    sub = command("write", write_command, "let the target write text for the draft to learn from")
    sub.add_argument("--rows", type=int, default=1024, help="rows of 513 tokens")
    sub.add_argument("--batch", type=int, default=256, help="rows between two saves")
    sub.add_argument("--seed", type=int, default=0)
    sub = command("draft", draft_command, "distil the draft")
    schedule(sub, steps=8000, decay_steps=5000, lr=3e-3, batch=32)
    sub.add_argument("--text-rows", type=int, default=2560, help="rows of 513 tokens, in addition to all generated ones")
    sub.add_argument("--tv", type=float, default=1.0, help="weight of the total variation relative to the KL")
    sub = command("evaluate", evaluate.run_command, "held-out losses, acceptance, speed")
    evaluate.add_options(sub)
    sub = command("head", head_command, "train a head that drafts for a target", needs_stories=False)
    schedule(sub, steps=4000, decay_steps=2000, lr=1e-3, batch=16)
    sub.add_argument("--target", type=Path, required=True, help="folder or file of the target")
    sub.add_argument("--rows", type=int, default=2048, help="rows to generate if OUT has no written.npy")
    sub.add_argument("--row-tokens", type=int, default=512)
    sub.add_argument("--length", type=int, default=256, help="tokens of a window, and positions of the head")
    sub.add_argument("--depths", type=int, default=4, help="draft depths in the training, on the head's own outputs")
    sub.add_argument("--tv", type=float, default=1.0, help="weight of the total variation relative to the KL")
    sub.add_argument("--dim", type=int, help="width of the head; by default the target's, with its embedding")
    sub.add_argument("--hidden-dim", type=int, help="width of the head's MLP; by default in the target's proportion")
    sub.add_argument(
        "--draft-vocab", type=int, default=8192, help="size of the head's vocabulary: the most frequent ids of the generated rows"
    )
    sub.add_argument("--held-out", type=int, default=20, help="held-out texts, to measure acceptance")
    sub.add_argument("--held-out-tokens", type=int, default=128, help="new tokens of each")
    return root


def main(arguments: list[str] | None = None) -> None:
    """Run a command."""
    args = make_parser().parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    args.function(args)


if __name__ == "__main__":
    main()
