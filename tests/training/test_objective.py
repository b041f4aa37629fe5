"""The chunked objective against losses over full logits: torch's own functions, autograd, double precision."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from jetspec_hf.training.objective import LossParts, Objective, draft_loss

BATCH, BLOCKS, DEPTH, HIDDEN, TARGET_HIDDEN, VOCABULARY, RANK = 2, 3, 4, 5, 6, 11, 3
ROWS = BATCH * BLOCKS * DEPTH

Logits = Callable[[torch.Tensor], torch.Tensor]


def assert_equal(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Up to the order of sums: some hundred terms of size one in double precision."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


@dataclass
class Batch:
    """A random batch in double precision; two thirds of its places are supervised, a third of its labels drafted."""

    draft_states: torch.Tensor
    teacher_hidden: torch.Tensor
    labels: torch.Tensor
    label_columns: torch.Tensor
    supervised: torch.Tensor
    draft_logits: Logits
    teacher_logits: Logits
    branch_states: torch.Tensor | None = None
    branch_table: torch.Tensor | None = None

    def loss(self, objective: Objective) -> LossParts:
        return draft_loss(objective, **vars(self))

    def inputs(self) -> list[torch.Tensor]:
        tensors = [self.draft_states, self.branch_states, self.branch_table]
        return [tensor for tensor in tensors if tensor is not None]

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, self.inputs())


def soft_capped(weight: torch.Tensor, cap: float) -> Logits:
    return lambda states: cap * torch.tanh(states @ weight.T / cap)


def random_batch(branch: bool = False, student_cap: float = 1e9, teacher_cap: float = 2.0) -> Batch:
    def states(width: int) -> torch.Tensor:
        return torch.randn(BATCH, BLOCKS, DEPTH, width, dtype=torch.float64)

    head_weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    target_weight = torch.randn(VOCABULARY, TARGET_HIDDEN, dtype=torch.float64)
    labels = torch.randint(100, (BATCH, BLOCKS, DEPTH))
    return Batch(
        draft_states=states(HIDDEN).requires_grad_(),
        teacher_hidden=states(TARGET_HIDDEN),
        labels=labels,
        label_columns=torch.where(labels < 33, labels % VOCABULARY, -1),
        supervised=torch.rand(BATCH, BLOCKS, DEPTH) < 2 / 3,
        draft_logits=soft_capped(head_weight, student_cap),
        teacher_logits=soft_capped(target_weight, teacher_cap),
        branch_states=states(RANK).requires_grad_() if branch else None,
        branch_table=torch.randn(VOCABULARY, RANK, dtype=torch.float64).requires_grad_() if branch else None,
    )


def full_loss(objective: Objective, batch: Batch) -> torch.Tensor:
    """The same loss from the logits of all places at once."""
    logits, temperature = batch.draft_logits(batch.draft_states), objective.temperature
    taught = F.softmax(batch.teacher_logits(batch.teacher_hidden) / temperature, dim=-1)
    counted = batch.supervised
    if objective.loss == "hard_labels":
        counted = counted & (batch.label_columns >= 0)
    gamma = objective.depth_decay
    by_depth = [1.0 if gamma is None else math.exp(-step / gamma) for step in range(DEPTH)]
    weights = torch.tensor(by_depth, dtype=torch.float64) * counted

    def mean(logits: torch.Tensor) -> torch.Tensor:
        if objective.loss == "hard_labels":
            losses = F.cross_entropy(logits.movedim(-1, 1), batch.label_columns, ignore_index=-1, reduction="none")
        else:
            losses = F.kl_div(F.log_softmax(logits / temperature, dim=-1), taught, reduction="none").sum(dim=-1)
            losses = losses * temperature**2
        return (weights * losses).sum() / weights.sum()

    if batch.branch_states is None or batch.branch_table is None:
        return mean(logits)
    return mean(logits) + mean(logits.detach() + batch.branch_states @ batch.branch_table.T)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(temperature=1.7),
        Objective(temperature=0.5, depth_decay=2.0),
        Objective(loss="hard_labels"),
        Objective(loss="hard_labels", depth_decay=4.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("chunk_rows", [1, 2, 5, ROWS, 1000])
def test_value_and_gradients_are_those_of_the_loss_over_full_logits(
    chunk_rows: int, objective: Objective, branch: bool
) -> None:
    batch = random_batch(branch, student_cap=3.0)
    assert 0 < batch.supervised.sum() < ROWS
    found, expected = batch.loss(replace(objective, chunk_rows=chunk_rows)).loss, full_loss(objective, batch)
    assert_equal(found, expected)
    for gradient, reference in zip(batch.gradients(found), batch.gradients(expected), strict=True):
        assert_equal(gradient, reference)


@pytest.mark.parametrize("supervised", ["all", "one"])
def test_it_does_not_matter_how_many_places_are_supervised(supervised: str) -> None:
    batch = random_batch(branch=True)
    batch.supervised = torch.zeros(BATCH, BLOCKS, DEPTH, dtype=torch.bool)
    batch.supervised[(...,) if supervised == "all" else (1, 2, 0)] = True
    found, expected = batch.loss(Objective(chunk_rows=7)), full_loss(Objective(), batch)
    assert found.rows == (ROWS if supervised == "all" else 1)
    assert_equal(found.loss, expected)
    for gradient, reference in zip(batch.gradients(found.loss), batch.gradients(expected), strict=True):
        assert_equal(gradient, reference)


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
def test_gradients_are_those_of_finite_differences(loss: str) -> None:
    objective, batch = Objective(loss=loss, depth_decay=3.0, chunk_rows=4), random_batch(student_cap=2.0)

    def of_states(draft_states: torch.Tensor) -> torch.Tensor:
        return replace(batch, draft_states=draft_states).loss(objective).loss

    assert torch.autograd.gradcheck(of_states, (batch.draft_states,))

    # The head's states are fixed here: through them the branch's loss changes without a gradient, on purpose.
    batch = random_batch(branch=True)
    batch.draft_states = batch.draft_states.detach()

    def of_branch(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return replace(batch, branch_states=states, branch_table=table).loss(objective).loss

    assert torch.autograd.gradcheck(of_branch, tuple(batch.inputs()[1:]))


def test_kl_of_a_coin_is_the_one_worked_out_by_hand() -> None:
    # Teacher (3/4, 1/4), head (1/2, 1/2), so KL = ln 2 - H(1/4) = 3/4 ln 3 - ln 2; slope of the logits (-1/4, 1/4).
    # Depth 2 has the weight 1/2, and there the head already says what the teacher does.
    teacher = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).expand(1, 1, 2, 2)
    states = torch.tensor([[[[5.0, 5.0], [math.log(3.0) + 1, 1.0]]]], dtype=torch.float64, requires_grad=True)
    found = draft_loss(
        Objective(depth_decay=1 / math.log(2)),
        draft_states=states,
        teacher_hidden=teacher,
        labels=torch.zeros(1, 1, 2, dtype=torch.long),
        supervised=torch.ones(1, 1, 2, dtype=torch.bool),
        draft_logits=lambda states: states,
        teacher_logits=lambda states: states,
    )
    assert found.loss.item() == pytest.approx((0.75 * math.log(3) - math.log(2)) / 1.5, abs=1e-14)
    found.loss.backward()
    expected = torch.tensor([[[[-1 / 6, 1 / 6], [0.0, 0.0]]]], dtype=torch.float64)
    assert_equal(states.grad, expected)


def test_a_weight_of_a_depth_is_a_power_of_the_one_before() -> None:
    torch.testing.assert_close(
        Objective(depth_decay=1 / math.log(2)).depth_weights(4), torch.tensor([1, 0.5, 0.25, 0.125]).double()
    )
    assert Objective().depth_weights(3).tolist() == [1, 1, 1]


def test_a_teacher_may_rule_tokens_out() -> None:
    batch = random_batch()
    ruled_out = torch.zeros(VOCABULARY, dtype=torch.float64).index_fill_(0, torch.tensor([0, 7]), -math.inf)
    capped = batch.teacher_logits
    batch.teacher_logits = lambda states: capped(states) + ruled_out
    found, expected = batch.loss(Objective(chunk_rows=5)).loss, full_loss(Objective(), batch)
    assert_equal(found, expected)
    assert_equal(*batch.gradients(found), *batch.gradients(expected))


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
def test_the_branch_term_does_not_pull_the_head(loss: str) -> None:
    objective, batch = Objective(loss=loss, chunk_rows=5), random_batch(branch=True)
    (alone,) = torch.autograd.grad(
        replace(batch, branch_states=None, branch_table=None).loss(objective).loss, batch.draft_states
    )
    together = batch.gradients(batch.loss(objective).loss)
    assert torch.equal(together[0], alone)
    assert together[1].any()
    assert together[2].any()


def test_a_head_that_is_right_already_gets_no_gradient_from_a_branch_term_that_is_wrong() -> None:
    batch = random_batch(branch=True, student_cap=2.0)
    batch.teacher_hidden, batch.teacher_logits = batch.draft_states.detach(), batch.draft_logits
    found = batch.loss(Objective())
    assert found.base.abs() < 1e-14
    assert found.branch is not None
    assert found.branch > 0.1
    assert batch.gradients(found.loss)[0].abs().max() < 1e-16


def test_only_the_branch_term_learns_where_the_head_is_frozen() -> None:
    batch = random_batch(branch=True)
    expected = batch.gradients(batch.loss(Objective(chunk_rows=5)).loss)[1:]
    batch.draft_states = batch.draft_states.detach()
    head_logits, with_gradient = batch.draft_logits, []

    def recording(states: torch.Tensor) -> torch.Tensor:
        with_gradient.append(states.requires_grad or torch.is_grad_enabled())
        return head_logits(states)

    batch.draft_logits = recording
    found = batch.loss(Objective(chunk_rows=5)).loss
    assert not any(with_gradient)
    for gradient, reference in zip(torch.autograd.grad(found, batch.inputs()[1:]), expected, strict=True):
        assert torch.equal(gradient, reference)


def test_hard_labels_skip_what_the_head_cannot_draft() -> None:
    batch = random_batch()
    batch.supervised[:] = True
    drafted = batch.label_columns >= 0
    found = batch.loss(Objective(loss="hard_labels", chunk_rows=3))
    assert found.rows == drafted.sum() < ROWS
    assert found.supervised.tolist() == drafted.sum(dim=(0, 1)).tolist()
    (gradient,) = batch.gradients(found.loss)
    assert not gradient[~drafted].any()
    assert gradient[drafted].any(dim=-1).all()
    assert batch.loss(Objective()).rows == ROWS


def test_labels_are_their_own_columns_in_the_whole_vocabulary() -> None:
    batch = random_batch()
    batch.labels = batch.label_columns = torch.randint(VOCABULARY, (BATCH, BLOCKS, DEPTH))
    expected = full_loss(Objective(loss="hard_labels"), batch)
    arguments = {name: value for name, value in vars(batch).items() if name != "label_columns"}
    assert_equal(draft_loss(Objective(loss="hard_labels"), **arguments).loss, expected)


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
def test_a_batch_without_supervised_rows_has_zero_gradients_rather_than_none(loss: str) -> None:
    batch = random_batch(branch=True)
    batch.supervised[:] = loss == "hard_labels"
    batch.label_columns[:] = -1
    found = batch.loss(Objective(loss=loss))
    assert (found.loss.item(), found.base.item(), found.rows) == (0, 0, 0)
    assert found.agreement.tolist() == [0] * DEPTH
    assert found.supervised.tolist() == [0] * DEPTH
    found.loss.backward()
    for tensor in batch.inputs():
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_every_parameter_behind_the_states_gets_a_gradient_from_an_empty_batch() -> None:
    batch, layer = random_batch(), nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    batch.draft_states, batch.supervised = layer(batch.draft_states), torch.zeros_like(batch.supervised)
    batch.loss(Objective()).loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


def test_states_may_be_part_of_a_larger_tensor() -> None:
    batch = random_batch()
    block = torch.cat([torch.randn(BATCH, BLOCKS, 1, HIDDEN).double(), batch.draft_states.detach()], dim=2)
    block.requires_grad_()
    (expected,) = batch.gradients(batch.loss(Objective()).loss)
    (found,) = torch.autograd.grad(replace(batch, draft_states=block[:, :, 1:]).loss(Objective()).loss, block)
    assert torch.equal(found[:, :, 1:], expected)
    assert not found[:, :, 0].any()


def test_gradients_follow_what_is_made_of_the_loss_and_can_be_asked_for_twice() -> None:
    batch = random_batch(branch=True)
    loss = batch.loss(Objective()).loss
    once = torch.autograd.grad(loss, batch.inputs(), retain_graph=True)
    scaled = torch.autograd.grad(-4 * loss, batch.inputs())
    for gradient, reference in zip(scaled, once, strict=True):
        assert torch.equal(gradient, -4 * reference)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    batch = random_batch(branch=True)
    expected = batch.loss(Objective()).loss
    head_logits, with_gradient = batch.draft_logits, []

    def recording(states: torch.Tensor) -> torch.Tensor:
        with_gradient.append(states.requires_grad or torch.is_grad_enabled())
        return head_logits(states)

    batch.draft_logits = recording
    with torch.no_grad():
        found = batch.loss(Objective()).loss
    assert with_gradient == [False]
    assert not found.requires_grad
    assert torch.equal(found, expected.detach())


def test_logits_are_made_of_supervised_rows_alone_and_of_few_at_a_time() -> None:
    batch = random_batch(branch=True)
    head_logits, target_logits = batch.draft_logits, batch.teacher_logits
    seen: dict[str, list[torch.Tensor]] = {"head": [], "target": []}

    def recording(name: str, logits: Logits) -> Logits:
        def recorded(states: torch.Tensor) -> torch.Tensor:
            seen[name].append(states.detach().clone())
            return logits(states)

        return recorded

    batch.draft_logits, batch.teacher_logits = recording("head", head_logits), recording("target", target_logits)
    rows = batch.loss(Objective(chunk_rows=4)).rows
    for name, states in (("head", batch.draft_states), ("target", batch.teacher_hidden)):
        assert [len(chunk) for chunk in seen[name]] == [4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)
        assert torch.equal(torch.cat(seen[name]), states[batch.supervised])


def test_nothing_handed_in_is_changed() -> None:
    batch = random_batch()
    same = torch.randn(BATCH, BLOCKS, DEPTH, VOCABULARY, dtype=torch.float64)
    batch.draft_states, batch.teacher_hidden = same.clone().requires_grad_(), same.clone()
    batch.draft_logits = batch.teacher_logits = lambda states: states
    batch.loss(Objective(temperature=2.0)).loss.backward()
    assert torch.equal(batch.draft_states.detach(), same)
    assert torch.equal(batch.teacher_hidden, same)


def test_parameters_of_the_output_matrix_get_no_gradient() -> None:
    batch, lm_head = random_batch(), nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
    batch.draft_logits = lm_head
    batch.loss(Objective()).loss.backward()
    assert lm_head.weight.grad is None
    assert batch.draft_states.grad is not None


def test_agreement_is_the_share_of_rows_with_the_targets_likeliest_token() -> None:
    # Two blocks, three depths: right and right, right and unsupervised, wrong and wrong. The branch term lifts token 2.
    head, target = torch.tensor([[1, 0, 0], [2, 1, 1]]), torch.tensor([[1, 0, 2], [2, 2, 2]])
    found = draft_loss(
        Objective(chunk_rows=2),
        draft_states=F.one_hot(head, 3)[None].float().requires_grad_(),
        teacher_hidden=F.one_hot(target, 3)[None].float(),
        labels=target[None],
        supervised=torch.tensor([[[True, True, True], [True, False, True]]]),
        draft_logits=lambda states: states,
        teacher_logits=lambda states: states,
        branch_states=torch.ones(1, 2, 3, 1),
        branch_table=torch.tensor([[0.0], [0.0], [9.0]]),
    )
    assert found.supervised.tolist() == [2, 1, 2]
    assert found.agreement.tolist() == [1, 1, 0]
    assert found.branch_agreement is not None
    assert found.branch_agreement.tolist() == [0.5, 0, 1]


def test_the_parts_add_up() -> None:
    batch = random_batch(branch=True)
    found = batch.loss(Objective())
    alone = replace(batch, branch_states=None, branch_table=None).loss(Objective())
    assert found.branch is not None
    assert_equal(found.loss, found.base + found.branch)
    assert_equal(found.base, alone.loss)
    assert not found.base.requires_grad
    assert not found.branch.requires_grad
    assert alone.branch is None
    assert alone.branch_agreement is None


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_states_and_products_are_rounded_in_half_precision(dtype: torch.dtype, loss: str) -> None:
    """Logits are the states here, so that nothing but the loss is computed."""
    shape = (BATCH, BLOCKS, DEPTH, 1000)
    states, teacher = (4 * torch.randn(shape)).to(dtype).requires_grad_(), (4 * torch.randn(shape)).to(dtype)
    columns = torch.randint(-1, 1000, (BATCH, BLOCKS, DEPTH))
    supervised = torch.rand(BATCH, BLOCKS, DEPTH) < 0.5

    def batch(states: torch.Tensor, teacher: torch.Tensor) -> Batch:
        return Batch(states, teacher, columns, columns, supervised, lambda states: states, lambda states: states)

    found = batch(states, teacher).loss(Objective(loss=loss, chunk_rows=5)).loss
    exact_states = states.detach().double().requires_grad_()
    expected = full_loss(Objective(loss=loss), batch(exact_states, teacher.double()))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)  # a softmax in bfloat16 is off by 1e-2
    (gradient,), (reference,) = torch.autograd.grad(found, states), torch.autograd.grad(expected, exact_states)
    assert gradient.dtype == dtype
    # Half a unit in the last place, for the slopes, the mean, and where a small number loses digits in float16.
    torch.testing.assert_close(gradient.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_training_works_under_autocast() -> None:
    lm_head, parents, table = nn.Linear(64, 128), nn.Linear(64, 16), nn.Parameter(torch.randn(128, 16))
    inputs = torch.randn(2, 3, 4, 64)
    teacher_hidden, supervised = torch.randn(2, 3, 4, 64), torch.rand(2, 3, 4) < 0.7

    def train(autocast: bool, chunk_rows: int) -> tuple[LossParts, list[torch.Tensor]]:
        layer = nn.Linear(64, 64)
        layer.weight.data.copy_(torch.eye(64))
        layer.bias.data.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            states = layer(inputs)
            found = draft_loss(
                Objective(chunk_rows=chunk_rows),
                draft_states=states,
                teacher_hidden=teacher_hidden,
                labels=torch.zeros(2, 3, 4, dtype=torch.long),
                supervised=supervised,
                draft_logits=lm_head,
                teacher_logits=lm_head,
                branch_states=parents(states.detach()),
                branch_table=table,
            )
        return found, list(torch.autograd.grad(found.loss, [layer.weight, layer.bias, parents.weight, table]))

    expected, references = train(autocast=False, chunk_rows=1000)
    for chunk_rows in (1, 5, 1000):
        found, gradients = train(autocast=True, chunk_rows=chunk_rows)
        assert found.loss.dtype == torch.float32
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=0.02)
        for gradient, reference in zip(gradients, references, strict=True):
            assert gradient.dtype == torch.float32
            assert (gradient - reference).norm() < 0.02 * reference.norm()  # bfloat16 has two to three digits


def test_a_table_in_half_precision_does_not_lose_what_single_rows_add_to_its_gradient() -> None:
    """In bfloat16, adding 1 to 256 leaves 256: the sum over rows must not be kept in it."""
    rows = 400
    found = draft_loss(
        Objective(chunk_rows=1),
        draft_states=torch.zeros(1, rows, 1, 2, dtype=torch.bfloat16),
        teacher_hidden=torch.tensor([0.0, 30.0]).expand(1, rows, 1, 2),
        labels=torch.zeros(1, rows, 1, dtype=torch.long),
        supervised=torch.ones(1, rows, 1, dtype=torch.bool),
        draft_logits=lambda states: states,
        teacher_logits=lambda states: states,
        branch_states=torch.ones(1, rows, 1, 1, dtype=torch.bfloat16),
        branch_table=(table := torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()),
    )
    found.loss.backward()
    # The head's probabilities are 1/2 and the teacher's 0 and 1, so every row's slope is 1/2 and -1/2.
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == [0.5, -0.5]


def allocations(run: Callable[[], Any], trace: Path) -> tuple[int, int]:
    """The most bytes that `run` holds at once, and its largest tensor, by torch's own record of every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    held = torch.tensor(sizes).cumsum(dim=0)
    return int(held.max()), max(sizes)


