"""Every node of a verified tree has the logits of its own path, on every architecture, with commits in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from jetspec_hf.decoding.taps import FeatureTaps
from jetspec_hf.decoding.verifier import Verifier
from jetspec_hf.target import decoder_layers
from jetspec_hf.tree import TokenTree
from support.references import left_padded, random_prompts
from support.tiny_targets import ARCHITECTURES, tiny_target
from support.versions import CACHE

pytestmark = pytest.mark.exactness

TOLERANCE = 1e-4  # a right mask and position give about 1e-5, a wrong one 0.1 to 10
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
DEPTHS = [0, 1, 1, 2, 2, 2, 3]
# Per round and row: the path that is kept. None lies in consecutive slots, and the rows keep different numbers.
PATHS = [[[0, 1, 4, 6], [0, 2]], [[0, 2], [0, 1, 4]], [[0, 1, 3], [0, 2, 5]]]
PROMPT_LENGTHS = (12, 9)
VARIANTS = [
    pytest.param(name, backend, windowed, id=f"{name}-{backend}" + "-window" * windowed)
    for name, architecture in ARCHITECTURES.items()
    for backend in architecture.backends
    for windowed in ([False] if architecture.window is None else [False, True])
]


def path_to(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[-1]] >= 0:
        path.append(PARENTS[path[-1]])
    return path[::-1]


def make_cache(target: PreTrainedModel, kind: str) -> Any:
    config = target.config.get_text_config(decoder=True)
    if kind == "dynamic":
        return DynamicCache(config=config)
    return DynamicCache() if kind == "windowless" else StaticCache(config=config, max_cache_len=64)


class Rounds:
    """A verifier over a batch of random prompts, and each row's committed tokens without padding."""

    def __init__(self, target: PreTrainedModel, batch: int, cache: str = "dynamic") -> None:
        self.target = target
        self.rows = random_prompts(PROMPT_LENGTHS[:batch], seed=batch)
        ids, mask = left_padded(self.rows)
        self.taps = FeatureTaps(target, [0, 1])
        model_kwargs = {
            CACHE: make_cache(target, cache),
            "attention_mask": mask if batch > 1 else None,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "use_cache": True,
        }
        self.verifier = Verifier(target, self.taps, model_kwargs, GenerationConfig())
        self.draws = torch.Generator().manual_seed(batch)
        self.prompt = ids

    def verify(self) -> tuple[TokenTree, torch.Tensor]:
        shape = (len(self.rows), len(PARENTS))
        tree = TokenTree(
            token_ids=torch.randint(3, 128, shape, generator=self.draws),
            parents=torch.tensor(PARENTS).expand(shape),
            depths=torch.tensor(DEPTHS).expand(shape),
            log_probs=torch.zeros(shape),
            depth_limit=max(DEPTHS),
        )
        return tree, self.verifier.verify(tree, last_depths=[max(DEPTHS)] * len(self.rows)).logits

    def commit(self, tree: TokenTree, paths: list[list[int]]) -> Any:
        for index, path in enumerate(paths):
            self.rows[index].extend(tree.token_ids[index, path].tolist())
        return self.verifier.commit(paths)

    def sequential_logits(self, row: int, tokens: list[int]) -> torch.Tensor:
        """The target's logits after `tokens` behind the row's committed ones, from a forward without any cache."""
        ids = torch.tensor([self.rows[row] + tokens])
        return self.target(input_ids=ids, use_cache=False).logits[0, -1]


def check_rounds(rounds: Rounds) -> None:
    with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
        rounds.verifier.prefill(rounds.prompt)
        for paths in PATHS:
            tree, logits = rounds.verify()
            for row in range(len(rounds.rows)):
                for node in range(len(PARENTS)):
                    expected = rounds.sequential_logits(row, tree.token_ids[row, path_to(node)].tolist())
                    assert (logits[row, node] - expected).abs().max() < TOLERANCE, (row, node)
            rounds.commit(tree, paths[: len(rounds.rows)])
            assert rounds.verifier.anchor_positions.tolist() == [len(tokens) for tokens in rounds.rows]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("name", "backend", "windowed"), VARIANTS)
def test_node_logits_equal_a_sequential_forward(name: str, backend: str, windowed: bool, batch: int) -> None:
    window = ARCHITECTURES[name].window if windowed else None
    check_rounds(Rounds(tiny_target(name, backend, **(window or {})), batch))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "deepseek_v3"])
def test_node_logits_are_right_on_a_static_cache(name: str, batch: int) -> None:
    window = {"sliding_window": 64} if name == "gemma3_text" else {}
    check_rounds(Rounds(tiny_target(name, **window), batch, cache="static"))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "cohere2", "llama4_text"])
def test_node_logits_are_right_on_a_cache_that_knows_no_windows(name: str, batch: int) -> None:
    window = ARCHITECTURES[name].window or {}
    check_rounds(Rounds(tiny_target(name, **window), batch, cache="windowless"))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gemma4_text", "llama4_text"])
