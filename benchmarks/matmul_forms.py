"""CPU time of a matrix multiplication in each form that ONNX Runtime has.

    python benchmarks/matmul_forms.py 256x256 ...

A graph holds many products of one shape with different weights, so that codes come from where they come from
in a model, not from the nearest cache. Sessions of all forms alternate; printed are µs a product (median of
the rounds, and half of their range in per cent with --spread), one thread, random weights. A form is fp32,
dynamic (one scale a column of weights), dynamic/tensor (one for all), dynamic/zero (columns have zero points
too), or bits/group as in 4b/64; 2b/64+lut multiplies codes by tables (session key mlas.use_lut_gemm).
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

MATMUL_FORMS = ("fp32", "dynamic", "8b/32", "8b/64", "8b/128", "4b/32", "4b/64", "4b/128")
_MIN_BYTES = 4_000_000  # of 8-bit codes that a graph holds, or one product
_MAX_LAYERS = 32
_TABLES = "+lut"


def matmul_constants(
    form: str, width: int, outputs: int, seed: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the operator of a product [width] x [width, outputs], its constants and attributes."""
    numbers = np.random.default_rng(seed)
    if form == "fp32":
        return "MatMul", {"w": numbers.standard_normal((width, outputs), np.float32)}, {}
    if form.startswith("dynamic"):
        codes = numbers.integers(-127, 128, (width, outputs)).astype(np.int8)
        scales = np.full(() if form == "dynamic/tensor" else outputs, 0.01, np.float32)
        zeros = {"z": numbers.integers(-9, 10, outputs).astype(np.int8)} if form == "dynamic/zero" else {}
        return "DynamicQuantizeMatMul", {"w": codes, "s": scales, **zeros}, {}
    bits, group = int(form[0]), int(form.split("/")[1].removesuffix(_TABLES))
    groups = -(-width // group)
    codes = numbers.integers(0, 256, (outputs, groups, group * bits // 8)).astype(np.uint8)
    scales = np.full((outputs, groups), 0.01, np.float32)
    layout = {"K": width, "N": outputs, "bits": bits, "block_size": group, "accuracy_level": 4}
    return "MatMulNBits", {"w": codes, "s": scales}, layout


def session(form: str, width: int, outputs: int) -> tuple[Any, int]:
    """Return a session of products on one input, and their number."""
    count = max(1, min(_MAX_LAYERS, _MIN_BYTES // (width * outputs)))
    nodes, held = [], []
    for at in range(count):
        operator, tensors, attributes = matmul_constants(form, width, outputs, at)
        domain = "" if operator == "MatMul" else "com.microsoft"
        names = [f"{name}{at}" for name in tensors]
        nodes.append(helper.make_node(operator, ["x", *names], [f"y{at}"], domain=domain, **attributes))
        held += [numpy_helper.from_array(t, n) for t, n in zip(tensors.values(), names, strict=True)]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [value("x", TensorProto.FLOAT, ["rows", width])],
        [value(f"y{at}", TensorProto.FLOAT, ["rows", outputs]) for at in range(count)],
        held,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if form.endswith(_TABLES):
        options.add_session_config_entry("mlas.use_lut_gemm", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options), count


def time_sessions(
    sessions: dict[str, tuple[Any, int]], rows: int, width: int, rounds: int
) -> dict[str, list[float]]:
    """Return µs a product by form, of each round."""
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    bindings = {}
    for form, (opened, count) in sessions.items():
        binding = opened.io_binding()
        binding.bind_cpu_input("x", x)
        for at in range(count):
            binding.bind_output(f"y{at}", "cpu")
        bindings[form] = binding
    found: dict[str, list[float]] = {form: [] for form in sessions}
    for number in range(rounds + 1):
        for form, (opened, count) in sessions.items():
            again, took, began = 0, 0.0, time.process_time()
            while took < 0.01:
                opened.run_with_iobinding(bindings[form])
                again, took = again + 1, time.process_time() - began
            if number:
                found[form].append(1e6 * took / (again * count))
    return found


def time_text(times: list[float], spread: bool) -> str:
    """Return the median, and how far the rounds were from it."""
    middle = median(times)
    return f"{middle:.1f}" + (f" ±{50 * (max(times) - min(times)) / middle:.0f} %" if spread else "")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="inputs x outputs, as 256x8000")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forms", nargs="+", default=MATMUL_FORMS)
    parser.add_argument("--spread", action="store_true")
    chosen = parser.parse_args()
    print(f"| product | rows | {' | '.join(chosen.forms)} |\n|:--|{'--:|' * (1 + len(chosen.forms))}")
    for shape in chosen.shapes:
        width, outputs = map(int, shape.split("x"))
        sessions = {form: session(form, width, outputs) for form in chosen.forms}
        for rows in chosen.rows:
            times = time_sessions(sessions, rows, width, chosen.rounds)
            cells = (time_text(of_form, chosen.spread) for of_form in times.values())
            print(f"| {shape} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
