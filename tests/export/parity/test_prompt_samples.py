"""Real prompts of text generation: parity batches, sizes of engines, candidates of a beam search."""

import numpy as np
import pytest

from smelt.data.splits import Columns
from smelt.export.parity.parity_samples import parity_samples
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_tokenizer, write_text_rules
from smelt.models.text_rules import TextRules
from smelt.models.tokenizer import encode_prompts
from smelt.runtimes.predict_texts import generate_candidates, generate_texts
from smelt.runtimes.registry import open_runner
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import causal, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = causal.write_model(tmp_path_factory.mktemp("m") / "m", "gpt2")
    write_text_rules(folder, TextRules(prompt_template="Q: {prompt}\nA:"))
    return folder


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = causal.write_prompts(tmp_path_factory.mktemp("d") / "train.jsonl", 12)
    return read_split(str(path), "text-generation", Columns(), path.parent)


def test_parity_uses_left_padded_rendered_prompts(model, split):
    tokenizer = load_tokenizer(model)
    prompts = encode_prompts([e.text for e in split.examples], tokenizer, 10**6)
    with open_runner(tiny.as_artifact(model, "text-generation")) as runner:
        batch, is_real = parity_samples(runner, model, {"train": split}, "text-generation", rows=4)
    assert is_real
    lengths = batch.attention_mask.sum(1)
    assert len(set(lengths.tolist())) == 4  # prompts of nearly one length are cut to different ones
    assert np.all(np.diff(batch.attention_mask, axis=1) >= 0)
    assert lengths[-1] == batch.input_ids.shape[1] == max(map(len, prompts))
    for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        assert any(row[mask == 1].tolist() == ids[-int(mask.sum()) :] for ids in prompts)


def test_engine_profiles_use_prompt_lengths(model, split, tmp_path):
    tokenizer = load_tokenizer(model)
    longest = max(map(len, encode_prompts([e.text for e in split.examples], tokenizer, 10**6)))
    ctx = harness.make_context(tmp_path / "out", "text-generation", split)
    [ranges], _ = profile_ranges(model, TensorrtSettings(max_new_tokens=8, length_percentile=100), ctx)
    assert longest <= ranges["input"].max < 64
    assert ranges["past"].max >= longest + 8 - 1


def test_best_beam_is_the_generated_text(model):
    generation = GenerationSettings(num_beams=2, max_new_tokens=5)
    with open_runner(tiny.as_artifact(model, "text-generation")) as runner:
        prompts = ["The cat", "Where does the man in the red hat walk?", "river"]
        candidates = generate_candidates(runner, prompts, generation, 2)
        answers = generate_texts(runner, prompts, generation)
    assert [beam_texts[0] for beam_texts in candidates] == answers
    assert all(len(beam_texts) == 2 for beam_texts in candidates)
