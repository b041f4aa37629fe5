"""Runs every method on every prompt in turn, and finds where texts part; the tables are made in `report`."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..decoding.output import AcceptanceStats
from ..modeling_jetspec import JetSpecDraftHead
from .machine import PeakMemory, wait_for, waiting_phases
from .measurement import Measurement
from .methods import DECODINGS, PLAIN, Method
from .options import ending
from .oracle import OracleHead
from .tasks import Prompt

WARM_UP_TOKENS = 4
LESSONS = 4  # how often an oracle is taught the text that a method writes in half precision
CaseKey = tuple[str, str, str]  # task, id, decoding
RunKey = tuple[str, str, str, str]  # and method


@dataclass(frozen=True)
class Case:
    """Texts to be generated at once by every method.

    Args:
        prompts (`tuple[Prompt, ...]`): What is asked, a row each.
        input_ids (`torch.LongTensor` of shape `(rows, length)`): Their token ids, left-padded.
        attention_mask (`torch.LongTensor` of shape `(rows, length)`): 0 for padding.
        decoding (`str`): One of `DECODINGS`.
        seed (`int`): Of sampling.
    """

    prompts: tuple[Prompt, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    decoding: str
    seed: int

    @property
    def key(self) -> CaseKey:
        """Task, ids and decoding."""
        return self.prompts[0].task, " ".join(prompt.id for prompt in self.prompts), self.decoding

    def to(self, device: torch.device) -> "Case":
        """The same with its tensors on a device.

        Args:
            device (`torch.device`): Where the models run.
        """
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=self.attention_mask.to(device))


@dataclass(frozen=True)
class Run:
    """One generation.

    Args:
        case (`Case`): What was generated.
        method (`str`): How.
        measurement (`Measurement`): Tokens and times.
    """

    case: Case
    method: str
    measurement: Measurement

    @property
    def key(self) -> RunKey:
        """Task, ids, decoding and method."""
        return (*self.case.key, self.method)


@dataclass(frozen=True)
class Difference:
    """Where a text leaves that of plain decoding.

    Args:
        position (`int`): The first new token that differs, from 0; if one text goes on where the other ends, its end.
        margin (`float`, *optional*): By how much plain decoding preferred its own token, in the logits it chose on.
            `None` where it drew, where one text had ended, or where it does not repeat itself.
    """

    position: int
    margin: float | None


Differences = Mapping[RunKey, Sequence[Difference | None]]


@dataclass(frozen=True)
class Benchmark:
    """Generates with every method on the same target.

    Args:
        target (`PreTrainedModel`): The model that is sped up. Of its generation config only EOS and padding are used.
        head ([`JetSpecDraftHead`]): The draft head.
        max_new_tokens (`int`): Most tokens to generate.
        accuracy (`float`, *optional*): How often an [`OracleHead`] is right.
    """

    target: PreTrainedModel
    head: JetSpecDraftHead
    max_new_tokens: int
    accuracy: float | None = None
    _known: dict[CaseKey | RunKey, Sequence[Sequence[int]]] = field(default_factory=dict, repr=False)

    def usable(self, case: Case, methods: Sequence[Method]) -> tuple[list[Method], dict[str, str]]:
        """Runs every method for the first time: first calls allocate, compile kernels, fill caches and test the target.

        Args:
            case (`Case`): What to generate, a few tokens of it.
            methods (`Sequence[Method]`): What is to be compared.

        Returns:
            `tuple`: The methods that work, and for the names of the others, all of them transformers' own, the reason.
        """
        working, reasons = [], {}
        for method in methods:
            try:
                self.learn(case, method)
                self.generate(case, method, max_new_tokens=WARM_UP_TOKENS)
            except Exception as error:
                if not method.is_stock:
                    raise
                reasons[method.name] = f"{type(error).__name__}: {error}"  # whatever transformers finds to refuse
            else:
                working.append(method)
        return working, reasons

    def run_all(self, cases: Sequence[Sequence[Case]], methods: Sequence[Method], repeats: int = 1) -> Iterator[Run]:
        """Every method on every case, interleaved.

        Args:
            cases (`Sequence[Sequence[Case]]`): For each prompt or batch of them, its cases.
            methods (`Sequence[Method]`): What to compare; see `usable`.
            repeats (`int`): How often.

        Returns:
            `Iterator[Run]`: In their order in time.
        """
        total = sum(map(len, cases)) * len(methods) * repeats
        with logging.tqdm(total=total, desc="Timing", unit="generation") as bar:
            for repeat in range(repeats):
                for number, prompt_cases in enumerate(cases):
                    for place, case in enumerate(prompt_cases):
                        first = (repeat + number + place) % len(methods)
                        for method in (*methods[first:], *methods[:first]):
                            yield self.run(case, method)
                            bar.update()

    def run(self, case: Case, method: Method) -> Run:
        """One timed generation; of an oracle, of a text that it knows, as far as that can be settled.

        Args:
            case (`Case`): What to generate.
            method (`Method`): How.
        """
        self.learn(case, method)
        experience = copy.deepcopy(self.head.experience)
        run = self._timed(case, method)
        for _ in range(LESSONS):
            if self.accuracy is None or not method.is_ours or run.measurement.texts == self._text_for(run.key):
                break
            self._known[run.key] = run.measurement.texts
            self.head.experience = copy.deepcopy(experience)  # of a text that was drafted wrongly nothing is learned
            self.learn(case, method)
            run = self._timed(case, method)
        if method.is_ours and self.target.device.type != "cpu":
            run = self._with_phases(run, method)
        return run

    def peak_memory(self, case: Case, method: Method) -> int | None:
        """Bytes above what the loaded models take that a generation needs; `None` where they cannot be measured.

        Args:
            case (`Case`): What to generate.
            method (`Method`): How.
        """
        self.learn(case, method)
        with PeakMemory(self.target.device) as memory:
            self.generate(case, method)
        return memory.bytes

    def learn(self, case: Case, method: Method) -> None:
        """Tells an oracle the text that is to be drafted; other heads need not know.

        Args:
            case (`Case`): What will be generated.
            method (`Method`): How.
        """
        if not isinstance(self.head, OracleHead) or self.accuracy is None or not method.is_ours:
            return
        if case.key not in self._known:
            self._known[case.key] = self.texts(case, self.generate(case, Method(PLAIN)))
        texts = self._text_for((*case.key, method.name))
        prompts = [row[mask.bool()].tolist() for row, mask in zip(case.input_ids, case.attention_mask, strict=True)]
        known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        self.head.know(known, self.accuracy, seed=case.seed)

    def differences(self, runs: Sequence[Run], margins: bool = True) -> Differences:
        """Where texts leave those of plain decoding, which is run once more where its logits tell the margins.

        Args:
            runs (`Sequence[Run]`): As `run_all` returns them.
            margins (`bool`): Whether to.

        Returns:
            `dict`: By `Run.key`, for those with texts that do, a difference or `None` for each row; among repeats,
            the first difference counts.
        """
        cases: dict[CaseKey, list[Run]] = {}
        for run in runs:
            cases.setdefault(run.case.key, []).append(run)
        found: dict[RunKey, list[Difference | None]] = {}
        for of_case in logging.tqdm(cases.values(), desc="Comparing", unit="text", disable=not margins):
            plain = next(run for run in of_case if run.method == PLAIN)
            departed: dict[tuple[RunKey, int], tuple[int, tuple[int, ...]]] = {}
            for run in of_case:
                for row, (text, other) in enumerate(zip(plain.measurement.texts, run.measurement.texts, strict=True)):
                    position = first_difference(text, other)
                    earliest, _ = departed.get((run.key, row), (None, ()))
                    if position is not None and (earliest is None or position < earliest):
                        departed[run.key, row] = (position, other)
            logits = self._choosing_logits(plain, [position for position, _ in departed.values()]) if margins else ()
            for (key, row), (position, other) in departed.items():
                rows = found.setdefault(key, [None] * len(plain.measurement.texts))
                gap = margin([step[row] for step in logits], position, plain.measurement.texts[row], other)
                rows[row] = Difference(position, gap)
        return found

    def generate(self, case: Case, method: Method, **options: Any) -> Any:
        """`generate` on the target.

        Args:
            case (`Case`): What to generate.
            method (`Method`): How.
            options: More fields of `GenerationConfig`.
        """
        target = cast(Any, self.target)  # the declared result depends on the arguments
        config = GenerationConfig(
            **{
                **DECODINGS[case.decoding],
                **method.options,
                "max_new_tokens": self.max_new_tokens,
                **ending(self.target.generation_config),
                **options,
            }
        )
        assistant = self.head if method.uses_head else method.assistant
        extra = {} if assistant is None else {"assistant_model": assistant}
        torch.manual_seed(case.seed)
        with _scaled_embeddings(self.head) if method.is_stock and method.uses_head else nullcontext():
            return target.generate(
                case.input_ids, attention_mask=case.attention_mask, generation_config=config, **extra
            )

    def texts(self, case: Case, sequences: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """Each row's new tokens, up to its EOS.

        Args:
            case (`Case`): What was generated.
            sequences (`torch.LongTensor` of shape `(rows, length + new)`): As `generate` returns them.
        """
        eos = ending(self.target.generation_config)["eos_token_id"]
        ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
        rows = sequences[:, case.input_ids.shape[1] :].tolist()
        lengths = (next((at for at, token in enumerate(row) if token in ends), len(row)) + 1 for row in rows)
        return tuple(tuple(row[:length]) for row, length in zip(rows, lengths, strict=True))

    def _timed(self, case: Case, method: Method) -> Run:
        device = self.target.device
        with _counted_forwards(self.target, device) as ends:
            wait_for(device)
            start = time.perf_counter()
            sequences = self.generate(case, method)
            wait_for(device)
            seconds = time.perf_counter() - start
        texts = self.texts(case, sequences)
        measurement = Measurement(
            texts,
            seconds,
            prefill_seconds=ends[0] - start,
            forwards=len(ends),
            row_forwards=len(ends) - 1 if len(texts) == 1 else sum(len(text) - 1 for text in texts),
        )
        return Run(case, method.name, self._with_statistics(measurement) if method.is_ours else measurement)

    def _with_statistics(self, measurement: Measurement) -> Measurement:
        """With what the head's last generation tells."""
        stats = cast(AcceptanceStats, self.head.last_acceptance)
        return replace(
            measurement,
            row_forwards=sum(map(len, stats.accepted_lengths)),
            tree_sizes=tuple(stats.tree_sizes),
            reasons=stats.reasons,
            step_seconds=tuple(stats.step_seconds),
            phased_seconds=measurement.decoding_seconds,
        )

    def _with_phases(self, run: Run, method: Method) -> Run:
        """The run with the phases of another one that waits for the device at their ends."""
        self.learn(run.case, method)
        with waiting_phases(self.target.device):
            phased = self._timed(run.case, method).measurement
        measurement = replace(run.measurement, step_seconds=phased.step_seconds, phased_seconds=phased.phased_seconds)
        return replace(run, measurement=measurement)

    def _text_for(self, key: RunKey) -> Sequence[Sequence[int]]:
        return self._known[key if key in self._known else key[:3]]

    def _choosing_logits(self, plain: Run, positions: Sequence[int]) -> Sequence[torch.Tensor]:
        """What plain decoding took the maximum of, up to the last position; nothing where it drew or differs now."""
        if not positions or DECODINGS[plain.case.decoding]["do_sample"]:
            return ()
        again = self.generate(
            plain.case,
            Method(PLAIN),
            max_new_tokens=max(positions) + 1,
            output_scores=True,
            return_dict_in_generate=True,
        )
        repeated = self.texts(plain.case, again.sequences)
        pairs = zip(repeated, plain.measurement.texts, strict=True)
        same = all(now == before[: len(now)] for now, before in pairs)
        return tuple(again.scores) if same else ()


