"""The objective of training: how far a head's draft distributions are from what the target says (arXiv 2606.18394).

Forward KL to the target's own distribution at every drafted position; or, as DFlash does, cross entropy with the data's
tokens. With a large vocabulary the logits of a batch would take more memory than the model, the head's as well as the
target's. So both are computed from hidden states for a few rows at a time, and the gradient with respect to those
states is taken before the next rows: no tensor of rows x vocabulary outlives its chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

LOSSES = ("forward_kl", "hard_labels")

LogitsOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """What a head is trained to minimise.

    Args:
        loss (`str`, defaults to `"forward_kl"`): `"forward_kl"`, the divergence of the head's distribution from the
            target's, which is JetSpec's; or `"hard_labels"`, the cross entropy with the data's tokens, DFlash's.
        depth_decay (`float`, *optional*): γ of the weights `exp(-(k - 1) / γ)` of depth `k`; `None` for equal weights.
        temperature (`float`, defaults to 1.0): Divides the logits on both sides of the divergence, which is then
            multiplied by its square so that gradients keep their size.
        chunk_rows (`int`, defaults to 512): Rows whose logits exist at once. Memory is proportional to it.

    Raises:
        ValueError: If a field is out of range, or `temperature` is not 1 for a loss without one.
    """

    loss: str = "forward_kl"
    depth_decay: float | None = None
    temperature: float = 1.0
    chunk_rows: int = 512

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(map(repr, LOSSES))}, got {self.loss!r}.")
        if self.depth_decay is not None and not 0 < self.depth_decay < math.inf:
            raise ValueError(
                f"`depth_decay` must be a positive number, or None for equal weights, got {self.depth_decay}."
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"`temperature` must be a positive number, got {self.temperature}.")
        if self.loss == "hard_labels" and self.temperature != 1:
            raise ValueError(
                f"`temperature` must be 1 with `loss='hard_labels'`, got {self.temperature}: only 'forward_kl' has one."
            )
        if not isinstance(self.chunk_rows, int) or self.chunk_rows < 1:
            raise ValueError(f"`chunk_rows` must be an integer of at least 1, got {self.chunk_rows!r}.")

    def depth_weights(self, depth: int) -> torch.Tensor:
        """The weights of the depths, of shape `(depth,)`, in double precision: 1 for the first, never rising."""
        steps = torch.arange(depth, dtype=torch.float64)
        return torch.ones_like(steps) if self.depth_decay is None else torch.exp(-steps / self.depth_decay)


@dataclass(frozen=True)
class LossParts:
    """The loss of a batch, and what to report beside it. A counted row is a supervised place that bears on the loss.

    Attributes:
        loss (`torch.Tensor` of shape `()`): What to minimise: the weighted mean over the counted rows, plus that of the
            branch term. 0 with zero gradients if no row counts.
        base (`torch.Tensor` of shape `()`): The part of the head's own logits, detached.
        branch (`torch.Tensor` of shape `()`, *optional*): The part of the logits with the branch term, detached.
        rows (`int`): Counted rows.
        agreement (`torch.Tensor` of shape `(depth,)`): Share of the counted rows whose likeliest token is the target's
            likeliest; 0 at a depth without any.
        branch_agreement (`torch.Tensor` of shape `(depth,)`, *optional*): The same with the branch term.
        supervised (`torch.LongTensor` of shape `(depth,)`): Counted rows per depth. With [`Objective.depth_weights`] it
            gives the sum of weights that the loss was divided by.
    """

    loss: torch.Tensor
    base: torch.Tensor
    branch: torch.Tensor | None
    rows: int
    agreement: torch.Tensor
    branch_agreement: torch.Tensor | None
    supervised: torch.Tensor


def draft_loss(
    objective: Objective,
    *,
    draft_states: torch.Tensor,
    teacher_hidden: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    draft_logits: LogitsOf,
    teacher_logits: LogitsOf,
    label_columns: torch.Tensor | None = None,
    branch_states: torch.Tensor | None = None,
    branch_table: torch.Tensor | None = None,
) -> LossParts:
    """The loss of a batch of blocks, differentiable with respect to `draft_states`, `branch_states` and `branch_table`.

    Nothing else gets a gradient, the parameters behind `draft_logits` included. The branch term's loss does not reach
    `draft_states`: it is taken over the detached logits of the head plus `branch_states @ branch_table.T`.

    Args:
        objective ([`Objective`]): What to minimise.
        draft_states (`torch.Tensor` of shape `(batch, blocks, depth, hidden)`): The head's states.
        teacher_hidden (`torch.Tensor` of shape `(batch, blocks, depth, target_hidden)`): The target's last hidden
            states, which predict the same tokens.
        labels (`torch.LongTensor` of shape `(batch, blocks, depth)`): The data's tokens.
        supervised (`torch.BoolTensor` of shape `(batch, blocks, depth)`): The places to learn from.
        draft_logits (`Callable`): From states `(rows, hidden)` to logits `(rows, draft_vocab)`, row by row and
            differentiable.
        teacher_logits (`Callable`): From the target's states to its finished logits over the same vocabulary. Its
            distribution is normalised over that vocabulary.
        label_columns (`torch.LongTensor` of shape `(batch, blocks, depth)`, *optional*): Place of each label in the
            draft vocabulary, -1 if it is not in it: hard labels skip such a row. `None` for the whole vocabulary, in
            which a label is its own place.
        branch_states (`torch.Tensor` of shape `(batch, blocks, depth, rank)`, *optional*): The branch term's states.
        branch_table (`torch.Tensor` of shape `(draft_vocab, rank)`, *optional*): Its factors of all drafted tokens.

    Returns:
        [`LossParts`]

    Raises:
        ValueError: If only one of `branch_states` and `branch_table` is given, or the two kinds of logits differ in
            their vocabulary.
    """
    if (branch_states is None) != (branch_table is None):
        missing = "branch_states" if branch_states is None else "branch_table"
        raise ValueError(f"`branch_states` and `branch_table` must be given together, got no `{missing}`.")
    columns = labels if label_columns is None else label_columns
    counted = supervised & (columns >= 0) if objective.loss == "hard_labels" else supervised
    places = counted.nonzero(as_tuple=True)
    rows, dtype = places[0].numel(), torch.promote_types(draft_states.dtype, torch.float32)
    weights = objective.depth_weights(counted.shape[2]).to(counted.device, dtype)[places[2]]
    comparison = _Comparison(objective, dtype)
    base = _Part(rows, dtype, draft_states)
    branch = None if branch_states is None else _Part(rows, dtype, branch_states, branch_table)

    for start in range(0, rows, objective.chunk_rows):
        rows_of_chunk = slice(start, start + objective.chunk_rows)
        place = tuple(index[rows_of_chunk] for index in places)
        chunk = _Chunk(rows_of_chunk, place, objective.temperature * weights[rows_of_chunk, None])
        with torch.no_grad():
            hidden = teacher_hidden[tuple(index.to(teacher_hidden.device) for index in place)]
            comparison.teach(teacher_logits(hidden).to(draft_states.device), columns[place])
            logits = _add_base(base, comparison, chunk, draft_logits)
            if branch is not None:
                _add_branch(branch, comparison, chunk, logits)
            del logits  # before the next chunk has its own

    parts = [base] if branch is None else [base, branch]
    sums = [(weights * part.losses).sum() for part in parts]
    divisor = weights.sum() if rows else weights.new_ones(())
    gradients = [gradient for part in parts for gradient in (part.states_grad, part.table_grad)]
    inputs = [tensor for part in parts for tensor in (part.states, part.table)]
    total: torch.Tensor = _KnownGradients.apply(torch.stack(sums).sum(), gradients, *inputs)  # type: ignore[no-untyped-call]
    return LossParts(
        loss=total / divisor,
        base=sums[0] / divisor,
        branch=None if branch is None else sums[1] / divisor,
        rows=rows,
        agreement=base.agreement(counted),
        branch_agreement=None if branch is None else branch.agreement(counted),
        supervised=counted.sum(dim=(0, 1)),
    )


@dataclass(frozen=True)
class _Chunk:
    """Rows whose logits exist at once.

    Attributes:
        rows (`slice`): Which of the counted rows.
        place (`tuple`): Their indices into `(batch, blocks, depth)`.
        scale (`torch.Tensor` of shape `(rows, 1)`): What to multiply their gradients by: their weights, and the
            temperature, since a divergence has the slope `(q - p) / temperature` and counts times its square. As rows
            are independent, this may wait until the vocabulary is summed out.
    """

    rows: slice
    place: tuple[torch.Tensor, ...]
    scale: torch.Tensor


class _Part:
    """What is known so far of one part of the loss: its rows, and the gradients of their weighted sum.

    Args:
        rows (`int`): Counted rows.
        dtype (`torch.dtype`): That of the losses.
        states (`torch.Tensor` of shape `(batch, blocks, depth, width)`): What the part is differentiated by.
        table (`torch.Tensor` of shape `(draft_vocab, width)`, *optional*): This too.
    """

    def __init__(self, rows: int, dtype: torch.dtype, states: torch.Tensor, table: torch.Tensor | None = None) -> None:
        self.states, self.table = states, table
        self.states_grad = _zero_gradient(states, states.dtype)
        # Every chunk adds to all of the table's gradient, so it must not be rounded in between.
        self.table_grad = _zero_gradient(table, dtype)
        self.losses = torch.zeros(rows, dtype=dtype, device=states.device)
        self.agrees = torch.zeros(rows, dtype=torch.bool, device=states.device)

    def agreement(self, counted: torch.Tensor) -> torch.Tensor:
        """The share of rows that agree with the teacher, of shape `(depth,)`."""
        agreeing = torch.zeros_like(counted)
        agreeing[counted] = self.agrees
        return agreeing.sum(dim=(0, 1)) / counted.sum(dim=(0, 1)).clamp(min=1)


class _Comparison:
    """The loss of a chunk of rows. It works in two tensors of chunk x vocabulary that serve all chunks.

    On a CPU, touching fresh memory costs several times as much as the arithmetic of a pass over it.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype) -> None:
        self._soft, self._temperature, self._dtype = objective.loss == "forward_kl", objective.temperature, dtype
        self._memory: torch.Tensor | None = None

    def teach(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Takes what the rows are to learn.

        Args:
            logits (`torch.Tensor` of shape `(rows, vocab)`): The target's.
            labels (`torch.LongTensor` of shape `(rows,)`): Columns of the data's tokens; read by hard labels only.
        """
        if self._memory is None:
            self._memory = logits.new_empty((2 if self._soft else 1, *logits.shape), dtype=self._dtype)
        self._teacher, self._scratch = self._memory[0, : len(logits)], self._memory[-1, : len(logits)]
        self._labels = labels
        if not self._soft:
            self._best = logits.argmax(dim=-1)
            return
        scaled = self._scratch.copy_(logits)
        if self._temperature != 1:
            scaled /= self._temperature
        peak, self._best = scaled.max(dim=-1)
        torch.softmax(scaled, dim=-1, out=self._teacher)
        # A token that the target rules out by a logit of minus infinity adds 0 to the entropy, not 0 x infinity.
        mean = scaled.clamp_(min=torch.finfo(self._dtype).min).mul_(self._teacher).sum(dim=-1)
        self._negative_entropy = mean - _log_normaliser(peak, self._teacher, self._best)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compares the head's logits with what was taught.

        Args:
            logits (`torch.Tensor` of shape `(rows, vocab)`): The head's, detached.

        Returns:
            `tuple`: The losses and whether the likeliest token is the teacher's, both of shape `(rows,)`; and the
            losses' slopes by `logits / temperature`, over the squared temperature, of shape `(rows, vocab)`, which last
            until the next call.
        """
        if logits.shape[-1] != self._teacher.shape[-1]:
            raise ValueError(
                "`draft_logits` and `teacher_logits` must be over the same vocabulary, got "
                f"{logits.shape[-1]} and {self._teacher.shape[-1]} columns."
            )
        scaled = logits.to(self._dtype)
        if self._temperature != 1:
            scaled = scaled / self._temperature
        peak, best = scaled.max(dim=-1)
        if self._soft:
            taught = torch.mul(scaled, self._teacher, out=self._scratch).sum(dim=-1) - self._negative_entropy
        else:
            taught = scaled.gather(-1, self._labels[:, None])[:, 0]
        slopes = torch.softmax(scaled, dim=-1, out=self._scratch)
        losses = _log_normaliser(peak, slopes, best) - taught
        if self._soft:
            slopes -= self._teacher
        else:
            slopes[torch.arange(len(slopes), device=slopes.device), self._labels] -= 1
        return losses * self._temperature**2, best == self._best, slopes


def _log_normaliser(peak: torch.Tensor, probabilities: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of exponentials of rows of logits, without another pass over them.

    Args:
        peak (`torch.Tensor` of shape `(rows,)`): The largest logits.
        probabilities (`torch.Tensor` of shape `(rows, vocab)`): Their softmax.
        best (`torch.LongTensor` of shape `(rows,)`): The columns of the largest.
    """
    return peak - probabilities.gather(-1, best[:, None])[:, 0].log()


def _add_base(part: _Part, comparison: _Comparison, chunk: _Chunk, draft_logits: LogitsOf) -> torch.Tensor:
    """Adds a chunk of the head's own logits, and returns them detached."""
    wanted = part.states_grad is not None
    states = part.states[chunk.place].detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        logits = draft_logits(states)
    part.losses[chunk.rows], part.agrees[chunk.rows], slopes = comparison(logits.detach())
    if part.states_grad is not None:
        (gradient,) = torch.autograd.grad(logits, states, slopes.to(logits.dtype))
        part.states_grad[chunk.place] = (gradient * chunk.scale).to(gradient.dtype)
    return logits.detach()


def _add_branch(part: _Part, comparison: _Comparison, chunk: _Chunk, base_logits: torch.Tensor) -> None:
    """Adds a chunk of the logits with the branch term, which are linear in it: autograd has nothing to do."""
    states, table = part.states[chunk.place], cast(torch.Tensor, part.table)
    term = states @ table.T
    logits = term.to(part.losses.dtype).add_(base_logits)
    part.losses[chunk.rows], part.agrees[chunk.rows], slopes = comparison(logits)
    if part.states_grad is not None:
        gradient = slopes.to(term.dtype) @ table  # under autocast the dtype is not that of the states
        part.states_grad[chunk.place] = (gradient * chunk.scale).to(part.states_grad.dtype)
    if part.table_grad is not None:
        part.table_grad.addmm_(slopes.T, states * chunk.scale)


def _zero_gradient(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Room for a gradient, if one is wanted."""
    if tensor is None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return None
    return torch.zeros_like(tensor, dtype=dtype)


class _KnownGradients(torch.autograd.Function):
    """Hands on gradients that were computed together with the value.

    It is there for a value without rows too: in distributed training every parameter must get a gradient, even of 0.
    """

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor | None], *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(None if found is None else (found * scale).to(dtype) for found, dtype in pairs)
