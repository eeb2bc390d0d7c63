"""ONNX Runtime's own CUDA provider on a machine without a GPU, over stub CUDA libraries.

The provider of onnxruntime-gpu places, fuses and partitions nodes as on a GPU of compute capability 9.0, and
its allocations and copies are real, in the host's memory. Kernels do nothing, so no number that it returns
means anything: what is tested is which graphs open, which nodes run where, and what is copied.

`rig_environment()` makes the stubs in build/rig the first time that a test asks for them (pip fetches 3 MB of
CUDA's headers; a C compiler builds the rest) and skips the test where that cannot be done. Sessions are
opened in processes with that environment, because the stubs would be a GPU for all other tests.
SMELT_CUDA_RIG names another folder; `off` makes none.

As a script it reads requests as JSON on standard input and prints the answers; see `open_graphs`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes.rig_folder import NoRigError, install, make_rig, rig_base

HEADERS = ("nvidia-cuda-runtime==13.*", "nvidia-cuda-crt==13.*")
_SOURCES = {"libcudart.so.13": "cuda_runtime_stub.c", "libcuda.so.1": "cuda_driver_stub.c"}
# Libraries whose symbols have no versions, by the beginning of their functions. ONNX Runtime lists the
# kernels of its providers only if each of them loads, TensorRT's too.
_UNVERSIONED = {
    "libcuda.so.1": "cu[A-Z]",
    "libcurand.so.10": "curand",
    "libnvinfer.so.10": "createInfer|getInfer|getPlugin",
    "libnvonnxparser.so.10": "createNvOnnx",
}
# Raised whenever the folder is put together in another way.
_LAYOUT = 2
_ROOT = Path(__file__).resolve().parents[3]
# the newest that is exported
NEWEST_OPSET = 23
_NO_END = 2**31 - 1
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


class OpenedGraph(NamedTuple):
    """A graph after the provider's optimizations.

    error: why no session opens it, or None. operators: their numbers. host_copies: nodes that copy between
    host and device in each run. on_cpu: operators of nodes that the CPU provider runs.
    """

    error: str | None
    operators: dict[str, int]
    host_copies: int
    on_cpu: dict[str, int]

    @property
    def nodes(self) -> int:
        """The number of nodes that are run."""
        return sum(self.operators.values())


def rig_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that has the stubs; skip the test with the reason.

    Args:
        variables: of this process, such as STUB_GPUS, the number of devices.
    """
    import pytest

    try:
        return environment() | variables
    except NoRigError as error:
        pytest.skip(f"no CUDA provider over stub libraries here: {error}")


def environment() -> dict[str, str]:
    """Return the environment of a process that has the stubs; make them if need be.

    Raises:
        NoRigError: no Linux, compiler, headers or onnxruntime-gpu.
    """
    _provider_libraries()
    name = f"cuda-{importlib.metadata.version('onnxruntime-gpu')}-{_LAYOUT}"
    rig = make_rig(rig_base("SMELT_CUDA_RIG"), name, _make)
    paths = os.pathsep.join(filter(None, (str(rig), os.environ.get("LD_LIBRARY_PATH"))))
    return os.environ | {"LD_LIBRARY_PATH": paths, "OMP_NUM_THREADS": "1"}


def _provider_libraries() -> list[Path]:
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin or "").parent if spec else Path()
    paths = [folder / "capi" / f"libonnxruntime_providers_{name}.so" for name in ("cuda", "tensorrt")]
    if not all(path.is_file() for path in paths):
        raise NoRigError("onnxruntime-gpu is not installed")
    return paths


