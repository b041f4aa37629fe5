"""The target answers prompts itself, with its own `generate`: what a draft head is trained on.

    python -m jetspec_hf.training.regenerate --target FOLDER --prompts PROMPTS.jsonl --output ANSWERS.jsonl

Token ids are kept as the target saw and wrote them. The batches of a run follow from the prompts and the settings
alone, each is drawn with a seed of its own and written in one piece: a run that was killed goes on to the very answers
of one that was not. See `answers` for the file, and `rows.rows_from_answers` for what comes next.
"""

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..command_line import at_least, check_model, check_writable, existing_file, usable_device
from .answers import AnswerFile, AnswerKey, check_shard_count, read_answers, shard_path
from .prompts import Prompt, PromptRenderer, prompts_fingerprint, read_prompts

# Prompts are sorted by length among this many batches: enough that a batch hardly needs padding.
WINDOW_BATCHES = 32
# Options of `generate` under which a row would not be one answer that ends at EOS or at `max_new_tokens`, or under
# which a second run would not write the same.
REFUSED_OPTIONS = (
    "assistant_model",
    "custom_generate",
    "generation_config",
    "max_length",
    "max_time",
    "num_return_sequences",
    "return_dict_in_generate",
    "stop_strings",
    "streamer",
)


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    output_path: str | os.PathLike[str],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 512,
    seed: int = 0,
    chat_template: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    **generate_options: Any,
) -> Path:
    """Lets the target answer prompts, and keeps the token ids.

    Called again after it was stopped, whatever stopped it, it goes on where it was; with prompts added at the end, it
    goes on with those. An answer to one of several `turns` is an answer of its own, whose `prompt_ids` are the
    conversation so far as a chat would give it to the target: through the template, with the earlier answers as text,
    even where those were cut at `max_new_tokens`.

    Args:
        target (`PreTrainedModel`): The model, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompts (`str`, `os.PathLike` or iterable of `dict`): A JSONL file, a `datasets.Dataset` or dicts, each with
            one of `prompt` (text), `messages` (a conversation; what it has of a last answer is dropped) or `turns`
            (what the user says, turn after turn), and optionally with `id` and `source`.
        output_path (`str` or `os.PathLike`): JSONL file of the answers, which is appended to.
        batch_size (`int`, *optional*, defaults to 16): Prompts answered at once.
        max_new_tokens (`int`, *optional*, defaults to 512): Where an answer without EOS is cut.
        seed (`int`, *optional*, defaults to 0): Of sampling.
        chat_template (`bool`, *optional*): Whether prompts go through the tokenizer's chat template; if it has one when
            not given.
        template_kwargs (`dict`, *optional*): Variables of the template, for example `{"enable_thinking": False}`.
        limit (`int`, *optional*): Takes the first prompts only.
        shard (`tuple[int, int]`, *optional*): Which share of the work this process does, from 1, and how many there
            are. Each is written to a file of its own, and `read_answers(output_path)` reads them all. When not given,
            the processes of `accelerate launch` share the work, and wait for each other at the end.
        generate_options (*optional*): Options of `generate`, for example `do_sample`, `temperature` or
            `repetition_penalty`; the target's own generation config stands for the others.

    Returns:
        `Path`: `output_path`.

    Raises:
        ValueError: If an argument or a prompt is not as described, or if the output was started with other settings.
        OSError: If the output cannot be written.
        RuntimeError: If another process is writing the same output.
    """
    state = _process_state()
    launched = shard is None and state.num_processes > 1
    if launched:
        shard = (state.process_index + 1, state.num_processes)
    number, count = shard or (1, 1)
    writer = _AnswerWriter(
        target=target,
        renderer=PromptRenderer(tokenizer, chat_template, dict(template_kwargs or {})),
        batch_size=batch_size,
        seed=seed,
        generate_options={"max_new_tokens": max_new_tokens, **generate_options},
    )
    _check_arguments(target, batch_size, max_new_tokens, (number, count), generate_options)
    share = read_prompts(prompts, limit)[number - 1 :: count]
    writer.renderer.check(share)
    output = Path(output_path)
    check_writable(shard_path(output, (number, count)), "`output_path`")
    check_shard_count(output, count)
    with AnswerFile(shard_path(output, (number, count))) as answers:
        settings = json.loads(json.dumps({**writer.settings(), "shard": f"{number}/{count}"}))  # as read again later
        segments = _agree_on_settings(answers, settings, share)
        answers.path.touch()  # a share without a prompt is a file, too, or it would be missed
        _answer_all(writer, answers, segments, show_progress=state.is_main_process)
    if launched:
        state.wait_for_everyone()
    return output


