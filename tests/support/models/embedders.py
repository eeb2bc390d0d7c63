"""Tiny random sentence embedders as sentence-transformers stores them, and rows for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from smelt.models.families.registry import FAMILIES as REGISTERED
from tests.support.models import every_family
from tests.support.models.tiny import SENTENCES
from tests.support.shared_folders import written_once

TASK = "sentence-similarity"
FAMILIES = tuple(name for name, family in REGISTERED.items() if TASK in family.tasks)


@written_once
def write_embedder(folder: Path, family: str = "bert", rules: bool = True, **options: Any) -> Path:
    """Write a bare encoder of `family` with its tokenizer into `folder`; return it.

    rules: it says how it makes vectors; `options`: pooling, normalize, max_length, lower of that. Other words
    are of its config.
    """
    from transformers import AutoModel

    from smelt.models.empty_model import silence_transformers
    from smelt.models.import_model import configure_embedder
    from smelt.models.text_rules import SentenceRules

    rule_options = {name: options.pop(name) for name in list(options) if name in SentenceRules.model_fields}
    full_folder = folder.with_name(f"{folder.name}-whole")
    every_family.make_model(full_folder, family, **options)
    with silence_transformers():
        model = AutoModel.from_pretrained(full_folder)
        shutil.copytree(full_folder, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
    shutil.rmtree(full_folder)
    if rules:
        configure_embedder(folder, SentenceRules(**rule_options))
    return folder


def write_rows(path: Path, count: int = 8, scores: bool = True, paired: bool = True) -> Path:
    """Write `count` rows as JSON lines: pairs with scores, pairs, or texts alone."""
    lines = []
    for i in range(count):
        line: dict[str, Any] = {"text": SENTENCES[i % len(SENTENCES)]}
        if paired:
            line["text_pair"] = SENTENCES[(3 * i + 1) % len(SENTENCES)]
        if scores:
            line["label"] = round(0.5 * (i % 5), 2)
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def expected_vectors(folder: Path, texts: list[str], pooling: str = "mean", normalize: bool = True) -> Any:
    """Return the vectors of `texts`, float64 [n, D], as transformers and numpy make them one by one."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    from smelt.models.empty_model import silence_transformers
    from smelt.models.text_rules import max_input_length

    with silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        limit = max_input_length(tokenizer, model.config.to_dict())
        batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)
        with torch.inference_mode():
            states = model(**batch).last_hidden_state[0].double().numpy()
        vector = {"mean": states.mean(0), "cls": states[0], "max": states.max(0)}[pooling]
        vectors.append(vector / np.linalg.norm(vector) if normalize else vector)
    return np.stack(vectors)
