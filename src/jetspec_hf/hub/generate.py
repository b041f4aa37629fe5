"""Decodes with a draft head where the library is not installed.

    target.generate(**inputs, custom_generate="user/head", trust_remote_code=True)

`hub.custom_generate` writes this file and every module it needs into the folder `custom_generate` of a head. An
installed library goes first.
"""

import inspect
import os
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

try:
    from jetspec_hf import JetSpecDraftHead
except ImportError:
    from ..integration import install
    from ..modeling_jetspec import JetSpecDraftHead

    install()

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def generate(model: PreTrainedModel, assistant_model: Any = None, **kwargs: Any) -> Any:
    """`model.generate` with the head that this file came with.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`JetSpecDraftHead`, `str` or `os.PathLike`, *optional*): Another head; the one of the
            repository or folder that was given as `custom_generate` when missing.
        kwargs: Those of `generate`; those that say where on the Hub the head lies (`revision`, `token`, ...) are used
            to load it. The last head stays in memory, for the calls to come.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: If nothing says which head to use.
    """
    places = tuple((name, kwargs.pop(name)) for name in _HUB_ARGUMENTS if name in kwargs)
    if assistant_model is None:
        # transformers does not tell where the code came from, but its own frame, which called this one, knows.
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        assistant_model = None if caller is None else caller.f_locals.get("custom_generate")
        if assistant_model is None:
            raise ValueError(
                "`assistant_model` must be a draft head, or its folder or Hub id, where `custom_generate` does not "
                "name one, got None."
            )
    if isinstance(assistant_model, str | os.PathLike):
        embeddings: Any = model.get_input_embeddings().weight
        dtype = embeddings.dtype if embeddings.is_floating_point() else model.dtype
        device = "cpu" if embeddings.device.type == "meta" else str(embeddings.device)
        assistant_model = _load_head(os.fspath(assistant_model), dtype, device, places, _files(assistant_model))
    return model.generate(assistant_model=assistant_model, **kwargs)  # type: ignore[operator]


def _files(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of a folder's files, which change when another head is saved into it."""
    if not os.path.isdir(path):
        return ()
    files = [(entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file()]
    return tuple(sorted((name, about.st_mtime_ns, about.st_size) for name, about in files))


@lru_cache(maxsize=1)
def _load_head(path: str, dtype: Any, device: str, places: tuple[tuple[str, Any], ...], files: Any) -> Any:
    """The head of a folder as it was when it had these files, or of a repository."""
    return JetSpecDraftHead.from_pretrained(path, dtype=dtype, **dict(places)).to(device).eval()
