"""What pytest does otherwise in this project: the quick part, failures in few lines, processor time by room.

Loaded by `-p tests.support.pytest_smelt` in pyproject.toml; a conftest.py would shadow other packages'
(see CONTRIBUTING).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler

from tests.support import blank_figures, export_speed, shared_folders
from tests.support.processes import forked_workers

# where they are imported from, their assertions show values as those of tests do
pytest.register_assert_rewrite(
    "tests.support.expected_errors",
    "tests.support.harness",
    "tests.support.models.init_models",
    "tests.support.standins.invalid_recipes",
    "tests.support.standins.stage_stand_ins",
    "tests.support.usability_checks",
    "tests.support.weight_sharing",
)

MAX_FAILURE_LINES = 80
"""A failure of more lines is told again: the project's own lines alone, and of messages both ends."""
EDGE_LINES, MAX_LINE_WIDTH = 7, 240
MAX_OUTPUT_LINES = 20
STDERR = 2  # its file descriptor
CPU_TIME_PROPERTY = "processor_s"
CAPTURE_MODULE = LogCaptureHandler.__module__
SLOWEST_FILES = (
    "pipeline/execute/test_ray_cluster.py",
    "training/test_processes.py",
    "pipeline/execute/test_training_processes.py",
    "pipeline/faults/test_fuzz.py",
    "pipeline/whole/test_matrix.py",
    "export/parity/test_check_parity.py",
    "house/test_golden.py",
    "pipeline/whole/test_pairs.py",
    "export/package/standalone/test_standalone_format.py",
    "api/test_loaded_model.py",
    "export/test_openvino_target.py",
    "pipeline/faults/test_safe_path.py",
    "pipeline/search/test_shrink.py",
    "house/test_same_bytes.py",
    "export/test_half_graphs.py",
    "export/tensorrt/test_families.py",
    "pipeline/whole/test_run_tensorrt.py",
    "export/parity/test_operator_checks.py",
    "export/test_choose_operators.py",
    "pipeline/whole/test_text_generation.py",
    "pipeline/whole/test_sentences.py",
    "pipeline/faults/test_kill.py",
    "export/onnx_models/test_drawn.py",
    "training/test_resume.py",
    "export/generation_graph/test_compose_graph.py",
    "house/test_imports.py",
    "pipeline/inspect/test_init_stages.py",
    "quantization/schemes/test_any_batch.py",
    "export/tensorrt/test_int4.py",
    "compress/test_what_follows.py",
    "runtimes/test_openvino_backend.py",
    "export/package/test_triton_format.py",
    "compress/quantize/test_convolution_rounding.py",
    "api/test_python.py",
    "compress/quantize/test_gptq_stage.py",
    "pipeline/whole/test_foreign_generators.py",
)
"""The files that take most (`--processor-time` shows them): they begin first, or one of them ends last."""
EXACT_EXPORTS = ("[onnx marian]", "[onnx gpt2]", "[onnx bert, int4]")
"""The golden cases that torch exports as it does elsewhere."""
START_TIME = pytest.StashKey[float]()
frozen_modules = [0]
CPU_TIME_BY_FOLDER: Counter[str] = Counter()
CPU_TIME_BY_FILE: Counter[str] = Counter()


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--processor-time",
        action="store_true",
        help="show the processor time of each room and of the files that take most (children included)",
    )


def pytest_configure(config: Any) -> None:
    """Make the folder of what is made once; spare torch's compiler what no test needs."""
    if shared_folders.FOLDER_VARIABLE not in os.environ:  # or this is a worker of a run that has one
        os.environ[shared_folders.FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="smelt-tests-")
        config.add_cleanup(remove_shared_folder)
    os.fsync = lambda descriptor: None  # a run of the tests need not survive the loss of power
    # torch's memory of what operators give pays from some layers on; models of tests have two
    os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would begin with the files that hold most tests
        config.option.maxworkerrestart = "0"  # xdist waits forever for a late replacement
    atexit.register(silence_native_code)
    trace = logging.getLogger("torch.__trace")
    add = trace.addHandler
    # all of pytest's, the one that writes to os.devnull too: for any handler torch writes each step down
    trace.addHandler = lambda handler: None if type(handler).__module__ == CAPTURE_MODULE else add(handler)  # type: ignore[method-assign]


