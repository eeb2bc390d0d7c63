import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from smelt.quantization.schemes import int8
from smelt.quantization.schemes.int8 import (
    dynamic_scale_zero_point,
    fake_quantize_dynamic,
    is_int8_matmul_exact,
)
from tests.support.graphs.ort_sessions import ort_session

pytestmark = pytest.mark.quick

CASES = {
    "both signs": torch.linspace(-3.7, 2.2, 97), "positive only": torch.linspace(0.5, 9.0, 33),
    "negative only": torch.linspace(-4.0, -0.25, 41), "zeros": torch.zeros(5),
    "halves round to even": torch.arange(0, 256, dtype=torch.float32) / 2,
}  # fmt: skip


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
def test_values_and_parameters_equal_the_onnx_operator(x):
    session = ort_session(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])],
        [("x", TensorProto.FLOAT)],
        [("y", TensorProto.UINT8), ("s", TensorProto.FLOAT), ("z", TensorProto.UINT8)],
    )
    y, s, z = session.run(None, {"x": x.numpy()})
    scale, zero = dynamic_scale_zero_point(x)
    assert np.allclose(fake_quantize_dynamic(x).numpy(), (y.astype(np.float32) - z) * scale, atol=1e-6)
    assert zero == int(z)
    if x.any():  # of zeros ONNX Runtime gives scale 1 in some versions and 0 in others
        assert float(scale) == pytest.approx(float(s), rel=1e-7)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (5, 1024), (33, 3000), (4, 1)])
@pytest.mark.parametrize("exactly", [True, False])
def test_sums_are_exact_for_any_quantized_weights(rows, inputs, exactly, monkeypatch):
    if not exactly or not is_int8_matmul_exact():
        monkeypatch.setattr(int8, "is_int8_matmul_exact", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=generator)
    codes = torch.randint(-127, 128, (40, inputs), dtype=torch.int8, generator=generator)
    x[0], codes[0] = -128, -127  # the largest sum there can be
    sums = int8.int8_matmul(x, codes)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.long(), x.long() @ codes.long().t())


def test_sums_are_exact_without_int8_instructions():
    """What torch's library does on x86 without VNNI, where it adds pairs of products in 16 bits."""
    code = """
import torch
from smelt.quantization.schemes.int8 import int8_matmul, is_int8_matmul_exact
for rows in (1, 40):
    x = torch.randint(-128, 128, (rows, 300), dtype=torch.int8)
    codes = torch.randint(-127, 128, (50, 300), dtype=torch.int8)
    assert torch.equal(int8_matmul(x, codes).long(), x.long() @ codes.long().t()), is_int8_matmul_exact()
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
