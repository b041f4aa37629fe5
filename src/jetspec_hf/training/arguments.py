"""The arguments of training: those of `Trainer` with the defaults that suit heads, and a few of their own."""

import sys
from dataclasses import dataclass, field

import torch
from transformers import SchedulerType, TrainingArguments

from .objective import Objective

CACHE_DTYPES = {"bfloat16": torch.bfloat16, "auto": None}


@dataclass
class JetSpecTrainingArguments(TrainingArguments):
    """Arguments of [`JetSpecTrainer`].

    The optimiser's defaults are those of published heads: AdamW with a peak of 3e-4 and betas (0.9, 0.95), no weight
    decay, 4 % of the steps for warm-up, then a cosine to 10 % of the peak. From a trained head, 1e-4 or less is right.

    Args:
        anchors_per_row (`int`, defaults to 256): Blocks drawn from a row at every visit, all if it has fewer.
        max_length (`int`, *optional*): Where rows are cut.
        muon_learning_rate (`float`, *optional*): Peak learning rate of Muon, which then trains the matrices of fusion
            and layers, while AdamW trains the rest with `learning_rate`. 3e-3 is a good start. AdamW trains all if
            missing.
        loss (`str`, defaults to `"forward_kl"`): See [`Objective`], as for the next three.
        depth_decay (`float`, *optional*): γ of exponential weights over depths.
        kl_temperature (`float`, defaults to 1.0): The temperature of the divergence.
        chunk_rows (`int`, defaults to 512): Rows whose logits exist at once.
        feature_cache_dir (`str`, *optional*): Where the target's states are kept on disk, for sets that are read more
            than once and small enough: `(taps + 1) * hidden` numbers per token. Every step reads the target if missing.
        feature_cache_dtype (`str`, defaults to `"bfloat16"`): What they are kept in: `"bfloat16"`, or `"auto"` for
            the target's own dtype.
        kwargs: Those of `TrainingArguments`.

    Raises:
        ValueError: If a field is out of range; the message names it.
    """

    learning_rate: float = field(
        default=3e-4, metadata={"help": "Peak learning rate; 1e-4 or less from a trained head."}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay."})
    adam_beta1: float = field(default=0.9, metadata={"help": "First beta of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Where the norm of gradients is cut; 0 for never."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps of warm-up; below 1, their share of all steps."})
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine_with_min_lr",
        metadata={"help": "Learning rate schedule; without arguments of its own, this one ends at 10 %% of the peak."},
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Columns are chosen by the collator."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter of a head takes part in every step, so there is no need."}
    )
    dataloader_pin_memory: bool | None = field(  # type: ignore[assignment]  # a choice of the user's is kept
        default=None, metadata={"help": "Whether batches are pinned; where there is an accelerator if not given."}
    )
    anchors_per_row: int = field(default=256, metadata={"help": "Blocks drawn from a row at every visit."})
    max_length: int | None = field(default=None, metadata={"help": "Where rows are cut."})
    muon_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of Muon for the matrices, such as 3e-3; AdamW without."}
    )
    loss: str = field(default="forward_kl", metadata={"help": "'forward_kl' or 'hard_labels'."})
    depth_decay: float | None = field(default=None, metadata={"help": "γ of exponential weights over depths."})
    kl_temperature: float = field(default=1.0, metadata={"help": "The temperature of the divergence."})
    chunk_rows: int = field(default=512, metadata={"help": "Rows whose logits exist at once."})
    feature_cache_dir: str | None = field(
        default=None, metadata={"help": "Where the target's states are kept on disk, for small sets."}
    )
    feature_cache_dtype: str = field(
        default="bfloat16", metadata={"help": "'bfloat16', or 'auto' for the target's own."}
    )

    def __post_init__(self) -> None:
        if self.lr_scheduler_type == "cosine_with_min_lr" and self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        if self.dataloader_pin_memory is None:  # torch warns where it cannot
            self.dataloader_pin_memory = torch.accelerator.is_available() and not torch.backends.mps.is_available()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        for name in ("anchors_per_row", "max_length"):
            value = getattr(self, name)
            least = 2 if name == "max_length" else 1
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        rate = self.muon_learning_rate
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 < rate <= sys.float_info.max):
            raise ValueError(f"`muon_learning_rate` must be a finite number above 0, got {rate!r}.")
        if rate is not None and self.optim not in ("adamw_torch", "adamw_torch_fused"):  # the defaults of transformers
            raise ValueError(f"`optim` must be left as it is with `muon_learning_rate`, got {self.optim!r}.")
        if self.feature_cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"`feature_cache_dtype` must be one of {', '.join(map(repr, CACHE_DTYPES))}, got "
                f"{self.feature_cache_dtype!r}."
            )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False, got True: a head's forward names no columns.")
        try:
            self.objective()
        except ValueError as error:
            raise ValueError(str(error).replace("`temperature`", "`kl_temperature`")) from None

    def objective(self) -> Objective:
        """What these arguments minimise."""
        return Objective(self.loss, self.depth_decay, self.kl_temperature, self.chunk_rows)
