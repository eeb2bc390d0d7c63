"""A whole recipe of speech recognition: a smaller decoder, pruned, int8, exported, scored and packaged."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch
import transformers

import smelt
from smelt.core.artifact import read_artifact
from smelt.generation.backend import AudioBatch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.search import generate_in_graph, generate_resolved
from smelt.runtimes.registry import open_runner
from tests.support.models import speech

SAMPLES = 200
RECIPE = """
model: model
task: speech-recognition
data: {train: train.jsonl, validation: validation.jsonl, test: test.jsonl}
stages:
  - onnx: {target: ort-cpu}
    name: plain
  - distill: {student: {decoder_layers: 1}, max_steps: 2, batch_size: 4, num_evals: 0}
    from: model
    name: small
  - prune: {targets: [heads, ffn], keep_ratio: 0.5}
  - quantize: {scheme: int8-dynamic}
  - onnx: {target: ort-cpu}
    name: int8
score:
  quality: [wer, {cer: {normalizer: basic}}]
  generation: {max_new_tokens: 12}
  latency: null
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    speech.write_whisper(folder / "model")
    for name in ("train", "validation", "test"):
        speech.write_rows(folder / f"{name}.jsonl")
    (folder / "recipe.yaml").write_text(RECIPE)
    report = smelt.run(folder / "recipe.yaml", out=folder / "run", store=folder / "store")
    return folder, report


def test_steps_are_scored_by_error_rates(run):
    folder, _ = run
    report = json.loads((folder / "run" / "report.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert set(steps["int8"]["quality"]) == {"wer", "cer"}
    plain, model = (steps[name]["quality"]["wer"]["value"] for name in ("plain", "model"))
    assert plain == model


@pytest.mark.parametrize(("num_beams", "language"), [(1, "en"), (1, "de"), (4, "en")])
def test_graph_generates_the_tokens_of_transformers(run, num_beams, language):
    folder, _ = run
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "model").eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder / "model")
    samples = [speech.make_speech(number, 0.2 + number / 250) for number in range(SAMPLES)]
    features = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
    mask = np.ones((SAMPLES, speech.STATES), dtype=np.int64)
    batch = AudioBatch(np.zeros_like(mask), mask, load=lambda: features)
    settings = GenerationSettings(num_beams=num_beams, max_new_tokens=20, language=language)
    with open_runner(read_artifact(folder / "run" / "artifacts" / "plain"), 1) as runner:
        decoding = resolve_generation(settings, runner)
        by_graph = generate_in_graph(runner, batch, decoding)
        by_steps = generate_resolved(runner, batch, decoding)
    expected = model.generate(
        torch.from_numpy(features), num_beams=num_beams, max_new_tokens=20, language=language
    )
    end = model.config.eos_token_id
    rows = [[token for token in row if token != end] for row in expected.tolist()]
    assert len({*map(tuple, rows)}) > SAMPLES // 2
    assert [[token for token in row if token != end] for row in by_graph] == rows
    assert [[token for token in row if token != end] for row in by_steps] == rows


def test_package_transcribes_as_the_artifact(run, tmp_path):
    folder, _ = run
    artifact = folder / "run" / "artifacts" / "int8"
    smelt.package(artifact, out=tmp_path / "package")
    paths = [str(folder / "test-audio" / f"{number}.wav") for number in range(2)]
    with smelt.load(artifact) as model:
        expected = model.transcribe(paths, batch_size=1, max_new_tokens=12)
    code = "import sys; from infer import SpeechRecognizer"
    code += f"; print(chr(10).join(SpeechRecognizer()({paths!r}, 1)))"
    code += "; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "package", capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == expected


def test_package_names_files_that_it_cannot_read(run, tmp_path):
    folder, _ = run
    smelt.package(folder / "run" / "artifacts" / "plain", out=tmp_path / "package")
    soundfile.write(tmp_path / "stereo.wav", np.zeros((100, 2)), 16_000)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16_000)
    (tmp_path / "text.wav").write_text("hello")
    command = [sys.executable, tmp_path / "package" / "infer.py"]
    for name in ("stereo.wav", "empty.wav", "text.wav", "missing.wav"):
        result = subprocess.run([*command, tmp_path / name], check=False, capture_output=True, text=True)
        assert result.returncode == 2
        assert str(tmp_path / name) in result.stderr
        assert "Traceback" not in result.stderr
    assert subprocess.run(command, check=True, input="", capture_output=True, text=True).stdout == ""


def test_spectrograms_of_package_equal_transformers():
    from smelt.export.package.standalone.speech_recognition import log_mel, mel_filters

    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    samples = speech.make_speech(3, 1.3)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(mel_filters(80), extractor.mel_filters, atol=1e-6)
    np.testing.assert_allclose(log_mel(samples, 32_000, mel_filters(80)), expected, atol=1e-3)
