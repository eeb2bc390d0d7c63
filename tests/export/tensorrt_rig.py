"""Builds real engines on a machine without a GPU, for tests of the build; run as a process of its own.

TensorRT's Python bindings (tensorrt-cu13-bindings) are put on TensorRT for RTX (bundled in
onnxruntime-ep-nv-tensorrt-rtx-cu13), which builds ahead of time on a CPU. The two are of different
versions, so this is a test rig and nothing else: flags may mean other things, and nothing can be run.

    pip install --no-deps --target RIG tensorrt-cu13-bindings onnxruntime-ep-nv-tensorrt-rtx-cu13
    SMELT_TENSORRT_RIG=RIG pytest tests/export

As a script: reads {"onnx": path, "shapes": {...}} on standard input, prints {"bytes", "warnings",
"progress"} or {"error"}.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

LINKS = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.*",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.*",
}
STUB = "int initLibNvInferPlugins(void* logger, const char* name) { return 1; }\n"


def assemble(site: Path, folder: Path) -> dict[str, str]:
    """Make links, the plugin stub and the package `tensorrt` in `folder`; return the environment."""
    libraries = site / "onnxruntime_ep_nv_tensorrt_rtx"
    for wanted, pattern in LINKS.items():
        (folder / wanted).symlink_to(next(libraries.glob(pattern)))
    source = folder / "stub.c"
    source.write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvinfer_plugin.so.11", source], check=True)
    package = folder / "tensorrt"
    package.mkdir()
    text = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    (package / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(folder), str(site)])
    return os.environ | {"LD_LIBRARY_PATH": f"{folder}{os.pathsep}{libraries}", "PYTHONPATH": paths}


def main() -> None:
    from smelt.core.errors import RunError
    from smelt.export.tensorrt_build import BuildOptions, build_engine
    from smelt.runtime.tensorrt_module import import_tensorrt

    request = json.load(sys.stdin)
    cache = Path(request["timing_cache"]) if request.get("timing_cache") else None
    options = BuildOptions(256, 1, True, "none", False, cache)
    steps: list[str] = []

    def progress(done: int, total: int, note: str = "") -> None:
        steps.append(note)

    try:
        plan, warnings = build_engine(
            import_tensorrt(), Path(request["onnx"]), request["shapes"], options, progress
        )
    except RunError as error:
        answer = {"error": str(error)}
    else:
        answer = {"bytes": len(plan), "warnings": warnings, "progress": len(steps)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
