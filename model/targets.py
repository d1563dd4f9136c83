"""Where a packed batch bears loss, and the log-probabilities of what stands there.

The one place that shifts by one: token t of a sequence is predicted by the hidden state of token t - 1.
Losses are computed on flat tensors over the N targets of a batch; the head is applied to those alone,
which for agent samples are a few in a hundred.

Axes: N targets, V vocabulary, D width, [B, T] the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch


@dataclass(frozen=True)
class Targets:
    """Loss-bearing tokens of a batch, in the order of its places, then of position."""

    rows_N: Tensor
    columns_N: Tensor
    """Column of the hidden state that predicts the target: one before the target's own."""
    ids_N: Tensor
    owners: tuple[tuple[int, int], ...]
    """(index of the sequence, number of its targets), in order: how flat per-target data is laid out."""

    def __len__(self) -> int:
        return self.ids_N.shape[0]

    def hidden(self, hidden_BTD: Tensor) -> Tensor:
        """The states [N, D] that predict the targets."""
        return hidden_BTD[self.rows_N, self.columns_N]

    def lay(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Per-target values [N] from one list a sequence, each as long as its number of targets."""
        flat: list[float] = []
        for index, count in self.owners:
            if len(values[index]) != count:
                raise ValueError(f"sequence {index} has {count} targets but {len(values[index])} values")
            flat.extend(values[index])
        return torch.tensor(flat, dtype=dtype, device=self.ids_N.device)

    def spread(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Per-target values [N] from one value a sequence."""
        flat = [values[index] for index, count in self.owners for _ in range(count)]
        return torch.tensor(flat, dtype=dtype, device=self.ids_N.device)


def targets(batch: Batch, positions: Sequence[Sequence[int]]) -> Targets:
    """Find the targets of a packed batch.

    Args:
        batch: made by `pack`.
        positions: for each sequence given to `pack`, ascending positions of its targets.

    Raises:
        ValueError: a target that no hidden state predicts: position 0, beyond the sequence, or the first
            position of the decoder (the state before it does not exist).
    """
    rows: list[int] = []
    columns: list[int] = []
    owners: list[tuple[int, int]] = []
    for index, row, column, length in batch.places:
        wanted = positions[index]
        first = int(batch.positions_BT[row, column])  # 0, or where a shared prefix ended
        start = max(first, int(batch.starts_BT[row, column]))
        if wanted and not (start < wanted[0] and wanted[-1] < first + length):
            raise ValueError(
                f"sequence {index}: targets lie in {start + 1}..{first + length - 1}, got {list(wanted)[:3]}"
            )
        rows += [row] * len(wanted)
        columns += [column - first + at - 1 for at in wanted]
        owners.append((index, len(wanted)))
    device = batch.tokens_BT.device
    rows_N = torch.tensor(rows, dtype=torch.long, device=device)
    columns_N = torch.tensor(columns, dtype=torch.long, device=device)
    return Targets(rows_N, columns_N, batch.tokens_BT[rows_N, columns_N + 1], tuple(owners))


def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    ids_N: Tensor,
    *,
    temperature_N: Tensor | None = None,
    kept: Sequence[Sequence[int] | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each target under the processed distribution; float32.

    Args:
        hidden_ND: states that predict the targets.
        head_VD: output matrix.
        ids_N: the targets.
        temperature_N: by which logits are divided; None is 1.
        kept: for each target the ids that top-p left to choose from; None where it cut nothing.

    Returns:
        logprob_N with gradient, entropy_N in nats without.
    """
    work = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_NV = hidden_ND.to(work) @ head_VD.to(work).T
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N.to(work).unsqueeze(1)
    if kept is not None and any(ids is not None for ids in kept):
        cut_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
        for row, ids in enumerate(kept):
            if ids is not None:
                cut_NV[row] = True
                cut_NV[row, list(ids)] = False
        logits_NV = logits_NV.masked_fill(cut_NV, float("-inf"))
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1), entropy_N
