"""smelt beside its peers: each system in an environment and a process of its own, in rounds that alternate.

    python benchmarks/peers.py --data ../shared --rounds 9                # all; goes on where it stopped
    python benchmarks/peers.py --data ../shared --only bert-batch1 openvino --rounds 3
    python benchmarks/peers.py --data ../shared --artifact marian:small:int8:runs/m/artifacts/onnx-int8
    python benchmarks/peers.py --data ../shared --sst2 runs/s/artifacts/tuned --artifact sst2:small:int8:...
    python benchmarks/peers.py --table > table.md
    python benchmarks/peers.py --data ../shared --cost                    # of making an int8 BERT

Environments, models and what each system makes of them lie in --envs and are kept between calls, results in
--results: a file for each system and case, which is not measured again as long as it is there (--again). A
word of --only selects the cases or systems whose name holds it; smelt's own of the same precision are always
run beside them.

A round gives each system in turn the same rows; it works in its own process and is blocked on a pipe when it
is not its turn. Processor time counts (clock beside it), and the ratio is of the two times of one round. The
first round warms up. The machine should do nothing else: watch the range of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peer_systems.cost import compare_cost
from peer_systems.process import BENCHMARKS, SystemUnavailableError, Worker, create_environment, make
from peer_systems.systems import System, systems_of
from peer_systems.table import Result, draw_tables, version_list
from peer_systems.workloads import (
    WORKS,
    Case,
    batches,
    calibration,
    case_request,
    cases_of,
    quality,
    read_rows,
    read_tokens,
)

DATA = {"marian": "multi30k_en_de", "opus": "multi30k_en_de", "bert": "sst2", "sst2": "sst2"}


class Bench:
    """What the command line asked for, and where everything lies."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.envs: Path = options.envs.resolve()
        self.shared: Path = options.data.resolve()
        self.results: Path = options.results.resolve()
        self.models: Path = self.envs / "models"

    def model(self, work: str) -> Path:
        """Return the folder of a work's model; random ones are made at the first call."""
        translator: Path = self.shared / "models" / "marian-small-en-de"
        if work == "marian":
            return translator
        if work == "sst2":
            return Path(self.options.sst2).resolve()
        folder: Path = self.models / work
        if not (folder / "config.json").exists():
            other = self.shared / "data" / "wikitext2" / "train.txt.gz" if work == "llama" else translator
            command = [sys.executable, "-P", "-m", "peer_systems.models", work, str(folder), str(other)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)})
        return folder

    def data(self, work: str) -> Path:
        """Return the rows that a recipe of smelt names; its export compares the graph on some of them."""
        name = "wikitext2/test.txt.gz" if work == "llama" else f"{DATA[work]}/test.jsonl.gz"
        return self.shared / "data" / name

    def job(self, system: System, threads: int, workers: int = 1) -> dict[str, Any]:
        """Return what a system's worker is told, see worker.py."""
        job: dict[str, Any] = {
            "work": "bert" if system.work == "sst2" else system.work,
            "variant": system.variant,
            "model": str(self.model(system.work)),
            "data": str(self.data(system.work)),
            "files": str(self.output_folder(system.work, system.name)),
            "threads": threads,
            "workers": workers,
        }
        if system.begins_with:
            job["from"] = str(self.output_folder(system.work, system.begins_with))
        if system.artifact:
            job["artifact"] = str(system.artifact)
        if not system.is_smelt:
            job["calibration"] = self.calibration(system.work)
        return job

    def calibration(self, work: str) -> list[list[int]]:
        """Return the rows that peers calibrate static int8 on."""
        if work != "sst2":
            return calibration(work)
        return read_tokens(self.data(work).with_name("validation.jsonl.gz"), self.model(work))[:32]

    def output_folder(self, work: str, name: str) -> Path:
        """Return the folder of what a system made."""
        return self.envs / "files" / work / name

    def is_selected(self, name: str, kinds: list[str]) -> bool:
        """Say whether --only asks for `name`: none of its words is of this kind, or one is in the name."""
        words = [part for part in self.options.only if any(part in other for other in kinds)]
        return not words or any(part in name for part in words)

    def result_path(self, case: Case, system: str) -> Path:
        """Return the file of a result."""
        return self.results / case.name / f"{system}.json"

    def load_result(self, case: Case, system: str) -> Result | None:
        """Return what was measured in an earlier call."""
        path = self.result_path(case, system)
        return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def save_result(self, case: Case, result: Result) -> None:
        """Write a result down."""
        path = self.result_path(case, result.system)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")


