"""The model card of a draft head: what it is, how it was trained, what was measured, how to use it.

The library owns one section, between two markers, and the metadata that nobody else has set; the rest of a card is its
author's and stays.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..configuration_jetspec import JetSpecConfig
from ..modeling_jetspec import JetSpecDraftHead
from .limits import warnings_for
from .serving import ENGINES, command_line

BEGIN = "<!-- jetspec_hf: from here on written by the library, and written anew when the head is saved -->"
END = "<!-- jetspec_hf: up to here -->"
TAGS = ("speculative-decoding", "draft-head", "jetspec")
KNOBS = ("tree_budget", "tree_width", "draft_depth")
METRICS = {"mean_acceptance_length": "acceptance length", "speedup": "speed-up over plain decoding"}

Results = str | Path | Mapping[str, Any]

_TEMPLATE = Path(__file__).with_name("card_template.md")
_SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PLAIN = "plain"
_TOLD_ARGUMENTS = ("num_train_epochs", "max_steps", "learning_rate", "anchors_per_row", "loss", "kl_temperature")


def make_card(
    head: JetSpecDraftHead,
    name: str,
    *,
    results: Results | Sequence[Results] = (),
    provenance: Mapping[str, Any] | None = None,
    license: str | None = None,
    tokenizer: bool = False,
    custom_generate: bool = False,
    existing: ModelCard | None = None,
) -> ModelCard:
    """Makes the card of a head, or brings one up to date.

    Args:
        head ([`JetSpecDraftHead`]): The head.
        name (`str`): Its Hub id, or its folder's name.
        results (`str`, `Path`, `Mapping` or a sequence of them, *optional*): What `python -m jetspec_hf.bench
            --json` has measured, as files or as read; one for each machine or setting. What an earlier card has is not
            kept, for the weights may be others, so without them the card has no figures.
        provenance (`Mapping`, *optional*): What training has written to `training_provenance.json`.
        license (`str`, *optional*): The Hub's name of the head's licence; that of `existing` when missing.
        tokenizer (`bool`): Whether the target's tokenizer lies beside the head.
        custom_generate (`bool`): Whether `custom_generate/` lies beside the head.
        existing (`ModelCard`, *optional*): The card to be brought up to date.

    Returns:
        `ModelCard`: Text and metadata of `existing` are in it, but for the section of the library.

    Raises:
        ValueError: If results are of another kind, or the markers of `existing` are not a pair.
    """
    if not isinstance(given := [results] if isinstance(results, str | Path | Mapping) else results, Sequence):
        raise ValueError(f"`results` must be what `python -m jetspec_hf.bench --json` writes, got {results!r}.")
    reports = [_report(result) for result in given]
    data = ModelCardData(
        base_model=_hub_id(head),
        base_model_relation="adapter" if _hub_id(head) else None,
        library_name="jetspec_hf",
        license=license or (existing.data.get("license") if existing is not None else None),
        pipeline_tag="text-generation",
        tags=[*TAGS, *(["custom_generate"] if custom_generate else [])],
        model_name=name.rsplit("/", 1)[-1] if reports or existing is not None else None,
        eval_results=[metric for report in reports for metric in report["metrics"]] or None,
    )
    target = public_name(head.config.target_name_or_path) or "the target"
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        head=name,
        target=target,
        target_link=f"[{target}](https://huggingface.co/{target})" if _hub_id(head) else target,
        facts=_facts(head),
        tokenizer=tokenizer,
        custom_generate=custom_generate,
        reports=reports,
        training=None if provenance is None else _trained(provenance),
        serving=_serving(head, target),
        licence=_licence(data.license, target),
    )
    section = f"{BEGIN}\n{card.text.strip()}\n{END}"
    if existing is None:
        card.text = f"# {name.rsplit('/', 1)[-1]}\n\n{section}\n"
        return card
    card = ModelCard(existing.content)
    windows = "\r\n" in card.text
    card.text = _with_section(card.text.replace("\r\n", "\n"), section)
    if windows:
        card.text = card.text.replace("\n", "\r\n")
    _add_metadata(card.data, data)
    if license is not None:
        card.data["license"] = license
    return card


def public_name(name_or_path: str | None) -> str | None:
    """A Hub id as it is, of a path its last part alone: where it lies is nobody's business.

    Args:
        name_or_path (`str`, *optional*): As in a config.
    """
    if not name_or_path:
        return None
    is_id = _HUB_ID.fullmatch(name_or_path) and not Path(name_or_path).is_dir()
    return name_or_path if is_id else Path(name_or_path).name


def _hub_id(head: JetSpecDraftHead) -> str | None:
    """The target's id with its owner: of a folder nobody knows where it came from."""
    name = public_name(head.config.target_name_or_path)
    return name if name is not None and "/" in name else None