@dataclass(frozen=True)
class _AnswerWriter:
    """How prompts become answers.

    Args:
        target (`PreTrainedModel`): The model.
        renderer (`PromptRenderer`): Makes token ids of prompts.
        batch_size (`int`): Prompts answered at once.
        seed (`int`): Of sampling.
        generate_options (`dict`): Options of `generate`.
    """

    target: PreTrainedModel
    renderer: PromptRenderer
    batch_size: int
    seed: int
    generate_options: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """All that the answers follow from, besides the prompts."""
        defaults = self.target.generation_config.to_diff_dict()
        defaults.pop("transformers_version", None)
        return {
            "target": self.target.config.name_or_path,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "template_fingerprint": self.renderer.template_fingerprint(),
            "template_kwargs": self.renderer.template_kwargs,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "generate_options": self.generate_options,
            "generation_config": defaults,
        }

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer."""
        given = self.generate_options.get("eos_token_id", self.target.generation_config.eos_token_id)
        return [] if given is None else [given] if isinstance(given, int) else list(given)

    @property
    def pad_token_id(self) -> int:
        """What fills the rows of a batch; it is masked out, so any token does."""
        pad: int | None = self.renderer.tokenizer.pad_token_id
        return pad if pad is not None else next(iter(self.eos_token_ids), 0)

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        """The prompts, longest first within windows: little padding, and memory runs out early if it does.

        Args:
            prompts (`Sequence[Prompt]`): The prompts.
        """
        window = self.batch_size * WINDOW_BATCHES
        for start in range(0, len(prompts), window):
            ordered = sorted(prompts[start : start + window], key=lambda prompt: -len(self.prompt_ids(prompt)))
            for first in range(0, len(ordered), self.batch_size):
                yield ordered[first : first + self.batch_size]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """What the target is given for the first answer."""
        ids = self.renderer.ids(prompt.messages)
        if not ids:
            raise ValueError(f"The prompt of id {prompt.id!r} must have a token at least, got none.")
        return ids

    def answer(self, batch: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The answers to a batch of prompts, in the order of `answer_keys`.

        Args:
            batch (`Sequence[Prompt]`): The prompts.
        """
        answers: dict[AnswerKey, dict[str, Any]] = {}
        conversations = {prompt.id: list(prompt.messages) for prompt in batch}
        for turn in range(max(prompt.answers for prompt in batch)):
            asked = [prompt for prompt in batch if turn < prompt.answers]
            inputs = [
                self.prompt_ids(prompt) if turn == 0 else self.renderer.ids(conversations[prompt.id])
                for prompt in asked
            ]
            outputs = self._generate(inputs, seed=_batch_seed(self.seed, turn, asked))
            for prompt, prompt_ids, response_ids in zip(asked, inputs, outputs, strict=True):
                ended = bool(response_ids) and response_ids[-1] in self.eos_token_ids
                answers[prompt.id, turn] = {
                    "id": prompt.id,
                    **({} if prompt.source is None else {"source": prompt.source}),
                    **({"turn": turn} if prompt.kind == "turns" else {}),
                    "prompt_ids": prompt_ids,
                    "response_ids": response_ids,
                    "finish": "eos" if ended else "length",
                }
                if turn < len(prompt.later_turns):
                    text = self.renderer.tokenizer.decode(response_ids, skip_special_tokens=True)
                    conversations[prompt.id] += [
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": prompt.later_turns[turn]},
                    ]
        return [answers[key] for key in answer_keys(batch)]

    def _generate(self, inputs: Sequence[list[int]], seed: int) -> list[list[int]]:
        """What the target writes after each of these token ids, with the EOS and without padding."""
        width = max(map(len, inputs))
        input_ids = torch.full((len(inputs), width), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(inputs):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            attention_mask[row, width - len(ids) :] = 1
        device = self.target.device
        target: Any = self.target  # its class is a `GenerationMixin` as well
        with _seeded(seed):
            output = target.generate(
                input_ids.to(device),
                attention_mask=attention_mask.to(device),
                **{"pad_token_id": self.pad_token_id, **self.generate_options},
            )
        return [self._until_eos(row) for row in output[:, width:].tolist()]

    def _until_eos(self, written: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(written) if token in self.eos_token_ids]
        return written[: ends[0] + 1] if ends else written


def answer_keys(batch: Sequence[Prompt]) -> list[AnswerKey]:
    """The keys of a batch's answers, in the order in which they are written: prompt after prompt, turn after turn.

    Args:
        batch (`Sequence[Prompt]`): The prompts.
    """
    return [(prompt.id, turn) for prompt in batch for turn in range(prompt.answers)]


def _process_state() -> Any:
    """Which of the launched processes this is."""
    # On its own, `PartialState` takes launched processes without an accelerator for unrelated ones.
    return PartialState(cpu=not torch.accelerator.is_available())


def _answer_all(
    writer: _AnswerWriter, answers: AnswerFile, segments: Sequence[Sequence[Prompt]], show_progress: bool
) -> None:
    total = sum(prompt.answers for segment in segments for prompt in segment)
    shown = contextlib.nullcontext() if not show_progress else logging.tqdm(total=total, unit="answer")
    tokens, seconds = 0, 0.0
    with shown as bar:
        for batch in (batch for segment in segments for batch in writer.batches(segment)):
            keys = answer_keys(batch)
            if not answers.holds(keys):
                start = time.perf_counter()
                written = writer.answer(batch)
                answers.append(written)
                seconds += time.perf_counter() - start
                tokens += sum(len(answer["response_ids"]) for answer in written)
                if bar is not None:
                    bar.set_postfix({"tokens/s": f"{tokens / seconds:.1f}"}, refresh=False)
            if bar is not None:
                bar.update(len(keys))


def _agree_on_settings(
    answers: AnswerFile, settings: Mapping[str, Any], prompts: Sequence[Prompt]
) -> list[Sequence[Prompt]]:
    """Checks that a file is gone on with as it was started, and writes down how.

    Returns:
        `list[Sequence[Prompt]]`: The prompts in the portions in which they were added, so that batches stay the same.
    """
    recorded = answers.settings()
    before = [] if recorded is None else recorded["prompts"]
    if recorded is not None:
        _compare_settings({**recorded, "prompts": None}, {**settings, "prompts": None}, answers.path)
    segments: list[Sequence[Prompt]] = []
    start = 0
    for portion in before:
        segment = prompts[start : start + portion["count"]]
        if len(segment) < portion["count"] or prompts_fingerprint(segment) != portion["fingerprint"]:
            total = sum(portion["count"] for portion in before)
            raise ValueError(
                f"`prompts` must begin with the {total} prompts of which {answers.path} was made, got {len(prompts)} "
                f"that differ between {start} and {start + portion['count']}; choose another output."
            )
        segments.append(segment)
        start += portion["count"]
    if start < len(prompts) or recorded is None:
        segments.append(prompts[start:])
    portions = [{"count": len(segment), "fingerprint": prompts_fingerprint(segment)} for segment in segments]
    if portions != before:
        answers.write_settings({**settings, "prompts": portions})
    return segments


def _compare_settings(recorded: Mapping[str, Any], given: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    for name in sorted({*recorded, *given}):
        before, now = recorded.get(name), given.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            _compare_settings(before, now, path, f"{prefix}{name}.")
        elif before != now:
            raise ValueError(
                f"`{prefix}{name}` must be what {path} was started with, {before!r}, got {now!r}; choose another "
                "output, or the same settings."
            )


def _check_arguments(
    target: PreTrainedModel, batch_size: int, max_new_tokens: int, shard: tuple[int, int], options: Mapping[str, Any]
) -> None:
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"`shard` must be a number from 1 to the count of shards, and that count, got {shard}.")
    if target.training:
        raise ValueError("`target` must be in evaluation mode, got a target in training mode; call `target.eval()`.")
    for name, value in options.items():
        if name in REFUSED_OPTIONS:
            raise ValueError(
                f"`{name}` must not be given: an answer ends with EOS or after `max_new_tokens`, got {value!r}."
            )
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"`{name}` must be a JSON value, to stand in the settings of the output, got {value!r}."
            ) from None


