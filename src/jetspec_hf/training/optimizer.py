"""Muon for the matrices of a head, AdamW for everything else.

Muon (`torch.optim.Muon`, from torch 2.9 on) makes the momentum of each matrix orthogonal, so that a step moves all
directions alike. A head has few tokens to learn from, and learns more from each this way: docs/training.md, "What was
tried".
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# Iterations that make a matrix nearly orthogonal: fewer than torch's 5, for cheaper steps; the two were not compared.
_ORTHOGONALISING_STEPS = 3


class MuonAndAdamW(torch.optim.Optimizer):
    """One optimiser of several: their groups and states together, each stepping its own.

    Args:
        parts (`torch.optim.Optimizer`): Muon of the matrices, AdamW of the rest.
        learning_rate (`float`): What schedulers that end at an absolute rate compare it with.
    """

    def __init__(self, *parts: torch.optim.Optimizer, learning_rate: float) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {"lr": learning_rate})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """What copying and pickling keep: torch's own leaves the parts out."""
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores it."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Lets the parts work on the groups and the states of the whole."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    muon_learning_rate: float,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> MuonAndAdamW:
    """Muon for the matrices of fusion and layers, AdamW for vectors and the branch term, whose factors are no layers.

    Args:
        parameters (`Iterable`): Names and parameters of the head; frozen ones are left out.
        muon_learning_rate (`float`): Of the matrices; updates have the size that AdamW's would have at this rate.
        learning_rate (`float`): Of the rest.
        weight_decay (`float`): Of the matrices and the branch term.
        betas (`tuple[float, float]`): Of AdamW.
        eps (`float`): Of AdamW.

    Raises:
        ValueError: If this torch has no Muon, or there is no matrix to train.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"`muon_learning_rate` needs torch 2.9 or newer, got {torch.__version__}: without it AdamW trains all."
        )
    matrices: list[nn.Parameter] = []
    branch: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            kind = vectors if parameter.ndim != 2 else branch if "branch." in name else matrices
            kind.append(parameter)
    if not matrices:
        raise ValueError("`muon_learning_rate` needs a matrix to train, got a head whose layers are all frozen.")
    muon = torch.optim.Muon(
        matrices,
        lr=muon_learning_rate,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
        ns_steps=_ORTHOGONALISING_STEPS,
    )
    groups = [{"params": branch, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]  # none of a head of which only adapters are trained
    rest = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)] if groups else []
    return MuonAndAdamW(muon, *rest, learning_rate=learning_rate)
