"""What a head and its target must be for a training run to make sense."""

from typing import Any

from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from ..modeling_jetspec import JetSpecDraftHead

logger = logging.get_logger(__name__)


def check_run(model: Any, target: PreTrainedModel, tokenizer: Any, args: TrainingArguments) -> None:
    """Checks what a trainer is given, before anything is moved or read.

    Args:
        model (`JetSpecDraftHead`): The head.
        target (`PreTrainedModel`): The model to be sped up.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        args (`TrainingArguments`): The arguments.

    Raises:
        ValueError: If head and target do not fit, or the head's mask token stands for something else.
    """
    if not isinstance(model, JetSpecDraftHead):
        raise ValueError(
            f"`model` must be a JetSpecDraftHead, got {type(model).__name__}: adapters belong into the head "
            "(`jetspec_hf.training.adapters.add_lora`)."
        )
    if args.n_gpu > 1:
        raise ValueError(f"A process must drive one device, got {args.n_gpu}: start with `torchrun` or `accelerate`.")
    model.check_target(target)
    _check_mask_token(model.config.mask_token_id, target, tokenizer)
    half = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4})
    if half:
        logger.warning(
            f"The head's weights are {', '.join(half)}, in which small updates are lost: load it with "
            "`dtype=torch.float32`, and train with `bf16=True` for speed."
        )


def _check_mask_token(mask: int, target: PreTrainedModel, tokenizer: Any) -> None:
    rows = getattr(target.get_input_embeddings(), "num_embeddings", None) or target.config.get_text_config().vocab_size
    if not 0 <= mask < rows:
        raise ValueError(f"`mask_token_id` must be one of the target's {rows} embeddings, got {mask}.")
    places = {
        "target's config": target.config.get_text_config(decoder=True),
        "target's generation config": target.generation_config,
        "tokenizer": tokenizer,
    }
    for place, holder in places.items():
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(holder, name, None)
            if mask == value or (isinstance(value, list) and mask in value):
                raise ValueError(
                    f"`mask_token_id` must be a token that stands in no text, got {mask}, the `{name}` of the {place}."
                )
