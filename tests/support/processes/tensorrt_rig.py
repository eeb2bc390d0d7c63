"""A real TensorRT builder on a machine without a GPU: packages, links and a stub in a folder.

TensorRT's Python bindings (tensorrt-cu13-bindings) are put on TensorRT for RTX (bundled in
onnxruntime-ep-nv-tensorrt-rtx-cu13), which parses and builds on a CPU. The two are of different
versions, so this is a test rig and nothing else: flags may mean other things, and nothing can be run.

`environment()` makes the rig in build/rig the first time that a test asks for it (pip fetches 142 MB,
307 MB unpacked) and returns the variables under which `import tensorrt` finds it; `require()` skips the
test where that cannot be done. SMELT_TENSORRT_RIG names another folder for it; `off` makes none.

As a script it reads requests as JSON on standard input and prints the answers; see `build`. With `--make` it
only makes the rig.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes.rig_folder import NoRigError, install, make_rig, rig_base

PACKAGES = ("tensorrt-cu13-bindings==11.4.0.106", "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0")
LIBRARIES = "onnxruntime_ep_nv_tensorrt_rtx"
LINKS = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.*",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.*",
}
# The bindings want NVIDIA's plugins, which are not on PyPI; no graph of ours uses one.
STUB = "int initLibNvInferPlugins(void* logger, const char* name) { return 1; }\n"
PACKAGE = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
# Raised whenever the folder is put together in another way.
_LAYOUT = 1


def rig_environment() -> dict[str, str]:
    """Return the rig's environment, or skip the test with the reason."""
    import pytest

    try:
        return environment()
    except NoRigError as error:
        pytest.skip(f"no TensorRT builder here: {error}")


def environment() -> dict[str, str]:
    """Return the environment of a process in which `import tensorrt` finds the rig; make it if need be.

    Raises:
        NoRigError: no Linux, no C compiler, or pip cannot fetch the packages.
    """
    name = "-".join([sys.implementation.cache_tag, *(p.split("==")[1] for p in PACKAGES), str(_LAYOUT)])
    rig = make_rig(rig_base("SMELT_TENSORRT_RIG"), name, _make)
    libraries = [str(rig), str(rig / "site" / LIBRARIES), os.environ.get("LD_LIBRARY_PATH", "")]
    # one thread each: tests run in parallel with others
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": str(rig / "python"),
        "OMP_NUM_THREADS": "1",
    }


def _make(folder: Path, compiler: str) -> None:
    install(folder / "site", PACKAGES)
    assemble(folder, compiler)


def assemble(folder: Path, compiler: str) -> None:
    """Make, next to `folder`/site: the links, the plugin stub, and python/ with `tensorrt`.

    All links are relative, so that the folder may be moved.

    Raises:
        NoRigError: a package does not hold what it should.
    """
    for link_name, pattern in LINKS.items():
        library = next((folder / "site" / LIBRARIES).glob(pattern), None)
        if library is None:
            raise NoRigError(f"no {pattern} in {PACKAGES[1]}")
        (folder / link_name).symlink_to(library.relative_to(folder))
    source = folder / "stub.c"
    source.write_text(STUB)
    stub = folder / "libnvinfer_plugin.so.11"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(stub), str(source)], check=True)
    package = folder / "python" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (folder / "python" / "tensorrt_bindings").symlink_to(Path("..") / "site" / "tensorrt_bindings")


def build(path: Path, shapes: Any, **more: Any) -> dict[str, Any]:
    """Build one engine with smelt's own code, in a process of its own; skip the test where there is no rig.

    Args:
        path: the ONNX file.
        shapes: min, opt and max shape by input name; a list of them for several profiles.
        more: timing_cache (path); plan (a path to write the engine to).

    Returns:
        `bytes` (of the engine), `network` (its summary), `warnings`, `progress` (steps reported), `types` (of
        the first outputs of the network's layers, counted); or `error`, the message.
    """
    return build_all({path: shapes}, **more)[0]


def build_all(graphs: dict[Path, Any], **more: Any) -> list[dict[str, Any]]:
    """Build several engines in one process; see `build`."""
    more = {name: str(value) for name, value in more.items()}
    requests = [{"onnx": str(path), "shapes": shapes, **more} for path, shapes in graphs.items()]
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(requests),
        env=rig_environment(),
        cwd=Path(__file__).resolve().parents[3],
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _run_request(request: dict[str, Any]) -> dict[str, Any]:
    from smelt.core.errors import RunError
    from smelt.core.messages import message_codes, messages_to_json
    from smelt.export.tensorrt.build_engine import BuildOptions, build_engine
    from smelt.runtimes.tensorrt_engine import import_tensorrt

    cache = Path(request["timing_cache"]) if "timing_cache" in request else None
    options = BuildOptions(256, 1, True, "none", False, cache)
    steps: list[str] = []
    profiles = request["shapes"] if isinstance(request["shapes"], list) else [request["shapes"]]

    def progress(done: int, total: int, note: str = "") -> None:
        steps.append(note)

    try:
        built = build_engine(import_tensorrt(), Path(request["onnx"]), profiles, options, progress)
    except RunError as error:
        return {"error": str(error), "codes": message_codes(error.messages) or [error.code]}
    if "plan" in request:
        Path(request["plan"]).write_bytes(built.plan)
    types = _layer_counts(import_tensorrt(), request["onnx"])
    return {
        "bytes": len(built.plan),
        "network": built.network,
        "warnings": messages_to_json(built.warnings),
        "progress": len(steps),
        "types": types,
    }


def _layer_counts(trt: Any, path: str) -> dict[str, int]:
    """Return how many layers of the parsed network give each type."""
    from collections import Counter

    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    trt.OnnxParser(network, logger).parse_from_file(path)
    outputs = [network.get_layer(index).get_output(0) for index in range(network.num_layers)]
    return Counter(out.dtype.name for out in outputs if out is not None)


def _main() -> None:
    if sys.argv[1:] == ["--make"]:
        try:
            environment()
        except NoRigError as error:
            print(f"no TensorRT builder here: {error}")
        return
    print(json.dumps([_run_request(request) for request in json.load(sys.stdin)]))


if __name__ == "__main__":
    _main()