def _make(folder: Path, compiler: str) -> None:
    """Build a stub of each library that the providers are linked with."""
    install(folder / "site", HEADERS)
    header = next((folder / "site").rglob("driver_types.h"), None)
    if header is None:
        raise NoRigError(f"no driver_types.h in {HEADERS[0]}")
    for library, names in _wanted_symbols().items():
        source = Path(__file__).with_name(_SOURCES[library]) if library in _SOURCES else None
        text = source.read_text() if source else "#include <stdlib.h>\n"
        text += "".join(_stub(library, name) for name in sorted(names) if f"{name}(" not in text)
        (folder / f"{library}.c").write_text(text + "int stub_of_cuda = 1;\n")
        (folder / f"{library}.map").write_text(f"{library} {{ global: *; }};\n")
        versions = [] if library in _UNVERSIONED else [f"-Wl,--version-script={folder / f'{library}.map'}"]
        command = [
            compiler, "-w", "-shared", "-fPIC", "-o", folder / library, folder / f"{library}.c",
            f"-Wl,-soname,{library}", "-I", header.parent, *versions,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def _wanted_symbols() -> dict[str, set[str]]:
    """Return the functions of NVIDIA's libraries that the providers import, by library."""
    command = ["nm", "-D", "--undefined-only", *map(str, _provider_libraries())]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted: dict[str, set[str]] = defaultdict(set, {library: set() for library in _UNVERSIONED})
    for name, library in re.findall(r"^\s+[Uw]\s+(\w+)(?:@+(\S+))?$", symbols, re.MULTILINE):
        owners = [library] if library else [n for n, start in _UNVERSIONED.items() if re.match(start, name)]
        for owner in owners:
            if owner.startswith(("libcu", "libnv")):
                wanted[owner].add(name)
    for path in _provider_libraries():  # cuDNN's are looked up by name when a kernel needs them
        names = re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", path.read_bytes())
        wanted["libcudnn.so.9"].update(name.decode() for name in names)
    return wanted


def _stub(library: str, name: str) -> str:
    if "GetStatus" in name or name.endswith("String"):
        return f'const char *{name}(int code) {{ return "stub"; }}\n'
    if library.startswith(("libcublas", "libcudnn")) and "Create" in name:
        return f"int {name}(void **handle) {{ *handle = malloc(4096); return 0; }}\n"
    return f"int {name}() {{ return 0; }}\n"


def open_graphs(paths: Iterable[Path]) -> list[OpenedGraph]:
    """Open graphs with smelt's own session in one process on the rig."""
    return [OpenedGraph(**answer) for answer in run_in_rig([{"onnx": str(path)} for path in paths])]


def run_in_rig(requests: Any, module: str = __name__, **variables: str) -> Any:
    """Run `python -m module` on the rig with `requests` as JSON; return what it prints last.

    Args:
        requests: its standard input.
        module: to run.
        variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(requests),
        env=rig_environment(**variables),
        cwd=_ROOT,
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def copied_bytes() -> dict[str, int]:
    """Return the bytes copied since the last call, in a process on the rig."""
    counts = (ctypes.c_longlong * 10)()
    ctypes.CDLL("libcudart.so.13").stub_copies(counts)
    return {"to device": counts[3], "to host": counts[5]}


def graph_counts() -> dict[str, int]:
    """Return how many CUDA graphs were captured and launched, in a process on the rig."""
    counts = (ctypes.c_longlong * 2)()
    ctypes.CDLL("libcudart.so.13").stub_graphs(counts)
    return {"captures": counts[0], "launches": counts[1]}


def _open(path: Path) -> dict[str, Any]:
    """Return the fields of an OpenedGraph."""
    import onnx

    from smelt.core.errors import InputError
    from smelt.runtimes import onnx_session

    real_options = onnx_session.session_options
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"

        def options_with_file(*arguments: Any) -> Any:
            options = real_options(*arguments)
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            return options

        onnx_session.session_options = options_with_file
        try:
            session = onnx_session.open_onnx_session(path, device="cuda")
        except InputError as error:
            return {"error": str(error), "operators": {}, "host_copies": 0, "on_cpu": {}}
        finally:
            onnx_session.session_options = real_options
        nodes = onnx.load(optimized, load_external_data=False).graph.node
        parts = session.get_provider_graph_assignment_info()
    operators = Counter(node.op_type for node in nodes)
    copies = sum(count for name, count in operators.items() if name.startswith("Memcpy"))
    cpu_parts = [part for part in parts if part.ep_name == "CPUExecutionProvider"]
    on_cpu = Counter(node.op_type for part in cpu_parts for node in part.get_nodes())
    return {"error": None, "operators": operators, "host_copies": copies, "on_cpu": on_cpu}


def list_kernels() -> dict[str, dict[str, int]]:
    """Return what the CUDA provider has kernels for, on the rig: `bf16`, and `older` of ONNX's own domain.

    Returns:
        bf16: operators with a bfloat16 kernel, of ONNX's own domain and of com.microsoft, which share no
        name; the first opset of the newest kernel's range without a gap. older: operators that have kernels,
        but not in the newest version up to NEWEST_OPSET; the opset of that version.
    """
    import onnx
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    starts: dict[str, dict[int, int]] = defaultdict(dict)
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for kernel in get_all_opkernel_def():
        if kernel.provider != PROVIDERS[0]:
            continue
        types = {name for names in kernel.type_constraints.values() for name in names}
        first, last = kernel.version_range
        if kernel.domain in ("", "com.microsoft") and "tensor(bfloat16)" in types:
            starts[kernel.op_name][last] = first
        if kernel.domain == "":
            ranges[kernel.op_name].append((first, last))
    names = [name for name in ranges if onnx.defs.has(name, NEWEST_OPSET)]
    versions = {name: onnx.defs.get_schema(name, NEWEST_OPSET) for name in names}
    older = {
        name: schema.since_version
        for name, schema in versions.items()
        if not schema.deprecated
        # a range without an end is of the operator's version at its start
        and not any(
            schema.since_version == first or (last < _NO_END and first <= schema.since_version <= last)
            for first, last in ranges[name]
        )
    }
    return {
        "bf16": {name: _first_without_gap(ends) for name, ends in sorted(starts.items())},
        "older": dict(sorted(older.items())),
    }


def _first_without_gap(starts: dict[int, int]) -> int:
    """Return the start of the last range and of those that end where it starts; `starts` by their ends."""
    first = starts[max(starts)]
    while first - 1 in starts:
        first = starts[first - 1]
    return first


def _main() -> None:
    if sys.argv[1:] == ["--kernels"]:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name], input='[{"kernels": true}]', env=environment(), text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        print(json.loads(done.stdout)[0])
        return
    requests = json.load(sys.stdin)
    answers = [_open(Path(r["onnx"])) if "onnx" in r else list_kernels() for r in requests]
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
