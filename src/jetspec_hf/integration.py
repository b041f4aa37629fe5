"""The drop-in: `generate(..., assistant_model=head)` reaches the tree decoding loop.

`generate` looks its decoding methods up on the class, so two methods of `GenerationMixin` are wrapped once, at import:
`_validate_generation_mode`, to refuse before anything has happened, and `_assisted_decoding`, to decode. Any other
assistant goes to the original method.
"""

import functools
from typing import Any, TypeGuard

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from .decoding.drafter import DraftingKnobs
from .decoding.loop import tree_decoding
from .decoding.self_test import check_tree_logits, signature
from .modeling_jetspec import JetSpecDraftHead
from .target import length_limit_reason

_OTHER_DRAFTERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def install() -> None:
    """Wraps the two methods; a second call changes nothing.

    Code that travels with heads is a copy of this file with a head class of its own, so each copy wraps for its class.
    """
    for name, wrap in (("_validate_generation_mode", _wrap_validation), ("_assisted_decoding", _wrap_decoding)):
        original = getattr(GenerationMixin, name)
        if not _serves_us(original):
            wrapper = wrap(original)
            wrapper.served_head = JetSpecDraftHead
            setattr(GenerationMixin, name, wrapper)


def _serves_us(method: Any) -> bool:
    """Whether a method, or one that it wraps, is a wrapper for this head class."""
    while method is not None:
        if getattr(method, "served_head", None) is JetSpecDraftHead:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _is_ours(assistant_model: object, generation_config: GenerationConfig) -> TypeGuard[JetSpecDraftHead]:
    """Whether this call decodes with a tree; a head with `speculation_type="dflash"` is a stock chain drafter."""
    return isinstance(assistant_model, JetSpecDraftHead) and generation_config.speculation_type != "dflash"


def _wrap_validation(original: Any) -> Any:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: PreTrainedModel,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        head = generation_mode_kwargs.get("assistant_model")
        if generation_mode == GenerationMode.ASSISTED_GENERATION and _is_ours(head, generation_config):
            check_call(self, head, generation_config, generation_mode_kwargs)
        original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decoding(original: Any) -> Any:
    @functools.wraps(original)
    def _assisted_decoding(self: PreTrainedModel, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        head = kwargs.get("assistant_model")
        if not _is_ours(head, kwargs["generation_config"]):
            return original(self, input_ids, *args, **kwargs)
        for name in ("assistant_model", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        _check_length(self, input_ids, **kwargs)
        _self_test_once(head, self)
        return tree_decoding(self, input_ids, *args, head=head, **kwargs)

    return _assisted_decoding


def check_call(
    target: PreTrainedModel, head: JetSpecDraftHead, generation_config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    """Refuses what a head cannot do exactly, before any token and before anything is changed.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        head (`JetSpecDraftHead`): The head.
        generation_config (`GenerationConfig`): What `generate` was called with.
        mode_kwargs (`dict`): Tokenizers, streamer and the like.

    Raises:
        ValueError: The message names what is not supported, and what to do.
    """
    head.check_target(target)
    DraftingKnobs.resolve(head, target, generation_config)
    for name in _OTHER_DRAFTERS:
        if getattr(generation_config, name, None):
            raise ValueError(
                f"`{name}` must not be set together with a JetSpec head, got {getattr(generation_config, name)!r}: "
                "choose one drafter."
            )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` must be `None` with a JetSpec head, got "
            f"{generation_config.assistant_ensemble_weight}: the text is the target's own, never a mixture."
        )
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "`assistant_tokenizer` must not be given with a JetSpec head, got one: the head drafts in the target's own "
            "vocabulary."
        )
    if generation_config.num_return_sequences > 1:
        raise ValueError(
            "`num_return_sequences` must be 1 with a JetSpec head, got "
            f"{generation_config.num_return_sequences}: repeat the prompt in the batch."
        )
    if generation_config.use_cache is False:
        raise ValueError(
            "`use_cache` must be `True` with a JetSpec head, got False: a tree is verified on top of the cached prefix."
        )
    if generation_config.cache_implementation == "quantized":
        raise ValueError(
            "`cache_implementation` must not be 'quantized' with a JetSpec head: rejected tokens cannot be taken out "
            "of a quantised cache."
        )
    if generation_config.output_attentions and generation_config.return_dict_in_generate:
        raise ValueError(
            "`output_attentions` must be `False` with a JetSpec head, got True: the weights of a tree are not those "
            "of plain decoding."
        )


def _check_length(
    target: PreTrainedModel, input_ids: Any, generation_config: GenerationConfig, position_ids: Any = None, **_: Any
) -> None:
    """Refuses a generation that crosses a length at which the target's own arithmetic changes."""
    slots = input_ids.shape[1]
    lengths = {slots} if position_ids is None else {slots, int(position_ids.max()) + 1}  # targets count either of them
    for length in lengths:
        if (reason := length_limit_reason(target, length, length + generation_config.max_length - slots)) is not None:
            raise ValueError(f"{type(target).__name__} {reason}.")


def _self_test_once(head: JetSpecDraftHead, target: PreTrainedModel) -> None:
    """Tests the target's numerics when this head first meets its kind."""
    key = signature(target)
    if key not in head.tested_targets:
        check_tree_logits(target)
        head.tested_targets.add(key)
