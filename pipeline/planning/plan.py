"""The plan: the tree of steps that a recipe asks for, with what it is judged by."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.artifact import Format
from smelt.core.data import SIMILARITY, TEXT_TO_TEXT, Split
from smelt.core.errors import InputError, MissingDependencyError, together
from smelt.core.labels import ProblemType
from smelt.core.messages import Message, mistake
from smelt.core.scripts import bleu_tokenizer
from smelt.core.shares import limited
from smelt.core.stage import Need, Settings, Stage
from smelt.evaluate.metrics import LOWER_IS_BETTER
from smelt.look.foreign import ForeignModel
from smelt.look.model_folder import fetch_model
from smelt.planning.sentences import described, sentence_rules
from smelt.planning.splits import read_source
from smelt.planning.text_rules import text_rules
from smelt.recipe.inputs import Untrained
from smelt.recipe.recipe import JudgedOn, Recipe
from smelt.recipe.stages import ROOT
from smelt.runtime.text.rules import read_text_rules

_WIDTH = 80


@dataclass(frozen=True)
class Step:
    """One stage with its settings, and the step that it goes on from (`model` is the untouched one).

    needs: data and machine, as its settings make it. wrong: settings that are mistakes and have their
    defaults here, while a recipe is being checked. unavailable: why it cannot run on this machine, or None.
    unscored: why what it makes cannot be scored on this machine, or None.
    """

    name: str
    stage: str
    cls: type[Stage[Any]]
    settings: Settings
    parent: str
    optional: bool
    line: int
    unavailable: str | None = None
    unscored: str | None = None
    wrong: frozenset[str] = frozenset()
    needs: frozenset[Need] = frozenset()

    @property
    def format(self) -> Format:
        """What the step gives: torch, onnx or tensorrt."""
        return self.cls.produces

    @property
    def trains(self) -> bool:
        """Whether it learns from the training rows."""
        return bool(self.needs & {"train", "unlabelled"})

    @property
    def stands_on(self) -> tuple[str, ...]:
        """The steps that must be there before this one: its parent and those that its settings name."""
        return (self.parent, *self.settings.references().values())


@dataclass(frozen=True)
class PlannedGate:
    """A limit on one metric, as in report.json. kind: max_drop, min or max. at: names of steps.

    confidence: of the interval whose worse end is judged; None judges the value.
    """

    metric: str
    kind: str
    limit: float
    at: tuple[str, ...]
    confidence: float | None = None


@dataclass(frozen=True)
class Plan:
    """A checked recipe.

    steps: in the recipe's order, parents first; the untouched model is not among them. With `until`
    only that step and those above it. splits: the rows that were read already, because their files
    are small. text: the recipe as it stands in its file. rest: the steps that `until` cuts off. order: the
    names of all steps, as the recipe has them.
    warnings: what a person should know; the report says it too. notes: what only the plan's reader needs.
    judged_on: the split that steps are scored on, gates judged and a step recommended.
    problem: what a classifier does, where model and data are at hand. foreign: the ONNX graph that the recipe
    starts from; None where it starts from weights.
    """

    recipe: Recipe
    steps: tuple[Step, ...]
    gates: tuple[PlannedGate, ...]
    local_model: Path | None
    text: str
    splits: Mapping[str, Split] = field(default_factory=dict)
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    until: str | None = None
    rest: tuple[Step, ...] = ()
    order: tuple[str, ...] = ()
    judged_on: JudgedOn = "test"
    problem: ProblemType | None = None
    foreign: ForeignModel | None = None

    def __str__(self) -> str:
        return _described(self)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the steps that `until` cuts off."""
        return tuple(step.name for step in self.rest)

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self.recipe.path

    @property
    def model_folder(self) -> Path:
        """The folder of the untouched model; an id on the hub is downloaded now.

        Raises:
            InputError: the hub does not give it, or smelt cannot start from it.
        """
        return self.local_model or fetch_model(str(self.recipe.model), self.recipe.base, self.recipe.task)

    def recipe_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, `--set` applied."""
        return dict(self.recipe.document)

    def gates_of(self, name: str) -> list[PlannedGate]:
        """Return the gates on the step `name`."""
        return [gate for gate in self.gates if name in gate.at]

    def step(self, name: str) -> Step:
        """Return the step `name`."""
        return next(step for step in self.steps if step.name == name)

    def children(self, name: str) -> list[Step]:
        """Return the steps that go on from the step `name` (`model` for the untouched one)."""
        return [step for step in self.steps if step.parent == name]

    @property
    def blocked(self) -> list[Step]:
        """The steps that cannot run on this machine and are not optional."""
        return [step for step in self.steps if step.unavailable and not step.optional]

    def above(self, step: Step) -> list[str]:
        """Return what `step` may look at: the model, the steps that it names, those it goes on from."""
        parents = {s.name: s.parent for s in self.steps}
        line, name = list[str](), step.parent
        while name != ROOT:
            line.append(name)
            name = parents[name]
        named = [name for name in step.stands_on if name != ROOT and name not in line]
        return [ROOT, *named, *reversed(line)]

    def require_runnable(self) -> None:
        """Make sure that all that is to be done can be done on this machine.

        Raises:
            MissingDependencyError: a step that is not optional cannot run; every such step is named.
        """
        if self.blocked:
            raise together(
                (
                    mistake(
                        "step-unavailable",
                        f"step '{step.name}' cannot run here: {step.unavailable}"
                        " With `optional: true` beside the stage it is skipped.",
                        file=str(self.recipe.path),
                        line=step.line,
                    )
                    for step in self.blocked
                ),
                MissingDependencyError,
            )

    def read_data(self, limit: int | None = None) -> dict[str, Split]:
        """Read the rows of every split that the recipe names, `limit` of each.

        Raises:
            InputError: what is wrong with the data, all splits together.
        """
        splits, problems = dict(self.splits), list[Message]()
        for name in self.recipe.data.files():
            if name not in splits:
                try:
                    splits |= read_source(self.recipe, name)
                except InputError as error:
                    problems += error.found or [error.as_message()]
        if problems:
            raise together(problems)
        return {name: limited(splits[name], limit) for name in self.recipe.data.splits()}


def _described(plan: Plan) -> str:
    """Return the plan as text of at most 80 columns: model, data, tree of steps, score, gates, warnings."""
    recipe = plan.recipe
    lines = [*_wrapped(f"{recipe.path}: {recipe.task}, {_count(len(plan.steps), 'step')}", 2), ""]
    lines += _wrapped(f"model       {_model(recipe.model)}", 12)
    for said in _graph(plan.foreign) if plan.foreign else ():
        lines += _wrapped(said, 12)
    for name, origin in recipe.data.splits().items():
        rows = f" ({_count(len(plan.splits[name]), 'row')})" if name in plan.splits else ""
        share = recipe.data.split.given().get(name)
        said = origin if share is None else f"{100 * share:.4g} % of train, seed {recipe.seed}"
        lines += _wrapped(f"{name:<12}{said}{rows}", 12)
    for said in text_rules(recipe, plan.local_model)[1] if plan.local_model else ():
        lines += _wrapped(f"texts       {said}", 12)
    if recipe.task == SIMILARITY and plan.local_model:
        lines += _wrapped(f"vectors     {described(sentence_rules(recipe, plan.local_model)[0])}", 12)
    lines += ["", ROOT, *_tree(plan, ROOT, ""), ""]
    lines += _score(plan)
    if plan.judged_on != "test":
        text = "judged on   validation: gates and what is recommended; that and the front are scored on test"
        lines += _wrapped(text, 12)
    elif recipe.judged_on == "test":
        text = "judged on   test: of several branches the one that looks best there looks better than it is"
        lines += _wrapped(text, 12)
    for gate in plan.gates:
        way = "rise" if gate.metric in LOWER_IS_BETTER else "drop"
        sign = {"max_drop": f"{way} at most", "min": "at least", "max": "at most"}[gate.kind]
        sure = f", with confidence {gate.confidence:g}" if gate.confidence is not None else ""
        limit = f"{sign} {gate.limit:,.10g}{sure}"
        lines += _wrapped(f"gate        {gate.metric}: {limit} at {', '.join(gate.at)}", 12)
    if plan.until:
        lines += _wrapped(f"until       {plan.until}; left out: {', '.join(plan.left_out) or 'nothing'}", 12)
    for note in plan.notes:
        lines += _wrapped(f"note        {note}", 12)
    for warning in plan.warnings:
        lines += _wrapped(f"warning     {warning}", 12)
    if plan.blocked:
        names = ", ".join(step.name for step in plan.blocked)
        lines += _wrapped(
            f"cannot run here as it is: {names}. Install what is missing, or write"
            " `optional: true` beside the stage to skip it.",
            0,
        )
    return "\n".join(line.rstrip() for line in lines)


def _tree(plan: Plan, name: str, indent: str) -> Iterator[str]:
    """Yield the steps below `name`; a chain stays in one column, branches are indented."""
    children = [step for step in plan.steps if step.parent == name]
    for number, step in enumerate(children):
        last = number == len(children) - 1
        mark, bar = ("", "") if len(children) == 1 else ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _step(step, indent + mark, indent + bar)
        yield from _tree(plan, step.name, indent + bar)


def _step(step: Step, first: str, rest: str) -> Iterator[str]:
    given = step.settings.model_dump(mode="json", exclude_defaults=True)
    settings = ", ".join(f"{name}: {_value(value)}" for name, value in given.items())
    reads = sorted(
        need for need in step.needs if need in ("train", "unlabelled", "validation", "calibration")
    )
    title = step.name if step.name == step.stage else f"{step.name} ({step.stage})"
    parts = [f"{title} -> {step.format}"]
    parts += [f"{{{settings}}}"] if settings else []
    parts += [f"reads {', '.join(reads)}"] if reads else []
    if step.unavailable:
        what = "will be skipped" if step.optional else "CANNOT RUN"
        parts.append(f"{what}: {step.unavailable}")
    elif step.optional:
        parts.append("optional")
    if step.unscored and not step.unavailable:
        built = "built, not scored (needs a CUDA GPU)"
        parts.append(built if step.format == "tensorrt" else f"not scored: {step.unscored}")
    yield from textwrap.wrap(
        "  ".join(parts),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=f"{rest}    ",
        break_on_hyphens=False,
    )


def _tokenizer(plan: Plan) -> str:
    """Return how BLEU will split the test references; they are read by then, unless they are large."""
    recipe = plan.recipe
    if recipe.task not in TEXT_TO_TEXT or "test" not in plan.splits:
        return "as the references need"
    language = recipe.data.target_language
    if language is None and plan.local_model:
        language = read_text_rules(plan.local_model).target_language
    texts = (text for example in plan.splits["test"].examples for text in example.references)
    return bleu_tokenizer(texts, language=language)


def _score(plan: Plan) -> list[str]:
    score = plan.recipe.score
    tokenize = plan.recipe.tokenize or _tokenizer(plan)
    names = [f"{m} ({tokenize})" if m == "bleu" else m for m in score.quality]
    text = f"score       {', '.join(names) or 'what fits the labels'}"
    if plan.recipe.task in TEXT_TO_TEXT:
        text += f"; {score.generation.summary()}"
    if score.latency:
        sizes = ", ".join(map(str, score.latency.batch_sizes))
        text += f"; latency at batch size {sizes} against {plan.recipe.baseline}"
    return _wrapped(text, 12)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def _model(model: str | Untrained) -> str:
    if isinstance(model, str):
        return model
    made = model.tokenizer
    if made is None:
        return f"{model.config}, untrained"
    words = made if isinstance(made, str) else f"{made.train}, at most {made.vocab_size:,} tokens, from train"
    return f"{model.config}, untrained; tokenizer: {words}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _graph(model: ForeignModel) -> Iterator[str]:
    """Yield what `smelt plan` says of a graph."""
    details = model.details
    made = f", written by {details['producer']}" if details.get("producer") else ""
    nodes = f"{details['nodes']:,} node{'' if details['nodes'] == 1 else 's'}"
    if model.parts:
        names = ", ".join(f"{name}.onnx" for name in model.parts)
        yield f"graphs      {names}: {nodes} of opset {details['opset']}{made}"
        return
    yield f"graph       {nodes} of opset {details['opset']}{made}"
    yield f"inputs      {'; '.join(value.described() for value in model.signature.inputs)}"
    yield f"outputs     {'; '.join(value.described() for value in model.signature.outputs)}"