def measure(bench: Bench, case: Case, systems: list[System], asked: list[System]) -> None:
    """Run what is asked for and not there yet of a case, with smelt's own beside it; keep the results."""
    new = [one for one in asked if bench.options.again or bench.load_result(case, one.name) is None]
    if not new:
        return
    names = {one.name for one in new}
    precisions = {one.precision for one in new}
    chosen = [one for one in systems if one.name in names or (one.is_smelt and one.precision in precisions)]
    if case.workers > 1:
        chosen = [one for one in chosen if one.has_workers]
        names &= {one.name for one in chosen}
    print(f"{case.name}: {', '.join(one.name for one in chosen)}", flush=True)
    results = {one.name: Result(one.name, one.precision, one.is_smelt, case.rows) for one in chosen}
    workers: dict[str, Worker] = {}
    try:
        for system in chosen:
            _run_or_record_failure(results, system.name, lambda one=system: _open(bench, case, one, workers))
        _rounds(bench, case, workers, results)
    finally:
        for worker in workers.values():
            worker.close()
    for name in names:
        bench.save_result(case, results[name])


def _run_or_record_failure(results: dict[str, Result], name: str, work: Any) -> None:
    try:
        work()
    except SystemUnavailableError as error:
        results[name].missing = str(error)
        print(f"  {name}: {error}", flush=True)


def _open(bench: Bench, case: Case, system: System, workers: dict[str, Worker]) -> None:
    if system.begins_with:
        (before,) = [one for one in systems_of(system.work) if one.name == system.begins_with]
        _prepare(bench, before)
    _prepare(bench, system)
    log = bench.output_folder(system.work, f"{system.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    workers[system.name] = Worker(bench.envs, system, bench.job(system, case.threads, case.workers), log)


def _prepare(bench: Bench, system: System) -> None:
    create_environment(bench.envs, system.environment, bench.options.minutes)
    make(bench.envs, system, bench.job(system, 2), bench.options.minutes)


def _rounds(bench: Bench, case: Case, workers: dict[str, Worker], results: dict[str, Result]) -> None:
    """Ask all in turn, round after round; who begins moves on by one."""
    fed, targets = _round_inputs(bench, case)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for number in range(bench.options.rounds + 1):
        order = list(workers)
        offset = number % max(1, len(order))
        for name in order[offset:] + order[:offset]:
            _run_or_record_failure(
                results, name, lambda one=name: answers[one].append(workers[one].ask(case_request(case), fed))
            )
            if results[name].missing:
                workers.pop(name).close()
                answers.pop(name)
        print(f"  round {number} of {bench.options.rounds}", flush=True)
    ours = [name for name in answers if results[name].ours]
    expected = _expected_outputs(bench, case, answers)
    for name, system_answers in answers.items():
        for number, one in enumerate(system_answers[1:], start=1):
            beside = {other: answers[other][number]["cpu_s"] for other in ours}
            results[name].rounds.append({"cpu_s": one["cpu_s"], "wall_s": one["wall_s"], "ours": beside})
        results[name].version = workers[name].version
        results[name].quality = quality(case, system_answers[-1]["results"], expected, targets)
    if case.work == "marian" and case.batch == max(one.batch for one in cases_of(case.work, case.rows)):
        _score(bench, case, workers, results)


def _score(bench: Bench, case: Case, workers: dict[str, Worker], results: dict[str, Result]) -> None:
    """Set BLEU of more sentences than a round has: once for each search, in the largest batches."""
    fed, targets = _round_inputs(bench, replace(case, rows=bench.options.scored))

    def score(name: str) -> None:
        outputs = workers[name].ask(case_request(case), fed)["results"]
        results[name].quality = quality(case, outputs, None, targets)
        results[name].scored = len(outputs)

    for name in workers:
        _run_or_record_failure(results, name, lambda one=name: score(one))


def _round_inputs(bench: Bench, case: Case) -> tuple[list[list[Any]], list[Any]]:
    """Return what is fed in a round, and what should come out, where somebody has written that down."""
    if case.work == "sst2":
        path = bench.data(case.work)
        labels = [row["label"] for row in read_rows(path)]
        return batches(case, read_tokens(path, bench.model(case.work))), labels[: case.rows]
    if case.work != "marian":
        return batches(case, []), []
    known = {row["source"]: row["target"] for row in read_rows(bench.data("marian"))}
    fed = batches(case, list(known))
    return fed, [known[text] for batch in fed for text in batch]


def _expected_outputs(bench: Bench, case: Case, answers: dict[str, Any]) -> list[Any] | None:
    """Return what the float32 model makes in PyTorch, measured now or in an earlier call."""
    path = bench.results / case.name / "expected" / "torch-eager.json"
    if "torch-eager" in answers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answers["torch-eager"][-1]["results"]), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(bench: Bench) -> str:
    """Return the page's tables, drawn from all results that are there."""
    from smelt.evaluate.environment import cpu_model

    cases: dict[str, list[Result]] = {}
    notes: dict[str, str] = {}
    for work in WORKS:
        for case in cases_of(work, bench.options.sentences):
            known = [one.name for one in systems_of(work, bench.options.artifact)]
            there = [path.stem for path in sorted((bench.results / case.name).glob("*.json"))]
            results = [
                bench.load_result(case, name)
                for name in sorted(there, key=lambda name: _index_or_end(name, known))
            ]
            if results:
                cases[case.title] = [one for one in results if one is not None]
                rows = max(one.texts for one in cases[case.title])
                notes[case.title] = (
                    f"{rows} rows a round; times are of one {case.unit}, median [lowest, highest]."
                    f"{scored_note(cases[case.title])}"
                )
    machine = f"{cpu_model()}, {os.cpu_count()} cores."
    return f"{machine}\n\n{draw_tables(cases, notes)}\nVersions:\n\n{version_list(cases)}"


