"""The type of stored weights is read from headers and details alone."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save_file

from smelt.core.artifact import ADAPTER_FOLDER, MASTER_WEIGHTS_FILE, FileRecord
from smelt.evaluate.environment import float_dtype
from tests.support.models import tiny

pytestmark = pytest.mark.quick


def _artifact(folder, tensors=None, **changes):
    artifact = tiny.as_artifact(folder, **changes.pop("details", {}))
    files = {}
    for file_index, arrays in enumerate(tensors or []):
        save_file(arrays, folder / f"{file_index}.safetensors")
        files[f"{file_index}.safetensors"] = FileRecord(sha256="0" * 64, size_bytes=1)
    return dataclasses.replace(
        artifact, manifest=artifact.manifest.model_copy(update={"files": files, **changes})
    )


def test_dtype_is_most_frequent_float_dtype_of_all_files(tmp_path):
    half, full_precision = (
        {"a": np.ones(5, np.float16)},
        {"b": np.ones(3, np.float32), "codes": np.ones(99, np.uint8)},
    )
    assert float_dtype(_artifact(tmp_path, [half, full_precision])) == "float16"
    assert float_dtype(_artifact(tmp_path, [full_precision])) == "float32"
    assert float_dtype(_artifact(tmp_path, [{"codes": np.ones(9, np.uint8)}])) is None


def test_quantization_scales_are_not_counted_as_weights(tmp_path):
    codes = {"q.matrix.codes": np.ones(99, np.uint8), "q.matrix.zeros": np.ones(9, np.uint8)}
    scales = {"q.matrix.scales": np.ones(9, np.float16)}  # a shard may end between the two
    assert float_dtype(_artifact(tmp_path, [codes, scales])) is None
    bias = {"q.bias": np.ones(2, np.float32), "norm.scales": np.ones(2, np.float32)}
    assert float_dtype(_artifact(tmp_path, [codes, scales | bias])) == "float32"
    halves = {"norm.scales": np.ones(3, np.float16), "q.bias": np.ones(2, np.float32)}
    assert float_dtype(_artifact(tmp_path, [codes, scales | halves])) == "float16"


def test_file_outside_manifest_is_ignored(tmp_path):
    save_file({"x": np.ones(999, np.float16)}, tmp_path / "stray.safetensors")
    assert float_dtype(_artifact(tmp_path, [{"b": np.ones(3, np.float32)}])) == "float32"


@pytest.mark.parametrize("other", [MASTER_WEIGHTS_FILE, f"{ADAPTER_FOLDER}/adapter_model.safetensors"])
def test_master_weights_and_adapters_are_not_counted_as_weights(tmp_path, other):
    artifact = _artifact(tmp_path, [{"b": np.ones(3, np.float16)}])
    (tmp_path / other).parent.mkdir(exist_ok=True)
    save_file({"b": np.ones(999, np.float32)}, tmp_path / other)
    files = artifact.manifest.files | {other: FileRecord(sha256="0" * 64, size_bytes=1)}
    with_others = dataclasses.replace(
        artifact, manifest=artifact.manifest.model_copy(update={"files": files})
    )
    assert float_dtype(with_others) == "float16"
    assert with_others.size_bytes == artifact.size_bytes


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", "float32"), ("fp16", "float16"), (None, None)])
def test_graph_artifact_reports_its_own_dtype(tmp_path, dtype, expected):
    assert float_dtype(_artifact(tmp_path, format="onnx", details={"dtype": dtype})) == expected
