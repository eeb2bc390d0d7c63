"""The backend for TensorRT in ONNX Runtime: on the CPU's provider in its place, and on a GPU where one is.

There caches are kept in the host's memory; all but that and the provider itself is real.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from smelt.core.errors import InputError, RunError
from smelt.export.settings import ProviderSettings
from smelt.export.tensorrt.build_engine import SizeRange, causal_ranges, profile_shapes
from smelt.export.tensorrt.preflight import load_graph
from smelt.export.tensorrt.stage import export_provider_options, tensorrt_options
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.tokenizer import encode_texts
from smelt.runtimes import onnx_backend, ort_tensorrt_backend
from smelt.runtimes.device_operators import DeviceOperators
from smelt.runtimes.onnx_backend import OnnxBackend
from smelt.runtimes.ort_tensorrt_backend import ProviderOptions, write_provider_options
from smelt.runtimes.ort_tensorrt_provider import missing_requirement
from smelt.runtimes.predict_texts import class_logits, pad_batch
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.models import tiny

# two rows at once, sixteen tokens of a text, twelve of what is put out; four of a prompt
TEXTS = {"batch": SizeRange(1, 1, 2), "input": SizeRange(1, 6, 16), "past": SizeRange(0, 4, 11)}
CAUSAL = {"batch": SizeRange(1, 1, 2)} | causal_ranges(prompt=4, max_new_tokens=12, limit=64)


def with_provider_options(folder: Path, ranges: dict[str, SizeRange]) -> Path:
    graphs = {}
    for path in folder.glob("*.onnx"):
        shapes = profile_shapes(load_graph(path), ranges, path.name)
        graphs[path.stem] = ProviderOptions("", tensorrt_options(ProviderSettings(), "fp32", False, shapes))
    write_provider_options(folder, graphs)
    return folder


class Counting:
    """A session on the CPU; notes the shapes of what is fed, and that nothing is larger than was told."""

    def __init__(self, path: Path, options: ProviderOptions, fed: list[tuple[str, tuple[int, ...]]]) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.most, self.fed = options.max_shapes, fed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def note(self, name: str, shape: tuple[int, ...]) -> None:
        self.fed.append((name, shape))
        if name in self.most and name != "num_logits_to_keep":
            most = list(self.most[name])
            if name.startswith("past_key_values."):
                most[2] += 1  # bound after the last call, for one that does not come
            assert all(n <= m for n, m in zip(shape, most, strict=True)), (name, shape)

    def run(self, names: Any, feeds: Any) -> Any:
        for name, values in feeds.items():
            self.note(name, values.shape)
        return self.session.run(names, feeds)

    def io_binding(self) -> Any:
        binding = self.session.io_binding()
        note, bind_value, bind_input = self.note, binding.bind_ortvalue_input, binding.bind_cpu_input
        bind_output = binding.bind_output
        binding.bind_output = lambda name, device, device_id=0: bind_output(name)
        binding.bind_ortvalue_input = lambda n, v: (note(n, tuple(v.shape())), bind_value(n, v))
        binding.bind_cpu_input = lambda n, v: (note(n, v.shape), bind_input(n, v))
        return binding


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(
        ort_tensorrt_backend, "provider_device", lambda wanted, target: "cpu" if wanted == "cpu" else "cuda"
    )
    monkeypatch.setattr(
        ort_tensorrt_backend,
        "open_provider_session",
        lambda path, options, n: Counting(path, options, shapes),
    )
    monkeypatch.setattr(onnx_backend, "DeviceOperators", lambda *device: DeviceOperators("cpu", 0))
    monkeypatch.setattr(
        OnnxBackend, "_to_ortvalue", lambda self, array: onnxruntime.OrtValue.ortvalue_from_numpy(array)
    )
    return shapes


def opened(folder: Path, device: str = "auto") -> Any:
    return open_folder(folder, "onnx", "ort-tensorrt", 1, device)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_provider_options(
        tensorrt_graphs.copy_graphs("marian", tmp_path_factory.mktemp("m") / "g"), TEXTS
    )


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_provider_options(
        tensorrt_graphs.copy_graphs("llama", tmp_path_factory.mktemp("l") / "g"), CAUSAL
    )


def batch_of(runner: Any, rows: int) -> Batch:
    tokenizer = runner.text.tokenizer
    return pad_batch(encode_texts(tiny.SENTENCES[:rows], tokenizer, 16), range(rows), tokenizer.pad_token_id)


def prompts(runner: Any, rows: int = 3) -> Batch:
    """Prompts of 6, 3 and 1 tokens, padded on the left."""
    mask = np.array([[1] * 6, [0] * 3 + [1] * 3, [0] * 5 + [1]])
    return Batch(np.random.default_rng(0).integers(5, 300, (3, 6)) * mask, mask)


@pytest.fixture(scope="module")
def beam_translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `translator`, but its decoder takes six rows at once."""
    return with_provider_options(
        tensorrt_graphs.copy_graphs("marian", tmp_path_factory.mktemp("b") / "g"),
        TEXTS | {"rows": SizeRange(1, 2, 6)},
    )


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("kind", "rows"), [("translator", 5), ("beam_translator", 5), ("writer", 3)])
def test_tokens_equal_onnx_runtime_with_split_rows_and_prompts(
    kind: str, rows: int, beams: int, fed: list[Any], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    make = prompts if kind == "writer" else batch_of
    settings = GenerationSettings(num_beams=beams, max_new_tokens=8)
    with open_folder(folder, "onnx", "tensorrt", 1) as runner:
        expected = generate(runner, make(runner, rows), settings)
    with opened(folder) as runner:
        assert (runner.name, runner.device) == ("onnxruntime-tensorrt", "cuda")
        assert generate(runner, make(runner, rows), settings) == expected
    assert len({tuple(row) for row in expected}) > 1
    most = min(6, beams * rows) if kind == "beam_translator" else 2
    assert max(shape[0] for name, shape in fed if name == "input_ids") == most
    assert [shape[0] for name, shape in fed if name == "input_ids"][:2] == [2, 2 if rows == 5 else 1]


def test_output_longer_than_the_engine_names_the_setting(translator: Path, fed: list[Any]) -> None:
    with opened(translator) as runner:
        state = runner.encode(batch_of(runner, 1))
        for _ in range(TEXTS["past"].max + 1):
            runner.decode_step(state, np.array([5]))
        with raises_code("engine-limit", RunError) as caught:
            runner.decode_step(state, np.array([5]))
        assert all(part in str(caught.value) for part in ("13", "12", "max_new_tokens"))


def test_classes_equal_onnx_runtime_and_the_limit_is_the_engines(tmp_path: Path, fed: list[Any]) -> None:
    folder = with_provider_options(
        tensorrt_graphs.copy_graphs("roberta", tmp_path / "g"), TEXTS | {"input": SizeRange(1, 6, 30)}
    )
    with open_folder(folder, "onnx", "tensorrt", 1) as runner:
        expected = class_logits(runner, tensorrt_graphs.ROWS, 5)
    with opened(folder) as runner:
        np.testing.assert_allclose(class_logits(runner, tensorrt_graphs.ROWS, 5), expected, atol=1e-6)
        assert runner.text.max_input_length == 30


def test_on_the_cpu_the_same_graphs_run_without_size_limits(
    translator: Path, tmp_path: Path, fed: list[Any]
) -> None:
    with opened(translator, "cpu") as runner:
        assert (runner.name, runner.device) == ("onnxruntime", "cpu")
        assert len(generate(runner, batch_of(runner, 5), GenerationSettings(max_new_tokens=4))) == 5
    assert fed == []


def test_file_without_the_graph_is_refused(translator: Path, tmp_path: Path, fed: list[Any]) -> None:
    folder = tensorrt_graphs.copy_graphs("marian", tmp_path / "g")
    content = json.loads((translator / "provider.json").read_text())
    del content["graphs"]["encoder_model"]
    (folder / "provider.json").write_text(json.dumps(content))
    with raises_code("missing-engine-sizes", InputError) as caught:
        opened(folder)
    assert all(part in str(caught.value) for part in ("provider.json", "encoder_model.onnx"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["marian", "llama", "roberta"])
def test_engines_in_onnx_runtime_equal_its_cpu_provider(family: str, tmp_path: Path) -> None:
    if (why := missing_requirement()) is not None:
        pytest.skip(why)
    folder = tensorrt_graphs.copy_graphs(family, tmp_path / "g")
    ctx = graph_exports.make_context(folder, graph_exports.FAMILIES[family][1])
    settings = ProviderSettings(max_batch_size=2, max_new_tokens=12, optimization_level=1)
    export_provider_options("fp32", settings, folder, ctx)
    with (
        open_folder(folder, "onnx", "ort-tensorrt", 1, "cpu") as host,
        open_folder(folder, "onnx", "ort-tensorrt", 1, "cuda") as engine,
    ):
        if family == "roberta":
            expected, actual = (class_logits(runner, tensorrt_graphs.ROWS, 5) for runner in (host, engine))
            np.testing.assert_allclose(actual, expected, atol=0.02)
            return
        make = batch_of if family == "marian" else prompts
        settings_of = GenerationSettings(num_beams=2, max_new_tokens=8)
        assert generate(engine, make(engine, 3), settings_of) == generate(host, make(host, 3), settings_of)
