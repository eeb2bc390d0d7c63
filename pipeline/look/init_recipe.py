"""`smelt init`: a first recipe for a model, with what was seen of it, of the data and of the machine."""

from __future__ import annotations

import itertools
import json
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from smelt.core.data import IMAGES, TEXT_TO_TEXT, Columns, Label, SplitName, Task
from smelt.core.errors import InputError
from smelt.core.files import write_atomically
from smelt.core.labels import decide_problem
from smelt.core.rows.images import image_rows
from smelt.core.rows.reading import read_file
from smelt.core.text import article
from smelt.families.registry import FAMILIES, blockless
from smelt.look.data import DataLook, look_at_data
from smelt.look.effort import training_time
from smelt.look.foreign import is_onnx
from smelt.look.init_coded import coded_notes, coded_steps, last_graph
from smelt.look.init_foreign import graph_recipe
from smelt.look.init_stages import CLASSES, ENOUGH, Machine, lines_of, steps
from smelt.look.model import ModelLook, look
from smelt.recipe.problem import METRICS_OF
from smelt.recipe.yaml_file import parse_yaml

_PLACEHOLDERS = {s: Path(f"data/{s}.jsonl") for s in ("train", "validation", "test")}
_ROWS = {
    "translation": '{"source": "...", "target": "..."}',
    "summarization": '{"source": "...", "target": "..."}',
    "text-classification": '{"text": "...", "label": "..."}, and "text_b" for pairs',
    "language-modeling": '{"text": "..."}; plain .txt files are read too',
    "sentence-similarity": '{"text": "..."}, of scored pairs "text_b" and "label" too',
    "image-classification": '{"image": "FILE", "label": "..."}, or a folder with a folder for each class',
}
_QUALITY = {
    "translation": "[bleu, chrf]",
    "summarization": "[rouge1, rouge2, rougeL, rougeLsum]",
    "language-modeling": "[perplexity, bits_per_byte]",
}
_LEADS = {
    "translation": "bleu",
    "summarization": "rougeL",
    "language-modeling": "perplexity",
    "sentence-similarity": "agreement",
}
# Rows that are looked at to see what the labels are.
_SEEN_ROWS = 2000
_MILLIONS = 100_000  # parameters; fewer are told one by one


@dataclass(frozen=True)
class Wishes:
    """What the user says beside the model.

    columns: by role. languages: source and target, of mBART. fast: as small a student as is known to work.
    """

    task: Task | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    fast: bool = False


def look_at_machine() -> Machine:
    """Look at processor, GPU and runtimes; imports neither torch nor TensorRT nor OpenVINO."""
    from importlib.util import find_spec

    from smelt.evaluate.environment import physical_cores
    from smelt.look.machine import has_cuda
    from smelt.runtime.backends.ort_tensorrt.provider import lack_of

    tensorrt = any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx"))
    provider = has_cuda() and lack_of("ort-tensorrt") is None
    return Machine(physical_cores(), has_cuda(), tensorrt, find_spec("openvino") is not None, provider)


def init_recipe(
    model: str,
    data: Sequence[Path] = (),
    out: str | None = None,
    task: Task | None = None,
    force: bool = False,
    wishes: Wishes | None = None,
) -> tuple[str, Path | None]:
    """Write a recipe for `model` that `smelt plan` accepts; return its text and where it was written.

    Args:
        model: a folder or a hub id.
        data: files or folders with the splits; none: names to be filled in.
        out: the recipe's file (default: NAME.yaml here), or `-`: nowhere, and the path returned is None.
        task: what the model is for, where its family can be for several things.
        force: write over a file that is there.
        wishes: what else the user says.

    Raises:
        InputError: no model that smelt can start from, unusable data, or the file exists.
    """
    wishes = wishes or Wishes(task)
    if is_onnx(model, Path.cwd()):
        return _of_graph(model, data, out, task or wishes.task, force, wishes)
    seen = look(model, task or wishes.task)
    if data and (task or wishes.task) is None and _are_labelled(data, seen, wishes.columns):
        seen = look(model, CLASSES)
    seen = replace(seen, languages=_languages(seen, wishes))
    found = look_at_data(data, seen.task, wishes.columns) if data else None
    if seen.new_head and found and "train" not in found.splits:
        raise InputError(
            f"{model}: this model has no classifier yet, and there are no rows to train one on; name a file"
            " with training rows too (--data).",
            code="missing-data",
        )
    path = None if out == "-" else Path(out or f"{_stem(model)}.yaml")
    if path is not None and path.exists() and not force:
        raise InputError(
            f"{path}: this file exists. Name another with --out, or write over it with --force.",
            code="file-exists",
            file=str(path),
        )
    base = (path.parent if path is not None else Path()).resolve()
    text = recipe_text(model, seen, found, look_at_machine(), base, path or Path("RECIPE.yaml"), wishes.fast)
    if found:
        _require_plan(text, base / (path or Path("RECIPE.yaml")).name)
    if path is not None:
        write_atomically(path, text)
    return text, path


