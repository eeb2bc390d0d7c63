"""Which artifacts a form takes, and what is proposed instead."""

import json
import re

import pytest

from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.export.package.fit import refusal, require_fit
from smelt.export.package.form import Takes


class Made:
    """A form that takes what it is told, of models that have no `bad` file."""

    summary, keeps = "", True

    def __init__(self, name="made", **takes):
        self.name, self.takes = name, Takes(**({"formats": frozenset({"onnx"})} | takes))

    def check(self, artifact):
        if (artifact.path / "bad").exists():
            raise InputError("a file is bad.")


@pytest.fixture
def make(tmp_path):
    def made(name, made="onnx", target="ort-cpu", task="translation", family="marian"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        manifest = Manifest(
            key="0" * 64, format=made, task=task, stage="onnx", settings={}, seed=0, parent=None, versions={},
            facts={"target": target} if target else {},
        )  # fmt: skip
        return Artifact(folder, manifest)

    return made


def test_what_fits_is_taken(make):
    form = Made(
        targets=frozenset({"ort-cpu"}), tasks=frozenset({"translation"}), families=frozenset({"marian"})
    )
    assert refusal(form, make("a")) is None
    assert refusal(Made(), make("b", target="tensorrt", task="x", family="y")) is None


@pytest.mark.parametrize(
    ("takes", "given", "said"),
    [
        ({"mend": "Add onnx."}, {"made": "torch"}, "it is a torch artifact; this form takes onnx. Add onnx."),
        ({"targets": frozenset({"b", "a"})}, {}, "it was exported for ort-cpu; this form takes a and b."),
        ({"tasks": frozenset({"x"})}, {}, "it is for translation; this form takes x."),
        (
            {"families": frozenset({"t5", "bart", "gpt2"})},
            {},
            "it is a model of the family marian; this form takes bart, gpt2 and t5.",
        ),
    ],
)
def test_what_does_not_fit_is_said(takes, given, said, make):
    assert refusal(Made(**takes), make("a", **given)) == said


def test_what_the_form_finds_itself_is_said_too(make):
    artifact = make("a")
    (artifact.path / "bad").touch()
    assert refusal(Made(), artifact) == "a file is bad."


def test_artifacts_of_the_run_and_forms_that_fit_are_named(make):
    wanted = Made(mend="Export it.")
    forms = [wanted, Made("torch-form", formats=frozenset({"torch"})), Made("other")]
    run = {"int8": make("int8"), "fp32": make("fp32"), "small": make("small", "torch"), "bad": make("bad")}
    (run["bad"].path / "bad").touch()
    with pytest.raises(InputError) as caught:
        require_fit(wanted, make("t", "torch"), "runs/x/t", forms, run)
    assert str(caught.value) == (
        "runs/x/t cannot be packaged as 'made': it is a torch artifact; this form takes onnx."
        " Of the same run it takes the steps int8 and fp32 (artifacts/int8)."
        " Forms that take this artifact: torch-form (--for)."
    )
    with pytest.raises(InputError, match=r"it takes the step int8 \(artifacts/int8\)\."):
        require_fit(wanted, make("v", "torch"), "v", forms, {"int8": run["int8"]})
    require_fit(wanted, make("u"), "u", forms, {})


def test_a_step_is_proposed_only_where_it_helps(make):
    form = Made(tasks=frozenset({"language-modeling"}), mend="Add the step onnx.")
    for task, helps in (("translation", False), ("language-modeling", True)):
        with pytest.raises(InputError) as caught:
            require_fit(form, make(task, "torch", task=task), "t", [form], {})
        assert ("Add the step onnx." in str(caught.value)) is helps
    assert str(refusal(form, make("onnx", "tensorrt", task="language-modeling"))).startswith("it is a tens")
    assert str(refusal(Made("f", formats=frozenset({"torch"})), make("x"))) == (
        "it is an onnx artifact; this form takes torch."
    )


def test_nothing_is_proposed_where_nothing_fits(make):
    form = Made()
    with pytest.raises(InputError) as caught:
        require_fit(form, make("t", "torch"), "t", [form], {"s": make("s", "torch")})
    assert re.search("Of the same run|Forms that", str(caught.value)) is None
