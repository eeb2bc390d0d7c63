"""What all runners have: files, a backend's details, a generator, an end."""

from types import SimpleNamespace

import pytest

from smelt.evaluate.latency.worker import TimedRunner
from smelt.generation.config import GenerationSettings
from smelt.generation.runner import read_model_files
from smelt.generation.runners import DecoderOnlyRunner
from smelt.generation.search import generate_resolved
from smelt.models.text_rules import position_limit
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from smelt.runtimes.runners import ClassifierRunner
from tests.support.models import tiny


def test_facts_are_the_backends_and_its_end_is_the_runners(tmp_path):
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


@pytest.mark.parametrize(("family", "word"), [("gpt2", "n_positions"), ("llama", "max_position_embeddings")])
def test_what_a_runtime_takes_is_said_in_the_word_of_the_models_family(tmp_path, family, word):
    """Prompts are cut, and outputs end, by that number; GPT-2 calls it otherwise than most."""
    for rows, in_all, expected in ((64, 20, 20), (64, 99, 64)):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "{word}": {rows}}}')
        backend = SimpleNamespace(max_tokens_per_call=8, max_total_tokens=in_all)
        runner = DecoderOnlyRunner(read_model_files(tmp_path), backend, generate_resolved)
        assert position_limit(runner.config) == expected
        assert runner.config[word] == expected


@pytest.mark.parametrize("watched", [False, True])
def test_texts_are_the_generators_when_a_runner_has_one_of_its_own(tmp_path, watched):
    """A loop inside a graph takes the place of the one in Python; who watches the runner is handed on."""
    asked = []

    def whole(runner, batch, decoding, part=0):
        asked.append((runner, len(batch.input_ids), decoding.max_new_tokens, part))
        return [[5, 6, 0]] * len(batch.input_ids)

    with open_runner(tiny.as_artifact(tiny.write_marian(tmp_path))) as runner:
        runner.generator = whole
        seen = TimedRunner(runner) if watched else runner
        found = generate_texts(seen, tiny.SENTENCES[:3], GenerationSettings(max_new_tokens=4), batch_size=2)
        assert found == runner.text.tokenizer.decode_batch([[5, 6, 0]] * 3)
    assert asked == [(seen, 2, 4, 0), (seen, 1, 4, 1)]
