"""A pytest plugin that keeps which targets passed the exactness suite, and makes the table of supported models of it.

    make test PYTEST_ARGS="--record-exactness"

`docs/data/exactness.json` has the outcomes, `docs/supported_models.md` the table; both are committed, and a test fails
when the suite has a target that they lack.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support.tiny_targets import ARCHITECTURES, tiny_config

DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "data" / "exactness.json"
PAGE = DOCS / "supported_models.md"
BEGIN, END = "<!-- the table is written by tests/support/exactness_record.py -->", "<!-- end of the table -->"
PROPERTY = "exactness target"


def target_of(item: Any) -> dict[str, Any] | None:
    """The target that a test of the exactness suite decodes with: architecture, backend, whether under a window."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    further = getattr(item.module, "FURTHER", {})
    if isinstance(params.get("case"), tuple):
        name, backend, windowed = params["case"]
        overrides = {**ARCHITECTURES[name].overrides, **((ARCHITECTURES[name].window or {}) if windowed else {})}
    elif params.get("name") in further:
        name, backend, overrides = params["name"], "eager", further[params["name"]]
        windowed = "sliding_window" in overrides
    else:
        return None
    return {"architecture": name, "backend": backend, "windowed": windowed, "attention": overrides}


def attention_of(name: str, overrides: dict[str, Any], windowed: bool) -> list[str]:
    """The kinds of attention in a tiny target."""
    config = tiny_config(name, overrides)
    if hasattr(config, "index_topk"):
        return ["indexed"]
    kinds = getattr(config, "layer_types", None) or [f"{'sliding' if windowed else 'full'}_attention"]
    return sorted({kind.removesuffix("_attention") for kind in kinds})


class Recorder:
    """Collects outcomes, from worker processes too, and writes them at the end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: when it ran, or where it ended before that."""
        target = dict(report.user_properties).get(PROPERTY)
        if target is None or (report.when != "call" and report.passed):
            return
        entry = self.outcomes.setdefault(
            str(target), {**json.loads(str(target)), "passed": 0, "failed": 0, "skipped": 0}
        )
        entry[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Writes the record and the page."""
        targets = sorted(
            self.outcomes.values(), key=lambda entry: (entry["architecture"], entry["backend"], entry["windowed"])
        )
        for entry in targets:
            if entry["passed"] + entry["failed"]:
                entry["attention"] = attention_of(entry["architecture"], entry["attention"], entry["windowed"])
        versions = {package: version(package).partition("+")[0] for package in ("transformers", "torch")}
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in targets)
        RECORD.write_text(f'{{"versions": {json.dumps(versions)},\n "targets": [\n{lines}\n]}}\n', encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_record()), encoding="utf-8")


def read_record() -> dict[str, Any]:
    """What was kept: `versions`, and `targets` with their outcomes."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the table of a record."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table(record)}\n\n{END}", page, flags=re.DOTALL
    )


def table(record: dict[str, Any]) -> str:
    """One row for each architecture whose tests all passed, in Markdown."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for entry in record["targets"]:
        by_name.setdefault(entry["architecture"], []).append(entry)
    rows = []
    for name, entries in sorted(by_name.items()):
        if all(entry["passed"] and not entry["failed"] for entry in entries):
            kinds = sorted({" + ".join(entry["attention"]) for entry in entries})
            backends = sorted({entry["backend"] for entry in entries}, reverse=True)
            passed = sum(entry["passed"] for entry in entries)
            rows.append(f"| {name.removesuffix('_text')} | {'; '.join(kinds)} | {', '.join(backends)} | {passed} |")
    versions = record["versions"]
    title = f"{len(rows)} architectures, with transformers {versions['transformers']} and torch {versions['torch']}:"
    return "\n".join([title, "", "| architecture | attention | backends | tests passed |", "|---|---|---|---|", *rows])


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that turns recording on."""
    parser.addoption("--record-exactness", action="store_true", help=f"write {RECORD.name} and the table made of it")


def pytest_configure(config: pytest.Config) -> None:
    """Records in the process that gathers all reports."""
    if config.getoption("--record-exactness") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets each test's report name its target."""
    for item in items:
        if item.get_closest_marker("exactness") and (target := target_of(item)) is not None:
            item.user_properties.append((PROPERTY, json.dumps(target)))
