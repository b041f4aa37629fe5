"""The code that travels with a head, for targets whose users do not install the library.

transformers loads `custom_generate/generate.py` and what it imports from its own folder by `from .module import`; there
are no packages. So the modules of the library that `hub.generate` needs are written side by side, `decoding/loop.py` as
`decoding_loop.py`, with their relative imports adapted and otherwise as they are: the library is the only source.
"""

import ast
from pathlib import Path

from .. import __version__

FOLDER = "custom_generate"
REQUIREMENTS = "transformers>=5.20\ntorch>=2.6\n"  # one bound a line is all that transformers can read

_PACKAGE = Path(__file__).resolve().parents[1]
_ENTRY = Path(__file__).resolve().with_name("generate.py")
_OURS = b"# From jetspec_hf "
_HEADER = f"{_OURS.decode()}{__version__} (Apache-2.0), which is the place to change it.\n"


def custom_generate_files() -> dict[str, str]:
    """All files of the folder.

    Returns:
        `dict[str, str]`: Their texts by name.
    """
    files = {"requirements.txt": REQUIREMENTS}
    waiting = [_ENTRY]
    while waiting:
        module = waiting.pop()
        name = f"{_flat_name(module)}.py"
        if name not in files:
            text, needed = _flatten(module)
            files[name] = _HEADER + text
            waiting += needed
    return files


def write_custom_generate(folder: str | Path) -> None:
    """Writes the files into `custom_generate` of a head's folder, and deletes modules of ours that are no longer used.

    Args:
        folder (`str` or `Path`): The head's.
    """
    place = Path(folder) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    files = custom_generate_files()
    for module in place.glob("*.py"):
        if module.name not in files and module.read_bytes().startswith(_OURS):
            module.unlink()  # of an earlier version
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")


def _flatten(module: Path) -> tuple[str, list[Path]]:
    """A module's text as it stands beside the others, and the modules it needs."""
    text = module.read_text(encoding="utf-8")
    lines, needed = text.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            imported = _find(module, node)
            written, flat = f"from {'.' * node.level}{node.module} import", f"from .{_flat_name(imported)} import"
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(written, flat)
            needed.append(imported)
    return "".join(lines), needed


def _find(module: Path, node: ast.ImportFrom) -> Path:
    place = module.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if node.module and file.is_file():
            return file
    raise ValueError(
        f"A relative import of code that travels with a head must name a module, got `{ast.unparse(node)}` in "
        f"{module.name}."
    )


def _flat_name(module: Path) -> str:
    if module == _ENTRY:
        return "generate"
    return "_".join(part for part in module.relative_to(_PACKAGE).with_suffix("").parts if part != "__init__")
