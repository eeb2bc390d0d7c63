"""The plan in words, for `smelt plan`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from smelt.core.data import SIMILARITY, TEXT_TO_TEXT
from smelt.core.scripts import bleu_tokenizer
from smelt.evaluate.metrics import LOWER_IS_BETTER
from smelt.plan.foreign.graph import described as described_graph
from smelt.plan.plan import Plan, Step
from smelt.plan.sentences import described, sentence_rules
from smelt.plan.text_rules import text_rules
from smelt.recipe.inputs import Untrained
from smelt.recipe.stages import ROOT
from smelt.runtime.text.rules import read_text_rules

WIDTH = 80


def describe_plan(plan: Plan) -> str:
    """Return the plan as text of at most 80 columns: model, data, tree of steps, score, gates, warnings."""
    recipe = plan.recipe
    lines = [*_wrapped(f"{recipe.path}: {recipe.task}, {_count(len(plan.steps), 'step')}", 2), ""]
    lines += _wrapped(f"model       {_model(recipe.model)}", 12)
    for said in described_graph(plan.foreign) if plan.foreign else ():
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
    return "\n".join(line.rstrip() for line in lines) + "\n"


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
        "  ".join(parts), WIDTH, initial_indent=first, subsequent_indent=f"{rest}    ", break_on_hyphens=False
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
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
