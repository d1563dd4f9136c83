"""Pretraining of the small networks that lie in `model/assets`: code, then code with games of choice.

    python -m sft.pretrain --corpus FILE.jsonl.xz --games FILE.jsonl.xz --out FOLDER [--minutes 8]

Two kinds of documents, from public packages that are none of the demo's (`sft.corpus`): source files, cut
into rows; and games (`sft.choices`): a function with one synthetic bug, eight candidate edits, tries and a
submission. No test is run and no task is seen. One process, one device (a GPU in practice); the last line
is a JSON summary with the figures on files and games kept out of training.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.auxiliary import collect
from model.batch import Batch
from model.chat import FlashChat
from model.flash import FlashPolicy
from model.moe import MoE
from model.policy import Policy
from model.tokenizer import Tokenizer
from sft.choices import games_in_row, is_dev, played, rows

IGNORE = -100
MAX_SKIPPED = 20
REPLAY = 128
"""Tokens of the decoder's bounded replay; both presets have the same."""


def encode_file(row: dict[str, str]) -> np.ndarray:
    """Token ids of one file, `<|eos|>` last."""
    tokenizer = Tokenizer()
    return np.array([*tokenizer.encode(row["text"]), tokenizer.eos], dtype=np.uint16)


class Document(NamedTuple):
    """A game as the network reads it."""

    ids: np.ndarray
    targets: np.ndarray
    """Positions that bear loss."""
    start: int
    """Where the decoder's bounded replay begins."""
    ends: tuple[int, ...]
    """Where each candidate's text ends."""
    right: int
    """Which candidate is right."""


def as_int16(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int16)


def encode_games(work: tuple[dict[str, Any], int]) -> list[Document]:
    """One document for each game of a file; `epoch` changes order and course of the games."""
    row, epoch = work
    tokenizer = Tokenizer()
    chat, rng = FlashChat(tokenizer), random.Random(f"{row['path']} {epoch}")

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    made = (played(game, chat, rng, window=REPLAY, count=count) for game in games_in_row(row))
    return [
        Document(as_int16(one.tokens), as_int16(one.targets), one.start, ends, right)
        for one, ends, right in made
    ]


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


class Choices(NamedTuple):
    """What a batch of games is about."""

    ends_BC: Tensor
    """Columns where each candidate's text ends."""
    right_B: Tensor
    """Which candidate is right."""


class Games:
    """Documents of one epoch in a random order, padded to one length."""

    def __init__(self, documents: list[Document], columns: int, device: str, seed: int) -> None:
        kept = [d for d in documents if len(d.ids) <= columns + 1]
        random.Random(seed).shuffle(kept)
        ids = np.full((len(kept), columns + 1), Tokenizer().pad, dtype=np.int16)
        said = np.zeros((len(kept), columns + 1), dtype=bool)
        for i, document in enumerate(kept):
            ids[i, : len(document.ids)] = document.ids
            said[i, document.targets] = True
        self.ids, self.said = torch.from_numpy(ids).to(device), torch.from_numpy(said).to(device)
        self.lengths = torch.tensor([len(d.ids) for d in kept], device=device)
        self.starts = torch.tensor([d.start for d in kept], device=device)
        self.ends = torch.tensor([d.ends for d in kept], device=device)
        self.right = torch.tensor([d.right for d in kept], device=device)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, at: int, count: int) -> tuple[Batch, Tensor, Choices]:
        """(batch with the decoder's bounded replay, targets [B, T], its choices); `at` wraps around."""
        index_B = torch.arange(at, at + count, device=self.ids.device) % len(self)
        ids_BT, said_BT = self.ids[index_B].long(), self.said[index_B]
        batch = plain_batch(
            ids_BT[:, :-1], lengths_B=self.lengths[index_B] - 1, starts_B=self.starts[index_B]
        )
        targets_BT = torch.where(said_BT[:, 1:], ids_BT[:, 1:], IGNORE)
        return batch, targets_BT, Choices(self.ends[index_B], self.right[index_B])


def plain_batch(ids_BT: Tensor, *, lengths_B: Tensor | None = None, starts_B: Tensor | None = None) -> Batch:
    """One sequence a row."""
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    segments_BT = torch.ones_like(ids_BT)
    if lengths_B is not None:
        segments_BT = (positions_BT < lengths_B[:, None]).long()
    starts_BT = torch.zeros_like(ids_BT) if starts_B is None else starts_B[:, None].expand_as(ids_BT)
    return Batch(ids_BT, segments_BT, positions_BT, starts_BT)


