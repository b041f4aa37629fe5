"""Files of answers: one JSON object per line, appended batch by batch, whole after a kill at any moment.

An answer has `id`, `prompt_ids`, `response_ids` (both as the target saw and wrote them, the EOS included), `finish`
(`"eos"` or `"length"`), `source` if its prompt had one, and `turn` if its prompt had several. A file of a shared run is
a shard, `answers.jsonl.shard-00001-of-00004`; what it was made with stands beside it in `*.settings.json`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

# What tells an answer from all others: its prompt's id, and its turn if the prompt has several.
AnswerKey = tuple[str, int]


def answer_key(answer: Mapping[str, Any]) -> AnswerKey:
    """What tells an answer from all others."""
    return str(answer["id"]), int(answer.get("turn", 0))


def shard_path(path: Path, shard: tuple[int, int]) -> Path:
    """Where a process that shares the work writes.

    Args:
        path (`Path`): The output of the whole run.
        shard (`tuple[int, int]`): Number of the share, from 1, and how many there are.
    """
    number, count = shard
    return path if count == 1 else path.with_name(f"{path.name}.shard-{number:05d}-of-{count:05d}")


def check_shard_count(path: Path, count: int) -> None:
    """Checks that a run was not started with another number of shares: its answers would be written twice.

    Args:
        path (`Path`): The output of the whole run.
        count (`int`): Shares of the work.

    Raises:
        ValueError: If it was.
    """
    counts = {1} if path.exists() else set()
    counts.update(total for _, total in _shards(path))
    if other := counts - {count}:
        raise ValueError(
            f"`shard` must divide {path} into as many shares as it was started with, {min(other)}, got {count}; move "
            "the earlier answers away to start again."
        )


def answer_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that hold the answers of a run.

    Args:
        path (`str` or `os.PathLike`): The output of the whole run, or a single shard of it.

    Returns:
        `list[Path]`: The file itself, or its shards in order.

    Raises:
        FileNotFoundError: If there is neither the file nor a shard of it, or if a shard is missing.
        ValueError: If there are both, or shards of different counts.
    """
    path = Path(path)
    shards = _shards(path)
    if not shards:
        if not path.exists():
            raise FileNotFoundError(f"There are no answers at {path}, neither a file nor shards of it.")
        return [path]
    counts = {count for _, count in shards} | ({1} if path.exists() else set())
    if len(counts) > 1:
        raise ValueError(
            f"{path} must be the output of one run, got answers in {', '.join(map(str, sorted(counts)))} files."
        )
    (count,) = counts
    if missing := set(range(1, count + 1)) - {number for number, _ in shards}:
        raise FileNotFoundError(f"{path} must have all its {count} shards, missing {sorted(missing)}.")
    return [shard_path(path, shard) for shard in sorted(shards)]


def read_answers(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The answers of a run, which may still be going on.

    Args:
        path (`str` or `os.PathLike`): The output of the whole run, or a single shard of it.

    Yields:
        `dict`: One answer after the other; a last line that is not finished is left out.

    Raises:
        ValueError: If an answer is there twice, or a line cannot be read.
    """
    seen = set()
    for file in answer_files(path):
        for answer, _ in _complete_lines(file):
            key = answer_key(answer)
            if key in seen:
                raise ValueError(f"An answer must be there once, got that of id {key[0]!r} again in {file}.")
            seen.add(key)
            yield answer


class AnswerFile:
    """One process's file of answers, to be used as a context manager that no second process can enter.

    The batches of a run are known beforehand, and are asked for and written in order; so what a kill left of the last
    one is found by comparing keys, and is cut off.

    Args:
        path (`Path`): The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + ".settings.json")
        self._lock = FileLock(path.with_name(path.name + ".lock"))
        self._written: list[_WrittenAnswer] = []
        self._confirmed = 0  # how many of the written answers belong to whole batches of the run

    def __enter__(self) -> "AnswerFile":
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(f"{self.path} must have one writer, and another process is writing it.") from None
        try:
            if self.path.exists():
                self._written = [_WrittenAnswer(answer_key(row), end) for row, end in _complete_lines(self.path)]
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def settings(self) -> dict[str, Any] | None:
        """What the file was started with, `None` if it has not been."""
        if self.settings_path.exists():
            settings: dict[str, Any] = json.loads(self.settings_path.read_text(encoding="utf-8"))
            return settings
        if self._written:
            raise ValueError(f"{self.path} must have its settings in {self.settings_path.name}, which is not there.")
        return None

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Writes what the file is made with, in one piece.

        Args:
            settings (`Mapping[str, Any]`): JSON values.
        """
        unfinished = self.settings_path.with_name(self.settings_path.name + ".unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(settings, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.settings_path)

    def holds(self, keys: Sequence[AnswerKey]) -> bool:
        """Whether the next batch of the run is already written; what is there of an unfinished one is cut off.

        Args:
            keys (`Sequence[AnswerKey]`): The keys of the batch.

        Raises:
            ValueError: If the file goes on with answers of other prompts.
        """
        found = [answer.key for answer in self._written[self._confirmed : self._confirmed + len(keys)]]
        if found == list(keys):
            self._confirmed += len(keys)
            return True
        if found != list(keys[: len(found)]):
            raise ValueError(
                f"{self.path} must go on with the answers of ids {_shown(keys)}, got those of {_shown(found)}: it was "
                "changed, or is not of this run."
            )
        del self._written[self._confirmed :]
        if self.path.exists():
            os.truncate(self.path, self._written[-1].end if self._written else 0)
        return False

    def append(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Writes a batch and waits until it is on the disk.

        Args:
            answers (`Sequence[Mapping[str, Any]]`): The answers of the batch for which `holds` was `False`.
        """
        lines = [json.dumps(answer).encode() + b"\n" for answer in answers]
        with self.path.open("ab") as file:
            end = file.tell()
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        for answer, line in zip(answers, lines, strict=True):
            end += len(line)
            self._written.append(_WrittenAnswer(answer_key(answer), end))
        self._confirmed = len(self._written)


@dataclass(frozen=True)
class _WrittenAnswer:
    key: AnswerKey
    end: int


def _shards(path: Path) -> list[tuple[int, int]]:
    pattern = re.compile(re.escape(path.name) + r"\.shard-(\d{5})-of-(\d{5})")
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    found = [match for match in map(pattern.fullmatch, names) if match]
    return [(int(match[1]), int(match[2])) for match in found]


def _complete_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line's object and the offset of its end; a kill leaves a last line without its newline."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                answer = json.loads(line)
                answer_key(answer)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {path} must be the JSON object of an answer, got {line!r}."
                ) from error
            yield answer, end


def _shown(keys: Sequence[AnswerKey]) -> str:
    names = [name if turn == 0 else f"{name} (turn {turn})" for name, turn in keys[:3]]
    return ", ".join(names) + (", ..." if len(keys) > 3 else "")
