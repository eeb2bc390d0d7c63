"""What is made once for an opened artifact."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from smelt.generation import runner as runner_module
from smelt.generation.config import GenerationSettings
from smelt.generation.runner import TextTools
from smelt.models.text_rules import NO_LIMIT

pytestmark = pytest.mark.quick

CONFIG = {"model_type": "marian", "max_position_embeddings": 48, "decoder_start_token_id": 3}


def _tools(tmp_path):
    return TextTools(tmp_path, CONFIG, {"max_new_tokens": 9})


def test_tokenizer_is_opened_once_for_all_threads(tmp_path, monkeypatch):
    opened = []

    def slow(folder):
        opened.append(folder)
        time.sleep(0.05)
        return SimpleNamespace(model_max_length=40)

    monkeypatch.setattr(runner_module, "open_tokenizer", slow)
    tools, gate = _tools(tmp_path), threading.Barrier(6)
    assert opened == []  # not before it is needed

    def first(_):
        gate.wait()
        return tools.tokenizer

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(first, range(6)))
    assert opened == [tmp_path]
    assert all(one is tools.tokenizer for one in found)
    assert tools.max_input_length == 40


@pytest.mark.parametrize("family", ["marian", "t5"])
@pytest.mark.parametrize(("most", "expected"), [(16, 16), (500, 40), (NO_LIMIT, 40)])
def test_a_runtime_that_takes_less_sets_the_limit(tmp_path, monkeypatch, family, most, expected):
    """An engine takes so many tokens, also of a T5, which has no table of positions."""
    monkeypatch.setattr(runner_module, "open_tokenizer", lambda folder: SimpleNamespace(model_max_length=40))
    assert TextTools(tmp_path, CONFIG | {"model_type": family}, {}, most).max_input_length == expected


def test_settings_are_settled_once_and_not_kept_without_end(tmp_path):
    tools = _tools(tmp_path)
    runner = SimpleNamespace(
        folder=tmp_path, config=CONFIG | {"is_encoder_decoder": True}, generation_config={"max_new_tokens": 9}
    )
    found = tools.resolved_generation(GenerationSettings(), runner)
    assert (found.max_new_tokens, found.start, found.positions) == (9, 3, 48)
    assert tools.resolved_generation(GenerationSettings(), runner) is found
    assert tools.resolved_generation(GenerationSettings(max_new_tokens=4), runner).max_new_tokens == 4
    for most in range(1, 200):
        assert (
            tools.resolved_generation(GenerationSettings(max_new_tokens=most), runner).max_new_tokens == most
        )
    assert len(tools._decodings) == runner_module._MAX_CACHED
    assert tools.resolved_generation(GenerationSettings(), runner) is found