def joined(code: Batch, targets_BT: Tensor, games: Batch, game_targets_BT: Tensor) -> tuple[Batch, Tensor]:
    """As many rows as `code` has, the last of them games: one shape, so that compiling once is enough."""
    keep = len(targets_BT) - len(game_targets_BT)

    def both(name: str) -> Tensor:
        return torch.cat([getattr(code, name)[:keep], getattr(games, name)])

    batch = Batch(both("tokens_BT"), both("segments_BT"), both("positions_BT"), both("starts_BT"))
    return batch, torch.cat([targets_BT[:keep], game_targets_BT])


def loss_of(policy: Policy, hidden_BTd: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss in nats over the targets, whether each target was the likeliest token [N])."""
    wanted_BT = targets_BT != IGNORE
    hidden_ND = hidden_BTd[wanted_BT]
    logits_NV = hidden_ND @ policy.head().to(hidden_ND.dtype).T
    targets_N = targets_BT[wanted_BT]
    loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N)
    return loss, logits_NV.argmax(-1) == targets_N


class Pointer(nn.Module):
    """Reads off the encoder's output which candidate is right; it is thrown away after pretraining.

    The pick itself is one token of a document. This loss says of each candidate, where its text ends, whether
    it was the right one, in the half of the network that must notice; the decoder only has to look it up.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.score = nn.Linear(width, 1)

    def forward(self, encoded_BTd: Tensor, choices: Choices) -> Tensor:
        """Mean over documents of the cross-entropy over their candidates, in nats; scalar."""
        index_BCd = choices.ends_BC[..., None].expand(-1, -1, encoded_BTd.shape[2])
        scores_BC = self.score(self.norm(encoded_BTd.gather(1, index_BCd))).squeeze(-1)
        return nn.functional.cross_entropy(scores_BC.float(), choices.right_B)


class Data:
    """Token streams of the corpus, and its games, rendered anew for each epoch while the caller goes on.

    Args:
        corpus: made by `sft.corpus`.
        games: made by `sft.choices`.
        pool: encodes.
    """

    def __init__(self, corpus: Path, games: Path, columns: int, pool: Pool) -> None:
        files = list(rows(corpus))
        encoded = pool.map(encode_file, files, chunksize=64)
        streams: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for row, ids in zip(files, encoded, strict=True):
            streams[is_dev(row)].append(ids)
        self.code = {"dev": np.concatenate(streams[True]), "train": np.concatenate(streams[False])}
        self.columns, self._pool = columns, pool
        made = list(rows(games))
        self._train = [row for row in made if not is_dev(row)]
        self._dev = [row for row in made if is_dev(row)]
        self._next = self._render(self._train, 0)

    def _render(self, games: list[dict[str, Any]], epoch: int) -> Any:
        return self._pool.map_async(encode_games, [(row, epoch) for row in games], chunksize=32)

    def epoch(self, number: int, device: str) -> Games:
        """Documents of epoch `number`; those of the next one are begun."""
        documents = [d for made in self._next.get() for d in made]
        self._next = self._render(self._train, number + 1)
        return Games(documents, self.columns, device, number)

    def dev(self, device: str) -> Games:
        """Games of the files kept out."""
        return Games([d for made in self._render(self._dev, -1).get() for d in made], self.columns, device, 0)


