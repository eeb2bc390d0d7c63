"""Tiny random models that mark answers, and questions with contexts for them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from smelt.models.families.registry import FAMILIES as REGISTERED
from tests.support.models import every_family
from tests.support.models.tiny import SENTENCES
from tests.support.shared_folders import written_once

TASK = "question-answering"
FAMILIES = tuple(name for name, family in REGISTERED.items() if TASK in family.tasks)


@written_once
def write_model(folder: Path, family: str = "bert", **config: Any) -> Path:
    """Write a model of `family` that marks spans, with its tokenizer, into `folder`; return it."""
    import torch
    from transformers import AutoModelForQuestionAnswering

    from smelt.models.empty_model import silence_transformers

    classifier = folder.with_name(f"{folder.name}-classifier")
    every_family.make_model(classifier, family, **config)
    torch.manual_seed(0)
    with silence_transformers():
        model = AutoModelForQuestionAnswering.from_pretrained(
            classifier, num_labels=2, ignore_mismatched_sizes=True
        )
        head = next(m for m in reversed([*model.modules()]) if getattr(m, "out_features", 0) == 2)
        torch.nn.init.normal_(head.weight, std=1.0)  # so that answers differ
        shutil.copytree(classifier, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
    shutil.rmtree(classifier)
    return folder


def answered(question: str, context: str, *answers: str) -> dict[str, Any]:
    """Return a row whose answers begin where the context has them first."""
    starts = [context.index(answer) for answer in answers]
    return {
        "question": question,
        "context": context,
        "answers": {"text": list(answers), "answer_start": starts},
    }


def write_rows(path: Path) -> Path:
    """Write a question about each sentence, whose answer is its last word; every fifth has none."""
    rows = [
        answered("what is last ?", s, *([s.split()[-1]] if i % 5 else [])) for i, s in enumerate(SENTENCES)
    ]
    return write_lines(path, rows)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


NAMES, CITIES = ("Ada", "Alan", "Grace", "Edsger"), ("Rome", "Oslo", "New York", "Buenos Aires")
TEMPLATES = ("{NAME} lives in {CITY}.", "In {CITY} it rains, says {NAME}.", "{NAME} is at home.")


def write_questions(path: Path, count: int, seed: int = 0) -> Path:
    """Write `count` questions for the city of a text, which the last template does not have."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        template, name, city = draw.choice(TEMPLATES), draw.choice(NAMES), draw.choice(CITIES)
        context = template.format(NAME=name, CITY=city)
        rows.append(answered("Which city?", context, *([city] if "{CITY}" in template else [])))
    return write_lines(path, rows)
