"""Speech recognition against transformers: spectrograms, transcripts, losses and generated tokens."""

import json

import numpy as np
import pytest
import torch
import transformers

from smelt.core.files import read_json_object, write_json
from smelt.data.splits import Columns
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.runner import read_model_files
from smelt.generation.search import generate_resolved
from smelt.generation.speech_prompt import speech_start_tokens
from smelt.models.checkpoint import load_model
from smelt.runtimes.audio import (
    SpeechFeatures,
    check_preprocessing,
    file_windows,
    join_windows,
    load_windows,
    window_batches,
)
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_folder
from smelt.tasks.read_split import read_split
from smelt.tasks.samples import collate, load_processor
from smelt.tasks.speech_recognition import TASK
from tests.support.expected_errors import raises_code
from tests.support.models import speech


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return speech.write_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = speech.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 5)
    return read_split(str(path), TASK.name, Columns(), path.parent)


def config_of(folder):
    return read_json_object(folder / "config.json")


def batch_of(folder, split):
    features = SpeechFeatures(config_of(folder))
    [(_, batch)] = window_batches(file_windows([e.text for e in split.examples], features), features, 8)
    return batch


def test_spectrograms_equal_the_feature_extractor(model_folder, split):
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(model_folder)
    samples = [speech.make_speech(number) for number in range(5)]
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
    np.testing.assert_allclose(batch_of(model_folder, split).input_features, expected, atol=1e-3)


def test_targets_equal_tokenizer_with_language_and_task(model_folder, split):
    tokenizer = transformers.WhisperTokenizer.from_pretrained(model_folder, language="en", task="transcribe")
    texts = [reference for example in split.examples for reference in example.references]
    ids, truncated = load_processor(model_folder).targets(texts, 48)
    start, prompt = 111, tokenizer.prefix_tokens
    assert prompt[0] == start
    assert ids == [
        [*prompt[1:], *row, tokenizer.eos_token_id]
        for row in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]
    assert not truncated
    assert load_processor(model_folder).targets(texts, 6)[1] == 5


def test_loss_of_batch_equals_transformers(model_folder, split):
    model, _ = load_model(model_folder)
    samples, _ = TASK.encode(split, model.config, load_processor(model_folder), 48, None)
    batch = collate(samples, model.config)
    with torch.no_grad():
        logits = model(
            input_features=batch["input_features"], decoder_input_ids=batch["decoder_input_ids"]
        ).logits
        expected = model(input_features=batch["input_features"], labels=batch["labels"]).loss
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("language", ["en", "german"])
def test_generated_tokens_equal_transformers(model_folder, split, num_beams, language):
    batch = batch_of(model_folder, split)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(model_folder).eval()
    expected = theirs.generate(
        torch.from_numpy(batch.input_features), num_beams=num_beams, max_new_tokens=16, language=language
    )
    settings = GenerationSettings(num_beams=num_beams, max_new_tokens=16, language=language)
    with open_folder(model_folder, "torch") as runner:
        tokens = generate_resolved(runner, batch, resolve_generation(settings, runner))
    end = theirs.config.eos_token_id
    assert [[t for t in row if t != end] for row in tokens] == [
        [t for t in row if t != end] for row in expected.tolist()
    ]


def test_start_tokens_follow_the_generation_config(model_folder):
    generation, config = read_json_object(model_folder / "generation_config.json"), config_of(model_folder)
    assert speech_start_tokens(generation, config) == [112, 115, 119]
    assert speech_start_tokens(generation, config, "<|de|>") == [113, 115, 119]
    assert speech_start_tokens(generation | {"task": "translate"}, config) == [112, 114, 119]
    forced = {"no_timestamps_token_id": 119, "forced_decoder_ids": [[1, 113], [2, 114], [3, 119]]}
    assert speech_start_tokens(forced, config) == [113, 114, 119]
    assert speech_start_tokens({"no_timestamps_token_id": 119}, config) == [119]
    assert speech_start_tokens({}, config) == []


@pytest.mark.parametrize(
    ("changed", "language", "code"),
    [
        ({"language": None}, None, "missing-language"),
        ({"language": None, "forced_decoder_ids": [[1, None], [2, 115]]}, None, "missing-language"),
        ({}, "klingon", "unknown-language"),
        ({"lang_to_id": None}, "en", "unused-setting"),
    ],
)
def test_language_that_cannot_be_used_is_refused(model_folder, changed, language, code):
    generation = read_json_object(model_folder / "generation_config.json") | changed
    with raises_code(code):
        speech_start_tokens(generation, config_of(model_folder), language)


def test_language_of_a_model_of_texts_is_refused(tmp_path):
    config = {"is_encoder_decoder": True, "decoder_start_token_id": 3, "eos_token_id": 1, "pad_token_id": 0}
    write_json(tmp_path / "config.json", config | {"model_type": "marian"})
    with raises_code("unused-setting"):
        resolve_generation(GenerationSettings(language="en"), read_model_files(tmp_path))


def test_text_of_long_audio_equals_joined_texts_of_windows(model_folder, tmp_path):
    import soundfile

    samples = np.concatenate([speech.make_speech(number, 1.0) for number in range(3)])[:-4_000]
    soundfile.write(tmp_path / "long.wav", samples, 16_000, subtype="FLOAT")
    for number in range(3):
        part = samples[number * 16_000 : (number + 1) * 16_000]
        soundfile.write(tmp_path / f"{number}.wav", part, 16_000, subtype="FLOAT")
    settings = GenerationSettings(max_new_tokens=8)
    parts = [str(tmp_path / f"{number}.wav") for number in range(3)]
    with open_folder(model_folder, "torch") as runner:
        joined_text, *texts = generate_texts(runner, [str(tmp_path / "long.wav"), *parts], settings, 2)
    assert joined_text == " ".join(texts)
    assert len(set(texts)) > 1


def test_batches_load_files_on_access(model_folder, split, monkeypatch):
    features = SpeechFeatures(config_of(model_folder))
    inputs = file_windows([e.text for e in split.examples], features)
    batches = window_batches(inputs, features, 2)
    assert [numbers for numbers, _ in batches] == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(batches[1][1].input_features, load_windows(inputs[2:4], features))
    selected = batches[1][1].select([1])
    np.testing.assert_array_equal(selected.input_features, load_windows(inputs[3:4], features))


def test_empty_texts_of_windows_add_no_space(model_folder, split):
    features = SpeechFeatures(config_of(model_folder))
    [window] = file_windows([split.examples[0].text], features)
    windows = [window, window._replace(window=1), window._replace(window=2), window]
    assert join_windows([" a ", "", "b", "c"], windows) == ["a b", "c"]


def test_other_preprocessing_is_refused(model_folder, tmp_path):
    write_json(tmp_path / "config.json", config_of(model_folder))
    check_preprocessing(tmp_path)  # without a file it is the usual one
    settings = read_json_object(model_folder / "preprocessor_config.json")
    write_json(tmp_path / "preprocessor_config.json", settings | {"hop_length": 80})
    with raises_code("unsupported-preprocessing"):
        check_preprocessing(tmp_path)


def test_row_without_a_transcript_is_named(tmp_path):
    path = speech.write_rows(tmp_path / "rows.jsonl", 2)
    first, second = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, second | {"text": " "})))
    with raises_code("empty-text"):
        read_split(str(path), TASK.name, Columns(), tmp_path)
