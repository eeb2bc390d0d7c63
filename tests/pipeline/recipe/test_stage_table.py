"""The table of stages: every row leads to a class that keeps the contract."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from expected_errors import raises_code

from smelt.core.artifact import Format
from smelt.core.errors import InputError
from smelt.core.stage import Need, Settings
from smelt.data.splits import Task
from smelt.pipeline.recipe.stages import STAGE_CLASSES, all_stages, load_stage

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("word", STAGE_CLASSES)
def test_every_row_is_a_stage(word: str) -> None:
    stage = load_stage(word)
    assert stage.name == word
    assert stage.accepts
    assert stage.accepts <= set(get_args(Format))
    assert stage.produces in get_args(Format)
    assert stage.needs <= set(get_args(Need))
    assert stage.tasks
    assert stage.tasks <= set(get_args(Task))
    assert stage.version >= 1
    assert stage.source
    assert stage.__doc__
    assert issubclass(stage.settings_type, Settings)
    assert stage.settings_type()


def test_stages_lists_all_in_the_order_of_the_table() -> None:
    assert list(all_stages()) == list(STAGE_CLASSES)


def test_unknown_stage_names_the_nearest() -> None:
    with raises_code("unknown-stage", InputError) as caught:
        load_stage("distil")
    assert all(value in str(caught.value) for value in ("'distil'", ", ".join(STAGE_CLASSES), "'distill'?"))


def test_loading_the_stages_imports_nothing_heavy() -> None:
    code = (
        "import sys; from smelt.pipeline.recipe.stages import all_stages; all_stages();"
        "sys.exit(' '.join({'torch', 'transformers', 'onnx', 'onnxruntime', 'tensorrt'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
