import mmap
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.runtimes.onnx_session import (
    full_huge_pages,
    lacks_vnni,
    open_onnx_session,
    resident_addresses,
    use_huge_pages,
)


@pytest.mark.parametrize(("flags", "lacking"), [
    ("fpu sse4_2 avx2", True), ("avx2 avx512f avx512_vnni", False), ("avx2 avx_vnni", False),
    ("asimd", False),
])  # fmt: skip
def test_exact_int8_kernels_are_requested_only_without_vnni(tmp_path, flags, lacking):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t: {flags}\n")
    assert lacks_vnni(tmp_path / "cpuinfo") is lacking
    assert lacks_vnni(tmp_path / "absent") is False


def test_int8_weight_of_two_layers_opens_on_every_processor(tmp_path):
    """Without VNNI, ONNX Runtime 1.31 itself cannot open such a graph with exact products."""
    random = np.random.default_rng(0)
    weight = random.integers(-128, 128, (16, 16)).astype(np.int8)
    nodes = []
    for layer in ("a", "b"):
        inputs, codes, scale, zero = (f"{name}_{layer}" for name in ("x", "codes", "scale", "zero"))
        nodes += [
            helper.make_node("DynamicQuantizeLinear", [inputs], [codes, scale, zero]),
            helper.make_node("MatMulInteger", [codes, "w", zero], [f"sums_{layer}"]),
            helper.make_node("Cast", [f"sums_{layer}"], [f"floats_{layer}"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [scale, "w_scale"], [f"scales_{layer}"]),
            helper.make_node("Mul", [f"floats_{layer}", f"scales_{layer}"], [f"y_{layer}"]),
        ]
    ends = [
        [helper.make_tensor_value_info(f"{name}_{layer}", TensorProto.FLOAT, ["N", 16]) for layer in "ab"]
        for name in ("x", "y")
    ]
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32(0.5), "w_scale")]
    graph = helper.make_graph(nodes, "shared", *ends, constants)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    x = random.integers(0, 256, (4, 16)).astype(np.float32)
    x[0, :2] = 0, 255  # the scale is 1
    outputs = open_onnx_session(tmp_path / "m.onnx", threads=1).run(None, {"x_a": x, "x_b": x})
    expected = x.astype(np.int32) @ weight.astype(np.int32) * np.float32(0.5)
    for output in outputs:
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize(("name", "has_encoder", "uses_patterns"), [
    ("generate", True, False), ("encoder_model", True, False), ("generate", False, True),
    ("generate_beams", True, True), ("decoder_with_past_model", True, True),
])  # fmt: skip
def test_memory_patterns_are_off_where_sizes_depend_on_the_mask(tmp_path, name, has_encoder, uses_patterns):
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for file in {name, *(["encoder_model"] if has_encoder else [])}:
        onnx.save(model, tmp_path / f"{file}.onnx")
    session = open_onnx_session(tmp_path / f"{name}.onnx", threads=1)
    assert session.get_session_options().enable_mem_pattern is uses_patterns


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _SETTING.is_file() or "[madvise]" not in _SETTING.read_text(),
    reason="huge pages are off, or Linux uses them unasked",
)
def test_touched_memory_has_the_same_values_in_huge_pages():
    block = mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_DONTDUMP)  # Linux joins no memory of other flags to it
    values = np.frombuffer(block, dtype=np.int64)
    start, half = values.ctypes.data, 16 * 2**20
    block[:half] = np.arange(half // 8).tobytes()
    block[half + half // 2] = 1  # the other half is untouched but for one page
    addresses = resident_addresses(start, start + 2 * half)
    assert len(addresses) in (7, 8)
    assert all(start <= address <= start + half - 2**21 for address in addresses)
    use_huge_pages(besides=full_huge_pages())  # moves what other threads touch meanwhile
    assert _sizes_kb(start)[1] == 0
    use_huge_pages()
    resident_kb, huge_kb = _sizes_kb(start)
    if huge_kb == 0:
        pytest.skip("before Linux 6.1, or no free memory is contiguous")
    assert huge_kb <= 2048 * len(addresses)
    assert resident_kb < 2048 * len(addresses) + half // 1024
    np.testing.assert_array_equal(values[: half // 8], np.arange(half // 8))


def _sizes_kb(address):
    """Return the resident kB of the memory block at `address`, and how many of them are in huge pages."""
    smaps = Path("/proc/self/smaps").read_text()
    (sizes,) = [
        (int(match[3]), int(match[4]))
        for match in _SMAPS_ENTRY.finditer(smaps)
        if int(match[1], 16) <= address < int(match[2], 16)
    ]
    return sizes


_SMAPS_ENTRY = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:\w+: .*\n)*?Rss: +(\d+) kB\n(?:\w+: .*\n)*?AnonHugePages: +(\d+) kB",
    re.MULTILINE,
)
