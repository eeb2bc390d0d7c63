"""When something breaks under a run: it says what, keeps what is done, and goes on where it can."""

import ctypes
import ctypes.util
import errno
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from smelt.compress.finetune import Finetune
from smelt.compress.prune.stage import Prune
from smelt.core.artifact import read_artifact
from smelt.core.errors import RunError
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.execute import run_result
from smelt.pipeline.execute.display import explain_step_error, unexpected_traceback, with_user_paths
from tests.support import harness
from tests.support.models import tiny
from tests.support.processes.fork_server import shared_server

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32}
  - quantize: {}
  - prune: {targets: [ffn], keep_ratio: 0.25, importance: magnitude}
    from: model
    name: other
score: {quality: [accuracy], latency: false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def _run(home, folder, *arguments):
    options = ("--out", folder / "r", "--store", folder / "s")
    return harness.smelt("run", home / "recipe.yaml", *options, *arguments, expect_bug=True)


def _steps(folder):
    report = json.loads((folder / "r" / "report.json").read_text())
    validate_report(report)
    return report, {step["name"]: step for step in report["steps"]}


def _require_whole(folder, count):
    """The store holds `count` artifacts, each with the bytes that it says, and no work in progress."""
    artifacts = list((folder / "s" / "artifacts").iterdir())
    assert len(artifacts) == count
    for path in artifacts:
        read_artifact(path).verify()
    assert not list((folder / "s" / "tmp").iterdir())
    assert not list((folder / "s" / "locks").iterdir())


def _breaking(error):
    def call(self, src, settings, ctx):
        (ctx.out / "model.safetensors").write_bytes(b"half")
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch\nlong story"), ValueError()])
def test_stage_exception_keeps_finished_steps(home, tmp_path, monkeypatch, error):
    monkeypatch.setattr(Finetune, "__call__", _breaking(error))
    result = _run(home, tmp_path)
    assert result.exit_code == 1
    report, steps = _steps(tmp_path)
    assert report["status"] == "error"
    assert [steps[n]["status"] for n in ("model", "prune", "other")] == ["done"] * 3
    assert steps["quantize"]["status"] == "not-reached"
    step_error = steps["finetune"]["error"]
    log = tmp_path / "r" / "log.txt"
    assert step_error["code"] == "unforeseen"
    assert all(
        value in step_error["message"] for value in ("finetune: ", f"{type(error).__name__}:", str(log))
    )
    assert "finetune: error[unforeseen]: " in result.output
    log_text = log.read_text()
    assert "Traceback (most recent call last)" in log_text
    assert "in call" in log_text
    _require_whole(tmp_path, 3)
    monkeypatch.undo()
    assert _run(home, tmp_path).exit_code == 0
    assert [s["status"] for s in _steps(tmp_path)[0]["steps"]] == [
        "cached",
        "cached",
        "done",
        "done",
        "cached",
    ]


def test_exception_while_scoring_is_error_of_its_step(home, tmp_path, monkeypatch):
    from smelt.pipeline.execute.scoring import Scorer

    score = Scorer.score

    def fail(self, artifact, *arguments):
        if artifact.manifest.stage == "quantize":
            raise IndexError("list index out of range")
        return score(self, artifact, *arguments)

    monkeypatch.setattr(Scorer, "score", fail)
    assert _run(home, tmp_path).exit_code == 1
    _, steps = _steps(tmp_path)
    assert steps["other"]["status"] == "done"
    assert steps["quantize"]["error"]["code"] == "unforeseen"
    assert "IndexError: list index out of range" in steps["quantize"]["error"]["message"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"
                     " tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad allocation"),
    ],
)  # fmt: skip
def test_out_of_memory_errors_are_recognized(tmp_path, error):
    explained = explain_step_error(error, "finetune", tmp_path, tmp_path / "log.txt")
    assert explained.code == "out-of-memory"
    assert "batch_size" in str(explained)


def test_torch_allocation_failure_is_reported_as_out_of_memory(tmp_path):
    import torch

    with pytest.raises(RuntimeError) as excinfo:
        torch.empty(2**55, dtype=torch.uint8)
    explained = explain_step_error(excinfo.value, "prune", tmp_path, tmp_path / "log.txt")
    assert explained.code == "out-of-memory"
    assert str(2**55) in str(explained)


@pytest.mark.parametrize("error", [
    OSError(errno.EDQUOT, "in words of another language"),
    RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
])  # fmt: skip
def test_disk_full_error_names_step_file_and_bytes(home, tmp_path, monkeypatch, error):
    monkeypatch.setattr(Finetune, "__call__", _breaking(error))
    assert _run(home, tmp_path).exit_code == 1
    _, steps = _steps(tmp_path)
    assert steps["finetune"]["error"]["code"] == "disk-full"
    message = steps["finetune"]["error"]["message"]
    assert message.startswith("finetune: ")
    assert all(value in message for value in ("out/model.safetensors", " 4 bytes; "))
    assert re.search(r"; [\d,]+ bytes", message)  # that are free
    assert steps["other"]["status"] == "done"
    _require_whole(tmp_path, 3)


