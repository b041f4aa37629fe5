"""What a head was trained on and with: written beside every checkpoint, and compared when a run is resumed."""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence, Sized
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from ..target import base_model
from .batches import cut_row, row_digest
from .rows import COLUMNS, check_row

logger = logging.get_logger(__name__)

FILE_NAME = "training_provenance.json"
LIBRARIES = ("jetspec_hf", "transformers", "torch", "accelerate", "peft", "datasets")
# Paths and names of a machine say nothing about a head, and may be private.
_PRIVATE_ARGUMENTS = (
    "output_dir",
    "logging_dir",
    "run_name",
    "feature_cache_dir",
    "deepspeed",
    "accelerator_config",
    "hub_model_id",
)
# Saving or loading sets these; the dtype is that of the parameters.
_VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")
_SAMPLED_VALUES = 1024


@dataclasses.dataclass(frozen=True)
class RowsSummary:
    """What there is to know about rows after one pass over them.

    Attributes:
        fingerprint (`str`): Of everything that training reads of them, in their order.
        lengths (`np.ndarray`): Tokens of each row.
        supervised_tokens (`int`): Those among them that are to be predicted.
    """

    fingerprint: str
    lengths: np.ndarray
    supervised_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For the provenance."""
        return {
            "fingerprint": self.fingerprint,
            "rows": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "supervised_tokens": self.supervised_tokens,
        }


def summarise_rows(
    rows: Any, max_length: int | None = None, name: str = "train_dataset", num_tokens: int | None = None
) -> RowsSummary:
    """Reads all rows once.

    Args:
        rows (`datasets.Dataset` or sequence of `dict`): Rows with `input_ids` and `loss_mask`.
        max_length (`int`, *optional*): Where rows are cut.
        name (`str`): What to call them in an error.
        num_tokens (`int`, *optional*): The number of tokens there are.

    Returns:
        [`RowsSummary`]

    Raises:
        ValueError: If they cannot be counted, there is none, a row is none, or it has no token to be predicted.
    """
    if not isinstance(rows, Sized):
        raise ValueError(f"`{name}` must have a length, got {type(rows).__name__}.")
    if not len(rows):
        raise ValueError(f"`{name}` must have a row, got none.")
    digest, lengths, supervised_tokens = hashlib.blake2b(digest_size=16), [], 0
    for number, row in enumerate(_iterate(rows)):
        check_row(row, f"row {number} of `{name}`", num_tokens)
        cut = cut_row(row, max_length)
        supervised = _predicted(cut)
        if not supervised:
            raise ValueError(
                f"Every row of `{name}` must have a token to be predicted (`loss_mask` 1, after another token of its "
                f"document), got none in row {number}"
                + (f" of {len(row['input_ids'])} tokens, cut at `max_length={max_length}`." if max_length else ".")
            )
        digest.update(row_digest(cut))
        lengths.append(len(cut["input_ids"]))
        supervised_tokens += supervised
    return RowsSummary(digest.hexdigest(), np.asarray(lengths, dtype=np.int64), supervised_tokens)


def _iterate(rows: Any) -> Iterator[Mapping[str, Any]]:
    """All rows in order; those of a `datasets.Dataset` in batches of arrays, which is much faster than one by one."""
    if not hasattr(rows, "with_format"):
        yield from (rows[index] for index in range(len(rows)))
        return
    names = [name for name in COLUMNS if name in rows.column_names]
    for batch in rows.select_columns(names).with_format("numpy").iter(batch_size=1000):
        for index in range(len(batch["input_ids"])):
            yield {name: batch[name][index] for name in names}


def _predicted(row: Mapping[str, np.ndarray]) -> int:
    predicted = row["loss_mask"][1:] != 0
    if "document_ids" in row:
        documents = row["document_ids"]
        predicted = predicted & (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
    return int(predicted.sum())


def target_fingerprint(target: PreTrainedModel) -> str:
    """Tells a target from others: its architecture, and some values of each of its parameters.

    Args:
        target (`PreTrainedModel` or `PeftModel`): The model to be sped up.

    Returns:
        `str`: The same on every device.
    """
    model = base_model(target)
    # Defaults are left out: the next release of transformers may have more fields.
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in _VOLATILE_FIELDS}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}".encode())
        values = parameter.detach()
        values = values.full_tensor() if hasattr(values, "full_tensor") else values  # sharded over processes
        if values.device.type == "meta" or type(values.data) is not torch.Tensor:
            continue  # offloaded or packed
        values = values.reshape(-1)
        values = values[:: max(1, values.numel() // _SAMPLED_VALUES)].cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, str | None]:
    """Tells a tokenizer, and its chat template, from others."""
    template = getattr(tokenizer, "chat_template", None)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": None if vocabulary is None else _digest_of(vocabulary),
        "chat_template": None if template is None else _digest_of(template),
    }


def _digest_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe_run(
    target: PreTrainedModel, target_mark: str, data: RowsSummary | None, tokenizer: Any, args: TrainingArguments
) -> dict[str, Any]:
    """All that is written of a run.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        target_mark (`str`): What [`target_fingerprint`] returned.
        data ([`RowsSummary`], *optional*): The training rows.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        args (`TrainingArguments`): Those that are not the defaults are written.

    Returns:
        `dict[str, Any]`: As in the file.
    """
    model = base_model(target)
    return {
        "data": None if data is None else data.to_dict(),
        "target": {
            "name": _public_name(model.config.name_or_path),
            "class": type(model).__name__,
            "fingerprint": target_mark,
        },
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
        },
        "arguments": _chosen_arguments(args),
    }


def _public_name(name_or_path: str | None) -> str | None:
    """A Hub id as it is, of a folder its name alone: where it lies is nobody's business."""
    if not name_or_path:
        return None
    return Path(name_or_path).name if Path(name_or_path).is_dir() else name_or_path


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _chosen_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Those that are not the defaults, and all that [`JetSpecTrainingArguments`] has an opinion on."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    opinions = type(args).__annotations__
    plain = json.loads(json.dumps(args.to_dict(), default=str))
    return {
        name: value
        for name, value in plain.items()
        if (name in opinions or value not in (defaults.get(name), [], {}))
        and name not in _PRIVATE_ARGUMENTS
        and not name.endswith("_token")
    }


