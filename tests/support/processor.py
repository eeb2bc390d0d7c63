"""What this processor's int8 products can do, for tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.runtime.backends.onnx_session import lacks_vnni

LACKS_VNNI = lacks_vnni(Path("/proc/cpuinfo"))
# docs/quantize.md says what that means for a user
needs_vnni = pytest.mark.skipif(
    LACKS_VNNI,
    reason="without VNNI ONNX Runtime 1.31 and OpenVINO 2026 add pairs of int8 products in 16 bits, and ONNX"
    " Runtime's exact mode opens no graph in which two products share a matrix",
)
