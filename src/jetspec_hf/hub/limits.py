"""What a format, or an engine that reads it, cannot say of a head: a table of warnings and refusals."""

from collections.abc import Callable
from dataclasses import dataclass

from ..configuration_jetspec import JetSpecConfig
from .formats.layout import uniform_causality

_ENGINES = ("published", "nemo", "speculators")
_ALL = (*_ENGINES, "transformers")


@dataclass(frozen=True)
class Limit:
    """One thing that gets lost.

    Args:
        formats (`tuple[str, ...]`): Where.
        concerns (`Callable`): Whether a head of this configuration has it.
        says (`str`): The sentence to warn or refuse with.
        refuses (`bool`, defaults to `False`): Whether the weights would mean something else without it.
    """

    formats: tuple[str, ...]
    concerns: Callable[[JetSpecConfig], bool]
    says: str
    refuses: bool = False


def _kinds(config: JetSpecConfig) -> set[str]:
    return set(config.layer_types or [])


def _like_sglang(config: JetSpecConfig) -> bool:
    return all(config.is_causal(kind) == (kind == "sliding_attention") for kind in _kinds(config))


def _taps_last_layer(config: JetSpecConfig) -> bool:
    return config.num_target_layers is not None and config.num_target_layers - 1 in (config.target_layer_ids or [])


LIMITS = (
    Limit(
        _ALL,
        lambda config: config.embedding_scale != 1.0,
        "`embedding_scale` must be 1 in this format: nobody who reads it would scale the target's embeddings.",
        refuses=True,
    ),
    Limit(
        ("transformers",),
        lambda config: config.attention_bias,
        "`attention_bias` must be false in this format: its layers have no biases, so the weights would be lost.",
        refuses=True,
    ),
    Limit(
        ("transformers",),
        lambda config: uniform_causality(config) is not False,
        "`causal` must be false in this format: transformers' assistants see the whole block. A head in the jetspec "
        'format also runs in stock transformers, with `speculation_type="dflash"`.',
        refuses=True,
    ),
    Limit(
        ("transformers",),
        lambda config: config.sliding_window == 1,
        "`sliding_window` must be at least 2 in this format, which does not count the row itself.",
        refuses=True,
    ),
    Limit(
        ("transformers",),
        lambda config: "sliding_attention" in _kinds(config),
        "`sliding_window`: in a text longer than the window, transformers' cache keeps one position less than the "
        "first row of a block may see, so drafts can differ a little.",
    ),
    Limit(
        ("speculators",),
        lambda config: "full_attention" in _kinds(config) and config.is_causal("full_attention"),
        "`causal` must be false for full-attention layers in this format: speculators makes them see the whole block. "
        "The published format says it.",
        refuses=True,
    ),
    Limit(
        ("published", "nemo"),
        lambda config: uniform_causality(config) is None and config.is_causal("full_attention"),
        "`causal` must not be true of full-attention and false of sliding layers in this format: its keys cannot "
        "say it.",
        refuses=True,
    ),
    Limit(
        ("speculators",),
        _taps_last_layer,
        "`target_layer_ids` must not have the target's last layer in this format: there it is tapped after the final "
        "norm, and here before it.",
        refuses=True,
    ),
    Limit(
        ("published", "transformers"),
        _taps_last_layer,
        "`target_layer_ids` has the target's last layer, which the official code and transformers tap after the final "
        "norm, and this library before it.",
    ),
    Limit(
        _ALL,
        lambda config: config.branch_rank > 0,
        "`branch_rank`: the branch term is left out, and the head drafts as if it had none.",
    ),
    Limit(
        ("published", "nemo", "transformers"),
        lambda config: config.draft_vocab_size is not None,
        "`draft_vocab_size`: the draft vocabulary is left out, so the head drafts all tokens, also those it was not "
        "trained on. The speculators format keeps it.",
    ),
    Limit(
        ("published",),
        lambda config: not _like_sglang(config),
        "`causal`: SGLang knows no key for it, and takes full-attention layers for bidirectional and sliding ones for "
        "causal, which this head is not.",
    ),
    Limit(
        ("published", "nemo", "speculators"),
        lambda config: uniform_causality(config) is None,
        "`causal` differs between layers: the official code has one value for all, and so have some releases of vLLM.",
    ),
    Limit(
        ("published", "speculators"),
        lambda config: len(_kinds(config)) > 1,
        "`layer_types`: full and sliding layers together need the second model runner of vLLM.",
    ),
    Limit(
        _ENGINES,
        lambda config: config.hidden_act != "silu",
        "`hidden_act`: vLLM and SGLang know only silu in a draft head.",
    ),
    Limit(
        ("transformers",),
        lambda config: config.logit_scale != 1.0,
        "`logit_scale` is left out: the most likely tokens stay the same, their probabilities do not.",
    ),
    Limit(
        ("speculators", "transformers"),
        lambda config: config.final_logit_softcapping is not None,
        "`final_logit_softcapping` is left out: the most likely tokens stay the same, their probabilities do not.",
    ),
    Limit(
        ("published",),
        lambda config: config.final_logit_softcapping is not None,
        "`final_logit_softcapping`: only SGLang reads it. The most likely tokens are the same without.",
    ),
    Limit(
        ("nemo",),
        lambda config: True,
        "NeMo goes on from weights alone: its optimizer state and `dflash_meta.pt` are not written.",
    ),
)


def warnings_for(config: JetSpecConfig, format: str) -> list[str]:
    """What is lost when a head is written in a format.

    Args:
        config ([`JetSpecConfig`]): The head's configuration.
        format (`str`): The format.

    Returns:
        `list[str]`: A sentence each.

    Raises:
        ValueError: If the weights would mean something else.
    """
    found = [limit for limit in LIMITS if format in limit.formats and limit.concerns(config)]
    if refusals := [limit.says for limit in found if limit.refuses]:
        raise ValueError(f"A head cannot be written in the {format} format. {' '.join(refusals)}")
    return [limit.says for limit in found]
