"""Standalone packages of tiny models, written once for all tests, and texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.graphs import exported_artifacts
from tests.support.models import tiny
from tests.support.shared_folders import make_once

TEXTS: list[str] = [
    *tiny.SENTENCES, "", "a  man?! \u00e4\u4f60 <s> </s>", " ".join(tiny.SENTENCES * 3), "dogs", "dogs",
]  # fmt: skip
GENERATION_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "rules": {"max_new_tokens": 9, "min_new_tokens": 3, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "beams": {"num_beams": 3, "max_new_tokens": 7, "length_penalty": 0.6},
    "the model's own": {},
}


def standalone_package(kind: str, generation: dict[str, Any] | None = None) -> Path:
    """Return a standalone package of a tiny model (a kind of `exported`); read only.

    generation: of the recipe; None: that of the run that made it.
    """
    from smelt.core.artifact import read_artifact
    from smelt.export.package.package_format import PackageOrigin
    from smelt.export.package.standalone_format import StandaloneFormat
    from smelt.export.package.write_package import write_package

    wishes = {"max_new_tokens": 4} if generation is None else generation

    def make(folder: Path) -> None:
        artifact = read_artifact(exported_artifacts.exported_artifact(kind))
        write_package(StandaloneFormat(), artifact, PackageOrigin(generation=wishes), folder)

    return make_once(f"package-{kind}-{json.dumps(wishes)}", make)
