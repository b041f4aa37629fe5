"""How far a head's probabilities can be believed, learned from what was accepted.

The numerator of the choice of a tree budget (docs/how_it_works.md, "The budget"): the expected number of accepted nodes
of every prefix of a tree.
"""

import math
from collections.abc import Sequence

BINS = 16  # by powers of two of the path probability
_KEPT = 0.99  # of what was learned, per step
_PRIOR = 4.0  # promised nodes for which the head is believed before any evidence


class Calibration:
    """Accepted over promised, per bin of path probability.

    A node of path probability `p` promises `p` accepted nodes. Per bin of `-log2(p)`, the promises kept are
    `(accepted + k g) / (promised + k)`, where `g` is the same over all bins with 1 in its place and `k` the weight of
    the prior. Evidence fades from step to step, since texts change: a head that failed gets another chance.
    """

    def __init__(self) -> None:
        self._promised = [0.0] * BINS
        self._accepted = [0.0] * BINS

    def factors(self) -> list[float]:
        """Per bin, what a promise is worth."""
        whole = (sum(self._accepted) + _PRIOR) / (sum(self._promised) + _PRIOR)
        return [
            (accepted + _PRIOR * whole) / (promised + _PRIOR)
            for accepted, promised in zip(self._accepted, self._promised, strict=True)
        ]

    def expected(self, log_probs: Sequence[float], depths: Sequence[float], sizes: Sequence[int]) -> list[list[float]]:
        """The chance of accepting a node at depth 1, 2, ... of each prefix of one row's tree.

        Args:
            log_probs (`list[float]`): Of the paths to the nodes besides the root, falling.
            depths (`list[float]`): Of these nodes.
            sizes (`list[int]`): Rising numbers of nodes besides the root, none above the tree's.

        Returns:
            `list[list[float]]`: For each size the chances by depth, never rising and at most 1.
        """
        factors = self.factors()
        by_depth = [0.0] * int(max(depths, default=0))
        chances, node = [], 0
        for size in sizes:
            for log_prob, depth in zip(log_probs[node:size], depths[node:size], strict=True):
                by_depth[int(depth) - 1] += math.exp(log_prob) * factors[_bin(log_prob)]
            node = size
            chances.append(_falling(by_depth))
        return chances

    def fade(self) -> None:
        """A step has passed."""
        for bins in (self._promised, self._accepted):
            bins[:] = [value * _KEPT for value in bins]

    def learn(self, log_probs: Sequence[float], accepted: Sequence[int]) -> None:
        """Takes in what became of one row's verified nodes.

        Args:
            log_probs (`list[float]`): Of the paths to the verified nodes besides the root.
            accepted (`list[int]`): Indices into these of the accepted ones.
        """
        for log_prob in log_probs:
            self._promised[_bin(log_prob)] += math.exp(log_prob)
        for node in accepted:
            self._accepted[_bin(log_probs[node])] += 1.0


def _bin(log_prob: float) -> int:
    return min(int(-log_prob / math.log(2)), BINS - 1) if log_prob > -1000.0 else BINS - 1


def _falling(by_depth: Sequence[float]) -> list[float]:
    """No depth is reached more often than the one above it."""
    chances, most = [], 1.0
    for chance in by_depth:
        most = min(most, chance)
        chances.append(most)
    return chances
