"""Pretraining of the small networks that lie in `model/assets`: code, then code with choices among edits.

    python -m sft.pretrain --preset flash-nano --corpus FILE.jsonl.xz --out FOLDER [--minutes 8]

Two kinds of documents, from public packages that are none of the demo's (`sft.corpus`): source files, cut
into rows; and choices (`sft.choices`): a function with one synthetic bug, eight candidate edits, and the
one that undoes the bug. No test is run and no task is seen. One process, one device (a GPU in practice);
the last line is a JSON summary with the losses on files and choices kept out of training.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import multiprocessing
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.auxiliary import collect
from model.batch import Batch
from model.flash import FlashPolicy
from model.moe import MoE
from model.policy import Policy
from model.tokenizer import Tokenizer
from sft.choices import Choice, choices_of

IGNORE = -100


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The corpus, one file at a time."""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def is_dev(row: dict[str, str]) -> bool:
    """One file in a hundred, chosen by its path, is kept out of training."""
    return zlib.crc32(f"{row['package']}/{row['path']}".encode()) % 100 == 0


def encode_file(row: dict[str, str]) -> np.ndarray:
    """Token ids of one file, `<|eos|>` last."""
    tokenizer = Tokenizer()
    return np.array([*tokenizer.encode(row["text"]), tokenizer.eos], dtype=np.uint16)


def encode_choices(row: dict[str, str]) -> list[Choice]:
    """The choice documents of one file, seeded by its path; a file that takes too long gives none."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(20)
    try:
        return choices_of(row["text"], seed=zlib.crc32(row["path"].encode()), limit=6)
    except TimeoutError:
        return []
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError


class Code:
    """A stream of tokens, cut into rows at random offsets.

    Args:
        tokens: all files, one after the other.
        columns: tokens of a row.
    """

    def __init__(self, tokens: np.ndarray, columns: int, device: str, seed: int) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.columns, self.device = columns, device
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, count: int) -> tuple[Batch, Tensor]:
        """(batch, targets [B, T])."""
        last = len(self.tokens) - self.columns - 1
        offsets_B = torch.randint(last, (count,), generator=self.generator).to(self.device)
        index_BT = offsets_B[:, None] + torch.arange(self.columns + 1, device=self.device)
        ids_BT = self.tokens[index_BT].long()
        return plain_batch(ids_BT[:, :-1]), ids_BT[:, 1:]


class Choices:
    """Choice documents, padded to one length; only the answer bears loss."""

    def __init__(self, documents: list[Choice], columns: int, device: str, seed: int) -> None:
        kept = [d for d in documents if len(d.tokens) <= columns + 1]
        pad = Tokenizer().pad
        ids = np.full((len(kept), columns + 1), pad, dtype=np.int16)
        said = np.zeros((len(kept), columns + 1), dtype=bool)
        for i, document in enumerate(kept):
            ids[i, : len(document.tokens)] = document.tokens
            said[i, : len(document.tokens)] = document.said
        self.ids, self.said = torch.from_numpy(ids).to(device), torch.from_numpy(said).to(device)
        self.lengths = torch.tensor([len(d.tokens) for d in kept], device=device)
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, count: int, index_B: Tensor | None = None) -> tuple[Batch, Tensor]:
        """(batch with the decoder's bounded replay, targets [B, T]: the answer's tokens)."""
        if index_B is None:
            index_B = torch.randint(len(self), (count,), generator=self.generator).to(self.device)
        ids_BT, said_BT = self.ids[index_B].long(), self.said[index_B]
        first_B = said_BT.int().argmax(1)
        batch = plain_batch(
            ids_BT[:, :-1], lengths_B=self.lengths[index_B] - 1, starts_B=(first_B - 128).clamp(min=0)
        )
        return batch, torch.where(said_BT[:, 1:], ids_BT[:, 1:], IGNORE)


def plain_batch(ids_BT: Tensor, *, lengths_B: Tensor | None = None, starts_B: Tensor | None = None) -> Batch:
    """One sequence a row."""
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    segments_BT = torch.ones_like(ids_BT)
    if lengths_B is not None:
        segments_BT = (positions_BT < lengths_B[:, None]).long()
    starts_BT = torch.zeros_like(ids_BT) if starts_B is None else starts_B[:, None].expand_as(ids_BT)
    return Batch(ids_BT, segments_BT, positions_BT, starts_BT)


def loss_of(policy: Policy, batch: Batch, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss in nats over the targets, whether each target was the likeliest token [N])."""
    wanted_BT = targets_BT != IGNORE
    hidden_ND = policy.hidden(batch)[wanted_BT]
    logits_NV = hidden_ND @ policy.head().to(hidden_ND.dtype).T
    targets_N = targets_BT[wanted_BT]
    loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N)
    return loss, logits_NV.argmax(-1) == targets_N


