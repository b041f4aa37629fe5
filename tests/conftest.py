"""Settings every test runs under: no network, one thread, seeded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from transformers import PreTrainedModel

from support.oracle import OracleHead
from support.tiny_targets import tiny_target

torch.set_num_threads(1)  # tiny tensors: more threads are slower, and results then depend on the machine


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def target() -> PreTrainedModel:
    """A tiny llama of the test's own."""
    return tiny_target("llama")


@pytest.fixture
def head(target: PreTrainedModel) -> OracleHead:
    """An oracle head for `target` with a draft depth of 5, which knows nothing yet."""
    return OracleHead.from_target(target, block_size=6)
