"""What is reported of a head while it trains: sums over steps and processes, divided when they are logged."""

from collections.abc import Callable

import torch

from .objective import LossParts, Objective


class LossTally:
    """Sums of losses and agreements, until they are taken.

    Args:
        objective ([`Objective`]): What is minimised.
        depth (`int`): Drafted positions of a block.
    """

    def __init__(self, objective: Objective, depth: int) -> None:
        self._weights, self._depth = objective.depth_weights(depth), depth
        self._sums: torch.Tensor | None = None
        self._has_branch = False

    def weight(self, supervised: torch.Tensor) -> torch.Tensor:
        """The sum of the weights of counted rows, given their number per depth of shape `(depth,)`."""
        return (supervised.cpu() * self._weights).sum().to(supervised.device, torch.float32)

    def add(self, parts: LossParts) -> None:
        """Adds a batch."""
        weight = self.weight(parts.supervised).double().cpu()
        counts = parts.supervised.double().cpu()
        zeros = torch.zeros(self._depth, dtype=torch.float64)
        self._has_branch = parts.branch is not None
        branch_loss = torch.zeros(()) if parts.branch is None else parts.branch.cpu()
        branch_agreement = zeros if parts.branch_agreement is None else parts.branch_agreement.cpu()
        sums = torch.cat(
            [
                torch.stack([weight, parts.base.cpu() * weight, branch_loss * weight]).double(),
                counts,
                parts.agreement.cpu() * counts,
                branch_agreement * counts,
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """What was added since the last call.

        Args:
            add_up (`Callable`): Sums a tensor over all processes.

        Returns:
            `dict[str, float]`: `base_loss`, the mean over everything; `agreement_k`, the share of places at depth `k`
            where the head's likeliest token is the target's, and `agreement` over all depths; and
            `accept_length_proxy`, one and the expected number of accepted tokens of a chain if depths agreed
            independently of each other, which they do not. With a branch term also `branch_loss` and its agreements,
            from which the proxy then follows.
        """
        sums = torch.zeros(3 + 3 * self._depth, dtype=torch.float64) if self._sums is None else self._sums
        self._sums = None
        sums = add_up(sums).cpu()
        weight, base, branch = sums[:3].tolist()
        counts, agreeing, branch_agreeing = sums[3:].view(3, self._depth)
        if not weight:
            return {}
        found = {"base_loss": base / weight}
        if self._has_branch:
            found["branch_loss"] = branch / weight
        for name, hits in (("agreement", agreeing), ("branch_agreement", branch_agreeing)):
            if name == "branch_agreement" and not self._has_branch:
                continue
            shares = hits / counts.clamp(min=1)
            found[name] = float(hits.sum() / counts.sum())
            found |= {f"{name}_{depth}": share for depth, share in enumerate(shares.tolist(), start=1)}
            found["accept_length_proxy"] = 1 + float(shares.cumprod(dim=0).sum())
        return found