@pytest.mark.parametrize("branch", [False, True])
def test_memory_is_bounded_by_a_few_chunks_for_a_vocabulary_of_262144(branch: bool, tmp_path: Path) -> None:
    vocabulary, rows, chunk_rows, hidden, rank = 262_144, 1024, 32, 8, 2
    weight, table = torch.randn(vocabulary, hidden), torch.randn(vocabulary, rank).requires_grad_()
    shape = (4, 64, 4)
    draft_states, branch_states = (torch.randn(*shape, width).requires_grad_() for width in (hidden, rank))

    def step() -> None:
        draft_loss(
            Objective(chunk_rows=chunk_rows),
            draft_states=draft_states,
            teacher_hidden=torch.ones(*shape, hidden),
            labels=torch.zeros(shape, dtype=torch.long),
            supervised=torch.ones(shape, dtype=torch.bool),
            draft_logits=lambda states: states @ weight.T,
            teacher_logits=lambda states: states @ weight.T,
            branch_states=branch_states if branch else None,
            branch_table=table if branch else None,
        ).loss.backward()

    peak, largest = allocations(step, tmp_path / "trace.json")
    chunk = chunk_rows * vocabulary * 4  # 32 MiB; all rows would be 32 of these
    # At any moment: the teacher's probabilities, a workspace (one tensor of two chunks), and the logits of one side.
    # The branch term needs the head's logits besides its own, and the gradient of its table. The rest is rows x hidden.
    bound = (4 * chunk + table.nbytes if branch else 3 * chunk) + 2**20
    assert largest == 2 * chunk
    assert 3 * chunk <= peak <= bound < rows * vocabulary * 4 / 7
    assert draft_states.grad is not None