def write_provenance(folder: str | Path, provenance: Mapping[str, Any]) -> None:
    """Writes the file into a folder."""
    text = json.dumps(provenance, indent=2, ensure_ascii=False)
    (Path(folder) / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def check_same_run(folder: str | Path, provenance: Mapping[str, Any]) -> None:
    """Checks that the checkpoint in a folder is of a run on the same data and the same target.

    Args:
        folder (`str` or `Path`): The checkpoint.
        provenance (`Mapping`): Of the run that is to go on.

    Raises:
        ValueError: If it is of another one; the message has both fingerprints.
    """
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        logger.warning(f"{folder} has no {FILE_NAME}: nobody knows whether it was trained on the same data and target.")
        return
    written = json.loads(file.read_text(encoding="utf-8"))
    before, now = (bool(of["arguments"].get("muon_learning_rate")) for of in (written, provenance))
    if before != now:
        raise ValueError(
            "`resume_from_checkpoint` needs the optimiser of the run that it goes on with: its `muon_learning_rate` "
            f"was {'given' if before else 'not given'}, this run's is{'' if now else ' not'}."
        )
    for part, rule in (
        ("data", "the same rows in the same order, cut at the same `max_length`"),
        ("target", "the same target, with the same weights in the same dtype"),
    ):
        before, now = written[part]["fingerprint"], provenance[part]["fingerprint"]
        if before != now:
            raise ValueError(
                f"`resume_from_checkpoint` needs {rule}: the checkpoint's {part} fingerprint is {before}, this run's "
                f"is {now}. To train a head further on something else, load it with `from_pretrained` and start anew."
            )


def complete_checkpoints(folder: str | Path) -> Sequence[str]:
    """The checkpoints in a folder that were written to their end, the oldest first.

    Args:
        folder (`str` or `Path`): The `output_dir` of a run.

    Returns:
        `Sequence[str]`: Paths; a run killed while it wrote a checkpoint leaves one that is not among them.
    """
    numbered = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal() and _is_json(path / "trainer_state.json"):  # what is written last
            numbered.append((int(number), str(path)))
    return [path for _, path in sorted(numbered)]


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
