"""Choose, check and hand out the target's tokens exactly as plain decoding does.

Logits processors, the random draw, stopping criteria and the streamer are called here and nowhere else: once per
emitted token, in order, on the true prefix. That is what makes any tree exact, and same-seed sampling identical.
"""

from collections.abc import Sequence
from typing import cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping_criteria_module
from transformers.generation.streamers import BaseStreamer

# These look at one row's ids and scores and keep nothing between calls, so rows may be at different lengths.
_ROWWISE_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
)
_ROWWISE_CRITERIA = (
    stopping_criteria_module.MaxLengthCriteria,
    stopping_criteria_module.EosTokenCriteria,
    stopping_criteria_module.StopStringCriteria,
)
_HOST_CRITERIA = (stopping_criteria_module.MaxLengthCriteria, stopping_criteria_module.EosTokenCriteria)


class TokenWriter:
    """The sequences of one generation, and the target's choice of what comes next.

    Rows advance **raggedly**, each by what it accepts, where every processor and criterion looks at rows one by one and
    keeps no state. Otherwise they advance in **lockstep**: every call sees the whole batch at one length, as in plain
    decoding.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt.
        logits_processor (`LogitsProcessorList`): As prepared by `generate`.
        stopping_criteria (`StoppingCriteriaList`): As prepared by `generate`.
        generation_config (`GenerationConfig`): As prepared by `generate`.
        streamer (`BaseStreamer`, *optional*): Receives every token once, in order, when all rows have theirs.
        lockstep (`bool`, defaults to `False`): Whether rows must advance in lockstep whatever the processors and
            criteria are.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        lockstep: bool = False,
    ) -> None:
        self._ids = input_ids.long().contiguous()  # an expanded prompt cannot be written to
        self._processors = logits_processor
        self._criteria = stopping_criteria
        self._streamer = streamer
        self._do_sample = generation_config.do_sample
        self._max_length: int = generation_config.max_length
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        pad = generation_config._pad_token_tensor
        self._pad_id = int(pad) if pad is not None else 0
        returns = bool(generation_config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if returns and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if returns and generation_config.output_logits else None
        records = returns and generation_config.output_hidden_states
        self.batch_size = input_ids.shape[0]
        self.lengths = [input_ids.shape[1]] * self.batch_size
        self.finished = [False] * self.batch_size
        self._streamed = input_ids.shape[1]
        recorded = self.scores is not None or self.logits is not None or bool(records)
        self.lockstep = lockstep or self.batch_size == 1 or recorded or not self._rows_are_independent()
        # whether the token is the largest logit's and length and EOS alone end a row: then the host needs no tensors
        self.takes_largest = not (self._do_sample or len(logits_processor) or recorded) and all(
            type(criterion) in _HOST_CRITERIA for criterion in stopping_criteria
        )
        self._eos_ids = {
            token
            for criterion in stopping_criteria
            if isinstance(criterion, stopping_criteria_module.EosTokenCriteria)
            for token in criterion.eos_token_id.tolist()
        }
        self._fresh: list[list[int]] = [[] for _ in range(self.batch_size)]  # taken, not yet in `_ids`

    def _rows_are_independent(self) -> bool:
        kinds = _ROWWISE_CRITERIA if self._pads else (stopping_criteria_module.MaxLengthCriteria,)
        return all(type(processor) in _ROWWISE_PROCESSORS for processor in self._processors) and all(
            type(criterion) in kinds for criterion in self._criteria
        )

    @property
    def decoding(self) -> str:
        """How tokens are chosen, in words that are the same for every text: sampled or not, and by which processors."""
        names = sorted(type(processor).__name__ for processor in self._processors)
        return " ".join(["sampled" if self._do_sample else "greedy", *names])

    @property
    def done(self) -> bool:
        """Whether every row has met a stopping criterion."""
        return all(self.finished)

    @property
    def remaining(self) -> list[int]:
        """Per row, how many tokens it can still get before `max_length`; 0 for a finished one that stands still."""
        return [
            0 if finished and not self.lockstep else max(self._max_length - length, 0)
            for finished, length in zip(self.finished, self.lengths, strict=True)
        ]

    @property
    def active_rows(self) -> list[int]:
        """The rows that get tokens in the next step: the unfinished ones, or in lockstep all."""
        return [row for row in range(self.batch_size) if self.lockstep or not self.finished[row]]

    @property
    def growing_rows(self) -> list[int]:
        """The rows that get tokens of their own, no padding, in the next step."""
        return [row for row in self.active_rows if not self.is_padding(row)]

    def is_padding(self, row: int) -> bool:
        """Whether this row only gets padding any more."""
        return self.finished[row] and self._pads

    @property
    def pad_id(self) -> int:
        """What a finished row gets; 0 where there is no padding token."""
        return self._pad_id

    def anchors(self) -> torch.Tensor:
        """The last token of every row, of shape `(batch,)`."""
        last = torch.tensor(self.lengths, device=self._ids.device)[:, None] - 1
        return self._ids.gather(1, last)[:, 0]

    def write(self, rows: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Lets the target choose the next token of these rows, appends it, and checks whether they stop.

        Args:
            rows (`list[int]`): Rows, in ascending order; in lockstep all of them.
            logits (`torch.Tensor` of shape `(len(rows), vocab)`): The target's logits after each row's last token.

        Returns:
            `list[int]`: The chosen tokens.
        """
        by_length: dict[int, list[int]] = {}  # where in `rows` the rows of each length are
        for index, row in enumerate(rows):
            by_length.setdefault(self.lengths[row], []).append(index)
        tokens = [0] * len(rows)
        for length, where in sorted(by_length.items()):
            group = logits if len(where) == len(rows) else logits[where]
            for index, token in zip(
                where, self._write_group([rows[index] for index in where], length, group), strict=True
            ):
                tokens[index] = token
        self._stream()
        return tokens

    def take(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """[`write`] where `takes_largest`: the host knows the tokens; [`flush`] hands them out.

        Args:
            rows (`list[int]`): Rows, in ascending order; in lockstep all of them.
            tokens (`list[int]`): The largest logits' tokens.

        Returns:
            `list[int]`: The tokens, padding in rows that only get padding.
        """
        taken = [self._pad_id if self.is_padding(row) else token for row, token in zip(rows, tokens, strict=True)]
        for row, token in zip(rows, taken, strict=True):
            self._fresh[row].append(token)
            self.lengths[row] += 1
            if token in self._eos_ids or self.lengths[row] >= self._max_length:
                self.finished[row] = True
        return taken

    def flush(self) -> None:
        """Appends what [`take`] was given to the sequences, and to the stream."""
        if not any(self._fresh):
            return
        self._reserve(max(self.lengths))
        for row, tokens in enumerate(self._fresh):
            if tokens:
                start = self.lengths[row] - len(tokens)
                self._ids[row, start : self.lengths[row]] = torch.tensor(tokens, device=self._ids.device)
                tokens.clear()
        for criterion in self._criteria:
            if isinstance(criterion, stopping_criteria_module.MaxLengthCriteria):
                criterion(self._prefix(max(self.lengths)), None)  # it warns of texts longer than the target knows
        self._stream()

    def _write_group(self, rows: list[int], length: int, logits: torch.Tensor) -> list[int]:
        """`write` for rows of one length, the others filling up the batch that processors and criteria expect."""
        whole = len(rows) == self.batch_size
        # a copy, as in plain decoding: processors work in place, and a view would keep the whole tree's logits alive
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = logits
        if len(self._processors):
            everyone = logits if whole else logits.new_zeros(self.batch_size, logits.shape[-1])
            if not whole:
                everyone[rows] = logits
            prefix = self._prefix(length)
            scores = self._processors(prefix, everyone)
            if whole:
                self._ids[:, :length] = prefix  # plain decoding keeps what a processor writes into its input too
            else:
                scores = scores[rows]
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self._do_sample:
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if any(self.is_padding(row) for row in rows):
            padding = torch.tensor([self.is_padding(row) for row in rows], device=tokens.device)
            tokens = tokens.masked_fill(padding, self._pad_id)
        self._append(rows, length, tokens)
        stops = self._criteria(self._prefix(length + 1), self.scores).tolist()
        for row in rows:
            self.finished[row] = self.finished[row] or stops[row]
        emitted: list[int] = tokens.tolist()
        return emitted

    def _prefix(self, length: int) -> torch.LongTensor:
        """The first `length` tokens of every row, contiguous; shorter rows end in padding that nobody looks at."""
        return cast(torch.LongTensor, self._ids[:, :length].contiguous())

    def _append(self, rows: list[int], length: int, tokens: torch.Tensor) -> None:
        self._reserve(length + 1)
        self._ids[rows, length] = tokens
        for row in rows:
            self.lengths[row] = length + 1

    def _reserve(self, length: int) -> None:
        """Makes room for so many tokens, by doubling."""
        if length > self._ids.shape[1]:
            room = max(64, length)
            self._ids = torch.cat([self._ids, self._ids.new_full((self.batch_size, room), self._pad_id)], dim=1)

    def _stream(self) -> None:
        """Hands out the positions that every row has reached; finished rows have padding there."""
        if self._streamer is None:
            return
        reached = [length for row, length in enumerate(self.lengths) if not self.is_padding(row)]
        end = min(reached) if reached else max(self.lengths)
        for position in range(self._streamed, end):
            self._streamer.put(self._ids[:, position].clone().cpu())  # the streamer may do with it what it likes
        self._streamed = max(self._streamed, end)

    def close(self) -> torch.Tensor:
        """Ends the stream.

        Returns:
            `torch.LongTensor` of shape `(batch, length)`: Prompt and new tokens; rows that stopped early end in
            padding.
        """
        self._stream()
        if self._streamer is not None:
            self._streamer.end()
        return self.sequences()

    def tail(self, count: int) -> torch.Tensor:
        """The last token of every row and the `count - 1` after it in [`sequences`], of shape `(batch, count)`."""
        first = torch.tensor(self.lengths, device=self._ids.device)[:, None] - 1
        columns = first + torch.arange(count, device=self._ids.device)
        return self._ids.gather(1, columns.clamp(max=self._ids.shape[1] - 1))

    def sequences(self) -> torch.Tensor:
        """Prompt and tokens so far, of shape `(batch, longest)`; shorter rows end in padding."""
        return self._ids[:, : max(self.lengths)].clone()