@contextmanager
def _counted_forwards(target: PreTrainedModel, device: torch.device) -> Iterator[list[float]]:
    """The times at which the target's forwards ended; only for the first, the prefill, is the device waited for."""
    ends: list[float] = []

    def count(*_: Any) -> None:
        if not ends:
            wait_for(device)
        ends.append(time.perf_counter())

    hook = target.register_forward_hook(count)
    try:
        yield ends
    finally:
        hook.remove()


@contextmanager
def _scaled_embeddings(head: JetSpecDraftHead) -> Iterator[None]:
    """Gives the head its `embedding_scale`, of which transformers' own chain drafter knows nothing."""

    def scale(_: Any, arguments: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**kwargs, "noise_embeds": kwargs["noise_embeds"] * head.config.embedding_scale}

    hook = head.register_forward_pre_hook(scale, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part, from 0, `None` if they do not.

    Args:
        plain (`Sequence[int]`): Tokens of plain decoding.
        other (`Sequence[int]`): Tokens of another method.
    """
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, other, strict=False)))
    return None if same == len(plain) == len(other) else same


def margin(logits: Sequence[torch.Tensor], position: int, plain: Sequence[int], other: Sequence[int]) -> float | None:
    """By how much plain decoding preferred its own token to the other, `None` where there are no two to compare.

    Args:
        logits (`Sequence[torch.Tensor]`): What it took the maximum of, of shape `(vocabulary,)`, per new token.
        position (`int`): Where the texts part.
        plain (`Sequence[int]`): Tokens of plain decoding.
        other (`Sequence[int]`): Tokens of the other text.
    """
    if position >= min(map(len, (logits, plain, other))):
        return None
    return float(logits[position][plain[position]] - logits[position][other[position]])