def _with_section(text: str, section: str) -> str:
    begins, ends = text.count(BEGIN), text.count(END)
    if (begins, ends) == (0, 0):
        return f"{text.rstrip()}\n\n{section}\n"
    if (begins, ends) != (1, 1) or _SECTION.search(text) is None:
        raise ValueError(
            f"A model card must have `{BEGIN}` and, after it, `{END}` once each or not at all, got {begins} and {ends} "
            "of them: repair README.md by hand."
        )
    return _SECTION.sub(lambda _: section, text)


def _add_metadata(data: Any, fresh: ModelCardData) -> None:
    """Fills what the author of a card has not set; of metrics, only our own are replaced."""
    data.tags = [*(data.tags or []), *(tag for tag in fresh.tags or () if tag not in (data.tags or []))]
    others = [result for result in data.eval_results or [] if result.metric_type not in METRICS]
    data.eval_results = [*others, *(fresh.eval_results or [])] or None
    if data.eval_results:
        data.model_name = data.model_name or fresh.model_name
    elif data.model_name == fresh.model_name:  # ours, which only figures need
        data.model_name = None
    data["language"] = _languages(data.get("language"))
    if data.base_model is None:
        data["base_model_relation"] = fresh.get("base_model_relation")
    for name in ("base_model", "library_name", "pipeline_tag", "license"):
        if data.get(name) is None:
            data[name] = fresh.get(name)


def _languages(language: Any) -> Any:
    """Norwegian, which YAML reads as `False`."""
    if isinstance(language, list):
        return [_languages(one) for one in language]
    return "no" if language is False else language


def _facts(head: JetSpecDraftHead) -> list[tuple[str, str]]:
    config = head.config
    saved = {name: getattr(head.generation_config, name, None) for name in KNOBS}
    knobs = ", ".join(f"`{name}={value!r}`" for name, value in saved.items() if value is not None)
    drafted = config.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
    causal = all(config.is_causal(kind) for kind in config.layer_types)
    return [
        ("parameters", f"{head.num_parameters() / 1e6:,.1f}M, {str(head.dtype).removeprefix('torch.')}"),
        ("layers", str(config.num_hidden_layers)),
        ("block", f"{config.block_size} positions, {'causal' if causal else 'bidirectional'}: at most "
                  f"{config.draft_depth} tokens deep"),
        ("tapped layers of the target", ", ".join(map(str, config.target_layer_ids))),
        ("draft vocabulary", f"{drafted:,} of {config.vocab_size:,} tokens"),
        ("branch term", f"rank {config.branch_rank}" if config.branch_rank else "none"),
        ("saved knobs", knobs),
    ]  # fmt: skip


