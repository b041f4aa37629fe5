"""Random trees, and a guard against waiting for the device, for the tests of the tree package."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec_hf.tree import TokenTree


@st.composite
def _token_trees(draw: st.DrawFn, min_batch: int = 1, max_batch: int = 3, max_nodes: int = 9) -> TokenTree:
    """Any tree: each node hangs from any earlier one; the tokens are all different."""
    batch, nodes = draw(st.integers(min_batch, max_batch)), draw(st.integers(1, max_nodes))
    parents = [[-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)] for _ in range(batch)]
    depths = [[0] * nodes for _ in range(batch)]
    for row in range(batch):
        for node in range(1, nodes):
            depths[row][node] = depths[row][parents[row][node]] + 1
    return TokenTree(
        token_ids=torch.arange(batch * nodes).view(batch, nodes),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        log_probs=-torch.arange(nodes, dtype=torch.float32).expand(batch, nodes),
        depth_limit=max(map(max, depths)) + draw(st.integers(0, 2)),  # only a bound
    )


@pytest.fixture(scope="session")
def token_trees() -> Callable[..., st.SearchStrategy[TokenTree]]:
    """The strategy of all small trees."""
    return _token_trees


class _NoHostSync(TorchDispatchMode):
    """Refuses every operation the host must wait for: values as Python numbers, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
        name = func.overloadpacket.__name__.removeprefix("aten::")
        assert not any(name == wait or name.startswith(f"{wait}_") for wait in waits), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_sync() -> TorchDispatchMode:
    """A context in which waiting for the device is an error."""
    return _NoHostSync()