def test_disk_full_while_copying_names_target(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", tmp_path / "source", None, tmp_path / "target")
    explained = explain_step_error(error, "onnx", tmp_path, tmp_path / "log.txt")
    assert explained.code == "disk-full"
    assert str(tmp_path / "target") in str(explained)
    assert "source" not in str(explained)


def test_disk_full_without_file_names_last_written_file(tmp_path):
    (tmp_path / "out" / "graphs").mkdir(parents=True)
    for name, mtime in (("z.bin", 10), ("graphs/last.bin", 30), ("a.bin", 20)):
        (tmp_path / "out" / name).touch()
        os.utime(tmp_path / "out" / name, (mtime, mtime))
    os.utime(tmp_path / "out" / "graphs", (40, 40))
    explained = explain_step_error(
        RuntimeError("No space left on device"), "onnx", tmp_path, tmp_path / "log"
    )
    assert f"cannot write {tmp_path / 'out' / 'graphs' / 'last.bin'}" in str(explained)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 700 kB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True) if sys.platform == "linux" else None
    if libc is None or libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=700k"):
        pytest.skip("this process may not mount a file system")
    yield folder
    assert libc.umount2(str(folder).encode(), 2) == 0


def test_full_disk_keeps_finished_steps(home, tmp_path, small_disk):
    """The untouched model (140 kB) and the first step fit; then a file takes the rest."""
    store = ["--store", small_disk / "s"]
    assert _run(home, tmp_path, "--until", "prune", *store).exit_code == 0
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 60_000))
    result = _run(home, tmp_path, "--until", "finetune", *store)
    assert result.exit_code == 1
    error = _steps(tmp_path)[1]["finetune"]["error"]
    assert error["code"] == "disk-full"
    assert str(small_disk / "s" / "tmp") in error["message"]
    assert len(list((small_disk / "s" / "artifacts").iterdir())) == 2
    assert not list((small_disk / "s" / "tmp").iterdir())
    (small_disk / "ballast").unlink()
    assert _run(home, tmp_path, "--until", "finetune", *store).exit_code == 0
    assert [s["status"] for s in _steps(tmp_path)[0]["steps"]] == ["cached", "cached", "done"]


def test_file_size_limit_is_reported(home, tmp_path):
    """RLIMIT_FSIZE, in a process of its own: the kernel refuses the weights while they are written."""
    code, output = shared_server().run(
        "run", home / "recipe.yaml", "--until", "prune", "--quiet", "--out", tmp_path / "r",
        "--store", tmp_path / "s",
        before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))",
    )  # fmt: skip
    assert code == 1, output
    assert "Traceback" not in output
    _, steps = _steps(tmp_path)
    assert steps["model"]["error"]["code"] == "file-too-large"
    assert "model.safetensors" in steps["model"]["error"]["message"]
    _require_whole(tmp_path, 0)


