"""All that needs an NVIDIA GPU, part by part, and a page of what came out; called by benchmarks/gpu.sh.

Each part is a command in a process of its own with a limit in time; a part that fails is reported as failed
and the next one runs. The page is written anew after each part, so what was done is kept.

    benchmarks/gpu.sh [--only PART ...] [--minutes 30] [--out docs/measurements/gpu.md]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
ORT = "benchmarks/recipes/gpu-ort.yaml"
_OUTPUT_LINES = 60
"""Of a part's output, the last ones that go into the page."""
_MIN_SECONDS = 20
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

    seconds: at most. report: a page of the run that goes into ours. libraries: a variable with a folder that
    the loader looks in first.
    """

    name: str
    description: str
    command: tuple[str, ...]
    seconds: int
    report: Path | None = None
    libraries: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of its process."""
        variables = os.environ | {"COLUMNS": "110"}
        first = os.environ.get(self.libraries, "") if self.libraries else ""
        if first:
            rest = os.environ.get("LD_LIBRARY_PATH", "")
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (first, rest)))
        return variables


@dataclass(frozen=True)
class Outcome:
    """What came of a part; code: the exit status, None where its time was up, or it was not begun."""

    part: Part
    code: int | None
    seconds: float
    output: str


def parts(python: str = sys.executable) -> tuple[Part, ...]:
    """Return all parts, in the order in which they run."""
    smelt, tests = (
        (python, "-m", "smelt"),
        (python, "-m", "pytest", "-q", "-rA", "-n", "0", "-m", "gpu"),
    )
    training = (*smelt, "run", "quickstart", "--until", "recovered", "--set", "device=cuda", "--rebuild")
    return (
        Part("doctor", "what is installed and works here", (*smelt, "doctor"), 60),
        Part(
            "tests", "the tests that wait for a GPU: CUDA beside the CPU, real engines beside ONNX Runtime",
            (*tests, "tests"), 240,
        ),
        Part(
            "training", "prune, factorize, distil on CUDA in float32, scored",
            (*training, "--out", str(RUNS / "gpu-training")), 200, RUNS / "gpu-training" / "report.md",
        ),
        Part(
            "training-bf16", "the same in bf16",
            (*training, "--set", "recovered.precision=bf16", "--out", str(RUNS / "gpu-training-bf16")), 180,
            RUNS / "gpu-training-bf16" / "report.md",
        ),
        Part(
            "tensorrt", "ort-cuda and TensorRT in fp32, tf32, fp16, bf16, int8 and int4: quality beside the"
            " untouched model (parity), latency interleaved; several profiles, stripped, compatible engines",
            (*smelt, "run", "benchmarks/recipes/gpu.yaml", "--out", str(RUNS / "gpu"), "--rebuild"), 700,
            RUNS / "gpu" / "report.md",
        ),
        Part(
            "ort-tensorrt", "TensorRT inside of ONNX Runtime in fp32, fp16 and int8, engines built when a"
            " graph is opened and kept: quality beside the untouched model, latency interleaved",
            (*smelt, "run", ORT, "--out", str(RUNS / "gpu-ort"), "--rebuild"), 260,
            RUNS / "gpu-ort" / "report.md", "SMELT_TENSORRT_10",
        ),
        Part(
            "bitsandbytes", "a layer and an optimizer of bitsandbytes on CUDA (smelt uses it on the CPU)",
            (python, "-c", BITSANDBYTES), 60,
        ),
    )  # fmt: skip


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


def run(part: Part, seconds: float) -> Outcome:
    """Run a part for at most so long; its output goes to the terminal's end and into the page."""
    began = time.monotonic()
    limit = min(seconds, part.seconds)
    if limit < _MIN_SECONDS:
        return Outcome(part, None, 0.0, "not begun: the time of the whole script was up")
    try:
        done = subprocess.run(
            part.command, cwd=ROOT, text=True, timeout=limit, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=part.environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.output or ""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Outcome(part, None, time.monotonic() - began, f"{text.rstrip()}\nstopped after {limit:.0f} s")
    except OSError as error:
        return Outcome(part, 127, time.monotonic() - began, str(error))
    return Outcome(part, done.returncode, time.monotonic() - began, done.stdout)


def machine_text() -> str:
    """Return the GPU, driver, commit and versions that the page is of."""
    asked = (
        ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"),
        ("git", "rev-parse", "--short", "HEAD"),
        (sys.executable, "-c", "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"),
    )
    lines = []
    for command in asked:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            lines.append(done.stdout.strip() or done.stderr.strip()[-200:])
        except (OSError, subprocess.SubprocessError) as error:
            lines.append(f"{command[0]}: {error}")
    return "\n".join(f"    {line}" for text in lines for line in text.splitlines())


def render_page(outcomes: Sequence[Outcome], here: str, skipped: Sequence[Part] = ()) -> str:
    """Return the page: a table of the parts, then what each of them said."""
    lines = [
        "# On a GPU", "", "Written by `benchmarks/gpu.sh`; every line is of that one run.", "", here, "",
        "| part | what | outcome | seconds |", "|---|---|---|--:|",
    ]  # fmt: skip
    for outcome in outcomes:
        lines.append(
            f"| {outcome.part.name} | {outcome.part.description} | {outcome_text(outcome)} "
            f"| {outcome.seconds:.0f} |"
        )
    lines += [f"| {part.name} | {part.description} | not run | |" for part in skipped]
    for outcome in outcomes:
        output_text = "\n".join(outcome.output.strip().splitlines()[-_OUTPUT_LINES:])
        lines += [
            "",
            f"## {outcome.part.name}",
            "",
            f"`{command_text(outcome.part)}`",
            "",
            "```text",
            output_text,
            "```",
        ]
        lines += _embedded_report(outcome)
    return "\n".join(lines) + "\n"


def outcome_text(outcome: Outcome) -> str:
    """Return how a part ended, in words."""
    if outcome.code is None:
        return "stopped: its time was up" if outcome.seconds else "not begun"
    return "done" if outcome.code == 0 else f"**failed** (exit code {outcome.code})"


def _embedded_report(outcome: Outcome) -> list[str]:
    """Return the report that a run left, one level down; nothing of a run that did not end."""
    path = None if outcome.part.report is None else ROOT / outcome.part.report
    if path is None or outcome.code is None or not path.is_file():
        return []
    text = path.read_text(encoding="utf-8").strip().splitlines()
    return ["", *(f"##{line}" if line.startswith("#") else line for line in text)]


def main(arguments: Sequence[str] | None = None, known: Sequence[Part] | None = None) -> int:
    """Run the parts, or say what they are; 1 where one failed."""
    known = parts() if known is None else known
    parser = argparse.ArgumentParser(description="Run what needs an NVIDIA GPU; write what came out.")
    parser.add_argument("--say", action="store_true", help="only say what would be run")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in known], metavar="PART")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "measurements" / "gpu.md")
    options = parser.parse_args(arguments)
    chosen = [part for part in known if options.only is None or part.name in options.only]
    if options.say:
        print(describe_parts(chosen))
        return 0
    until, here = time.monotonic() + 60 * options.minutes, machine_text()
    outcomes: list[Outcome] = []
    for index, part in enumerate(chosen):
        print(f"{part.name}: {part.description} ...", flush=True)
        outcomes.append(run(part, until - time.monotonic()))
        print(f"  {outcome_text(outcomes[-1])}, {outcomes[-1].seconds:.0f} s", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(render_page(outcomes, here, chosen[index + 1 :]), encoding="utf-8")
    print(f"written: {options.out}")
    return int(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
