from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from expected_errors import raises_code
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from transformers import MarianConfig, MarianMTModel

from smelt.core.artifact import Artifact, FileRecord, Manifest
from smelt.core.errors import InputError
from smelt.evaluate.footprint import artifact_parameters, artifact_size, onnx_parameters
from smelt.quantization.schemes.registry import quantized_operators

pytestmark = pytest.mark.quick


def artifact(path: Path, kind: str, **details: Any) -> Artifact:
    files = {p.name: FileRecord(sha256="0", size_bytes=p.stat().st_size) for p in path.iterdir()}
    manifest = Manifest(
        key="a" * 64,
        format=kind,
        task="translation",
        stage="x",
        settings={},
        seed=0,
        parent=None,
        versions={},
        files=files,
        details=details,
    )
    return Artifact(path, manifest)


def test_torch_count_equals_the_model_s_own(tmp_path: Path) -> None:
    config = MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=8,
        pad_token_id=63,
        decoder_start_token_id=63,
    )
    model = MarianMTModel(config)
    model.save_pretrained(tmp_path)
    learnt = sum(p.numel() for n, p in model.named_parameters() if "embed_positions" not in n)
    # transformers keeps the (zero) bias of the logits as a buffer in the file
    assert artifact_parameters(artifact(tmp_path, "torch")) == learnt + model.final_logits_bias.numel()


def test_recorded_count_wins_and_engines_have_no_other(tmp_path: Path) -> None:
    (tmp_path / "model.plan").write_bytes(b"x" * 10)
    assert artifact_size(artifact(tmp_path, "tensorrt", parameters=7)) == {"parameters": 7, "size_bytes": 10}
    assert artifact_parameters(artifact(tmp_path, "tensorrt")) is None


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 64])
def test_damaged_safetensors_is_an_input_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    with raises_code("damaged-weights", InputError):
        artifact_parameters(artifact(tmp_path, "torch"))


def test_a_shard_is_counted_from_its_header_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: -4 * 22])  # the values are gone, the header is not
    assert artifact_parameters(artifact(tmp_path, "torch")) == 22


def _write(path: Path, weights: dict[str, np.ndarray[Any, Any]], external: bool = False) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "bias"], ["y"]),
    ]
    initializers = [numpy_helper.from_array(v, n) for n, v in weights.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], initializers))
    onnx.save(model, path, save_as_external_data=external, location=path.name + ".data", size_threshold=0)


@pytest.mark.parametrize("external", [False, True])
def test_onnx_counts_weights_once_and_no_scales_or_shapes(tmp_path: Path, external: bool) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "codes": rng.integers(-100, 100, (16, 8), dtype=np.int8),
        "scale": np.array(0.1, np.float32),
        "zero": np.array(0, np.int8),
        "bias": rng.random(8, dtype=np.float32),
        "shape": np.array([1, -1], np.int64),
    }
    _write(tmp_path / "encoder_model.onnx", weights, external)
    assert onnx_parameters(tmp_path) == 16 * 8 + 8
    _write(tmp_path / "decoder_with_past_model.onnx", weights | {"bias": np.ones(8, np.float32)}, external)
    assert onnx_parameters(tmp_path) == 16 * 8 + 8 + 8, "the codes are the same, the bias is another"


@pytest.mark.parametrize(("operator", "places"), quantized_operators().items())
def test_scales_and_zero_points_of_our_schemes_are_not_counted(
    tmp_path: Path, operator: str, places: tuple[int, ...]
) -> None:
    names = ["x", "codes", *(f"helper{place}" for place in places)]
    nodes = [helper.make_node(operator, names, ["y"], domain="com.microsoft")]
    sizes = {"codes": 100} | {f"helper{place}": 200 for place in places}
    arrays = [
        numpy_helper.from_array(np.full(size, i, np.float32), n) for i, (n, size) in enumerate(sizes.items())
    ]
    graph = helper.make_graph(nodes, "g", [], [], arrays)
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    assert onnx_parameters(tmp_path) == 100


def test_onnx_file_that_is_none_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff\xff")
    with raises_code("unreadable-file", InputError):
        onnx_parameters(tmp_path)
