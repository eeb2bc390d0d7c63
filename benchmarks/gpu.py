"""All that needs an NVIDIA GPU, part by part, within nine minutes; called by benchmarks/gpu.sh.

Each part is a command in a process of its own with a time limit, and writes its result at once. A second
start goes on: parts without a result first, then those that failed. What succeeded is recorded in RUNS_FILE.

    benchmarks/gpu.sh [--only PART ...] [--minutes 9] [--rehearse]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
RUNS = Path("runs")
RUNS_FILE = ROOT / "benchmarks" / "gpu-runs.json"
RESULTS = ROOT / "build" / "gpu" / "results"
RECIPES = Path("benchmarks") / "recipes"
_OUTPUT_LINES = 60
"""Of a part's output, the last ones that are kept."""
_MIN_SECONDS = 15
"""Seconds below which a part is not begun."""

BITSANDBYTES = """
import bitsandbytes as bnb, torch
torch.manual_seed(0)
layer = torch.nn.Linear(512, 512).cuda()
x = torch.randn(64, 512, device="cuda")
half = layer(x)
int8 = bnb.nn.Linear8bitLt(512, 512, has_fp16_weights=False)
int8.load_state_dict(layer.state_dict())
got = int8.cuda()(x.half()).float()
print(f"Linear8bitLt: mean difference {(got - half).abs().mean() / half.std():.4f} of the deviation")
steps = bnb.optim.AdamW8bit(layer.parameters(), lr=1e-3)
before = float((layer(x) - x).square().mean())
for _ in range(50):
    steps.zero_grad(); loss = (layer(x) - x).square().mean(); loss.backward(); steps.step()
print(f"AdamW8bit: 50 updates, loss {before:.4f} to {float(loss):.4f}")
assert float(loss) < before
"""


