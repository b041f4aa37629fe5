"""What the target needs to see a token tree as its paths: attention masks and positions.

Paper (arXiv 2606.18394): tree attention in the verify forward. Knows slots, windows and chunks, but nothing of
transformers' cache classes.
"""

import torch

from .token_tree import TokenTree


def tree_attention_mask(
    tree: TokenTree,
    prefix_mask: torch.Tensor,
    *,
    kv_length: int,
    kv_offset: int = 0,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    root_slots: torch.Tensor | None = None,
    text_starts: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the additive mask under which one forward treats every node of the tree as the end of its own path.

    Keys stand in cache slots: the `P` cached tokens in slots `0..P-1`, the nodes of the tree in slots `P..P+nodes-1`,
    and nothing yet in later slots. Column `c` of the mask is slot `kv_offset + c`. A node sees the real tokens of the
    prefix, its ancestors and itself. Distances count a node at depth `d` as standing `d` slots behind its root, where
    it would stand if its path were the whole continuation.

    Args:
        tree ([`TokenTree`]):
            The trees about to be verified.
        prefix_mask (`torch.BoolTensor` of shape `(batch, P)`):
            Whether each of the `P` slots before the tree holds a real token of its row, rather than padding or a hole.
        kv_length (`int`):
            The number of columns: the keys that the layer will attend to.
        kv_offset (`int`, *optional*, defaults to 0):
            The slot of the first column, more than 0 for a sliding layer whose cache dropped the oldest tokens.
        sliding_window (`int`, *optional*):
            For a sliding layer: a key is seen only if it stands less than this many slots before the node.
        chunk_size (`int`, *optional*):
            For a chunked layer: a key is seen only if it falls into the node's chunk of this many tokens, counted from
            the start of the row's text.
        root_slots (`torch.LongTensor` of shape `(batch,)`, *optional*):
            The slot at which distances count each row's root, by default `P`. It is smaller in a row with fewer slots
            than others, whose `prefix_mask` is `False` from there on.
        text_starts (`torch.LongTensor` of shape `(batch,)`, *optional*):
            The slot at which each row's text starts, by default that of its first real token.
        dtype (`torch.dtype`):
            The floating dtype of the mask, which must be the target's.

    Returns:
        `torch.FloatTensor` of shape `(batch, 1, nodes, kv_length)`: 0 where a node sees a key, else the dtype's lowest
            finite value. Not `-inf`, which turns a row that sees nothing (a padded batch has some) into NaN.

    Raises:
        ValueError: `prefix_mask` is not a `torch.BoolTensor` of shape `(batch, P)`, the columns do not cover all of the
            tree, `kv_offset` is negative or behind the prefix, `sliding_window` or `chunk_size` is below 1,
            `root_slots` or `text_starts` is not a `torch.LongTensor` of shape `(batch,)`, or `dtype` is not floating.
    """
    _check(tree, prefix_mask, kv_length, kv_offset, sliding_window, chunk_size, dtype)
    for name, slots in (("root_slots", root_slots), ("text_starts", text_starts)):
        if slots is not None:
            _check_per_row(tree, name, slots)
    prefix_length = prefix_mask.shape[1]
    tree_start = prefix_length - kv_offset
    tree_end = tree_start + tree.num_nodes

    seen_prefix = prefix_mask[:, None, kv_offset:]
    seen_nodes = tree.ancestors()
    if sliding_window is not None or chunk_size is not None:
        slots = (prefix_length if root_slots is None else root_slots[:, None]) + tree.depths
        if chunk_size is not None and text_starts is None:
            text_starts = (prefix_mask.cumsum(dim=1, dtype=torch.int32) == 0).sum(dim=1)
        earliest = _earliest_slots(slots, sliding_window, chunk_size, text_starts)[:, :, None]
        seen_prefix = seen_prefix & (torch.arange(kv_offset, prefix_length, device=tree.device) >= earliest)
        seen_nodes = seen_nodes & (slots[:, None, :] >= earliest)

    lowest = torch.finfo(dtype).min
    mask = torch.full((tree.batch_size, 1, tree.num_nodes, kv_length), lowest, dtype=dtype, device=tree.device)
    mask[:, 0, :, :tree_start] = _additive(seen_prefix, dtype)
    mask[:, 0, :, tree_start:tree_end] = _additive(seen_nodes, dtype)
    return mask


def tree_position_ids(tree: TokenTree, anchor_positions: torch.Tensor) -> torch.Tensor:
    """Return the nodes' positions: each node stands where it would stand if its path were the whole continuation.

    Args:
        tree ([`TokenTree`]):
            The trees about to be verified.
        anchor_positions (`torch.LongTensor` of shape `(batch,)`):
            Each anchor's index in its unpadded sequence.

    Returns:
        `torch.LongTensor` of shape `(batch, nodes)`.

    Raises:
        ValueError: `anchor_positions` is not a `torch.LongTensor` of shape `(batch,)`.
    """
    _check_per_row(tree, "anchor_positions", anchor_positions)
    return anchor_positions[:, None] + tree.depths


class TreeMaskBuffer:
    """Masks of layers that see the whole prefix, in one buffer: a step writes the columns that it changes.

    Args:
        dtype (`torch.dtype`):
            The floating dtype of the masks, which must be the target's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffer = torch.empty(0, 0, 0, 0, dtype=dtype)
        self._settled = 0
        self._end = 0

    def write(self, tree: TokenTree, prefix_mask: torch.Tensor, *, kv_length: int, settled: int) -> torch.Tensor:
        """Return what [`tree_attention_mask`] returns without a window, valid until the next call.

        Args:
            tree ([`TokenTree`]):
                The trees about to be verified.
            prefix_mask (`torch.BoolTensor` of shape `(batch, P)`):
                Whether each of the `P` slots before the tree holds a real token of its row.
            kv_length (`int`):
                The number of columns: the keys that the layer will attend to.
            settled (`int`):
                The number of slots at the front for which `prefix_mask` will never change again.

        Returns:
            `torch.FloatTensor` of shape `(batch, 1, nodes, kv_length)`: A view of the buffer.
        """
        _check(tree, prefix_mask, kv_length, 0, None, None, self._dtype)
        tree_start, tree_end = prefix_mask.shape[1], prefix_mask.shape[1] + tree.num_nodes
        rows, columns = self._buffer.shape[2:]
        if rows < tree.num_nodes or columns < kv_length or self._buffer.device != tree.device:
            # a static cache needs no room, and keeps its one shape and strides
            columns = kv_length if kv_length > tree_end else kv_length + max(64, kv_length // 4)
            shape = (tree.batch_size, 1, max(rows, tree.num_nodes), columns)
            self._buffer = torch.full(shape, torch.finfo(self._dtype).min, dtype=self._dtype, device=tree.device)
            self._settled = self._end = 0
        mask = self._buffer[:, 0]
        mask[:, :, self._settled : tree_start] = _additive(prefix_mask[:, None, self._settled :], self._dtype)
        mask[:, : tree.num_nodes, tree_start:tree_end] = _additive(tree.ancestors(), self._dtype)
        mask[:, : tree.num_nodes, tree_end : min(self._end, kv_length)] = torch.finfo(self._dtype).min
        self._settled, self._end = settled, max(self._end, tree_end)
        return self._buffer[:, :, : tree.num_nodes, :kv_length]


def _earliest_slots(
    slots: torch.Tensor, sliding_window: int | None, chunk_size: int | None, text_starts: torch.Tensor | None
) -> torch.Tensor:
    """Return the first slot that nodes at these slots may see, of shape `(batch, nodes)`.

    One bound serves both kinds of layer, because what a node sees never stands after it: the start of its window, or of
    its chunk.
    """
    earliest = torch.zeros_like(slots)
    if sliding_window is not None:
        earliest = torch.maximum(earliest, slots - sliding_window + 1)
    if chunk_size is not None and text_starts is not None:
        earliest = torch.maximum(earliest, slots - (slots - text_starts[:, None]) % chunk_size)
    return earliest


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where `seen`, else the lowest finite value of `dtype`."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _check_per_row(tree: TokenTree, name: str, values: torch.Tensor) -> None:
    if values.shape != (tree.batch_size,) or values.dtype != torch.int64:
        raise ValueError(
            f"`{name}` must be a torch.LongTensor of shape ({tree.batch_size},), got {values.dtype} of shape "
            f"{tuple(values.shape)}: pass one for each row."
        )


def _check(
    tree: TokenTree,
    prefix_mask: torch.Tensor,
    kv_length: int,
    kv_offset: int,
    sliding_window: int | None,
    chunk_size: int | None,
    dtype: torch.dtype,
) -> None:
    if prefix_mask.ndim != 2 or prefix_mask.shape[0] != tree.batch_size or prefix_mask.dtype != torch.bool:
        raise ValueError(
            f"`prefix_mask` must be a torch.BoolTensor of shape ({tree.batch_size}, cached slots), got "
            f"{prefix_mask.dtype} of shape {tuple(prefix_mask.shape)}: pass one row for each tree, `mask.bool()` if it "
            "is an integer mask."
        )
    if prefix_mask.device != tree.device:
        raise ValueError(
            f"`prefix_mask` must be on the tree's device {tree.device}, got {prefix_mask.device}: move one of the two."
        )
    slots = prefix_mask.shape[1]
    if not 0 <= kv_offset <= slots:
        raise ValueError(
            f"`kv_offset` must be between 0 and the {slots} slots of `prefix_mask`, got {kv_offset}: "
            "it is the slot of the first key that the layer attends to, and the tree comes after it."
        )
    if kv_offset + kv_length < slots + tree.num_nodes:
        raise ValueError(
            f"`kv_length` must be at least {slots + tree.num_nodes - kv_offset}, to hold {slots} cached slots and "
            f"{tree.num_nodes} nodes from slot {kv_offset} on, got {kv_length}: pass the number of keys that the layer "
            "attends to, the tree's included."
        )
    for name, value in (("sliding_window", sliding_window), ("chunk_size", chunk_size)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}: pass None for a layer without one.")
    if not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be floating, got {dtype}: the mask is added to attention scores.")