def _are_labelled(data: Sequence[Path], seen: ModelLook, columns: Mapping[str, str]) -> bool:
    """Return whether the rows are texts with labels, of which a model that can classify becomes a classifier.

    Whatever the folder was made for: a sentence embedder too. Numbers beside pairs of texts are similarities.
    """
    if CLASSES not in seen.tasks or seen.task == CLASSES:
        return False
    try:
        found = look_at_data(data, CLASSES, columns)
    except InputError:
        return False  # rows of the task that the model is for, or of none, which is told there
    names = Columns(**found.columns)
    row = next((row for _, row in read_file(next(iter(found.splits.values())))), {})
    label = row.get(names.label)
    return label is not None and (row.get(names.text_pair) is None or isinstance(label, str | list))


def _of_graph(
    model: str, data: Sequence[Path], out: str | None, task: Task | None, force: bool, wishes: Wishes
) -> tuple[str, Path | None]:
    """As `init_recipe`, for an ONNX graph."""
    path = None if out == "-" else Path(out or f"{Path(_stem(model)).stem}.yaml")
    if path is not None and path.exists() and not force:
        raise InputError(
            f"{path}: this file exists. Name another with --out, or write over it with --force.",
            code="out-exists",
        )
    base = (path.parent if path is not None else Path()).resolve()
    text = graph_recipe(model, data, task, path or Path("RECIPE.yaml"), base, wishes.columns)
    if data:
        _require_plan(text, base / (path or Path("RECIPE.yaml")).name)
    if path is not None:
        write_atomically(path, text)
    return text, path


def _languages(seen: ModelLook, wishes: Wishes) -> tuple[str | None, str | None]:
    """Return the languages that the recipe has to say: of a multilingual model both."""
    family = FAMILIES[seen.family]
    if family.languages != "codes":
        if any(wishes.languages):
            raise InputError(
                f"--source-language, --target-language: {article(seen.family)} model takes none.",
                code="does-not-fit-model",
            )
        return None, None
    source, target = (mine or its for mine, its in zip(wishes.languages, seen.languages, strict=True))
    if source is None or target is None:
        raise InputError(
            f"{article(seen.family)} model has to be told its languages, as its tokenizer writes them, for"
            f" instance: --source-language {family.codes[0]} --target-language {family.codes[1]}.",
            code="missing-languages",
        )
    return source, target


def _require_plan(text: str, path: Path) -> None:
    """Make sure that the recipe `text`, written at `path`, is one that can be planned.

    Raises:
        InputError: it is not: rows that are broken, labels that the model does not know, ...
    """
    from smelt.planning.load import make_plan

    try:
        make_plan(parse_yaml(text, path.name), path)
    except InputError as error:
        raise InputError(
            f"no recipe is written, because it could not be carried out:\n{error}",
            code=error.code,
            found=error.found,
        ) from error


def recipe_text(
    model: str,
    seen: ModelLook,
    data: DataLook | None,
    machine: Machine,
    base: Path,
    path: Path,
    fast: bool = False,
) -> str:
    """Return the recipe as YAML with comments; `base` is the folder that its paths are relative to."""
    splits = data.splits if data else _PLACEHOLDERS
    train = "train" in splits
    decides = seen.task in TEXT_TO_TEXT if fast else seen.task == CLASSES
    rows = _count(data) if data and train and decides else ENOUGH
    judge = _leading_metric(seen, data) if "validation" in {*splits, *(data.shares if data else ())} else ""
    wanted = (
        coded_steps(seen, machine, train) if seen.coded else steps(seen, machine, train, fast, rows, judge)
    )
    proposed = list(wanted)
    said = [*(coded_notes(seen.coded, fast) if seen.coded else ()), *(data.notes if data else ())]
    if data and not machine.gpu and (effort := training_time(seen, data, proposed)):
        said.append(effort)
    given = Path(model).expanduser()
    local = given.as_posix() if given.is_absolute() else _relative(seen.folder or given, base)
    named = model if seen.folder is None else local
    head = _head(model, seen, machine, path, said, named_files=data is not None)
    lines = [*head, f"model: {_scalar(named)}", f"task: {seen.task}"]
    if len(seen.tasks) > 1:
        others = ", ".join(t for t in seen.tasks if t != seen.task)
        lines[-1] += f"    # this family also does: {others}"
    lines += [f"# A row of the data: {_ROWS[seen.task]}", "data:    # a stage never gets to see test"]
    for name in (n for n in get_args(SplitName) if n in splits):
        file = splits[name]
        lines.append(f"  {name}: {_scalar(_as_given(file, base) if data else file.as_posix())}")
    if data and data.shares:
        parts = ", ".join(f"{name}: {share}" for name, share in data.shares.items())
        lines.append(f"  split: {{{parts}}}    # drawn out of train by the seed")
    if data and data.columns:
        named_columns = ", ".join(f"{role}: {_scalar(name)}" for role, name in data.columns.items())
        lines.append(f"  columns: {{{named_columns}}}    # guessed from the first row")
    if all(seen.languages):
        source, target = map(_scalar, map(str, seen.languages))
        lines += [f"  source_language: {source}", f"  target_language: {target}"]
    lines += ["stages:", *(line for step in proposed for line in lines_of(step))]
    lines += _score(seen)
    if seen.new_head:
        lines += ["baseline: tuned    # before it the classifier is random"]
    metric, last = _leading_metric(seen, data), "onnx-fp32" if blockless(seen.config) else "onnx-int8"
    last = last_graph(seen, train) if seen.coded else last
    lines += [
        "# A limit that must be kept, or the run exits with 3:",
        f"# gates: {{{metric}: {{max_drop: 1.0}}, speedup: {{min: 1.5, at: {last}}}}}",
    ]
    return "\n".join(lines) + "\n"


