"""Mutated files of every kind end in an answer or in an explained error, in 20 seconds and 3 GB."""

import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

DRAWS = int(os.environ.get("SMELT_FUZZ_DRAWS", "24"))


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_files_end_in_an_answer_or_an_explained_error(kind, tmp_path):
    fuzz.write_files(tmp_path / "home", kind)
    command = [sys.executable, Path(fuzz.__file__), kind, str(DRAWS), tmp_path / "home"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stderr.count(f"{kind}: ") == 1  # not killed: it tells of all its draws


def test_what_must_not_happen_is_seen(tmp_path, monkeypatch):
    fuzz.write_files(tmp_path / "home", "recipes")

    class Panic(BaseException):
        """What a Rust library raises."""

    def panics(*_):
        raise Panic

    for wrong in (panics, lambda *_: 1 / 0):
        monkeypatch.setattr("smelt.pipeline.plan.load_plan.load_plan", wrong)
        [found] = fuzz.fuzz("recipes", 1, tmp_path / "home")
        assert found.startswith("recipes 0: recipe.yaml: smelt plan recipe.yaml: ")
