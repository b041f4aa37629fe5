"""The token tree: which tokens one verify forward asks the target about, and what follows what.

Paper (arXiv 2606.18394): the draft tree. Nothing here waits for the device: shapes and dtypes are checked, values never
are.
"""

from dataclasses import dataclass, replace

import torch

from .picture import draw_tree


@dataclass(frozen=True, eq=False, repr=False)
class TokenTree:
    """A batch of token trees with the same number of nodes.

    Parents stand before their children, the root first, and the other nodes are sorted by path probability, so that
    every prefix of the list of nodes is a tree too. Two trees are equal only if they are the same object.

    Args:
        token_ids (`torch.LongTensor` of shape `(batch, nodes)`):
            The token at each node. Node 0 is the root, and carries the anchor: the last committed token, which the
            target has not seen yet.
        parents (`torch.LongTensor` of shape `(batch, nodes)`):
            The index of each node's parent, always smaller than the node's own; -1 for the root.
        depths (`torch.LongTensor` of shape `(batch, nodes)`):
            The number of steps from the root to each node; 0 for the root.
        log_probs (`torch.FloatTensor` of shape `(batch, nodes)`):
            The draft head's log-probability of the path from the root to each node; 0 for the root. It never rises
            along a path, and after the root never from one node to the next.
        depth_limit (`int`):
            No node is deeper. Known on the host, so that walks along the tree need not ask the device; the deepest node
            may be less deep.

    Raises:
        ValueError: A tensor is not of shape `(batch, nodes)` with at least one node, has another dtype or sits on
            another device than the others, or `depth_limit` is not an `int` of at least 0.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_probs: torch.Tensor
    depth_limit: int

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices, which the host knows without asking the device."""
        shape, device = self.token_ids.shape, self.token_ids.device
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(
                f"`token_ids` must have shape (batch, nodes) with at least one node, the root, got {tuple(shape)}: "
                "make a tree without drafted nodes with `TokenTree.root_only(anchor_ids)`."
            )
        for name in ("token_ids", "parents", "depths", "log_probs"):
            tensor, dtype = getattr(self, name), torch.float32 if name == "log_probs" else torch.int64
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise ValueError(
                    f"`{name}` must have shape {tuple(shape)} and device {device}, as `token_ids`, and dtype {dtype}, "
                    f"got {tuple(tensor.shape)}, {tensor.dtype} and {tensor.device}: convert it before making the tree."
                )
        if isinstance(self.depth_limit, bool) or not isinstance(self.depth_limit, int) or self.depth_limit < 0:
            raise ValueError(
                f"`depth_limit` must be an int of at least 0, got {self.depth_limit!r}: pass the depth no node exceeds."
            )

    @classmethod
    def root_only(cls, anchor_ids: torch.Tensor) -> "TokenTree":
        """Return trees without drafted nodes: verifying one is a step of plain decoding.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch,)`):
                The last committed token of each row.

        Raises:
            ValueError: `anchor_ids` is not a `torch.LongTensor` of shape `(batch,)`.
        """
        if anchor_ids.ndim != 1:
            raise ValueError(
                f"`anchor_ids` must have shape (batch,), got {tuple(anchor_ids.shape)}: pass one token for each row."
            )
        return cls.chain(anchor_ids[:, None])

    @classmethod
    def chain(cls, token_ids: torch.Tensor) -> "TokenTree":
        """Return trees of one path each. Their log-probabilities are all 0, for nothing is known about them.

        Args:
            token_ids (`torch.LongTensor` of shape `(batch, nodes)`):
                The root's token, then the drafted ones in order.

        Raises:
            ValueError: `token_ids` is not a `torch.LongTensor` of shape `(batch, nodes)` with at least one node.
        """
        depths = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
        log_probs = torch.zeros(token_ids.shape, dtype=torch.float32, device=token_ids.device)
        return cls(token_ids, depths - 1, depths, log_probs, depth_limit=max(token_ids.shape[-1] - 1, 0))

    @property
    def batch_size(self) -> int:
        """The number of trees."""
        return self.token_ids.shape[0]

    @property
    def num_nodes(self) -> int:
        """The number of nodes of each tree, the root included."""
        return self.token_ids.shape[1]

    @property
    def max_depth(self) -> int:
        """The depth that no node exceeds (`depth_limit`)."""
        return self.depth_limit

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.token_ids.device

    def to(self, device: torch.device | str) -> "TokenTree":
        """Return the trees on `device`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            parents=self.parents.to(device),
            depths=self.depths.to(device),
            log_probs=self.log_probs.to(device),
        )

    def prefix(self, tree_budget: int) -> "TokenTree":
        """Return the trees of the root and the `tree_budget` most probable other nodes, or all there are.

        Args:
            tree_budget (`int`):
                The number of nodes besides the root.

        Raises:
            ValueError: `tree_budget` is negative.
        """
        if tree_budget < 0:
            raise ValueError(
                f"`tree_budget` must be at least 0, got {tree_budget}: it counts the nodes besides the root."
            )
        nodes = tree_budget + 1
        return TokenTree(
            token_ids=self.token_ids[:, :nodes],
            parents=self.parents[:, :nodes],
            depths=self.depths[:, :nodes],
            log_probs=self.log_probs[:, :nodes],
            depth_limit=min(self.depth_limit, tree_budget),
        )

    def ancestors(self) -> torch.Tensor:
        """Say for each pair of nodes whether the second lies on the path from the root to the first.

        Returns:
            `torch.BoolTensor` of shape `(batch, nodes, nodes)`: `[b, i, j]` is true if node `j` is node `i` or an
            ancestor of it.
        """
        shape = (self.batch_size, self.num_nodes, self.num_nodes)
        hop = self.parents.clamp(min=0)  # the root stays where it is
        path = torch.arange(self.num_nodes, device=self.device).expand(self.batch_size, -1)[:, :, None]
        # Each round doubles the known part of all paths and the length of the hop.
        while path.shape[-1] <= self.depth_limit:
            path = torch.cat([path, hop.gather(1, path.flatten(1)).view_as(path)], dim=-1)
            hop = hop.gather(1, hop)
        return torch.zeros(shape, dtype=torch.bool, device=self.device).scatter_(2, path, True)

    def __repr__(self) -> str:
        """Return one line without values: reading them would wait for the device."""
        return (
            f"TokenTree(batch_size={self.batch_size}, num_nodes={self.num_nodes}, "
            f"depth_limit={self.depth_limit}, device='{self.device}')"
        )

    def _repr_html_(self) -> str:
        """Draw the first row's tree in a notebook."""
        return draw_tree(self)._repr_html_()
