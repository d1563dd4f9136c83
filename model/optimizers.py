"""Muon, Sinkhorn-balanced momentum and AdamW, assigned by the role of each parameter.

Muon (DeepSeek-V4 report, algorithm 1): M = mu M + G; O = hybrid Newton-Schulz(mu M + G) * sqrt(max(n, m)) *
gamma; W = (1 - lr wd) W - lr O. Query projections are orthogonalised head by head, experts and output groups
one by one; matrices of one shape go through Newton-Schulz together.

Sinkhorn-balanced momentum (V4.1-Flash report, algorithm 1), for embedding, head and lookup tables when
`embeddings = "sinkhorn"`: M = b M + (1 - b) G; G' = b M + (1 - b) G; W = W - lr gamma sqrt(n) balance(G'). It
keeps one buffer where AdamW keeps two, and has no weight decay. Everything else uses AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from model.train_config import OptimizerConfig

_torch: Any = torch
"""Type stubs leave the foreach operations out."""

Method = Literal["muon", "sinkhorn", "adamw"]


@dataclass(frozen=True)
class Role:
    """How one parameter is trained."""

    name: str
    parameter: nn.Parameter
    method: Method
    blocks: int
    """Matrices that the parameter is cut into along its first axis, for Muon."""
    lr: float
    weight_decay: float


def roles(module: nn.Module, config: OptimizerConfig) -> list[Role]:
    """Assign every trainable parameter.

    Muon: matrices and stacks of matrices, except tables: embedding, head and what a module names in
    `lookup_tables` (parameter name to factor on the rate; the release has 5 for Engram). Tables use
    `config.embeddings`. AdamW: the rest; weight decay on norms and on tables that it trains, none on sinks
    and biases. A module says by `matrix_blocks` (parameter name to number) which matrices are several.
    """
    blocks: dict[int, int] = {}
    tables: dict[int, float] = {}
    norms: set[int] = set()
    for part in module.modules():
        for name, count in getattr(part, "matrix_blocks", {}).items():
            blocks[id(part.get_parameter(name))] = count
        for name, scale in getattr(part, "lookup_tables", {}).items():
            tables[id(part.get_parameter(name))] = scale
        own = [id(p) for p in part.parameters(recurse=False)]
        if isinstance(part, nn.Embedding):
            tables.update((key, config.embedding_lr_scale) for key in own if key not in tables)
        if "norm" in type(part).__name__.lower():
            norms.update(own)
    hugging_face: Any = getattr(module, "lm_head", None)
    head = getattr(module, "output", None) if hugging_face is None else hugging_face.weight
    if isinstance(head, nn.Parameter):
        tables[id(head)] = config.embedding_lr_scale
    adamw_lr = config.adamw_lr or config.lr
    found: list[Role] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        key = id(parameter)
        if key in tables and config.embeddings == "sinkhorn":
            found.append(Role(name, parameter, "sinkhorn", 1, config.lr * tables[key], 0.0))
        elif key in tables:
            found.append(Role(name, parameter, "adamw", 1, adamw_lr * tables[key], config.weight_decay))
        elif parameter.dim() >= 2:
            method = config.kind
            lr = config.lr if method == "muon" else adamw_lr
            count = parameter.shape[0] if parameter.dim() == 3 else blocks.get(key, 1)
            found.append(Role(name, parameter, method, count, lr, config.weight_decay))
        else:
            decay = config.weight_decay if key in norms else 0.0
            found.append(Role(name, parameter, "adamw", 1, adamw_lr, decay))
    return found


def table(assigned: list[Role]) -> str:
    """The roles as text, parameters of one name in all layers on one line."""
    lines: dict[tuple[Any, ...], list[int]] = {}
    for role in assigned:
        name = ".".join("*" if part.isdigit() else part for part in role.name.split("."))
        key = (name, tuple(role.parameter.shape), role.method, role.blocks, role.lr, role.weight_decay)
        lines.setdefault(key, []).append(role.parameter.numel())
    rows = [("parameter", "shape", "method", "blocks", "lr", "decay", "count", "elements")]
    for (name, shape, method, blocks, lr, decay), sizes in lines.items():
        size = "x".join(map(str, shape))
        rows.append(
            (name, size, method, str(blocks), f"{lr:g}", f"{decay:g}", str(len(sizes)), str(sum(sizes)))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


class RoleOptimizer(torch.optim.Optimizer):
    """One optimizer over all roles; `schedule` multiplies every rate by the number of steps taken.

    Args:
        assigned: from `roles`.
        config: constants.
    """

    def __init__(self, assigned: list[Role], config: OptimizerConfig) -> None:
        self.config = config
        groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for role in assigned:
            shape = (role.blocks, *role.parameter.shape) if role.method == "muon" else ()
            key = (role.method, role.lr, role.weight_decay, role.blocks, shape)
            groups.setdefault(key, []).append(role.parameter)
        super().__init__(
            [
                {"params": parameters, "method": m, "lr": lr, "weight_decay": wd, "blocks": b, "steps": 0}
                for (m, lr, wd, b, _), parameters in groups.items()
            ],
            {},
        )

    @property
    def factor(self) -> float:
        """The schedule's factor of the next step."""
        return self.config.schedule.factor(self.param_groups[0]["steps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        factor = self.factor
        for group in self.param_groups:
            group["steps"] += 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                update = {"muon": self._muon, "sinkhorn": self._sinkhorn, "adamw": self._adamw}
                update[group["method"]](parameters, group["lr"] * factor, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state bit for bit: buffers stay float32, whatever the type of the weights.

        Raises:
            ValueError: the state belongs to other roles.
        """
        saved: list[dict[str, Any]] = state_dict["param_groups"]
        if [_assignment(g) for g in saved] != [_assignment(g) for g in self.param_groups]:
            raise ValueError(
                "the saved optimizer trains its parameters by other methods: resume with the settings it was "
                "saved with, or start a new run"
            )
        super().load_state_dict(state_dict)
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for key, parameter in zip(theirs["params"], ours["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)

    def _sinkhorn(self, parameters: list[nn.Parameter], lr: float, group: dict[str, Any]) -> None:
        c = self.config
        for parameter in parameters:
            assert parameter.grad is not None
            grad, momentum = parameter.grad.float(), self._state(parameter, "momentum")
            momentum.lerp_(grad, 1 - c.momentum)
            update = balance(grad.lerp(momentum, c.momentum), c.sinkhorn_steps, c.sinkhorn_floor)
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(update.to(parameter.dtype), alpha=-lr * c.gamma * parameter.shape[-1] ** 0.5)

    def _muon(self, parameters: list[nn.Parameter], lr: float, group: dict[str, Any]) -> None:
        c = self.config
        grads = [p.grad.float() for p in parameters if p.grad is not None]
        momenta = [self._state(p, "momentum") for p in parameters]
        _torch._foreach_mul_(momenta, c.momentum)
        _torch._foreach_add_(momenta, grads)
        shape = parameters[0].shape
        matrix = shape[-2] * (shape[0] if len(shape) == 3 else 1) // group["blocks"], shape[-1]
        ahead = _torch._foreach_add(grads, momenta, alpha=c.momentum)
        stacked = torch.stack([x.reshape(-1, *matrix) for x in ahead]).flatten(0, 1)
        update = newton_schulz(stacked) * (c.gamma * max(matrix) ** 0.5)
        updates = [u.reshape(shape) for u in update.unflatten(0, (len(parameters), -1)).unbind(0)]
        _torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        _torch._foreach_add_(parameters, updates, alpha=-lr)

    def _adamw(self, parameters: list[nn.Parameter], lr: float, group: dict[str, Any]) -> None:
        c = self.config
        b1, b2 = c.betas
        grads = [p.grad.float() for p in parameters if p.grad is not None]
        first = [self._state(p, "first") for p in parameters]
        second = [self._state(p, "second") for p in parameters]
        _torch._foreach_lerp_(first, grads, 1 - b1)
        _torch._foreach_mul_(second, b2)
        _torch._foreach_addcmul_(second, grads, grads, 1 - b2)
        steps = group["steps"]
        scale = _torch._foreach_div(second, 1 - b2**steps)
        _torch._foreach_sqrt_(scale)
        _torch._foreach_add_(scale, c.eps)
        _torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        _torch._foreach_addcdiv_(parameters, first, scale, -lr / (1 - b1**steps))

    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state[name]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> RoleOptimizer:
    """Assign roles and make the optimizer; print `table(roles(...))` to show them."""
    return RoleOptimizer(roles(module, config), config)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [..., n, m]: 8 fast and 2 converging steps, float32."""
    x = matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-20)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def balance(matrix: Tensor, steps: int = 11, floor: float = 1e-3) -> Tensor:
    """Divide rows and columns of [m, n] by their Euclidean norms in turn, rows first; float32.

    An odd number of `steps` ends with rows: each has norm 1 then, and columns nearly equal norms. Rows whose
    norm is at most `floor` times the mean row norm become zero and count in no column, so that noise of rows
    that were not visited is not blown up. Only the two vectors of factors change from step to step: a step
    is one product of the squared matrix with a vector.
    """
    x = matrix.float()
    x = x / x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    norms = x.norm(dim=1)
    x = x * (norms > floor * norms.mean())[:, None]
    squares = x.square()
    rows, columns = x.new_ones(x.shape[0]), x.new_ones(x.shape[1])
    for step in range(steps):
        if step % 2 == 0:
            rows = _inverse_root(squares @ columns.square())
        else:
            columns = _inverse_root(rows.square() @ squares)
    return rows[:, None] * x * columns


def _inverse_root(sums: Tensor) -> Tensor:
    """1 / sqrt, and 0 for 0: a row or column of zeros stays as it is."""
    return torch.where(sums > 0, sums, torch.inf).rsqrt()


def _assignment(group: dict[str, Any]) -> tuple[Any, ...]:
    return group["method"], group["blocks"], len(group["params"])