class Data:
    """Token streams of the corpus, and its choice documents as far as the pool's processes have made them.

    Args:
        corpus: made by `sft.corpus`.
        pool: makes the documents, which takes minutes, while the caller goes on.
    """

    def __init__(self, corpus: Path, pool: Pool) -> None:
        everything = list(rows(corpus))
        order = list(range(len(everything)))
        random.Random(0).shuffle(order)
        everything = [everything[i] for i in order]
        self._split = ["dev" if is_dev(row) else "train" for row in everything]
        encoded = pool.map(encode_file, everything, chunksize=64)
        self.code = {
            name: np.concatenate(
                [ids for ids, split in zip(encoded, self._split, strict=True) if split == name]
            )
            for name in ("train", "dev")
        }
        self._made: list[list[Choice]] = []
        self._results = pool.imap(encode_choices, everything, chunksize=8)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for documents in self._results:
            self._made.append(documents)

    @property
    def ready(self) -> bool:
        return not self._thread.is_alive()

    def choices(self, name: str) -> list[Choice]:
        """Choice documents of a split, those made so far."""
        made = list(self._made)
        return [
            d for split, documents in zip(self._split, made, strict=False) if split == name for d in documents
        ]


def train(args: argparse.Namespace, preset_name: str, data: Data) -> dict[str, object]:
    """Train one preset and save it under `args.out`; returns the summary."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    code = Code(data.code["train"], args.columns, device, args.seed)
    choices: Choices | None = None
    growing = True
    policy = FlashPolicy.fresh(preset_name, seed=args.seed)
    if args.init:
        policy.load(args.init)
    policy.module.to(device).train()
    optimizer = make_optimizer(policy, args.lr, fused=device == "cuda")
    began, step, seconds = time.monotonic(), 0, args.minutes * 60
    while (spent := time.monotonic() - began) < seconds and step < args.steps:
        progress = max(spent / seconds, step / args.steps)
        lr = args.lr * min(1.0, (step + 1) / 200) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        parts = [(1.0, *code.batch(args.rows))]
        if progress >= args.choices_from:
            if choices is None or (growing and step % args.refresh == 0):
                growing = not data.ready
                choices = Choices(data.choices("train"), args.columns, device, args.seed + step)
            parts.append((args.choice_share, *choices.batch(args.rows)))
        for weight, batch, targets in parts:
            with (
                torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"),
                collect(policy.module) as beside,
            ):
                loss, _ = loss_of(policy, batch, targets)
            (weight * (loss + 1e-4 * beside.balance()) + beside.indexer()).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for module in policy.module.modules():
            if isinstance(module, MoE):
                module.update_bias()
        step += 1
        if step % args.report_every == 0:
            if not math.isfinite(float(norm)):
                raise SystemExit(f"step {step}: the gradient is not finite; lower --lr")
            print(
                f"{preset_name} step {step} {spent:.0f} s loss {loss.item():.3f} norm {float(norm):.2f}",
                flush=True,
            )
    policy.save(Path(args.out) / preset_name, dtype=torch.bfloat16)
    spent = time.monotonic() - began
    dev_code = Code(data.code["dev"], args.columns, device, 1)
    dev_choices = Choices(data.choices("dev"), args.columns, device, 1)
    return {
        "preset": preset_name,
        "seed": args.seed,
        "steps": step,
        "choice_documents": len(choices) if choices else 0,
        "tokens": step * args.rows * args.columns,
        "minutes": round(spent / 60, 2),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **evaluate(policy, dev_code, dev_choices, args.rows),
    }


def make_optimizer(policy: FlashPolicy, lr: float, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors do not."""
    parameters = list(policy.module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


@torch.no_grad()
def evaluate(policy: Policy, code: Code, choices: Choices, count: int) -> dict[str, float]:
    """Loss per token on kept-out code, and the share of kept-out choices whose first pick is right."""
    policy.module.eval()
    losses = [float(loss_of(policy, *code.batch(count))[0]) for _ in range(8)]
    hits: list[float] = []
    for at in range(0, min(len(choices), 4096), count):
        index = torch.arange(at, min(at + count, len(choices)), device=choices.device)
        batch, targets = choices.batch(count, index)
        _, hit_N = loss_of(policy, batch, targets)
        rows_N = (targets != IGNORE).nonzero()[:, 0]
        wrong_B = torch.zeros(len(index), device=choices.device).index_add_(0, rows_N, (~hit_N).float())
        hits += (wrong_B == 0).float().tolist()
    return {
        "dev_code_nats": sum(losses) / len(losses),
        "dev_choice_accuracy": sum(hits) / max(1, len(hits)),
        "dev_choices": len(hits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["flash-nano", "flash-slim"])
    parser.add_argument("--corpus", type=Path, required=True, help="made by sft.corpus")
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", type=Path, help="go on from these weights")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each preset")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--choice-share", type=float, default=0.5, help="weight of the choices' loss")
    parser.add_argument(
        "--choices-from", type=float, default=0.4, help="share of the run after which they come"
    )
    parser.add_argument("--refresh", type=int, default=200, help="steps between looks for new documents")
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        data = Data(args.corpus, pool)
        print(json.dumps([train(args, name, data) for name in args.presets]))


if __name__ == "__main__":
    main()
