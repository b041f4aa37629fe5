"""Train a draft head with transformers' own Trainer.

The target is read at every step, or its states come from a cache; the head learns what the target would say next. Loss
and gradients are means over all supervised places of a global batch, however it is split into processes and steps of
gradient accumulation.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from ..configuration_jetspec import JetSpecConfig
from ..modeling_jetspec import JetSpecDraftHead
from . import adapters
from .arguments import CACHE_DTYPES, JetSpecTrainingArguments
from .batches import EVALUATION_EPOCH, TrainingCollator, draw_blocks
from .blocks import Blocks, branch_states, draft_states
from .checks import check_run
from .feature_cache import CacheLayout, cache_key, cache_states
from .objective import draft_loss
from .optimizer import make_optimizer
from .provenance import (
    RowsSummary,
    check_same_run,
    complete_checkpoints,
    describe_run,
    summarise_rows,
    target_fingerprint,
    write_provenance,
)
from .rows import RowCollator
from .tally import LossTally
from .target_reader import TargetReader, TargetStates, frozen, place_target

_MIXED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class JetSpecTrainer(Trainer):
    """Trains a draft head for a target.

    The target is frozen and in evaluation mode while the trainer works and untouched otherwise. It is no part of what
    is optimised, wrapped or saved. Every process holds all of it, unless it is given spread over devices, or with each
    of its decoder layers sharded by FSDP2 (`fully_shard`).

    Args:
        model (`JetSpecDraftHead`): The head: a fresh one, a trained one, or one with adapters (`adapters.add_lora`).
        target (`PreTrainedModel`): The model to be sped up.
        args ([`JetSpecTrainingArguments`]): The arguments.
        train_dataset (`datasets.Dataset` or sequence of `dict`, *optional*): Rows with `input_ids` and `loss_mask`,
            and `document_ids` if they hold several documents.
        eval_dataset (the same or a `dict` of them, *optional*): Held-out rows. Their anchors never change.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, saved beside the head.
        data_collator ([`RowCollator`], *optional*): How rows are padded.
        kwargs: Those of `Trainer`, such as `callbacks` and `optimizers`.

    Raises:
        ValueError: If head and target do not fit, the mask token is none, a row has nothing to predict, or an argument
            is out of range.

    Example:
        ```python
        >>> head = JetSpecDraftHead.from_target(target, num_hidden_layers=2, block_size=8)
        >>> args = JetSpecTrainingArguments("out", num_train_epochs=6, bf16=True)
        >>> trainer = JetSpecTrainer(model=head, target=target, args=args, train_dataset=rows)
        >>> trainer.train()
        >>> trainer.save_model()
        ```
    """

    args: JetSpecTrainingArguments
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the weight of the whole accumulated batch

    def __init__(
        self,
        model: JetSpecDraftHead,
        target: PreTrainedModel,
        args: JetSpecTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: RowCollator | None = None,
        **kwargs: Any,
    ) -> None:
        args = JetSpecTrainingArguments() if args is None else args
        check_run(model, target, processing_class, args)
        optimizers = {
            "optimizers": (kwargs.get("optimizers") or (None, None))[0],
            "optimizer_cls_and_kwargs": kwargs.get("optimizer_cls_and_kwargs"),
        }
        for name, given in optimizers.items():
            if args.muon_learning_rate is not None and given is not None:
                raise ValueError(f"`muon_learning_rate` must be None with `{name}`, got {args.muon_learning_rate}.")
        self.target, self.head = target, model
        self._config = cast(JetSpecConfig, model.config)
        pad_token_id = target.config.get_text_config(decoder=True).pad_token_id
        rows = data_collator or RowCollator(pad_token_id if isinstance(pad_token_id, int) else 0)
        super().__init__(
            model=model,
            args=args,
            data_collator=TrainingCollator(rows, args.max_length),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        vars(self._config).pop("use_cache", None)  # no field of a head; `Trainer` sets it on every model
        self._objective = args.objective()
        self._tallies = {
            training: LossTally(self._objective, self._config.block_size - 1) for training in (True, False)
        }
        if self.place_model_on_device:
            place_target(target, self.args.device)
        with frozen(target):
            self.reader = TargetReader(target, cast(list[int], self._config.target_layer_ids))
            self._target_mark = target_fingerprint(target)
            data, self.train_dataset = self._look_at(self.train_dataset, "train_dataset")
            if isinstance(self.eval_dataset, Mapping):
                named = self.eval_dataset.items()
                self.eval_dataset = {name: self._look_at(rows, f"eval_dataset[{name!r}]")[1] for name, rows in named}
            else:
                _, self.eval_dataset = self._look_at(self.eval_dataset, "eval_dataset")
        self._provenance = describe_run(target, self._target_mark, data, processing_class, args)

    def _look_at(self, rows: Any, name: str) -> tuple[RowsSummary | None, Any]:
        """Reads all rows once; where the target's states are to be kept, returns rows that come with them."""
        if rows is None:
            return None, None
        embedded = getattr(self.target.get_input_embeddings(), "num_embeddings", self._config.vocab_size)
        data = summarise_rows(rows, self.args.max_length, name, num_tokens=embedded)
        if self.args.feature_cache_dir is None:
            return data, rows
        taps = cast(list[int], self._config.target_layer_ids)
        dtype = CACHE_DTYPES[self.args.feature_cache_dtype] or self.target.dtype
        key = cache_key(data.fingerprint, self._target_mark, taps, dtype)
        layout = CacheLayout(key, data.lengths, (len(taps) + 1) * self._config.hidden_size, dtype)
        with self.args.main_process_first(local=False, desc="reading the target"):
            return data, cache_states(
                rows,
                self.reader,
                self.args.feature_cache_dir,
                layout,
                cast(TrainingCollator, self.data_collator),
                batch_size=self.args.per_device_eval_batch_size,
                progress=self.is_world_process_zero() and not self.args.disable_tqdm,
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint, or `True` for the last one in
                `args.output_dir` that was written to its end. The run goes on as if it had never stopped.
            args: Those of `Trainer.train`.
            kwargs: Those of `Trainer.train`.

        Returns:
            `TrainOutput`

        Raises:
            ValueError: If the checkpoint is of a run on other data or for another target.
        """
        if resume_from_checkpoint is True:
            found = complete_checkpoints(cast(str, self.args.output_dir))
            if not found:
                raise ValueError(f"`resume_from_checkpoint` needs a checkpoint in {self.args.output_dir}, got none.")
            resume_from_checkpoint = found[-1]
        if resume_from_checkpoint:
            check_same_run(resume_from_checkpoint, self._provenance)
        with frozen(self.target):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """See `Trainer.create_optimizer`; Muon and AdamW with `muon_learning_rate`.

        Args:
            model (`nn.Module`, *optional*): The head, perhaps wrapped.
        """
        if self.optimizer is None and self.args.muon_learning_rate is not None:
            self.optimizer = make_optimizer(
                (self.head if model is None else model).named_parameters(),
                muon_learning_rate=self.args.muon_learning_rate,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Draws the blocks of the next optimiser step, and adds up what its loss is to be divided by."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight = torch.zeros((), device=device)
        for batch in batches:
            batch["blocks"] = self._draw(batch, int(self.state.epoch or 0))
            counted = batch["blocks"].supervised
            if self._objective.loss == "hard_labels" and (columns := self._label_columns(batch["blocks"])) is not None:
                counted = counted & (columns >= 0)
            weight += self._tallies[True].weight(counted.sum(dim=(0, 1))).to(device)
        return batches, self.accelerator.reduce(weight, reduction="sum")

    def _draw(self, batch: Mapping[str, Any], epoch: int) -> Blocks:
        count, seed = self.args.anchors_per_row, self.args.seed
        return draw_blocks(batch, count=count, block_size=self._config.block_size, seed=seed, epoch=epoch)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: with `num_items_in_batch`, its share of that of the whole optimiser step.

        Args:
            model (`nn.Module`): The head, perhaps wrapped.
            inputs (`dict`): What [`TrainingCollator`] returned, and `blocks` while training.
            return_outputs (`bool`): Whether to return the [`LossParts`] as well.
            num_items_in_batch (`torch.Tensor` of shape `()`, *optional*): The weights of all counted rows of the step.

        Returns:
            `torch.Tensor` of shape `()`, or a `tuple` of it and [`LossParts`].
        """
        head, token_ids = self.head, self.head.draft_token_ids
        blocks = inputs["blocks"] if "blocks" in inputs else self._draw(inputs, EVALUATION_EPOCH)
        target_states = self._target_states(inputs)
        drafted = run_as_forward(model, head, lambda: self._draft(inputs, target_states.features, blocks))
        last_hidden = target_states.last_hidden
        slots = blocks.teacher_slots.to(last_hidden.device).flatten(1)
        teacher_hidden = last_hidden.gather(1, slots[..., None].expand(-1, -1, last_hidden.shape[-1]))
        parts = draft_loss(
            self._objective,
            **drafted,
            teacher_hidden=teacher_hidden.view(*blocks.teacher_slots.shape, -1),
            labels=blocks.labels,
            supervised=blocks.supervised,
            draft_logits=self._draft_logits,
            teacher_logits=lambda hidden: self.reader.teacher_logits(hidden, token_ids),
            label_columns=self._label_columns(blocks),
        )
        tally = self._tallies[model.training]
        tally.add(parts)
        loss = parts.loss
        if num_items_in_batch is not None:  # processes average their gradients, so their number is multiplied back
            share = tally.weight(parts.supervised) / num_items_in_batch.clamp(min=torch.finfo(torch.float32).tiny)
            loss = loss * share * self.accelerator.num_processes
        return (loss, parts) if return_outputs else loss

    def _target_states(self, inputs: Mapping[str, torch.Tensor]) -> TargetStates:
        kept = inputs.get("target_states")
        if kept is None:
            return self.reader.read(inputs["input_ids"], inputs["document_ids"])
        hidden = self._config.hidden_size
        return TargetStates(kept[..., :-hidden], kept[..., -hidden:])

    def _draft(self, inputs: Mapping[str, torch.Tensor], features: torch.Tensor, blocks: Blocks) -> dict[str, Any]:
        """All that the head computes with its parameters; its logits are the target's `lm_head` over these states."""
        head, ids = self.head, inputs["input_ids"]
        with self.accelerator.autocast():
            states = draft_states(head, self.reader, ids, inputs["document_ids"], features, blocks)
            if head.branch is None:
                return {"draft_states": states}
            drafted = head.draft_token_ids
            if drafted is None:
                drafted = torch.arange(self.reader.num_logits, device=ids.device)
                drafted = drafted.clamp(max=self._config.vocab_size - 1)  # as `branch.BranchScores`
            return {
                "draft_states": states,
                "branch_states": branch_states(head, self.reader, ids, states, blocks),
                "branch_table": head.branch.table(head.embed(drafted, self.reader)),
            }

    def _draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        dtype = _MIXED_DTYPES.get(self.accelerator.mixed_precision, states.dtype)
        return self.head.finish_logits(self.reader.draft_logits(states.to(dtype), self.head.draft_token_ids))

    def _label_columns(self, blocks: Blocks) -> torch.Tensor | None:
        token_ids = self.head.draft_token_ids
        if token_ids is None:
            return None
        columns = torch.searchsorted(token_ids, blocks.labels).clamp(max=len(token_ids) - 1)
        return torch.where(token_ids[columns] == blocks.labels, columns, -1)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_args: Any, **_kwargs: Any) -> Any:
        """The loss alone, as `(loss, None, None)`."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """See `Trainer.evaluation_loop`; the loss is the mean over all supervised places, not over batches."""
        tally = self._tallies[False]
        tally.take(self._add_up)
        with frozen(self.target):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        found = tally.take(self._add_up)
        if found:
            found["loss"] = found["base_loss"] + found.get("branch_loss", 0.0)
        cast(dict[str, float], output.metrics).update(
            {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        )
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`; what was counted since the last training loss is logged beside it."""
        if "loss" in logs:
            logs.update(self._tallies[True].take(self._add_up))
        super().log(logs, start_time)

    def _add_up(self, sums: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return cast(torch.Tensor, self.accelerator.reduce(sums.to(self.args.device), reduction="sum"))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those of the head, forward and backward, without its logits."""
        return 6 * int(inputs["blocks"].positions.numel()) * int(self.head.num_parameters())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = Path(cast(str, self.args.output_dir if output_dir is None else output_dir))
        has_lora = adapters.has_lora(self.head)
        if self.args.should_save:  # first, for the head's card tells of it
            folder.mkdir(parents=True, exist_ok=True)
            write_provenance(folder, self._provenance)
        super()._save(str(folder), adapters.merged_state_dict(self.head) if has_lora else state_dict)
        if self.args.should_save and has_lora and folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            adapters.save_lora(self.head, folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the card alone that the head wrote when it was saved: Trainer's own knows nothing of drafting."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if adapters.has_lora(self.head):
            adapters.load_lora(self.head, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if adapters.has_lora(self.head):
            adapters.load_lora(self.head, cast(str, self.state.best_model_checkpoint))
        else:
            super()._load_best_model()


def run_as_forward(wrapped: nn.Module, head: nn.Module, step: Callable[[], Any]) -> Any:
    """Calls `step` from within the forward of what wraps a head, which then sees all that the step does with it.

    Args:
        wrapped (`nn.Module`): The head, or what wraps it to train on several processes.
        head (`nn.Module`): The head.
        step (`Callable`): Takes nothing, and calls the head or its parts.

    Returns:
        What `step` returns.
    """
    if wrapped is head:
        return step()
    own = vars(head).get("forward")  # mixed precision puts one there

    def restore() -> None:
        vars(head).pop("forward", None)
        if own is not None:
            vars(head)["forward"] = own

    def redirected(_nothing: None) -> Any:
        restore()
        return step()

    vars(head)["forward"] = redirected
    try:
        return wrapped(None)
    finally:
        restore()
