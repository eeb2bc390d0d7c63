"""Tiny random masked language models, and running text for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from smelt.models.families.registry import FAMILIES as REGISTERED
from tests.support.models import every_family
from tests.support.models.tiny import SENTENCES
from tests.support.shared_folders import written_once

TASK = "masked-language-modeling"
FAMILIES = tuple(name for name, family in REGISTERED.items() if TASK in family.tasks)


@written_once
def write_model(folder: Path, family: str = "bert", **config: Any) -> Path:
    """Write a masked language model of `family` with its tokenizer into `folder`; return it."""
    import torch
    from transformers import AutoModelForMaskedLM

    from smelt.models.empty_model import silence_transformers

    classifier = folder.with_name(f"{folder.name}-classifier")
    every_family.make_model(classifier, family, **config)
    torch.manual_seed(0)
    with silence_transformers():
        model = AutoModelForMaskedLM.from_pretrained(classifier)
        shutil.copytree(classifier, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
    shutil.rmtree(classifier)
    return folder


def write_lines(path: Path, repeats: int = 4) -> Path:
    """Write a sentence per line: plain text, or JSON lines in a file of this name."""
    lines = [json.dumps({"text": s}) if path.suffix == ".jsonl" else s for s in SENTENCES * repeats]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
