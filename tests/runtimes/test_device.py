"""Where a runner works: what is asked for, what the machine has, and what is said where the two differ."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smelt.core.errors import DeviceWarning, InputError, MissingDependencyError
from smelt.generation.backend import Batch
from smelt.pipeline.inspect import machine
from smelt.runtimes import device as places
from smelt.runtimes.device import onnx_device, torch_device
from smelt.runtimes.onnx_session import open_onnx_session
from smelt.runtimes.registry import open_runner
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


@pytest.fixture
def gpu(monkeypatch):
    """Let torch and ONNX Runtime say that they see a GPU."""
    import onnxruntime

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(places, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(places, "cuda_provider_loads", lambda: True)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_selects_cuda_if_torch_has_it(gpu):
    assert [torch_device(w) for w in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_auto_selects_the_cpu_without_a_gpu_and_cuda_is_refused(no_gpu):
    assert torch_device("auto") == torch_device("cpu") == "cpu"
    with raises_code("no-gpu", InputError):
        torch_device("cuda")


def test_only_graphs_for_ort_cuda_run_outside_the_cpu(gpu):
    assert [onnx_device(w, "ort-cuda") for w in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    assert {onnx_device(w, t) for w in ("auto", "cpu", "cuda") for t in ("ort-cpu", "tensorrt", None)} == {
        "cpu"
    }


def test_cuda_graphs_run_on_the_cpu_if_the_driver_has_no_device(gpu, monkeypatch):
    monkeypatch.setattr(places, "cuda_device_count", lambda: 0)
    assert onnx_device("auto", "ort-cuda") == "cpu"
    with raises_code("no-cuda-provider", MissingDependencyError):
        onnx_device("cuda", "ort-cuda")


@pytest.mark.parametrize(("init", "asked", "expected"), [(0, 0, 2), (100, 0, 0), (0, 3, 0)])
def test_device_count_equals_driver_count(monkeypatch, init, asked, expected):
    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuInit(self, flags):  # noqa: N802
            return init

        def cuDeviceGetCount(self, pointer):  # noqa: N802
            pointer._obj.value = 2
            return asked

    monkeypatch.setattr(places.sys, "platform", "linux")
    monkeypatch.setattr(places.ctypes, "CDLL", Driver)
    assert places.cuda_device_count() == expected


def test_missing_driver_means_no_device(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(places.ctypes, "CDLL", missing)
    assert places.cuda_device_count() == 0


def test_missing_provider_error_names_the_remedy(gpu, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert onnx_device("auto", "ort-cuda") == "cpu"
    with raises_code("no-cuda-provider", MissingDependencyError):
        onnx_device("cuda", "ort-cuda")


def test_gpu_without_cuda_libraries_falls_back_to_the_cpu_with_a_reason(gpu, monkeypatch):
    monkeypatch.setattr(places, "cuda_provider_loads", lambda: False)
    with pytest.warns(DeviceWarning):
        assert onnx_device("auto", "ort-cuda") == "cpu"
    assert onnx_device("cuda", "ort-cuda") == "cuda"  # opening the session is the error then
    assert onnx_device("cpu", "ort-cuda") == "cpu"


def test_cuda_provider_is_tested_on_a_graph():
    """No CUDA here, so the provider that is listed does not load; ONNX Runtime goes on without it."""
    assert places.cuda_provider_loads() is (places.cuda_device_count() > 0)


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_used_only_if_requested(monkeypatch, tmp_path, tf32):
    import onnxruntime

    settings = {}

    class Session:
        def __init__(self, path, options, providers, **more):
            settings["providers"] = providers

        def get_providers(self):
            return ["CUDAExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    open_onnx_session(tmp_path / "model.onnx", device="cuda", **({"tf32": True} if tf32 else {}))
    assert settings["providers"][0] == (
        "CUDAExecutionProvider",
        {"use_tf32": "1" if tf32 else "0", "device_id": "0"},
    )


def test_session_that_lost_its_provider_is_an_error(monkeypatch, tmp_path):
    """ONNX Runtime goes on without a provider whose libraries do not load; that would be the wrong device."""
    import onnxruntime

    class Session:
        def __init__(self, *arguments, **options):
            assert options["providers"][0][0] == "CUDAExecutionProvider"

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with raises_code("no-cuda-provider", MissingDependencyError):
        open_onnx_session(tmp_path / "model.onnx", device="cuda")


def test_torch_moves_model_and_inputs_to_the_device(tmp_path, monkeypatch):
    """The meta device stands in for a GPU; it computes nothing, so a stand-in answers for the model."""
    from smelt.runtimes import torch_backend

    monkeypatch.setattr(torch_backend, "torch_device", lambda wanted: "meta")
    fed = {}

    def model(**inputs):
        fed.update(inputs)
        return SimpleNamespace(logits=torch.ones(2, 2))

    ids = np.ones((2, 5), dtype=np.int64)
    with open_runner(tiny.as_artifact(tiny.write_bert(tmp_path / "b"), "text-classification")) as runner:
        assert {p.device.type for p in runner.backend.model.parameters()} == {"meta"}
        runner.backend.model = model
        assert runner.forward(Batch(ids, ids, np.zeros_like(ids))).shape == (2, 2)
    assert {name: value.device.type for name, value in fed.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), "meta"
    )


def test_recipe_requiring_cuda_is_refused_without_it(tmp_path, monkeypatch):
    from smelt.pipeline.plan.load_plan import load_plan

    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    tiny.write_bert(tmp_path / "m")
    tiny.write_labeled(tmp_path / "d.jsonl")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: m\ntask: text-classification\ndata: {test: d.jsonl}\nstages: []\ndevice: cuda\n"
    )
    with raises_code("no-gpu", InputError) as caught:
        load_plan(recipe)
    assert [(message.setting, message.line) for message in caught.value.messages] == [("device", 5)]


@pytest.mark.quick
def test_cpu_build_of_torch_is_reported_on_a_gpu_machine(monkeypatch):
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0+cpu")
    assert "2.13.0+cpu" in (machine.cuda_missing_reason() or "")
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0")
    assert machine.cuda_missing_reason() is None


def test_training_gets_the_device(tmp_path):
    from smelt.compress.finetune import Finetune, FinetuneSettings
    from smelt.training.settings import TrainingSettings
    from smelt.training.trainer import _training_arguments

    def arguments_for(kind):
        ctx = harness.make_context(tmp_path, device="auto")
        device, model = torch.device(kind), torch.nn.Identity()
        return _training_arguments(TrainingSettings(), str(tmp_path), "fp32", ctx, device, None, model)

    assert arguments_for("cpu").use_cpu  # also of `auto` without a GPU
    assert not arguments_for("cuda").use_cpu
    if not torch.cuda.is_available():
        settings = FinetuneSettings.model_validate({"max_steps": 1, "num_evals": 0})
        with raises_code("no-gpu", InputError):
            harness.run_stage(
                Finetune(), settings, tiny.write_marian(tmp_path / "m"), tmp_path / "w" / "out",
                data=tiny.read_pairs(tmp_path), device="cuda",
            )  # fmt: skip


@pytest.mark.parametrize("command", [["predict", "x"], ["eval", "--data", "d.jsonl"], ["bench"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_commands_refuse_cuda_without_a_gpu(tmp_path, monkeypatch, command):

    from smelt.core.artifact import Manifest
    from smelt.core.store import Store

    tiny.write_labeled(tmp_path / "d.jsonl")
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "s")
    with store.workspace() as space:
        folder = tiny.write_bert(space / "out")
        values = {
            "format": "torch",
            "task": "text-classification",
            "stage": "model",
            "settings": {},
            "seed": 0,
        }
        artifact = store.commit(folder, Manifest(key="0" * 64, parent=None, versions={}, **values))
    name, *arguments = command
    done = harness.smelt(name, artifact.path, *arguments, "--device", "cuda")
    assert done.exit_code == 2, done.output
    assert "error[no-gpu]: " in done.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_outputs_equal_cpu_outputs(tmp_path):
    from smelt.generation.config import GenerationSettings
    from smelt.runtimes.predict_texts import generate_texts

    src = tiny.as_artifact(tiny.write_marian(tmp_path / "m"))
    results = []
    for device in ("cpu", "cuda"):
        with open_runner(src, device=device) as runner:
            assert runner.device == device
            results.append(generate_texts(runner, tiny.SENTENCES, GenerationSettings(max_new_tokens=12)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("code", "out", "gain"), [(0, "1.75\n", 1.75), (-4, "", 0.0), (1, "", 0.0), (0, "odd\n", 0.0)]
)
def test_bf16_is_used_if_a_trial_shows_a_speedup(monkeypatch, code, out, gain):
    """-4: an illegal instruction ended the process."""
    monkeypatch.setattr(
        places.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code, stdout=out)
    )
    assert places.bf16_speedup.__wrapped__() == gain


def test_bf16_trial_prints_a_ratio(monkeypatch):
    """Both in fp32, which all processors support."""
    monkeypatch.setattr(places, "_BF16_PROBE", places._BF16_PROBE.replace("least(True)", "least(False)"))
    assert 0.2 < places.bf16_speedup.__wrapped__() < 5


@pytest.mark.quick
def test_numbered_gpu_is_the_only_visible_one(monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert [places.select_gpu(name) for name in ("cpu", "cuda")] == ["cpu", "cuda"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert [places.select_gpu("cuda:1") for _ in range(2)] == ["cuda"] * 2  # also in a child process
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    with raises_code("gpu-selected"):
        places.select_gpu("cuda:0")


@pytest.mark.quick
@pytest.mark.parametrize("visible", ["", "-1", "3"])
def test_invisible_gpu_is_never_selected(monkeypatch, visible):
    monkeypatch.delenv(places._SELECTED_GPU, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with raises_code("no-gpu"):
        places.select_gpu("cuda:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
