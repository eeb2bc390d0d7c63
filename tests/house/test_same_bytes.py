"""Stages and trained tokenizers write the same bytes in each process, as their keys in the store require.

A set or a hash table that is iterated, a path or a time that is written would differ.
"""

import json
import os
import subprocess
import sys

import pytest

from smelt.pipeline.recipe.stages import STAGE_CLASSES
from tests.support.goldens.output_hashes import CASES_OF_STAGES, TOKENIZERS, output_hashes


@pytest.fixture(scope="module")
def hashes_of_another_process():
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.goldens.output_hashes",
        *TOKENIZERS,
        *CASES_OF_STAGES.values(),
    ]
    result = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*TOKENIZERS, *CASES_OF_STAGES.values()])
def test_output_files_are_equal_in_other_process(name, hashes_of_another_process):
    hashes = output_hashes(name)
    assert hashes
    assert hashes == hashes_of_another_process[name]


def test_every_stage_has_case():
    assert set(CASES_OF_STAGES) == set(STAGE_CLASSES) - {"tensorrt"}  # whose engines depend on the machine
