import pytest

from smelt.runtimes.onnx_backend import lacks_vnni


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        ("fpu sse4_2 avx2", True),
        ("avx2 avx512f avx512_vnni", False),
        ("avx2 avx_vnni", False),
        ("asimd", False),
    ],
)
def test_exact_int8_kernels_are_requested_only_without_vnni(tmp_path, flags, lacking):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t: {flags}\n")
    assert lacks_vnni(tmp_path / "cpuinfo") is lacking
    assert lacks_vnni(tmp_path / "absent") is False