def test_the_record_of_allocations_sees_full_logits(tmp_path: Path) -> None:
    batch = random_batch()
    batch.draft_states = torch.randn(4, 8, 8, 4, requires_grad=True)
    batch.teacher_hidden = torch.randn(4, 8, 8, 4)
    batch.supervised = torch.ones(4, 8, 8, dtype=torch.bool)
    weight = torch.randn(4096, 4)
    batch.draft_logits = batch.teacher_logits = lambda states: states @ weight.T

    def naive() -> None:
        taught = F.softmax(batch.teacher_logits(batch.teacher_hidden), dim=-1)
        logits = F.log_softmax(batch.draft_logits(batch.draft_states), dim=-1)
        F.kl_div(logits, taught, reduction="sum").backward()

    peak, largest = allocations(naive, tmp_path / "trace.json")
    assert peak >= 3 * 256 * 4096 * 4
    assert largest == 256 * 4096 * 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "reverse_kl"}, "`loss` must be one of 'forward_kl', 'hard_labels', got 'reverse_kl'"),
        ({"depth_decay": 0.0}, "`depth_decay` must be a positive number, or None for equal weights, got 0.0"),
        ({"temperature": -1.0}, "`temperature` must be a positive number, got -1.0"),
        ({"temperature": math.inf}, "`temperature` must be a positive number, got inf"),
        ({"loss": "hard_labels", "temperature": 2.0}, "`temperature` must be 1 with `loss='hard_labels'`, got 2.0"),
        ({"chunk_rows": 0}, "`chunk_rows` must be an integer of at least 1, got 0"),
    ],
)
def test_a_field_out_of_range_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Objective(**fields)


def test_half_a_branch_term_is_refused() -> None:
    batch = random_batch(branch=True)
    with pytest.raises(ValueError, match="must be given together, got no `branch_table`"):
        replace(batch, branch_table=None).loss(Objective())


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
def test_a_teacher_over_another_vocabulary_is_refused(loss: str) -> None:
    batch = random_batch()
    batch.teacher_logits = lambda states: states[:, :4]
    batch.supervised[:], batch.label_columns[:] = True, 0
    with pytest.raises(ValueError, match=r"same vocabulary, got 11 and 4 columns"):
        batch.loss(Objective(loss=loss))
