"""What is next to an engine is compared with what is here, and each refusal says both and what to do."""

import pytest

import smelt
from smelt.api.predict import Predictor
from smelt.core.errors import InputError
from smelt.runtimes.onnx_import import trial_run
from smelt.runtimes.tensorrt_engine import (
    EngineSidecar,
    check_sidecar,
    other_model_warning,
    read_sidecar,
    record_built_engine,
    require_trusted_engines,
    sidecar_path,
    write_sidecar,
)
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

H200 = {"name": "NVIDIA H200", "compute_capability": "9.0"}
A40 = {"name": "NVIDIA A40", "compute_capability": "8.6"}
A10 = {"name": "NVIDIA A10", "compute_capability": "8.6"}
T4 = {"name": "Tesla T4", "compute_capability": "7.5"}


def engine(folder, **other):
    plan = folder / "model.plan"
    plan.write_bytes(b"plan")
    options = {
        "package": "tensorrt", "version": "11.4.0.106", "gpu": A10, "graph": "model.onnx",
        "graph_sha256": "0" * 64, "size_bytes": 4, "weights": "embedded", "version_compatible": False,
        "hardware_compatibility": "none", "flags": {"tf32": True}, "profiles": [{"x": [[1], [2], [3]]}],
    }  # fmt: skip
    write_sidecar(plan, EngineSidecar(**(options | other)))
    return plan


def check(plan, package="tensorrt", version="11.4.0.106", gpu=A10):
    check_sidecar(plan, read_sidecar(plan), package, version, gpu)


def test_saved_sidecar_is_loaded_and_a_missing_one_is_none(tmp_path):
    plan = engine(tmp_path)
    assert read_sidecar(plan).profiles == [{"x": [[1], [2], [3]]}]
    check(plan)
    sidecar_path(plan).unlink()
    assert read_sidecar(plan) is None


@pytest.mark.parametrize(
    ("built", "here", "code", "values"),
    [
        ({}, {"version": "11.5.0"}, "wrong-engine-version", ("tensorrt 11.4.0.106", "tensorrt 11.5.0.")),
        ({}, {"package": "tensorrt_rtx", "version": "11.4.0.106"}, "wrong-engine-version", ("tensorrt_rtx",)),
        ({}, {"version": "11.4.0.200"}, "wrong-engine-version", ("11.4.0.106", "11.4.0.200")),
        ({"version_compatible": True}, {"version": "11.3.9"}, "wrong-engine-version", ("tensorrt 11.3.9.",)),
        ({"version_compatible": True}, {"version": "12.0.0"}, "wrong-engine-version", ("tensorrt 12.0.0.",)),
        ({}, {"gpu": H200}, "wrong-gpu", ("NVIDIA A10", "8.6", "NVIDIA H200")),
        ({"hardware_compatibility": "same-cc"}, {"gpu": H200}, "wrong-gpu", ("same-cc",)),
        ({"hardware_compatibility": "ampere+"}, {"gpu": T4}, "wrong-gpu", ("Tesla T4",)),
        ({"size_bytes": 5}, {}, "incomplete-file", (" 4 ", " 5 ")),
        ({"weights": "stripped"}, {}, "missing-file", ("model.onnx",)),
    ],
)  # fmt: skip
def test_incompatible_engine_reports_its_build_environment_and_a_remedy(tmp_path, built, here, code, values):
    with raises_code(code, InputError) as caught:
        check(engine(tmp_path, **built), **here)
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(("built", "here"), [
    ({"version_compatible": True}, {"version": "11.5.0"}),
    ({"hardware_compatibility": "ampere+"}, {"gpu": H200}),
    ({"hardware_compatibility": "ampere+", "gpu": H200}, {"gpu": A40}), ({}, {"gpu": A40}),
    ({"gpu": None}, {"gpu": T4}),  # built ahead of time
    ({}, {"gpu": None}),
])  # fmt: skip
def test_compatible_engine_passes(tmp_path, built, here):
    check(engine(tmp_path, **built), **here)


@pytest.mark.parametrize(("gpu", "level", "warns"), [
    (A10, "none", False), (A40, "none", True), (A40, "same-cc", False), (A40, "ampere+", False),
    (A10 | {"multiprocessors": "72"}, "none", False),
    (A10 | {"multiprocessors": "36"}, "none", True),  # a part of the GPU that built it
])  # fmt: skip
def test_engine_of_another_model_of_gpu_is_opened_with_a_warning(tmp_path, gpu, level, warns):
    """TensorRT requires an equal compute capability and warns about other properties."""
    plan = engine(tmp_path, gpu=A10 | {"multiprocessors": "72"}, hardware_compatibility=level)
    check(plan, gpu=gpu)
    message = other_model_warning(plan, read_sidecar(plan), gpu)
    assert (message is not None) == warns
    assert not warns or ("NVIDIA A10 (72" in message and gpu["name"] in message)


def test_graph_other_than_that_of_the_engine_is_refused(tmp_path):
    from onnx import helper, save

    save(helper.make_model(helper.make_graph([], "g", [], [])), tmp_path / "model.onnx")
    with raises_code("changed-file", InputError) as caught:
        check(engine(tmp_path, weights="stripped"))
    assert all(part in str(caught.value) for part in ("model.onnx", "model.plan"))


@pytest.mark.parametrize(("text", "code"), [
    ("{", "damaged-file"), ("[]", "damaged-file"), ('{"schema_version": 1}', "damaged-file"),
    ('{"schema_version": 2}', "wrong-version"), ("{}", "damaged-file"),
])  # fmt: skip
def test_damaged_sidecar_is_named(tmp_path, text, code):
    plan = engine(tmp_path)
    sidecar_path(plan).write_text(text)
    with raises_code(code, InputError) as caught:
        read_sidecar(plan)
    assert "model.plan.json" in str(caught.value)


def test_untrusted_engine_requires_consent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "artifact"
    folder.mkdir()
    require_trusted_engines(folder, False)  # no engine in it
    (folder / "model.plan").write_bytes(b"an engine")
    with raises_code("untrusted-engine", InputError):
        require_trusted_engines(folder, False)
    require_trusted_engines(folder, True)
    record_built_engine(folder / "model.plan")
    require_trusted_engines(folder, False)
    (folder / "model.plan").write_bytes(b"another one in its place")
    with raises_code("untrusted-engine", InputError):
        require_trusted_engines(folder, False)


def test_every_way_to_open_an_artifact_requires_consent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(trial_run, "require_trusted_engines", lambda folder, trusted: calls.append(trusted))
    folder = tiny.write_bert(tmp_path / "model")
    artifact = tiny.as_artifact(folder, "text-classification")
    monkeypatch.setattr("smelt.api.load.read_artifact", lambda path: artifact)
    monkeypatch.setattr("smelt.api.predict.read_artifact", lambda path: artifact)
    monkeypatch.setattr(type(artifact), "verify", lambda self: None)
    with smelt.load(folder, trust_engine=True):
        Predictor(folder, {})
    assert calls == [True, False]