def _report(result: Results) -> dict[str, Any]:
    """What the template needs of one run of the speed benchmark."""
    file = f" ({result})" if isinstance(result, str | Path) else ""
    try:
        found = json.loads(Path(result).read_text(encoding="utf-8")) if isinstance(result, str | Path) else result
        machine, settings = found["machine"], found["settings"]
        rows = [row for row in found["summary"] if row["method"] != _PLAIN]
        return {
            "machine": _one_line(
                f"{machine['description']}; device: {machine['device']}; cores: {machine['cores']}, torch threads: "
                f"{machine['threads']}"
            ),
            "settings": _one_line(
                f"target {settings['target']}, {settings['dtype']}, batch size {settings['batch_size']}, at most "
                f"{settings['max_new_tokens']} new tokens, repeats: {settings['repeats']}"
            ),
            "rows": [_cells(row) for row in rows],
            "metrics": [metric for row in rows for metric in _metrics(row)],
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"something without {error} in it" if isinstance(error, KeyError) else f"something else: {error}"
        raise ValueError(
            f"`results` must be what `python -m jetspec_hf.bench --json` writes, got {problem}{file}."
        ) from error


def _one_line(text: object) -> str:
    """Text that can stand in a cell of a table, and ends no section of the card."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<!--", "&lt;!--")


def _finite(value: float) -> float:
    if isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"a figure must be a finite number, got {value!r}")
    return value


def _cells(row: Mapping[str, Any]) -> list[str]:
    tau, (lower, middle, upper) = row["mean_acceptance_length"], row["speedup"]
    return [
        _one_line(f"{row['task']} ({row['prompts']} prompts)"),
        _one_line(row["decoding"]),
        _one_line(row["method"]),
        "-" if tau is None else f"{_finite(tau):.2f}",
        f"{_finite(middle):.2f} ({_finite(lower):.2f}–{_finite(upper):.2f})",
        f"{_finite(row['tokens_per_second']):.1f}",
        _one_line(f"{row['identical']} of {row['prompts']}"),
    ]


def _metrics(row: Mapping[str, Any]) -> list[EvalResult]:
    values = {"mean_acceptance_length": row["mean_acceptance_length"], "speedup": row["speedup"][1]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=_one_line(row["task"]),
            dataset_name=_one_line(row["task"]),
            metric_type=metric,
            metric_name=f"{METRICS[metric]}, {row['method']}, {row['decoding']}",
            metric_value=round(value, 3),
        )
        for metric, value in values.items()
        if value is not None and row["method"].startswith(("tree", "chain"))  # prompt lookup needs no head
    ]


def _trained(provenance: Mapping[str, Any]) -> str:
    try:
        return _training(provenance)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"`training_provenance.json` must be what the trainer writes, got something else: {error!r}."
        ) from error


def _training(provenance: Mapping[str, Any]) -> str:
    """Sentences from what is there; another version of the library may have written less."""
    data, target = provenance.get("data") or {}, provenance.get("target") or {}
    arguments, versions = provenance.get("arguments") or {}, provenance.get("versions") or {}
    chosen = [f"`{name}={arguments[name]!r}`" for name in _TOLD_ARGUMENTS if arguments.get(name) is not None]
    sentences = []
    if data:
        sentences.append(
            f"On {data['rows']:,} rows of {data['tokens']:,} tokens, {data['supervised_tokens']:,} of them to be "
            f"predicted (fingerprint `{data['fingerprint']}`)."
        )
    if target:
        sentences.append(f"Target: {target['name'] or target['class']} (fingerprint `{target['fingerprint']}`).")
    if chosen:
        sentences.append(f"With {', '.join(chosen)}.")
    if versions:
        used = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
        sentences.append(f"By {used}.")
    sentences.append("All options: `training_provenance.json`.")
    return "\n".join(sentences)


def _serving(head: JetSpecDraftHead, target: str) -> dict[str, Any]:
    """The command lines, what gets lost on the way, or why there is none."""
    try:
        lost = warnings_for(cast(JetSpecConfig, head.config), "published")
    except ValueError as error:
        return {"reason": str(error)}
    commands = [command_line(engine, target, "HEAD_FOLDER", head.config.block_size) for engine in ENGINES]
    return {"commands": commands, "lost": lost}


def _licence(license: str | None, target: str) -> str:
    ours = f"The head: `{license}`." if license else "Its author has not named a licence for the head."
    return f"{ours} The target ({target}) has terms of its own, which may also bind what was trained on its output."