def scored_note(results: Sequence[Result]) -> str:
    """Return how many rows BLEU is of, where it is not of a round's."""
    counts = sorted({one.scored for one in results if one.scored})
    return f" BLEU is of {' and '.join(map(str, counts))} rows." if counts else ""


def _index_or_end(name: str, known: list[str]) -> int:
    return known.index(name) if name in known else len(known)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared"), help="has models/ and data/")
    parser.add_argument("--envs", type=Path, default=Path("runs/peers/envs"))
    parser.add_argument("--results", type=Path, default=Path("runs/peers/results"))
    parser.add_argument("--only", nargs="+", default=[], help="words in names of cases and systems")
    parser.add_argument("--artifact", action="append", default=[], help="WORK:NAME:PRECISION:FOLDER of smelt")
    parser.add_argument("--sst2", type=Path, help="folder of a BERT fine-tuned on SST-2; not run without it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sentences", type=int, default=64, help="of marian, a round")
    parser.add_argument("--scored", type=int, default=1000, help="of marian, for BLEU")
    parser.add_argument("--minutes", type=float, default=30, help="for one installation, or one making")
    parser.add_argument("--again", action="store_true", help="measure what was measured already")
    parser.add_argument("--table", action="store_true", help="draw the tables, measure nothing")
    parser.add_argument("--cost", action="store_true", help="time and memory of making an int8 BERT")
    return parser.parse_args()


def main() -> None:
    """Measure what is asked for, or draw it."""
    bench = Bench(read_options())
    if bench.options.table:
        print(table(bench))
        return
    if bench.options.cost:
        print(compare_cost(bench))
        return
    for work in WORKS:
        if work == "sst2" and bench.options.sst2 is None:
            continue
        cases = cases_of(work, bench.options.sentences)
        systems = systems_of(work, bench.options.artifact)
        names = [case.name for entry in WORKS for case in cases_of(entry, 1)]
        kinds = [one.name for entry in WORKS for one in systems_of(entry, bench.options.artifact)]
        asked = [one for one in systems if bench.is_selected(one.name, kinds)]
        for case in cases:
            if bench.is_selected(case.name, names):
                measure(bench, case, systems, asked)


if __name__ == "__main__":
    main()
