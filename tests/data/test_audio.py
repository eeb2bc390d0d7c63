"""Files of audio: formats, rates, channels, and what is refused."""

import json

import numpy as np
import pytest
import soundfile
from scipy.signal import resample_poly

from smelt.data.audio import SAMPLING_RATE, audio_hash, audio_length, check_audio, read_audio
from smelt.data.splits import Columns
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code
from tests.support.models.speech import TASK, make_speech


def read(folder, *rows, **columns):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_split("rows.jsonl", TASK, Columns(**columns), folder)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_file_of_16_bits_equals_its_samples(tmp_path, suffix):
    samples = make_speech(0)
    soundfile.write(tmp_path / f"a.{suffix}", samples, SAMPLING_RATE)
    values = read_audio(str(tmp_path / f"a.{suffix}"))
    assert values.dtype == np.float32
    assert np.abs(values - samples).max() <= 2**-15


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_other_rates_are_resampled_as_scipy_does(tmp_path, rate):
    samples = make_speech(1, rate=rate)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    values = read_audio(str(tmp_path / "a.wav"))
    up, down = {8_000: (2, 1), 44_100: (160, 441)}[rate]
    np.testing.assert_allclose(values, resample_poly(samples, up, down), atol=1e-6)
    assert len(values) == audio_length(str(tmp_path / "a.wav"))


@pytest.mark.parametrize("dtype", ["float64", "int16"])
def test_array_has_the_samples_of_its_file(tmp_path, dtype):
    samples = make_speech(2)
    stored = (samples * 2**15).astype(np.int16) if dtype == "int16" else samples.astype(dtype)
    np.savez(tmp_path / "a.npz", audio=stored, sampling_rate=8_000)
    values = read_audio(str(tmp_path / "a.npz"))
    np.testing.assert_allclose(values, resample_poly(samples, 2, 1), atol=1e-3 if dtype == "int16" else 1e-6)
    assert len(values) == audio_length(str(tmp_path / "a.npz")) == 2 * len(samples)


def write_invalid(folder, kind):
    if kind == "stereo":
        soundfile.write(folder / "a.wav", np.zeros((100, 2)), SAMPLING_RATE)
    elif kind == "empty":
        soundfile.write(folder / "a.wav", np.zeros(0), SAMPLING_RATE)
    elif kind == "broken":
        (folder / "a.wav").write_bytes(b"RIFF and no more")
    elif kind == "not finite":
        np.savez(folder / "a.npz", audio=np.array([0.0, np.nan]))
    elif kind == "other array":
        np.savez(folder / "a.npz", sound=np.zeros(3))
    return "a.npz" if (folder / "a.npz").is_file() else "a.wav"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("stereo", "not-mono"),
        ("empty", "empty-audio"),
        ("broken", "damaged-audio"),
        ("missing", "missing-file"),
        ("not finite", "damaged-audio"),
        ("other array", "damaged-audio"),
    ],
)
def test_invalid_audio_is_named_with_its_line(tmp_path, kind, code):
    soundfile.write(tmp_path / "good.wav", make_speech(0), SAMPLING_RATE)
    name = write_invalid(tmp_path, kind)
    with raises_code(code) as caught:
        read(tmp_path, {"audio": "good.wav", "text": "a"}, {"audio": name, "text": "b"})
    assert caught.value.line == 2
    assert caught.value.file.endswith("rows.jsonl")


def test_paths_are_relative_to_the_file_of_rows(tmp_path, monkeypatch):
    (tmp_path / "speech").mkdir()
    soundfile.write(tmp_path / "speech" / "a.wav", make_speech(0), SAMPLING_RATE)
    monkeypatch.chdir("/")
    split = read(tmp_path, {"wav": "speech/a.wav", "said": "hello"}, audio="wav", transcript="said")
    assert split.examples[0].text == str(tmp_path / "speech" / "a.wav")
    assert split.examples[0].references == ("hello",)


def test_fingerprint_follows_the_bytes_of_the_audio(tmp_path):
    soundfile.write(tmp_path / "a.wav", make_speech(0), SAMPLING_RATE)
    first = read(tmp_path, {"audio": "a.wav", "text": "a"})
    before, hashed = first.fingerprint, audio_hash(first.examples[0].text)
    (tmp_path / "b.wav").write_bytes((tmp_path / "a.wav").read_bytes())
    assert read(tmp_path, {"audio": "b.wav", "text": "a"}).fingerprint == before
    soundfile.write(tmp_path / "a.wav", make_speech(1), SAMPLING_RATE)
    assert read(tmp_path, {"audio": "a.wav", "text": "a"}).fingerprint != before
    assert audio_hash(first.examples[0].text) != hashed


def test_folder_in_place_of_a_file_is_named(tmp_path):
    with raises_code("not-a-file"):
        check_audio(str(tmp_path), "audio 1")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_of_audio_folder_names_files(tmp_path, kind):
    soundfile.write(tmp_path / "a.wav", make_speech(0), SAMPLING_RATE)
    lines = {"csv": "file_name,transcription\na.wav,hello\n",
             "jsonl": '{"file_name": "a.wav", "transcription": "hello"}\n'}  # fmt: skip
    (tmp_path / f"metadata.{kind}").write_text(lines[kind])
    split = read_split(str(tmp_path), TASK, Columns(transcript="transcription"), tmp_path)
    assert [(e.text, e.references) for e in split.examples] == [(str(tmp_path / "a.wav"), ("hello",))]


def test_audio_folder_without_metadata_is_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", make_speech(0), SAMPLING_RATE)
    with raises_code("not-a-file"):
        read_split(str(tmp_path), TASK, Columns(), tmp_path)