def _count(data: DataLook) -> int:
    """Return how many rows train keeps; where they are ENOUGH, no more are counted."""
    kept = 1 - sum(data.shares.values())
    found = sum(1 for _ in itertools.islice(read_file(data.splits["train"]), math.ceil(ENOUGH / kept)))
    return int(found * kept)


def _leading_metric(seen: ModelLook, data: DataLook | None) -> str:
    """Return the metric that leads the report; of a classifier its labels decide, as far as they are seen."""
    if seen.task in _LEADS:
        return _LEADS[seen.task]
    labels: list[Label] = []
    if data:
        column = data.columns.get("label", Columns().label)
        path, columns = next(iter(data.splits.values())), Columns()
        found = image_rows(path, columns.image, column) if seen.task == IMAGES else read_file(path)
        for _, row in itertools.islice(found, _SEEN_ROWS):
            value = row.get(column)
            if isinstance(value, int | float | str):
                labels.append(value)
            elif isinstance(value, list):
                labels.append(tuple(map(str, value)))
    config = None if seen.new_head or not seen.config else seen.config
    return METRICS_OF[decide_problem(config, labels)][0]


def _head(
    model: str, seen: ModelLook, machine: Machine, path: Path, said: Sequence[str], named_files: bool
) -> Iterator[str]:
    """Yield comments: what the recipe was made for.

    said: notes on model and data. named_files: whether the user named the files of the data.
    """
    count = seen.parameters or 0
    number = f"{count / 1e6:,.1f}M" if count >= _MILLIONS else f"{count:,}"
    size = f", {number} parameters in {seen.dtype}" if count else ""
    limit = f", texts of at most {seen.limit:,} tokens" if seen.limit else ""
    yield f"# smelt run {path}"
    yield "#"
    notes = [f"Made by `smelt init` for {_stem(model)}: {seen.family}{size}{limit}; on {_place(machine)}."]
    notes += [f"Note: {note}." for note in said]
    if not named_files:
        notes += ["Name your files under data, then:"]
    for note in notes:
        yield from textwrap.wrap(
            note, 78, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
    yield f"# `smelt plan {path}` checks it; with `--limit 64` a run is a first try;"
    yield "# `smelt stages NAME` explains a stage and its settings."


def _place(machine: Machine) -> str:
    """Return what the machine has, in words."""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    gpu = " and an NVIDIA GPU" if machine.gpu else " without an NVIDIA GPU"
    there = (("TensorRT", machine.tensorrt), ("OpenVINO", machine.openvino))
    runtimes = " and ".join(name for name, is_there in there if is_there)
    return f"{cores}{gpu}, with {runtimes}" if runtimes else f"{cores}{gpu}"


def _score(seen: ModelLook) -> Iterator[str]:
    yield "score:"
    if seen.task in _QUALITY:
        yield f"  quality: {_QUALITY[seen.task]}"
    if seen.task in TEXT_TO_TEXT:
        yield "  generation: {max_new_tokens: 128}"
    yield "  latency: {batch_sizes: [1, 8]}"


def _stem(model: str) -> str:
    return Path(os.path.abspath(model)).name if Path(model).exists() else model.rstrip("/").split("/")[-1]


def _relative(path: Path, base: Path) -> str:
    # not resolved: a run's artifacts are links into the store, whose names say nothing
    return Path(os.path.relpath(path.expanduser().absolute(), base)).as_posix()


def _as_given(path: Path, base: Path) -> str:
    """Return the path for a recipe in `base`: one that was given absolute stays so."""
    path = path.expanduser()
    return path.as_posix() if path.is_absolute() else _relative(path, base)


def _scalar(text: str) -> str:
    """Return `text` as YAML that reads as this text: plain where that is enough, else in quotes."""
    try:
        plain = not any(c in text for c in "{}[],#:\n") and parse_yaml(f"a: {text}", "").value == {"a": text}
    except InputError:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)
