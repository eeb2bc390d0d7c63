"""Who feeds a model is told by its config, who computes by its folder's format."""

from types import SimpleNamespace

import pytest

from smelt.core.errors import InputError
from smelt.generation.generating_runners import DecoderOnlyRunner, EncoderDecoderRunner
from smelt.runtimes.registry import open_folder, open_runner, runner_class_for
from smelt.runtimes.single_call_runners import ClassifierRunner
from smelt.runtimes.torch_backend import TorchBackend
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


@pytest.mark.parametrize(("kind", "architecture", "more", "expected"), [
    ("llama", "LlamaForCausalLM", {}, DecoderOnlyRunner), ("gpt2", "GPT2LMHeadModel", {}, DecoderOnlyRunner),
    ("llama", "LlamaForSequenceClassification", {}, ClassifierRunner),
    ("marian", "MarianMTModel", {"is_encoder_decoder": True}, EncoderDecoderRunner),
    ("t5", "T5ForConditionalGeneration", {"is_encoder_decoder": True}, EncoderDecoderRunner),
    ("bart", "BartForSequenceClassification", {"is_encoder_decoder": True}, ClassifierRunner),
    ("bert", "BertForSequenceClassification", {}, ClassifierRunner),
])  # fmt: skip
def test_config_determines_the_runner(kind, architecture, more, expected):
    assert runner_class_for({"model_type": kind, "architectures": [architecture], **more}) is expected


def test_config_without_architecture_is_a_classifier():
    assert runner_class_for({}) is ClassifierRunner


def test_artifact_opens_in_its_runtime(tmp_path):
    with open_runner(tiny.as_artifact(tiny.write_bert(tmp_path), "text-classification"), 1, "cpu") as runner:
        assert isinstance(runner, ClassifierRunner)
        assert isinstance(runner.backend, TorchBackend)
        assert (runner.name, runner.device, runner.folder) == ("torch", "cpu", tmp_path)


@pytest.mark.parametrize(
    ("named", "threads", "expected"),
    [(2, None, 2), (2, 1, 1), (None, None, None), ("two", None, None), (0, None, None)],
)
def test_user_threads_override_artifact_threads(monkeypatch, named, threads, expected):
    """Of the manifest alone: nothing is opened."""
    from smelt.runtimes import registry as code

    thread_counts = []

    def record(*arguments, **_):
        thread_counts.append(arguments[3])
        return SimpleNamespace()

    monkeypatch.setattr(code, "open_folder", record)
    artifact = tiny.as_artifact("/nowhere", "translation")
    artifact.manifest.details["threads"] = named
    open_runner(artifact, threads)
    assert thread_counts == [expected]


def test_unsupported_format_error_names_the_folder(tmp_path):
    with raises_code("unknown-format", InputError) as caught:
        open_folder(tmp_path, "gguf")
    assert all(part in str(caught.value) for part in (tmp_path.name, "'gguf'"))


def test_unreadable_config_is_reported_before_anything_is_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{")
    with raises_code("invalid-json", InputError) as caught:
        open_folder(tmp_path, "onnx", "ort-cpu")
    assert "generation_config.json" in str(caught.value)
