"""What all runners have: files, a backend's details, a generator, an end."""

from types import SimpleNamespace

import pytest

from smelt.evaluate.latency.worker import TimedRunner
from smelt.generation.config import GenerationSettings
from smelt.generation.generating_runners import DecoderOnlyRunner
from smelt.generation.runner import read_model_files
from smelt.generation.search import generate_resolved
from smelt.models.text_rules import position_limit
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from smelt.runtimes.single_call_runners import ClassifierRunner
from tests.support.models import tiny


def test_properties_come_from_the_backend_and_close_is_forwarded(tmp_path):
    (tmp_path / "config.json").write_text('{"id2label": {"0": "a"}}')
    closed = []
    backend = SimpleNamespace(
        name="n",
        version="7",
        device="cuda",
        max_tokens_per_call=None,
        max_total_tokens=None,
        close=lambda: closed.append(1),
    )
    with ClassifierRunner(read_model_files(tmp_path), backend, generate_resolved) as runner:
        assert (runner.name, runner.version, runner.device) == ("n", "7", "cuda")
        assert runner.config == {"id2label": {"0": "a"}}
        assert runner.generation_config == {}  # there is no such file
        assert not closed
    assert closed == [1]


@pytest.mark.parametrize(("family", "key"), [("gpt2", "n_positions"), ("llama", "max_position_embeddings")])
def test_supported_tasks_are_named_as_in_the_model_family(tmp_path, family, key):
    """Prompts are cut, and outputs end, by that number; GPT-2 calls it otherwise than most."""
    for rows, in_all, expected in ((64, 20, 20), (64, 99, 64)):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "{key}": {rows}}}')
        backend = SimpleNamespace(max_tokens_per_call=8, max_total_tokens=in_all)
        runner = DecoderOnlyRunner(read_model_files(tmp_path), backend, generate_resolved)
        assert position_limit(runner.config) == expected
        assert runner.config[key] == expected


@pytest.mark.parametrize("watched", [False, True])
def test_texts_come_from_the_generator_of_the_runner(tmp_path, watched):
    """A loop inside a graph takes the place of the one in Python; who watches the runner is handed on."""
    calls = []

    def generate(runner, batch, decoding, part=0):
        calls.append((runner, len(batch.input_ids), decoding.max_new_tokens, part))
        return [[5, 6, 0]] * len(batch.input_ids)

    with open_runner(tiny.as_artifact(tiny.write_marian(tmp_path))) as runner:
        runner.generator = generate
        watched_runner = TimedRunner(runner) if watched else runner
        texts = generate_texts(
            watched_runner, tiny.SENTENCES[:3], GenerationSettings(max_new_tokens=4), batch_size=2
        )
        assert texts == runner.text.tokenizer.decode_batch([[5, 6, 0]] * 3)
    assert calls == [(watched_runner, 2, 4, 0), (watched_runner, 1, 4, 1)]
