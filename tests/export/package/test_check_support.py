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
    def made(name, made="onnx", target="ort-cpu", task="translation", family="marian"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        manifest = Manifest(
            key="0" * 64, format=made, task=task, stage="onnx", settings={}, seed=0, parent=None, versions={},
            details={"target": target} if target else {},
        )  # fmt: skip
        return Artifact(folder, manifest)

    return made


def test_what_fits_is_taken(make):
    form = Made(
        targets=frozenset({"ort-cpu"}), tasks=frozenset({"translation"}), families=frozenset({"marian"})
    )
    assert unsupported_format(form, make("a")) is None
    assert unsupported_format(Made(), make("b", target="tensorrt", task="x", family="y")) is None


@pytest.mark.parametrize(
    ("takes", "given", "code", "of_export", "is_one_of"),
    [
        ({}, {"made": "torch"}, "unsupported-format", True, ("torch", "onnx")),
        ({"targets": frozenset({"b", "a"})}, {}, "unsupported-target", True, ("ort-cpu", "a and b")),
        ({"tasks": frozenset({"x"})}, {}, "unsupported-task", False, ("translation", "x")),
        (
            {"families": frozenset({"t5", "bart", "gpt2"})},
            {},
            "unsupported-family",
            False,
            ("marian", "bart, gpt2 and t5"),
        ),
    ],
)
def test_what_does_not_fit_is_said(takes, given, code, of_export, is_one_of, make):
    found = unsupported_format(Made(**takes), make("a", **given))
    assert (found.code, found.needs_export) == (code, of_export)
    it_is, one_of = is_one_of
    assert found.text.index(it_is) < found.text.index(f" {one_of}.")


def test_what_the_form_finds_itself_is_said_too(make):
    artifact = make("a")
    (artifact.path / "bad").touch()
    assert unsupported_format(Made(), artifact) == ("made-up", "a file is bad.", False)


def test_artifacts_of_the_run_and_forms_that_fit_are_named(make):
    wanted = Made(hint="Export it.")
    forms = [wanted, Made("torch-form", formats=frozenset({"torch"})), Made("other")]
    run = {"int8": make("int8"), "fp32": make("fp32"), "small": make("small", "torch"), "bad": make("bad")}
    (run["bad"].path / "bad").touch()
    with raises_code("unsupported-format", InputError) as caught:
        require_supported(wanted, make("t", "torch"), "runs/x/t", forms, run)
    message = str(caught.value)
    assert message.startswith("runs/x/t ")
    for value in ("'made'", "int8 and fp32", "artifacts/int8", " torch-form "):
        assert value in message
    assert "Export it." not in message  # where the run has an export
    assert not {"other", "small", "bad"} & set(re.findall(r"[\w-]+", message))
    with raises_code("unsupported-format", InputError) as caught:
        require_supported(wanted, make("v", "torch"), "v", forms, {"int8": run["int8"]})
    assert "artifacts/int8" in str(caught.value)
    assert "fp32" not in str(caught.value)
    require_supported(wanted, make("u"), "u", forms, {})


def test_a_step_is_proposed_only_where_it_helps(make):
    form = Made(tasks=frozenset({"language-modeling"}), hint="Add the step onnx.")
    for task, helps, code in (
        ("translation", False, "unsupported-task"),
        ("language-modeling", True, "unsupported-format"),
    ):
        with raises_code(code, InputError) as caught:
            require_supported(form, make(task, "torch", task=task), "t", [form], {})
        assert ("Add the step onnx." in str(caught.value)) is helps
    found = unsupported_format(form, make("onnx", "tensorrt", task="language-modeling"))
    assert (found.code, found.needs_export) == ("unsupported-format", True)
    assert "tensorrt" in found.text
    found = unsupported_format(Made("f", formats=frozenset({"torch"})), make("x"))
    assert (found.code, found.needs_export) == ("unsupported-format", True)
    assert "onnx" in found.text


def test_nothing_is_proposed_where_nothing_fits(make):
    form = Made()
    with raises_code("unsupported-format", InputError) as caught:
        require_supported(form, make("t", "torch"), "t", [form], {"s": make("s", "torch")})
    assert "artifacts/" not in str(caught.value)
    assert "--format" not in str(caught.value)