@dataclass(frozen=True)
class Part:
    """One thing to run.

    seconds: at most. needs: modules without which it is left out. report: a page of the run that is kept.
    libraries: a variable with a folder that the loader looks in first, without which the part is left out.
    variables: of its process, besides this process's.
    """

    name: str
    description: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    report: Path | None = None
    libraries: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of its process."""
        variables = os.environ | {"COLUMNS": "110", "HF_HUB_OFFLINE": "1"} | dict(self.variables)
        first = os.environ.get(self.libraries, "") if self.libraries else ""
        if first:
            rest = os.environ.get("LD_LIBRARY_PATH", "")
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (first, rest)))
        return variables

    @property
    def missing(self) -> str:
        """Return what the part needs and is not here, or an empty text."""
        folders = [*filter(None, self.variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        names = [name for name in self.needs if PathFinder.find_spec(name, folders) is None]
        if self.libraries and not Path(os.environ.get(self.libraries, "/nowhere")).is_dir():
            names.append(self.libraries)
        return ", ".join(names)


@dataclass(frozen=True)
class Outcome:
    """What came of a part.

    code: the exit status; None where its time was up. report: the page of its run. finished: date and time.
    """

    part: str
    code: int | None
    seconds: float
    output: str
    report: str = ""
    commit: str = ""
    gpu: str = ""
    finished: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat("T", "minutes")
    )


def parts(python: str = sys.executable, device: str = "cuda") -> tuple[Part, ...]:
    """Return all parts, in the order in which they run."""
    smelt = (python, "-m", "smelt")
    on_device = ("--set", f"device={device}", "--rebuild")
    quickstart = (*smelt, "run", "quickstart", "--until", "recovered", *on_device)

    def recipe(name: str) -> tuple[str, ...]:
        path, out = RECIPES / f"gpu-{name}.yaml", RUNS / f"gpu-{name}"
        return (*smelt, "run", str(path), "--out", str(out), "--limit", "200", *on_device)

    def report(name: str) -> Path:
        return RUNS / f"gpu-{name}" / "report.md"

    return (
        Part("doctor", "what is installed and works", (*smelt, "doctor"), 40),
        Part(
            "training", "PyTorch: prune, factorize and distill in float32, scored, timed",
            (*quickstart, "--out", str(RUNS / "gpu-training")), 100, report=report("training"),
        ),
        Part(
            "training-bf16", "PyTorch: the same in bf16",
            (*quickstart, "--set", "recovered.precision=bf16", "--out", str(RUNS / "gpu-training-bf16")),
            80, report=report("training-bf16"),
        ),
        Part(
            "torch-quantized", "PyTorch: int8 and int4 (GPTQ) calibrated, scored and timed",
            recipe("torch"), 60, report=report("torch"),
        ),
        Part(
            "ort-cuda", "ONNX Runtime on CUDA in fp32, fp16, bf16 and int4: quality, latency",
            recipe("cuda"), 110, ("onnxruntime",), report("cuda"),
        ),
        Part(
            "cuda-graphs", "ONNX Runtime on CUDA: an encoder with and without CUDA graphs: quality, latency",
            recipe("cuda-graphs"), 60, ("onnxruntime",), report("cuda-graphs"),
        ),
        Part(
            "tests", "the tests that wait for a GPU",
            (python, "-m", "pytest", "-q", "-rA", "-p", "no:xdist", "-m", "gpu", "tests/runtimes",
             "tests/compress"), 60, ("pytest", "onnxruntime"),
        ),
        Part(
            "bitsandbytes", "a layer and an optimizer of bitsandbytes on CUDA",
            (python, "-c", BITSANDBYTES), 30, ("bitsandbytes",),
        ),
        Part(
            "tensorrt", "TensorRT engines in fp32, tf32, fp16, bf16, int8 and int4: parity, quality, latency",
            recipe("tensorrt"), 300, ("tensorrt", "onnxruntime"), report("tensorrt"),
        ),
        Part(
            "tensorrt-schemes", "TensorRT engines of schemes for GPUs, fp8: parity, quality, latency",
            recipe("schemes"), 150, ("tensorrt", "onnxruntime"), report("schemes"),
        ),
        Part(
            "ort-tensorrt", "TensorRT inside of ONNX Runtime in fp32, fp16 and int8: quality, latency",
            recipe("ort"), 200, ("onnxruntime",), report("ort"), "SMELT_TENSORRT_10",
        ),
    )  # fmt: skip


def on_rig(part: Part) -> Part:
    """Return the part with TensorRT's builder for machines without a GPU, if it needs one and it is there."""
    if "tensorrt" not in part.needs or "tensorrt" not in part.missing:
        return part
    from tests.support.processes.rig_folder import NoRigError
    from tests.support.processes.tensorrt_rig import environment

    try:
        variables = environment()
    except NoRigError as error:
        print(f"{part.name}: {error}")
        return part
    paths = filter(None, (variables["PYTHONPATH"], os.environ.get("PYTHONPATH")))
    changed = {"LD_LIBRARY_PATH": variables["LD_LIBRARY_PATH"], "PYTHONPATH": os.pathsep.join(paths)}
    return replace(part, variables=changed)


def describe_parts(parts_to_run: Sequence[Part]) -> str:
    """Return what would be done on a machine with a GPU."""
    lines = ["No NVIDIA GPU here (nvidia-smi does not answer): nothing is run and nothing is written."]
    for part in parts_to_run:
        lines += [
            "",
            f"{part.name} (at most {part.seconds} s) would do: {part.description}",
            f"  {command_text(part)}",
        ]
    return "\n".join(lines)


def command_text(part: Part) -> str:
    """Return the command as one types it; a script is not printed out."""
    words = ["python", *part.command[1:]]
    return " ".join("'...'" if "\n" in argument else argument for argument in words)


