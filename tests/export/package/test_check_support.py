"""Which artifacts a form takes, and what is proposed instead."""

import json
import re

import pytest

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.export.package.package_format import SupportedArtifacts
from smelt.export.package.write_package import require_supported, unsupported_format
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


class Made:
    """A form that takes what it is told, of models that have no `bad` file."""

    summary, keeps = "", True

    def __init__(self, name="made", **takes):
        self.name, self.supported = name, SupportedArtifacts(**({"formats": frozenset({"onnx"})} | takes))

    def check(self, artifact):
        if (artifact.path / "bad").exists():
            raise InputError("a file is bad.", code="made-up")


@pytest.fixture
def make(tmp_path):
    def make_artifact(name, model_format="onnx", target="ort-cpu", task="translation", family="marian"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        manifest = Manifest(
            key="0" * 64, format=model_format, task=task, stage="onnx", settings={}, seed=0, parent=None,
            versions={}, details={"target": target} if target else {},
        )  # fmt: skip
        return Artifact(folder, manifest)

    return make_artifact


def test_supported_artifact_is_accepted(make):
    form = Made(
        targets=frozenset({"ort-cpu"}), tasks=frozenset({"translation"}), families=frozenset({"marian"})
    )
    assert unsupported_format(form, make("a")) is None
    assert unsupported_format(Made(), make("b", target="tensorrt", task="x", family="y")) is None


@pytest.mark.parametrize(("takes", "options", "code", "of_export", "is_one_of"), [
    ({}, {"model_format": "torch"}, "unsupported-format", True, ("torch", "onnx")),
    ({"targets": frozenset({"b", "a"})}, {}, "unsupported-target", True, ("ort-cpu", "a and b")),
    ({"tasks": frozenset({"x"})}, {}, "unsupported-task", False, ("translation", "x")),
    ({"families": frozenset({"t5", "bart", "gpt2"})}, {}, "unsupported-family", False,
     ("marian", "bart, gpt2 and t5")),
])  # fmt: skip
def test_unsupported_artifact_reports_reason(takes, options, code, of_export, is_one_of, make):
    unsupported = unsupported_format(Made(**takes), make("a", **options))
    assert (unsupported.code, unsupported.needs_export) == (code, of_export)
    it_is, one_of = is_one_of
    assert unsupported.text.index(it_is) < unsupported.text.index(f" {one_of}.")


def test_format_specific_errors_are_reported(make):
    artifact = make("a")
    (artifact.path / "bad").touch()
    assert unsupported_format(Made(), artifact) == ("made-up", "a file is bad.", False)


def test_error_names_supported_artifacts_and_formats(make):
    package_format = Made(hint="Export it.")
    forms = [package_format, Made("torch-form", formats=frozenset({"torch"})), Made("other")]
    run = {"int8": make("int8"), "fp32": make("fp32"), "small": make("small", "torch"), "bad": make("bad")}
    (run["bad"].path / "bad").touch()
    with raises_code("unsupported-format", InputError) as excinfo:
        require_supported(package_format, make("t", "torch"), "runs/x/t", forms, run)
    message = str(excinfo.value)
    assert message.startswith("runs/x/t ")
    for value in ("'made'", "int8 and fp32", "artifacts/int8", " torch-form "):
        assert value in message
    assert "Export it." not in message  # where the run has an export
    assert not {"other", "small", "bad"} & set(re.findall(r"[\w-]+", message))
    with raises_code("unsupported-format", InputError) as excinfo:
        require_supported(package_format, make("v", "torch"), "v", forms, {"int8": run["int8"]})
    assert "artifacts/int8" in str(excinfo.value)
    assert "fp32" not in str(excinfo.value)
    require_supported(package_format, make("u"), "u", forms, {})


def test_onnx_step_is_suggested_only_if_it_helps(make):
    form = Made(tasks=frozenset({"language-modeling"}), hint="Add the step onnx.")
    for task, helps, code in (
        ("translation", False, "unsupported-task"),
        ("language-modeling", True, "unsupported-format"),
    ):
        with raises_code(code, InputError) as excinfo:
            require_supported(form, make(task, "torch", task=task), "t", [form], {})
        assert ("Add the step onnx." in str(excinfo.value)) is helps
    unsupported = unsupported_format(form, make("onnx", "tensorrt", task="language-modeling"))
    assert (unsupported.code, unsupported.needs_export) == ("unsupported-format", True)
    assert "tensorrt" in unsupported.text
    unsupported = unsupported_format(Made("f", formats=frozenset({"torch"})), make("x"))
    assert (unsupported.code, unsupported.needs_export) == ("unsupported-format", True)
    assert "onnx" in unsupported.text


def test_no_suggestion_without_alternatives(make):
    form = Made()
    with raises_code("unsupported-format", InputError) as excinfo:
        require_supported(form, make("t", "torch"), "t", [form], {"s": make("s", "torch")})
    assert "artifacts/" not in str(excinfo.value)
    assert "--format" not in str(excinfo.value)