def _batch_seed(seed: int, turn: int, batch: Sequence[Prompt]) -> int:
    """A seed that follows from what is drawn, so that it does not matter what was drawn before."""
    text = "\n".join([str(seed), str(turn), *(prompt.id for prompt in batch)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws with this seed inside, and as if nothing had happened afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jetspec_hf.training.regenerate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", required=True, help="folder or name of the target")
    parser.add_argument(
        "--prompts", type=existing_file, required=True, help="JSONL with `prompt`, `messages` or `turns`"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL of the answers; gone on with if there")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(%(default)s)"
    )
    parser.add_argument(
        "--device", type=_device, help="`auto` spreads the target over all devices (default: that of the process)"
    )
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="prompts answered at once (%(default)s)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=512, help="where answers are cut (%(default)s)")
    parser.add_argument(
        "--temperature", type=_temperature, help="0 is greedy (default: the target's generation config)"
    )
    parser.add_argument("--top-k", type=at_least(0), help="0 is off (default: the target's generation config)")
    parser.add_argument("--top-p", type=float, help="(default: the target's generation config)")
    parser.add_argument("--repetition-penalty", type=float, help="(default: the target's generation config)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    parser.add_argument("--limit", type=at_least(1), help="takes the first prompts only")
    parser.add_argument("--shard", type=_shard, help="which share to write, as in 1/4 (default: that of the process)")
    parser.add_argument(
        "--threads", type=at_least(1), default=torch.get_num_threads(), help="torch threads (%(default)s)"
    )
    parser.add_argument(
        "--no-chat-template", action="store_true", help="prompts are plain text for the target to go on"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="the chat template's `enable_thinking` (default: its own)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Loads the target and lets it answer.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    state = _process_state()
    shard = options.shard or (state.process_index + 1, state.num_processes)
    file = shard_path(options.output, shard)
    check_writable(file, "`--output`")
    read_prompts(options.prompts, options.limit)  # for what is wrong with them, before the target is loaded
    check_model(options.target, "`--target`", is_target=True)
    target = AutoModelForCausalLM.from_pretrained(
        options.target, dtype=options.dtype, device_map=options.device or str(state.device)
    )
    chosen = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    generate_options = {name: value for name, value in chosen.items() if value is not None}
    if options.temperature is not None:
        generate_options["do_sample"] = options.temperature > 0
        if options.temperature == 0:
            del generate_options["temperature"]
    regenerate(
        target.eval(),
        AutoTokenizer.from_pretrained(options.target),
        options.prompts,
        options.output,
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        chat_template=False if options.no_chat_template else None,
        template_kwargs={} if options.thinking is None else {"enable_thinking": options.thinking},
        limit=options.limit,
        shard=options.shard,
        **generate_options,
    )
    print(f"{sum(1 for _ in read_answers(file))} answers are in {file}")
    state.destroy_process_group()


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be a share and how many there are, as in 1/4, got {text!r}")
    return int(number), int(count)


def _device(text: str) -> str:
    return text if text == "auto" else str(usable_device(text))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


if __name__ == "__main__":
    main()
