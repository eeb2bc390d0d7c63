"""Mutated files of every kind end in an answer or in an explained error, in 20 seconds and 3 GB."""

import os

import pytest

from tests.support.processes import fuzz
from tests.support.processes.fork_server import shared_server

DRAWS = int(os.environ.get("SMELT_FUZZ_DRAWS", "2"))


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_files_give_result_or_explained_error(kind, tmp_path):
    fuzz.write_files(tmp_path / "home", kind)
    before = (
        "import sys; from tests.support.processes import fuzz\n"
        "from pathlib import Path\n"
        f"sys.exit(fuzz.main({kind!r}, {DRAWS}, Path({str(tmp_path / 'home')!r})))"
    )
    code, output = shared_server().run(before=before)
    assert code == 0, output[-6000:]
    assert output.count(f"{kind}: ") == 1  # not killed: it tells of all its draws


def test_fuzzer_detects_panics_and_exceptions(tmp_path, monkeypatch):
    fuzz.write_files(tmp_path / "home", "recipes")

    class Panic(BaseException):
        """What a Rust library raises."""

    def panics(*_):
        raise Panic

    for failing_load in (panics, lambda *_: 1 / 0):
        monkeypatch.setattr("smelt.pipeline.plan.load_plan.load_plan", failing_load)
        [failure] = fuzz.fuzz("recipes", 1, tmp_path / "home")
        assert failure.startswith("recipes 0: recipe.yaml: smelt plan recipe.yaml: ")
