"""Generate the tables of the documentation: of settings from their classes, of members from the registries.

`make docs` writes the text between these lines in the pages of docs/:

    <!-- settings: NAME -->
    <!-- end of settings -->

and the table of stages, the first lines of their docstrings, between `<!-- stages -->` and
`<!-- end of stages -->`.

NAME is a stage or a key of `RECIPE_TABLES`; in `<!-- members: NAME -->` a key of `MEMBER_TABLES`. Nested
settings are rows with dotted names. Three rules keep the tables short: a nested class is listed once per
table; a setting whose class has its own table links to it; inherited settings of an earlier stage are
replaced by a link to that stage.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, create_model

from smelt.cli.stage_help import Setting, settings_of
from smelt.compress.sparsify.methods.registry import GRADUAL_METHODS, SPARSITY_METHODS
from smelt.data.tasks import tasks_with
from smelt.evaluate.latency import LatencySettings
from smelt.evaluate.metrics.registry import (
    METRICS,
    METRICS_BY_PROBLEM,
    METRICS_BY_TASK,
    CustomMetricSettings,
    default_metrics,
    fitting_metrics,
)
from smelt.generation.config import GenerationSettings
from smelt.pipeline.recipe.model_and_data import DataSettings
from smelt.pipeline.recipe.recipe import GateSettings, RecipeKeys, ScoreSettings
from smelt.pipeline.recipe.stages import all_stages
from smelt.pipeline.search.space import SearchSettings
from smelt.stage import Settings

Model = type[BaseModel]
# A row for each metric that has settings.
_METRIC_FIELDS: dict[str, Any] = {
    **{
        name: (metric.settings | None, Field(default=None, description=metric.title))
        for name, metric in METRICS.items()
        if metric.settings
    },
    **{
        "module:function": (
            CustomMetricSettings | None,
            Field(default=None, description="a custom metric"),
        )
    },
}
MetricTable: Model = create_model("MetricTable", **_METRIC_FIELDS)

DOCS = Path(__file__).parent.parent / "docs"
RECIPE_TABLES: dict[str, Model] = {
    "recipe": RecipeKeys,
    "data": DataSettings,
    "score": ScoreSettings,
    "score.quality": MetricTable,
    "score.latency": LatencySettings,
    "generation": GenerationSettings,
    "gates": GateSettings,
    "search": SearchSettings,
}
TABLES = {name: stage.settings_type for name, stage in all_stages().items()} | RECIPE_TABLES
_STAGES = re.compile(r"(<!-- stages -->\n).*?(<!-- end of stages -->)", flags=re.S)
_MARKED = re.compile(r"(<!-- settings: (\S+) -->\n).*?(<!-- end of settings -->)", flags=re.S)
_MARKED_MEMBERS = re.compile(r"(<!-- members: (\S+) -->\n).*?(<!-- end of members -->)", flags=re.S)


def fill(page: Path) -> str:
    """Return the text of a page with updated tables."""
    text = page.read_text(encoding="utf-8")
    text = _STAGES.sub(lambda match: f"{match[1]}\n{_stage_table(page)}\n\n{match[2]}", text)
    text = _MARKED.sub(lambda match: f"{match[1]}\n{_table(match[2], page)}\n\n{match[3]}", text)
    return _MARKED_MEMBERS.sub(lambda match: f"{match[1]}\n{_member_table(match[2])}\n\n{match[3]}", text)


def _stage_table(page: Path) -> str:
    """Return the table of all stages, with links from `page`."""
    lines = ["|stage|what it does|", "|---|---|"]
    for name, stage in all_stages().items():
        link = relpath(DOCS / "reference" / "stages" / f"{name}.md", page.parent)
        lines.append(f"|[`{name}`]({link})|{(stage.__doc__ or '').splitlines()[0].rstrip('.')}|")
    return "\n".join(lines)


@cache
def places() -> dict[str, str]:
    """Return the link of each table: its page, relative to docs/, with the heading as anchor."""
    links = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for marked in _MARKED.finditer(text):
            headings = re.findall(r"^##+ (.*)$", text[: marked.start()], flags=re.M)
            anchor = f"#{headings[-1].lower().replace(' ', '-')}" if headings else ""
            links[marked[2]] = f"{page.relative_to(DOCS)}{anchor}"
    return links


def rows(name: str) -> Iterator[tuple[str, Setting, Model]]:
    """Yield the settings of a table: dotted name, setting, class."""
    _, base = inherited(name) or ("", BaseModel)
    for row in _rows(TABLES[name], "", set()):
        if row[0].partition(".")[0] not in base.model_fields:
            yield row


def _rows(model: Model, prefix: str, seen: set[Model]) -> Iterator[tuple[str, Setting, Model]]:
    seen.add(model)
    for setting in settings_of(model):
        yield prefix + setting.name, setting, model
        for inner in setting.inner:
            listed = any(issubclass(inner, base) for base in seen)  # or only with other defaults
            if not listed and inner not in RECIPE_TABLES.values():
                yield from _rows(inner, f"{prefix}{setting.name}.", seen)


def inherited(name: str) -> tuple[str, Model] | None:
    """Return the earlier stage with the same inherited settings, and the class of these; or None."""
    base = TABLES[name].__bases__[0]
    for other, model in TABLES.items():
        if other == name or base in (Settings, BaseModel):
            return None
        if issubclass(model, base):
            return other, base
    return None


def _table(name: str, page: Path) -> str:
    lines = ["|setting|type|default|description|", "|---|---|---|---|"]
    for path, setting, _ in rows(name):
        tables = [table for table, model in RECIPE_TABLES.items() if model in setting.inner]
        label = _link(f"`{path}`", tables[0], page) if tables else f"`{path}`"
        default = "required" if setting.required else setting.default
        cells = (label, setting.kind.replace(" | ", ", "), default, setting.description)
        lines.append("|" + "".join(cell.replace("|", r"\|") + "|" for cell in cells))
    shared = inherited(name)
    if shared:
        lines += ["", f"All settings of {_link(shared[0], shared[0], page)} apply too."]
    return "\n".join(lines)


def _link(text: str, name: str, page: Path) -> str:
    to, mark, anchor = places()[name].partition("#")
    path = "" if DOCS / to == page else relpath(DOCS / to, page.parent)
    return f"[{text}]({path}{mark}{anchor})"


def _metric_rows() -> Iterator[tuple[str, ...]]:
    yield "metric", "name", "definition", "unit", "range", "better"
    for name, metric in METRICS.items():
        low, high = metric.limits
        limits = f"from {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
        better = "higher" if metric.higher_is_better else "lower"
        yield f"`{name}`", metric.title, metric.description, metric.unit, limits, better


def _metrics_by_task() -> Iterator[tuple[str, ...]]:
    yield "task, or labels", "default", "only if listed"
    for group in dict.fromkeys([*METRICS_BY_TASK, *METRICS_BY_PROBLEM]):
        if group in tasks_with(output="labels"):
            continue  # these depend on the labels
        defaults = default_metrics(group)
        listed = [name for name in fitting_metrics(group) if name not in defaults]
        yield group, *(", ".join(f"`{name}`" for name in names) for names in (defaults, listed))


def _metrics_by_test() -> Iterator[tuple[str, ...]]:
    yield "metrics", "interval", "p-value"
    proportions = ", ".join(f"`{name}`" for name, metric in METRICS.items() if metric.kind == "proportion")
    tango = "Tango's score interval for paired proportions (Statistics in Medicine 17, 1998)"
    yield proportions, tango, "McNemar's exact test"
    student = "Student's for pairs: both steps on the same resamples; the degrees of freedom are of the"
    yield "all others", f"{student} examples that differ", "Fisher's randomization test"


def _sparsity_methods() -> Iterator[tuple[str, ...]]:
    yield "method", "weights set to zero", "remaining weights", "source"
    for name, method in SPARSITY_METHODS.items():
        yield name, method.zeros, method.kept, method.source


def _gradual_methods() -> Iterator[tuple[str, ...]]:
    yield "method", "weights set to zero", "source"
    for name, method in GRADUAL_METHODS.items():
        yield name, method.zeros, method.source


def _gpu_parts() -> Iterator[tuple[str, ...]]:
    """Yield what benchmarks/gpu.sh runs, and where it last succeeded, as that script recorded it."""
    yield "part", "what", "last success"
    for entry in json.loads((DOCS.parent / "benchmarks" / "gpu-runs.json").read_text(encoding="utf-8")):
        executed = entry["executed"]
        last_success = (
            "never" if executed is None else "{gpu}; {finished}, commit {commit}".format(**executed)
        )
        yield f"`{entry['part']}`", entry["what"], last_success


MEMBER_TABLES = {
    "gpu-parts": _gpu_parts,
    "sparsity-methods": _sparsity_methods,
    "gradual-methods": _gradual_methods,
    "metrics": _metric_rows,
    "metrics-by-task": _metrics_by_task,
    "metrics-by-test": _metrics_by_test,
}


def _member_table(name: str) -> str:
    head, *body = MEMBER_TABLES[name]()
    lines = [head, ("---",) * len(head), *body]
    text = "\n".join("|" + "|".join(cell.replace("|", r"\|") for cell in line) + "|" for line in lines)
    return re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        path.write_text(fill(path), encoding="utf-8")
