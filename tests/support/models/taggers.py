"""Tiny random token classifiers, and sentences with entities for them."""

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

TASK = "token-classification"
FAMILIES = tuple(name for name, family in REGISTERED.items() if TASK in family.tasks)
TAGS = ("O", "B-BEING", "I-BEING", "B-PLACE", "I-PLACE")
TAG_OF_WORD = dict.fromkeys(("man", "dogs", "cat", "mann", "hunde", "katze"), "B-BEING") | dict.fromkeys(
    ("grass", "sun", "river", "gras", "sonne", "fluss"), "B-PLACE"
)


@written_once
def write_model(folder: Path, family: str = "bert", tags: tuple[str, ...] = TAGS, **config: Any) -> Path:
    """Write a token classifier of `family` with its tokenizer into `folder`; return it."""
    import torch
    from transformers import AutoModelForTokenClassification

    from smelt.models.empty_model import silence_transformers

    classifier = folder.with_name(f"{folder.name}-classifier")
    every_family.make_model(classifier, family, **config)
    names = dict(enumerate(tags))
    torch.manual_seed(0)
    with silence_transformers():
        model = AutoModelForTokenClassification.from_pretrained(
            classifier,
            id2label=names,
            label2id={v: k for k, v in names.items()},
            ignore_mismatched_sizes=True,
        )
        torch.nn.init.normal_(model.classifier.weight, std=1.0)  # so that all tags occur
        shutil.copytree(classifier, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
    shutil.rmtree(classifier)
    return folder


def write_rows(path: Path) -> Path:
    """Write a row for each sentence, with the tag of each of its words."""
    rows = [
        {"tokens": s.split(), "tags": [TAG_OF_WORD.get(name, "O") for name in s.split()]} for s in SENTENCES
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


NAMES, CITIES = ("Ada", "Alan", "Grace", "Edsger"), ("Rome", "Oslo", "New York", "Buenos Aires")
TEMPLATES = ("{NAME} lives in {CITY}.", "in {CITY} it rains", "{NAME}, {NAME} and {NAME} met.", "Who is it?")


def write_entities(path: Path, count: int, seed: int = 0) -> Path:
    """Write `count` texts with the entities NAME and CITY, drawn from templates."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        text, entities = "", []
        for part in draw.choice(TEMPLATES).replace("}", "{").split("{"):
            values = {"NAME": NAMES, "CITY": CITIES}.get(part)
            value = draw.choice(values) if values else part
            if values:
                entities.append({"start": len(text), "end": len(text) + len(value), "label": part})
            text += value
        rows.append({"text": text, "entities": entities})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