def test_unwritable_report_is_error_without_traceback(home, tmp_path, monkeypatch):

    def full(path, text):
        if path.name.startswith("report"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(path, text)

    original = run_result.write_atomically
    monkeypatch.setattr(run_result, "write_atomically", full)
    result = _run(home, tmp_path, "--until", "prune")
    assert result.exit_code == 1
    assert "[disk-full]: report: " in result.output
    assert f"{tmp_path}/r/report.json" in result.output
    _require_whole(tmp_path, 2)


def test_unwritable_folder_is_explained_to_non_root_user(home):
    """As root, who may write everywhere, through a child that becomes nobody.

    It imports first: nobody may not be allowed to read this Python.
    """
    become_nobody = (
        "import contextlib, os, encodings.unicode_escape\n"
        "from smelt.pipeline.plan.load_plan import load_plan\n"
        "with contextlib.suppress(Exception): load_plan({recipe!r})\n"
        "os.chdir('/')\n"
        "os.environ['HOME'] = '/nonexistent'\n"
        "os.geteuid() or os.setuid(65534)\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        tiny.write_bert(folder / "m")
        tiny.write_labeled(folder / "data.jsonl", 8)
        (folder / "recipe.yaml").write_text(RECIPE)
        for path in (folder / "m").iterdir():
            path.chmod(0o644)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        (folder / "closed").mkdir(mode=0o555)

        def smelt(*arguments):
            recipe = str(folder / "recipe.yaml")
            before = become_nobody.format(recipe=recipe)
            code, output = shared_server().run("run", recipe, "--until", "model", *arguments, before=before)
            assert "Traceback" not in output, output
            return code, output

        exit_code, errors = smelt("--out", folder / "open" / "r", "--store", folder / "closed" / "s")
        assert exit_code == 2
        assert "error[unusable-store]: " in errors
        assert f"{folder}/closed/s" in errors
        exit_code, errors = smelt("--out", folder / "closed" / "r", "--store", folder / "open" / "s")
        assert exit_code == 2
        assert "error[unusable-folder]: " in errors
        assert f"{folder}/closed/r" in errors
        (folder / "m" / "model.safetensors").chmod(0o000)
        exit_code, errors = smelt("--out", folder / "open" / "r", "--store", folder / "open" / "s")
        assert exit_code == 2
        assert "model.safetensors" in errors
        (folder / "m" / "model.safetensors").chmod(0o644)
        (folder / "data.jsonl").chmod(0o000)
        exit_code, errors = smelt("--out", folder / "open" / "r", "--store", folder / "open" / "s")
        assert exit_code == 2
        assert "error[unreadable-file]: " in errors
        assert "data.jsonl: " in errors


def test_changed_byte_is_reported_and_rebuild_repairs_it(home, tmp_path):
    assert _run(home, tmp_path).exit_code == 0
    weights = (tmp_path / "r" / "artifacts" / "prune" / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = _run(home, tmp_path)
    assert result.exit_code == 1
    _, steps = _steps(tmp_path)
    assert steps["prune"]["error"]["code"] == "changed-file"
    assert all(value in steps["prune"]["error"]["message"] for value in (str(weights), "--rebuild prune"))
    assert [steps[n]["status"] for n in ("finetune", "quantize")] == ["not-reached"] * 2
    assert steps["other"]["status"] == "cached"
    result = _run(home, tmp_path, "--rebuild", "prune")
    assert result.exit_code == 0
    assert [s["status"] for s in _steps(tmp_path)[0]["steps"]] == [
        "cached",
        "done",
        "cached",
        "cached",
        "cached",
    ]
    _require_whole(tmp_path, 5)


def test_changed_byte_of_input_model_is_reported_with_step(home, tmp_path):
    assert _run(home, tmp_path, "--until", "model").exit_code == 0
    (tmp_path / "r" / "artifacts" / "model" / "config.json").resolve().write_text("{}")
    result = _run(home, tmp_path, "--until", "model")
    assert result.exit_code == 2
    assert "error[changed-file]: " in result.output
    assert all(value in result.output for value in ("config.json: ", "--rebuild model"))
    assert _run(home, tmp_path, "--until", "model", "--rebuild", "model").exit_code == 0


def test_failed_rebuild_keeps_old_artifact(home, tmp_path, monkeypatch):
    assert _run(home, tmp_path, "--until", "prune").exit_code == 0
    monkeypatch.setattr(Prune, "__call__", _breaking(KeyError("x")))
    assert _run(home, tmp_path, "--until", "prune", "--rebuild", "prune").exit_code == 1
    monkeypatch.undo()
    _require_whole(tmp_path, 2)
    assert _run(home, tmp_path, "--until", "prune").exit_code == 0
    assert [s["status"] for s in _steps(tmp_path)[0]["steps"]] == ["cached", "cached"]


def test_report_of_running_run_has_status_interrupted(home, tmp_path, monkeypatch):
    statuses = []

    def look(self, src, settings, ctx):
        statuses.append(_steps(tmp_path)[0]["status"])
        raise KeyError

    monkeypatch.setattr(Finetune, "__call__", look)
    _run(home, tmp_path)
    assert statuses == ["interrupted"]


@pytest.mark.quick
def test_traceback_is_kept_only_for_unexpected_errors():
    from smelt.core.errors import InputError, RunError

    assert unexpected_traceback(RunError("the loss is not a number")) == ""
    error = InputError("no x")
    error.__cause__ = KeyError("x")
    assert "KeyError: 'x'" in unexpected_traceback(error)


def test_errors_name_user_paths_instead_of_store_paths(home, tmp_path, monkeypatch):
    def broken(self, parent, settings, ctx):
        raise RunError(f"{parent.path / 'config.json'}: wrong", code="made-up")

    monkeypatch.setattr(Prune, "__call__", broken)
    assert _run(home, tmp_path).exit_code == 1
    error = _steps(tmp_path)[1]["prune"]["error"]
    assert error["code"] == "made-up"
    message = error["message"]
    assert "artifacts/model/config.json" in message
    store = tmp_path / "s"
    assert str(store) not in message
    store_path = store / "tmp" / "ab12" / "out" / "x.json"
    copied = with_user_paths(RunError(f"{store_path}: wrong", code="a"), store, home, {})
    assert (str(copied), copied.code, type(copied)) == (f"{home}/x.json: wrong", "a", RunError)
