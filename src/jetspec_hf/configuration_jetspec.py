"""Configuration of a JetSpec draft head (arXiv 2606.18394, section 3).

This file travels to the Hub with a head, so it imports only its sibling `published_config`.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard, cast

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .published_config import (
    MOST,
    MOST_OF_ANY_SIZE,
    SHAPE_KEYS,
    architectures_of,
    check_causality,
    check_kinds,
    default_target_layer_ids,
    is_published_config,
    shown,
    translate_published_config,
)

LAYER_KINDS = ("full_attention", "sliding_attention")
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ROPE_TYPES = tuple(_ROPE_NEEDS)
DTYPES = ("float32", "bfloat16", "float16", "float64")
# What a file may say besides the fields. How a head runs is for whoever loads it to say: other keys would fetch
# kernels, patch classes, name files elsewhere, hide methods.
_KEPT = (
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "rope_theta",
    "rope_scaling",
)
_POSITIVE_INTEGERS = (
    *SHAPE_KEYS,
    "max_position_embeddings",
    "num_target_layers",
)


class JetSpecConfig(PreTrainedConfig):
    r"""Configuration of a [`JetSpecDraftHead`].

    Every field is validated when the configuration is built and again when a head is built from it.

    Args:
        vocab_size (`int`, defaults to 151936): Size of the **target's** vocabulary.
        hidden_size (`int`, defaults to 4096): Width of the head, equal to the target's hidden size.
        intermediate_size (`int`, defaults to 12288): Width of the MLPs.
        num_hidden_layers (`int`, defaults to 5): Number of draft layers.
        num_attention_heads (`int`, defaults to 32): Number of query heads.
        num_key_value_heads (`int`, *optional*): Number of key and value heads; `num_attention_heads` when missing.
        head_dim (`int`, *optional*): Width of one head, even; `hidden_size // num_attention_heads` when missing.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLPs.
        rms_norm_eps (`float`, defaults to 1e-6): Epsilon of every RMS norm.
        attention_bias (`bool`, defaults to `False`): Whether the attention projections have biases.
        attention_dropout (`float`, defaults to 0.0): Dropout of the attention weights while training.
        max_position_embeddings (`int`, defaults to 40960): Longest context the head is meant for, in tokens.
        initializer_range (`float`, defaults to 0.02): Standard deviation of fresh weights.
        rope_parameters (`dict`, *optional*): Rotary parameters; `rope_theta` is also accepted at top level.
        layer_types (`list[str]`, *optional*): Per layer, `"full_attention"` or `"sliding_attention"`.
        sliding_window (`int`, *optional*): Window of the sliding layers in tokens, the query included.
        block_size (`int`, defaults to 16): Positions of one draft block, the anchor included.
        mask_token_id (`int`, defaults to 151669): Row of the target's embedding that fills undrafted positions.
        target_layer_ids (`list[int]`, *optional*): Tapped layers; id `i` is the output of decoder layer `i`. When
            missing, spread evenly over `num_target_layers` as in the published heads.
        num_target_layers (`int`, *optional*): Number of decoder layers of the target.
        causal (`bool` or `dict[str, bool]`, defaults to `True`): Whether a block position sees only itself and the
            earlier ones (JetSpec) or the whole block (DFlash); a dict says it per layer kind.
        branch_rank (`int`, defaults to 0): Rank of the branch term [`JetSpecBranch`], which scores a token by the path
            that leads to it; 0 for none, as in the published heads.
        draft_vocab_size (`int`, *optional*): Number of tokens the head drafts, listed in its buffer `draft_token_ids`;
            all of the target's when missing.
        final_logit_softcapping (`float`, *optional*): Soft cap applied to the draft logits after the target's
            `lm_head`. Published heads were trained on the bare `lm_head`: `None`.
        logit_scale (`float`, defaults to 1.0): Factor applied to the draft logits before the soft cap.
        embedding_scale (`float`, defaults to 1.0): Factor applied to what the target's embedding module returns.
        target_name_or_path (`str`, *optional*): The target this head was made for. One whose name ends
            otherwise is only a warning.
        pad_token_id, bos_token_id (`int`, *optional*) and eos_token_id (`int` or `list[int]`, *optional*): Ids of the
            target, which `pipeline` compares.

    Raises:
        ValueError: If a field breaks its rule; the message names the field, the rule and the value.

    Example:
        ```python
        >>> from jetspec_hf import JetSpecConfig

        >>> config = JetSpecConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, num_target_layers=6)
        >>> config.target_layer_ids
        [3]
        ```
    """

    model_type = "jetspec"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    block_size: int = 16
    mask_token_id: int = 151669
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    causal: bool | dict[str, bool] = True
    branch_rank: int = 0
    draft_vocab_size: int | None = None
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    target_name_or_path: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills the derived defaults, then validates every field."""
        self._check_lengths()  # lists of these lengths come next
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if (
            self.head_dim is None
            and _is_positive_integer(self.hidden_size)
            and _is_positive_integer(self.num_attention_heads)
        ):
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None and _is_positive_integer(self.num_hidden_layers):
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            if self.num_target_layers is None:
                self.num_target_layers = 36
            if _is_positive_integer(self.num_target_layers) and _is_positive_integer(self.num_hidden_layers):
                self.target_layer_ids = default_target_layer_ids(self.num_hidden_layers, self.num_target_layers)
        for name, kind, rule in (
            ("rope_parameters", dict, "a dictionary"),
            ("layer_types", list, "a list of layer kinds"),
        ):
            if not isinstance(value := getattr(self, name), kind | None):
                raise ValueError(f"`{name}` must be `None` or {rule}, got {value!r}.")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.check_fields()

    def is_causal(self, layer_kind: str) -> bool:
        """Whether block positions of this layer kind see only themselves and the earlier ones."""
        return self.causal[layer_kind] if isinstance(self.causal, dict) else self.causal

    @property
    def draft_depth(self) -> int:
        """Number of positions one block drafts: `block_size - 1`."""
        return self.block_size - 1

    def check_fields(self) -> None:
        """Validates every field.

        Raises:
            ValueError: If a field breaks its rule; the message names the field, the rule and the value.
        """
        self._check_lengths()
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if not _is_positive_integer(value) and not (name == "num_target_layers" and value is None):
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        self._check_architecture()
        self._check_rope()
        self._check_layers()
        self._check_drafting()

    def _check_lengths(self) -> None:
        for name in (*_POSITIVE_INTEGERS, "block_size", "branch_rank", "sliding_window"):
            value, most = getattr(self, name), MOST.get(name, MOST_OF_ANY_SIZE)
            if _is_integer(value) and value > most:
                raise ValueError(f"`{name}` must be at most {most}, got {shown(value)}.")

    def _check_architecture(self) -> None:
        head_dim, key_value_heads = cast(int, self.head_dim), cast(int, self.num_key_value_heads)
        if self.num_attention_heads % key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {self.num_attention_heads} "
                f"and {key_value_heads}."
            )
        if head_dim % 2:
            raise ValueError(f"`head_dim` must be even, got {head_dim}: rotary embeddings turn pairs of channels.")
        for name, holds, rule in _SCALAR_RULES:
            if not holds(getattr(self, name)):
                raise ValueError(f"`{name}` must {rule}, got {shown(getattr(self, name))}.")
        if self.tie_word_embeddings:
            raise ValueError(
                "`tie_word_embeddings` must be `False`, got True: a draft head has no embeddings of its own."
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(
                f"`hidden_act` must be the name of an activation in transformers, got {self.hidden_act!r}."
            )
        if not isinstance(self.target_name_or_path, str | None):
            raise ValueError(f"`target_name_or_path` must be `None` or a string, got {self.target_name_or_path!r}.")

    def _check_rope(self) -> None:
        rope = self.rope_parameters or {}
        theta = rope.get("rope_theta")
        if not _is_positive_number(theta):
            raise ValueError(f"`rope_parameters['rope_theta']` must be a finite number above 0, got {shown(theta)}.")
        if rope.get("rope_type") not in ROPE_TYPES:
            raise ValueError(
                f"`rope_parameters['rope_type']` must be one of {', '.join(ROPE_TYPES)}, got "
                f"{rope.get('rope_type')!r}: other types change cached keys as the text grows."
            )
        for name in _ROPE_NEEDS[rope["rope_type"]]:
            if not _is_positive_number(value := rope.get(name)):
                raise ValueError(f"`rope_parameters['{name}']` must be a finite number above 0, got {shown(value)}.")
        for name, value in rope.items() if rope["rope_type"] != "default" else ():
            if name != "rope_type" and not isinstance(value, bool | None) and not _is_number(value):
                raise ValueError(f"`rope_parameters['{name}']` must be a finite number, got {shown(value)}.")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                "`rope_parameters['partial_rotary_factor']` must be 1 or missing, got "
                f"{rope['partial_rotary_factor']!r}: draft heads turn every channel."
            )

    def _check_layers(self) -> None:
        if not isinstance(self.layer_types, list) or any(kind not in LAYER_KINDS for kind in self.layer_types):
            raise ValueError(f"`layer_types` must be a list of {' or '.join(LAYER_KINDS)}, got {self.layer_types!r}.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` must have one entry per layer, got {len(self.layer_types)} for "
                f"`num_hidden_layers={self.num_hidden_layers}`."
            )
        if self.sliding_window is not None and not _is_positive_integer(self.sliding_window):
            raise ValueError(
                f"`sliding_window` must be `None` or an integer of at least 1, got {self.sliding_window!r}."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("`sliding_window` must be set when `layer_types` has sliding_attention layers, got None.")
        kinds = set(self.layer_types)
        if isinstance(self.causal, dict):
            valid = kinds <= set(self.causal) <= set(LAYER_KINDS)
            if not valid or any(not isinstance(value, bool) for value in self.causal.values()):
                raise ValueError(
                    f"`causal` as a dict must map each of {sorted(kinds)} to `True` or `False`, got {self.causal!r}."
                )
        elif not isinstance(self.causal, bool):
            raise ValueError(f"`causal` must be `True`, `False` or a dict per layer kind, got {self.causal!r}.")

    def _check_drafting(self) -> None:
        if not _is_positive_integer(self.block_size) or self.block_size < 2:
            raise ValueError(
                f"`block_size` must be an integer of at least 2, got {self.block_size!r}: a block is the anchor and at "
                "least one drafted position."
            )
        if not _is_integer(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be a row of the target's embedding, from 0 to {self.vocab_size - 1}, got "
                f"{self.mask_token_id!r}."
            )
        if not _is_integer(self.branch_rank) or self.branch_rank < 0:
            raise ValueError(f"`branch_rank` must be an integer of at least 0, got {self.branch_rank!r}.")
        drafted = self.draft_vocab_size
        if drafted is not None and not (_is_positive_integer(drafted) and drafted <= self.vocab_size):
            raise ValueError(
                f"`draft_vocab_size` must be `None` or an integer from 1 to `vocab_size={self.vocab_size}`, got "
                f"{drafted!r}."
            )
        ids = self.target_layer_ids
        if not isinstance(ids, list) or not ids or any(not _is_integer(i) or i < 0 for i in ids):
            raise ValueError(f"`target_layer_ids` must be a non-empty list of layer numbers from 0, got {ids!r}.")
        if len(set(ids)) != len(ids):
            raise ValueError(f"`target_layer_ids` must not repeat a layer, got {ids!r}.")
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            raise ValueError(
                f"`target_layer_ids` must be below `num_target_layers={self.num_target_layers}`, got {ids!r}."
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            values = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if any(entry is not None and not (_is_integer(entry) and -1 <= entry < 2**31) for entry in values):
                raise ValueError(f"`{name}` must be `None`, a token id or (for eos) a list of them, got {value!r}.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Makes a configuration of a parsed `config.json`, without what only the one who loads a head may decide.

        Args:
            config_dict (`dict`): The parsed file. Keys that are no fields are dropped.
            kwargs: See `PreTrainedConfig.from_dict`.

        Returns:
            `JetSpecConfig`: The configuration.

        Raises:
            ValueError: If a key is of a wrong type or breaks its rule, or another key contradicts `causal`.
        """
        check_kinds(config_dict)
        check_causality(config_dict)
        architectures_of(config_dict)
        for name in ("dtype", "torch_dtype"):
            if not _is_dtype(value := config_dict.get(name)):
                raise ValueError(f"`{name}` must be missing or one of {', '.join(DTYPES)}, got {value!r}.")
        names = {*cls.__annotations__, *_KEPT} - {"keys_to_ignore_at_inference"}
        kept = {name: value for name, value in config_dict.items() if name in names}
        try:
            return super().from_dict(kept, **kwargs)
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"The fields of `config.json` must be of the right types, got {error!r}.") from error

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads `config.json`; the published JetSpec and DFlash layout is translated, its remote code never runs."""
        head_type = kwargs.pop("head_type", None)
        try:
            config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (
            AttributeError,
            TypeError,
            RecursionError,
        ) as error:  # transformers reads keys of whatever the file holds
            raise ValueError(f"`config.json` of {pretrained_model_name_or_path} must hold a dictionary.") from error
        if not isinstance(config, dict):
            raise ValueError(f"`config.json` of {pretrained_model_name_or_path} must hold a dictionary.")
        if is_published_config(config):
            config = translate_published_config(config, head_type=head_type)
        elif config.get("model_type") not in (None, cls.model_type):
            raise ValueError(
                f"`model_type` must be `jetspec`, or `architectures` name a published draft head, got "
                f"{config['model_type']!r} and {architectures_of(config)} in {pretrained_model_name_or_path}. "
                "`jetspec_hf.hub.read_checkpoint` reads other layouts too."
            )
        else:
            check_kinds(config)
            check_causality(config, head_type)
        return config, kwargs


def _is_dtype(value: object) -> bool:
    name = value if isinstance(value, str) else str(value) if isinstance(value, torch.dtype) else ""
    return value is None or name.removeprefix("torch.") in DTYPES


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_integer(value: object) -> TypeGuard[int]:
    return _is_integer(value) and value >= 1


def _is_number(value: object) -> TypeGuard[float]:
    # Comparing, unlike `math.isfinite`, takes integers that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_positive_number(value: object) -> TypeGuard[float]:
    return _is_number(value) and value > 0


# Fields whose rule needs no other field: the test, and the words that follow "must".
_SCALAR_RULES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("rms_norm_eps", _is_positive_number, "be a finite number above 0"),
    ("initializer_range", _is_positive_number, "be a finite number above 0"),
    ("logit_scale", _is_positive_number, "be a finite number above 0"),
    ("embedding_scale", _is_positive_number, "be a finite number above 0"),
    (
        "final_logit_softcapping",
        lambda value: value is None or _is_positive_number(value),
        "be `None` or a finite number above 0",
    ),
    ("attention_dropout", lambda value: _is_number(value) and 0 <= value < 1, "lie in [0, 1)"),
    ("attention_bias", lambda value: isinstance(value, bool), "be `True` or `False`"),
    ("tie_word_embeddings", lambda value: isinstance(value, bool), "be `True` or `False`"),
)