def run(part: Part, seconds: float, machine: dict[str, str]) -> Outcome:
    """Run a part for at most so long."""
    began = time.monotonic()
    code: int | None = None
    try:
        done = subprocess.run(
            part.command, cwd=ROOT, text=True, timeout=seconds, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=part.environment,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        text = error.output or ""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        output = f"{text.rstrip()}\nstopped after {seconds:.0f} s"
    except OSError as error:
        code, output = 127, str(error)
    output = "\n".join(output.strip().splitlines()[-_OUTPUT_LINES:])
    page = "" if part.report is None or code is None else _read(ROOT / part.report)
    return Outcome(part.name, code, round(time.monotonic() - began, 1), output, page, **machine)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def describe_machine() -> dict[str, str]:
    """Return the commit, and the GPU with its memory, driver and compute capability."""
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    commands = {
        "commit": ("git", "rev-parse", "--short", "HEAD"),
        "gpu": ("nvidia-smi", query, "--format=csv,noheader"),
    }
    texts = {}
    for name, command in commands.items():
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            texts[name] = done.stdout.strip() if done.returncode == 0 else ""
        except (OSError, subprocess.SubprocessError):
            texts[name] = ""
    return texts


def write_result(outcome: Outcome, folder: Path) -> None:
    """Write the result of a part at once, also into the folder OUT of the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.part}.json"
    path.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    if out := os.environ.get("OUT"):
        shutil.copyfile(path, Path(out) / path.name)


def read_results(folder: Path) -> dict[str, Outcome]:
    """Return the results so far by part."""
    contents: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {content["part"]: Outcome(**content) for content in contents}


def order_to_run(known: Sequence[Part], results: dict[str, Outcome]) -> list[Part]:
    """Return the parts without a result, then those that failed or whose time was up."""
    failed = [part for part in known if part.name in results and results[part.name].code != 0]
    return [part for part in known if part.name not in results] + failed


def record_runs(known: Sequence[Part], results: dict[str, Outcome], path: Path) -> None:
    """Write for each part what it does, and when and where it last succeeded."""
    earlier = {entry["part"]: entry for entry in json.loads(_read(path) or "[]")}
    entries = []
    for part in known:
        outcome = results.get(part.name)
        executed = earlier.get(part.name, {}).get("executed")
        if outcome is not None and outcome.code == 0:
            executed = {"gpu": outcome.gpu, "commit": outcome.commit, "finished": outcome.finished}
        entries.append({"part": part.name, "what": part.description, "executed": executed})
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def outcome_text(outcome: Outcome) -> str:
    """Return how a part ended, in words."""
    if outcome.code is None:
        return "stopped: its time was up"
    return "done" if outcome.code == 0 else f"FAILED (exit code {outcome.code})"


def main(arguments: Sequence[str] | None = None, known: Sequence[Part] | None = None) -> int:
    """Run the parts, or say what they are; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Run what needs an NVIDIA GPU; keep what came out.")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="on the CPU, without limits of single parts; engines are only built; nothing is recorded",
    )
    parser.add_argument("--record", action="store_true", help="only update the list of parts in --runs-file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs-file", type=Path, default=RUNS_FILE)
    options = parser.parse_args(arguments)
    known = parts(device="cpu" if options.rehearse else "cuda") if known is None else known
    chosen = [part for part in known if options.only is None or part.name in options.only]
    if options.rehearse:
        chosen = [on_rig(part) for part in chosen]
    if options.record:
        record_runs(known, {}, options.runs_file)
        return 0
    machine = describe_machine()
    if not (machine["gpu"] or options.rehearse):
        print(describe_parts(chosen))
        return 0
    folder = options.results.with_name("rehearsal") if options.rehearse else options.results
    until, results = time.monotonic() + 60 * options.minutes, read_results(folder)
    for part in order_to_run(chosen, results):
        if part.missing:
            print(f"{part.name}: left out, {part.missing} is not here", flush=True)
            continue
        if (left := until - time.monotonic()) < _MIN_SECONDS:
            print(f"{part.name}: not begun, the time is up; start again to go on", flush=True)
            break
        print(f"{part.name}: {part.description} ...", flush=True)
        results[part.name] = run(part, left if options.rehearse else min(left, part.seconds), machine)
        write_result(results[part.name], folder)
        print(f"  {outcome_text(results[part.name])}, {results[part.name].seconds:.0f} s", flush=True)
    if not options.rehearse:
        record_runs(known, results, options.runs_file)
    return int(any(results[part.name].code != 0 for part in chosen if part.name in results))


if __name__ == "__main__":
    raise SystemExit(main())