def silence_native_code() -> None:
    """Discard what libraries write while Python frees its objects; onnxsim lists those that it leaves."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)


def remove_shared_folder() -> None:
    shutil.rmtree(os.environ.pop(shared_folders.FOLDER_VARIABLE), ignore_errors=True)


# the quick part


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """For `-m quick`, ignore files without a quick test: importing them would take longer than the tests."""
    if config.getoption("markexpr") != "quick" or collection_path.suffix != ".py":
        return None
    return True if "mark.quick" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Begin with the slowest files, then those with most tests."""
    place_of = {f"tests/{file}": index for index, file in enumerate(SLOWEST_FILES)}
    num_items = Counter(file_of(item) for item in items)
    items.sort(key=lambda item: (place_of.get(file_of(item), len(SLOWEST_FILES)), -num_items[file_of(item)]))


def file_of(item: Any) -> str:
    return str(item.nodeid).partition("::")[0]


# memory


def pytest_collection_finish() -> None:
    """Collect garbage seldom."""
    gc.set_threshold(20_000, 20, 20)


def freeze_imported_modules() -> None:
    """Let the collections of garbage pass over what importing torch and transformers made.

    Each walks through a million objects that stay (0.2 s); the trainer of transformers asks for some in every
    training.
    """
    if len(sys.modules) > frozen_modules[0] + 50:
        gc.collect()
        gc.freeze()
        frozen_modules[0] = len(sys.modules)
    # the trainer collects garbage at its beginning, to free the memory of a GPU
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.clear_device_cache = lambda garbage_collection=False: None  # type: ignore[attr-defined]


# failures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Tell long failures in few lines (`--tb=long` tells all), and keep the processor time that was spent."""
    report = yield
    now = processor_seconds()
    report.user_properties.append((CPU_TIME_PROPERTY, now - item.stash[START_TIME]))
    item.stash[START_TIME] = now
    if report.failed and call.excinfo is not None and item.config.option.tbstyle == "auto":
        if len(str(report.longrepr).splitlines()) > MAX_FAILURE_LINES:
            report.longrepr = shorten_failure(call.excinfo, item.config.rootpath)
        report.sections = [(name, last_lines(text)) for name, text in report.sections]
    return report


def shorten_failure(failure: Any, root: Path) -> str:
    """Return a failure without the frames of other packages; long messages lose their middle."""

    def own_frames(excinfo: Any) -> Any:
        entries = excinfo.traceback.filter(lambda entry: is_project_file(Path(entry.path), root))
        return entries or excinfo.traceback[-1:]

    text = str(failure.getrepr(style="short", tbfilter=own_frames, chain=True))
    lines: list[str] = []
    for message, block in itertools.groupby(text.splitlines(), lambda line: line.startswith("E ")):
        kept_lines = [line[:MAX_LINE_WIDTH] for line in block if line[1:].strip()]
        lines += drop_middle_lines(kept_lines) if message else kept_lines
    return "\n".join(
        [
            failure.exconly().splitlines()[0],
            *lines,
            "",
            "(frames of other packages are left out; --tb=long shows them)",
        ]
    )


def is_project_file(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and "site-packages" not in path.parts


def drop_middle_lines(lines: list[str], ends: int = EDGE_LINES) -> list[str]:
    """Return the first and the last `ends` lines."""
    if len(lines) <= 2 * ends:
        return lines
    return [*lines[:ends], f"E   ... {len(lines) - 2 * ends} lines ...", *lines[-ends:]]


def last_lines(text: str, most: int = MAX_OUTPUT_LINES) -> str:
    """Return the last lines of what was printed or logged."""
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([f"({len(lines) - most} lines more)", *lines[-most:]])


# processor time


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
    """Begin to count."""
    freeze_imported_modules()
    export_speed.speed_up_exports(exact=item.nodeid.endswith(EXACT_EXPORTS))
    blank_figures.leave_figures_blank(item.nodeid)
    forked_workers.fork_isolated_processes(item.nodeid)
    item.stash[START_TIME] = processor_seconds()
    return (yield)


def processor_seconds() -> float:
    """Return what this process and its children that have ended took."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pytest_runtest_logreport(report: Any) -> None:
    """Add up what each part of a test took, wherever it ran."""
    file = report.nodeid.partition("::")[0]
    for name, seconds in report.user_properties:
        if name == CPU_TIME_PROPERTY:
            CPU_TIME_BY_FILE[file] += seconds
            CPU_TIME_BY_FOLDER["/".join(file.split("/")[:-1])] += seconds


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Show it, where it was asked for."""
    if not config.getoption("--processor-time"):
        return
    terminalreporter.section("processor time, s")
    for kind in (CPU_TIME_BY_FOLDER, CPU_TIME_BY_FILE):
        for name, seconds in kind.most_common(60):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line(f"{sum(kind.values()):8.1f}  together\n")
