"""What lies beside the weights of a shared head, and how it gets to the Hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase
from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs are a package of their own

from ..modeling_jetspec import JetSpecDraftHead
from ..weight_files import INDEX, SHARDS, WEIGHTS, read_json
from .card import Results, make_card, public_name
from .custom_generate import FOLDER, write_custom_generate

CARD = "README.md"
PROVENANCE = "training_provenance.json"  # as `training.provenance` writes it


def write_companions(
    head: JetSpecDraftHead,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    results: Results | Sequence[Results] = (),
    license: str | None = None,
    custom_generate: bool = False,
    name: str | None = None,
) -> None:
    """Writes what lies beside a head's weights: `head.save_pretrained` calls this.

    Args:
        head ([`JetSpecDraftHead`]): The head.
        folder (`str` or `Path`): Where it was saved. A `README.md` there is brought up to date, not replaced, and a
            `training_provenance.json` there is told of in it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, which `pipeline` wants beside the head.
        results (`str`, `Path`, `Mapping` or a sequence of them, *optional*): What the speed benchmark has measured, see
            [`make_card`].
        license (`str`, *optional*): The Hub's name of the head's licence.
        custom_generate (`bool`, defaults to `False`): Whether to write the code that decodes without the library.
        name (`str`, *optional*): What the card calls the head, a Hub id for instance; the folder's name when missing.

    Raises:
        ValueError: If `results` or the record of the training are of another kind, or the card that is there cannot be
            brought up to date. Nothing is written then.
    """
    place = Path(folder)
    card = _card(head, place, tokenizer, results, license, custom_generate, name)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    if custom_generate:
        write_custom_generate(place)
    card.save(place / CARD)


def check_companions(head: JetSpecDraftHead, folder: str | Path, **companions: Any) -> None:
    """Checks that [`write_companions`] can do its part, before a head's weights are written.

    Args:
        head ([`JetSpecDraftHead`]): The head.
        folder (`str` or `Path`): Where it shall be saved.
        companions: As [`write_companions`] takes them.

    Raises:
        ValueError: See [`write_companions`].
    """
    _card(head, Path(folder), **companions)


def _card(
    head: JetSpecDraftHead,
    place: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    results: Results | Sequence[Results] = (),
    license: str | None = None,
    custom_generate: bool = False,
    name: str | None = None,
) -> ModelCard:
    """The card as it will be once the companions lie there."""
    provenance, card = place / PROVENANCE, place / CARD
    try:
        existing = ModelCard.load(card) if card.is_file() else None
    except (ValueError, TypeError, YAMLError) as error:  # of the encoding, the metadata or their syntax
        raise ValueError(f"{card} must be a model card in UTF-8, got {error}: repair it by hand.") from error
    return make_card(
        head,
        name or place.resolve().name,
        results=results,
        provenance=read_json(provenance) if provenance.is_file() else None,
        license=license,
        tokenizer=tokenizer is not None or (place / "tokenizer_config.json").is_file(),
        custom_generate=custom_generate or (place / FOLDER).is_dir(),
        existing=existing,
    )


def push_head(
    head: JetSpecDraftHead,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    results: Results | Sequence[Results] = (),
    license: str | None = None,
    commit_message: str = "Upload draft head",
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
) -> CommitInfo:
    """Pushes a head in one commit: weights, config, knobs, card, code, and the target's tokenizer when given.

    The card that the repository has is brought up to date. If it has none, that of the folder the head was loaded from
    is taken, and so is that folder's record of the training: as long as the head has the weights that are in there.

    Args:
        head ([`JetSpecDraftHead`]): The head.
        repo_id (`str`): Where to; made if it does not exist.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, which `pipeline` wants beside the head.
        results (`str`, `Path`, `Mapping` or a sequence of them, *optional*): See [`make_card`].
        license (`str`, *optional*): The Hub's name of the head's licence.
        commit_message (`str`): Title of the commit.
        commit_description (`str`, *optional*): Its text.
        private (`bool`, *optional*): Of a repository that is made.
        token (`bool` or `str`, *optional*): Of the Hub; the one of `hf auth login` when missing.
        revision (`str`, *optional*): Branch, made if it does not exist.
        create_pr (`bool`): Whether to open a pull request instead.
        max_shard_size (`int` or `str`): Of a file of weights.

    Returns:
        `CommitInfo`: The commit; as a string its address.

    Raises:
        ValueError: See [`write_companions`].
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with TemporaryDirectory() as made:
        folder = Path(made)
        _collect(head, folder, _card_on_hub(api, repo_id, revision))
        head.save_pretrained(
            folder,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            results=results,
            license=license,
            custom_generate=True,
            name=repo_id,
        )
        _hide_paths(folder / "config.json")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=[f"{FOLDER}/*", WEIGHTS, SHARDS, INDEX],  # of an earlier version, whole or in shards
        )


def _card_on_hub(api: HfApi, repo_id: str, revision: str | None) -> Path | None:
    try:
        return Path(api.hf_hub_download(repo_id, CARD, revision=revision))
    except (EntryNotFoundError, RevisionNotFoundError):
        return None


def _collect(head: JetSpecDraftHead, folder: Path, card: Path | None) -> None:
    """Puts what is known of these weights into the folder to be pushed."""
    source = Path(head.name_or_path or "")
    unchanged = _has_weights_of(head, source / WEIGHTS)
    if card is None and unchanged:
        card = source / CARD
    for file in (card, source / PROVENANCE if unchanged else None):
        if file is not None and file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())


def _has_weights_of(head: JetSpecDraftHead, file: Path) -> bool:
    """Whether the head still has the weights of a file, as far as its dtype can hold them."""
    if not head.name_or_path or not file.is_file():
        return False
    saved, weights = load_file(file), head.state_dict()
    return saved.keys() == weights.keys() and all(
        torch.equal(saved[name].to(weight.dtype), weight.cpu()) for name, weight in weights.items()
    )


def _hide_paths(config: Path) -> None:
    """Of a target that was loaded from a folder only the name is published."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["target_name_or_path"] = public_name(fields.get("target_name_or_path"))
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