def train(args: argparse.Namespace, preset_name: str, data: Data) -> dict[str, object]:
    """Train one preset and save it under `args.out`; returns the summary."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    code = Code(data.code["train"], args.columns, device, args.seed)
    policy = FlashPolicy.fresh(preset_name, seed=args.seed)
    if args.init:
        policy.load(args.init)
    policy.module.to(device).train()
    if args.compile:
        policy.module.compile(dynamic=False)
    pointer = Pointer(policy.width).to(device)
    trained = [*policy.module.parameters(), *pointer.parameters()]
    optimizer = make_optimizer(trained, args.lr, fused=device == "cuda")
    games: Games | None = None
    choices: Choices | None = None
    epoch = at = seen = skipped = 0
    began, step, seconds = time.monotonic(), 0, args.minutes * 60
    while (spent := time.monotonic() - began) < seconds and step < args.steps:
        progress = max(spent / seconds, step / args.steps)
        lr = args.lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch, targets = code.batch(args.rows)
        if progress >= args.games_from:
            if games is None or at >= len(games):
                games, epoch, at = data.epoch(epoch, device), epoch + 1, 0
            game, said, choices = games.batch(at, args.game_rows)
            batch, targets = joined(batch, targets, game, said)
            at += args.game_rows
            seen += args.game_rows
        losses: list[Tensor] = []
        with (
            torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"),
            collect(policy.module) as beside,
        ):
            hidden_BTd = policy.hidden(batch)
            for part in (
                (slice(0, -args.game_rows), slice(-args.game_rows, None)) if games else (slice(None),)
            ):
                losses.append(loss_of(policy, hidden_BTd[part], targets[part])[0])
            if choices is not None:
                assert beside.encoded_BTd is not None
                losses.append(pointer(beside.encoded_BTd[-args.game_rows :], choices))
        (sum(losses) + 1e-4 * beside.balance() + beside.indexer()).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        if not math.isfinite(float(norm)):
            skipped += 1
            if skipped > MAX_SKIPPED:
                raise SystemExit(f"step {step}: the gradient was not finite {skipped} times; lower --lr")
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for module in policy.module.modules():
            if isinstance(module, MoE):
                module.update_bias()
        step += 1
        if step % args.report_every == 0:
            told = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"{preset_name} step {step} {spent:.0f} s loss {told} norm {float(norm):.2f}", flush=True)
    spent = time.monotonic() - began
    policy.save(Path(args.out) / preset_name, dtype=torch.bfloat16)
    policy.module._compiled_call_impl = None  # evaluation has other shapes
    return {
        "preset": preset_name,
        "seed": args.seed,
        "steps": step,
        "skipped": skipped,
        "games_seen": seen,
        "epochs": epoch,
        "minutes": round(spent / 60, 2),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **evaluate(policy, Code(data.code["dev"], args.columns, device, 1), data.dev(device), 128),
    }


def make_optimizer(parameters: list[nn.Parameter], lr: float, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


@torch.no_grad()
def evaluate(policy: Policy, code: Code, games: Games, count: int) -> dict[str, float]:
    """Loss on kept-out code; kept-out games: share of right picks by turn, of right submissions after a pass.

    `first_pick` counts documents whose first turn is the right try (none failed before).
    """
    policy.module.eval()
    losses: list[float] = []
    for _ in range(8):
        batch, targets_BT = code.batch(count)
        losses.append(float(loss_of(policy, policy.hidden(batch), targets_BT)[0]))
    picks: dict[str, list[bool]] = {"first_pick": [], "later_pick": [], "submission": []}
    try_id = Tokenizer().encode("try")[0]
    for at in range(0, min(len(games), 4096), count):
        batch, targets_BT, _ = games.batch(at, min(count, len(games) - at))
        _, hit_N = loss_of(policy, policy.hidden(batch), targets_BT)
        place_N2 = (targets_BT != IGNORE).nonzero()
        turns: dict[tuple[int, int], list[bool]] = {}
        opened: dict[int, int] = {}
        for (row, column), hit in zip(place_N2.tolist(), hit_N.tolist(), strict=True):
            begins = opened.get(row) != column - 1
            opened[row] = column
            if begins:
                turns[row, column] = []
            turns[max(key for key in turns if key[0] == row)].append(hit)
        for (row, column), hits in turns.items():
            first = column == int(batch.starts_BT[row, 0]) + REPLAY - 1
            kind = (
                "submission"
                if int(targets_BT[row, column]) != try_id
                else "first_pick"
                if first
                else "later_pick"
            )
            picks[kind].append(all(hits))
    shares = {name: sum(hits) / max(1, len(hits)) for name, hits in picks.items()}
    counts = {f"{name}s": len(hits) for name, hits in picks.items()}
    return {"dev_code_nats": sum(losses) / len(losses), **shares, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["flash-nano", "flash-slim"])
    parser.add_argument("--corpus", type=Path, required=True, help="made by sft.corpus")
    parser.add_argument("--games", type=Path, required=True, help="made by sft.choices")
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", type=Path, help="go on from these weights")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each preset")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument(
        "--games-from", type=float, default=0.35, help="share of the run after which they come"
    )
    parser.add_argument("--game-rows", type=int, default=192, help="of the rows, once games come")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        data = Data(args.corpus, args.games, args.columns, pool)
        print(json.dumps([train(args, name, data) for name in args.presets]))


if __name__ == "__main__":
    main()