def test_rows_may_drift_far_apart(name: str) -> None:
    """Past windows and chunks, which are counted in each row's own tokens, and back to equal lengths."""
    rounds = Rounds(tiny_target(name, **(ARCHITECTURES[name].window or {})), batch=2)
    ahead, behind = [[0, 1, 4, 6], [0]], [[], [0, 1, 3]]  # a row that stands still is shown nothing
    with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
        rounds.verifier.prefill(rounds.prompt)
        for number, paths in enumerate([ahead] * 12 + [behind] * 12):
            tree, logits = rounds.verify()
            if number % 5 == 4:
                for row, node in ((0, 6), (1, 5)):
                    expected = rounds.sequential_logits(row, tree.token_ids[row, path_to(node)].tolist())
                    assert (logits[row, node] - expected).abs().max() < TOLERANCE, (number, row)
            rounds.commit(tree, paths)
    assert [len(tokens) - length for tokens, length in zip(rounds.rows, PROMPT_LENGTHS, strict=True)] == [48, 48]
    mask = left_padded(rounds.rows)[1]
    step: dict[str, Any] = {CACHE: rounds.verifier.cache}
    position_ids = mask.sum(1, keepdim=True)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
    with torch.no_grad():
        logits = rounds.target(
            input_ids=torch.tensor([[5], [5]]), attention_mask=mask, position_ids=position_ids, **step
        ).logits[:, -1]
    for row in range(2):
        assert (logits[row] - rounds.sequential_logits(row, [5])).abs().max() < TOLERANCE


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "gemma4_text", "llama4_text"])
def test_committed_features_are_the_tapped_layers_outputs_of_a_plain_forward(name: str, batch: int) -> None:
    rounds = Rounds(tiny_target(name), batch)
    with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
        _, prompt = rounds.verifier.prefill(rounds.prompt)
        committed = [prompt]
        for paths in PATHS:
            tree, _ = rounds.verify()
            committed.append(rounds.commit(tree, paths[:batch]))
    for row, tokens in enumerate(rounds.rows):
        features = torch.cat([step.features[row][mask_of(step, row)] for step in committed])
        positions = torch.cat([step.positions[row][mask_of(step, row)] for step in committed])
        assert positions.tolist() == list(range(len(tokens)))
        expected = plain_layer_outputs(rounds.target, tokens, [0, 1])
        assert (features - expected).abs().max() < TOLERANCE


def mask_of(step: Any, row: int) -> torch.Tensor:
    return torch.ones(step.positions.shape[1], dtype=torch.bool) if step.visible is None else step.visible[row]


@torch.no_grad()
def plain_layer_outputs(target: PreTrainedModel, tokens: list[int], layer_ids: list[int]) -> torch.Tensor:
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer_id: int, output: Any) -> None:
        outputs[layer_id] = output[0] if isinstance(output, tuple) else output

    layers = decoder_layers(target)
    handles = [layers[i].register_forward_hook(lambda _m, _a, output, i=i: keep(i, output)) for i in layer_ids]
    target(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat([outputs[layer_id][0] for layer_id in layer_ids], dim=-1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_the_committed_cache_continues_with_the_targets_own_masks(name: str) -> None:
    rounds = Rounds(tiny_target(name, **(ARCHITECTURES[name].window or {})), batch=1)
    with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
        rounds.verifier.prefill(rounds.prompt)
        for paths in PATHS:
            tree, _ = rounds.verify()
            rounds.commit(tree, paths[:1])
        expected = rounds.sequential_logits(0, [5])
    step: dict[str, Any] = {CACHE: rounds.verifier.cache}
    with torch.no_grad():
        logits = rounds.target(input_ids=torch.tensor([[5]]), **step).logits[0, -1]
    assert (logits - expected).abs().max() < TOLERANCE


def test_the_prompts_logits_are_never_computed(target: PreTrainedModel) -> None:
    rounds = Rounds(target, batch=1)
    rounds.verifier._model_kwargs["logits_to_keep"] = 1  # as `generate` sets it
    with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
        outputs, _ = rounds.verifier.prefill(rounds.prompt)
    assert outputs.logits.shape[1] == 1


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_an_error_between_verification_and_commit_leaves_no_node_in_the_cache(name: str) -> None:
    rounds = Rounds(tiny_target(name, **(ARCHITECTURES[name].window or {})), batch=1)

    def stop_after_verification() -> None:
        with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
            rounds.verifier.prefill(rounds.prompt)
            rounds.verify()
            raise KeyError

    with pytest.raises(KeyError):
        stop_after_verification()
    assert rounds.verifier.cache.get_seq_length() == PROMPT_LENGTHS[0]


def test_an_error_inside_the_verify_forward_leaves_no_node_in_any_layer(target: PreTrainedModel) -> None:
    rounds = Rounds(target, batch=1)

    def fail(*_: Any) -> None:
        raise MemoryError

    def run_out_of_memory() -> None:
        with torch.no_grad(), rounds.taps.attached(), rounds.verifier:
            rounds.verifier.prefill(rounds.prompt)
            decoder_layers(target)[1].mlp.register_forward_hook(fail)  # the first layer has its keys already
            rounds.verify()

    with pytest.raises(MemoryError):
        run_out_of_memory()
    assert [layer.get_seq_length() for layer in rounds.verifier.cache.layers] == [PROMPT_LENGTHS[0]] * 2
