"""All pairs of techniques on all models, one after the other: `make matrix`.

Each line of the log (build/matrix/pairs.jsonl) tells of one pair: what the plan said against it, or that it
was done and what it took, or what broke. A run goes on where the last one ended; what broke is tried again,
and all of it where `--rebuild` is given. Of one pair in PART the graph is made and compared as well.

    make matrix ARGS="bert t5"          # these models
    make matrix ARGS="--first share"    # these first (`--second` likewise)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from tests.support.pairs.pair_cases import PairCase, all_pairs, is_exported
from tests.support.pairs.pair_runner import PairRunner, plan_errors
from tests.support.pairs.paired_techniques import MODELS, TECHNIQUES

LOG_FILE = Path("build/matrix/pairs.jsonl")
EXPORT_INTERVAL = 25


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return what was asked for: models, all where none is named, and which techniques."""
    parser = argparse.ArgumentParser()
    # no `choices`: argparse would look for the default list, as a whole, among them
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    for position in ("first", "second"):
        parser.add_argument(f"--{position}", action="append", choices=list(TECHNIQUES))
    parser.add_argument("--rebuild", action="store_true")
    options = parser.parse_args(arguments)
    if unknown_models := sorted(set(options.models) - MODELS.keys()):
        parser.error(f"no model '{unknown_models[0]}'; known: {', '.join(MODELS)}")
    options.models = options.models or list(MODELS)
    return options


def main(arguments: list[str]) -> int:
    """Work through the pairs; return 1 where one broke."""
    options = parse_arguments(arguments)
    LOG_FILE.parent.mkdir(parents=True, exist_ok=True)
    if options.rebuild:
        LOG_FILE.unlink(missing_ok=True)
    records = _read_log()
    possible = set(all_pairs())
    broken = 0
    for model in options.models:
        cells = [
            (model, first, second)
            for first in options.first or TECHNIQUES
            for second in options.second or TECHNIQUES
            if records.get((model, first, second), {}).get("broke", True)
        ]
        if cells:
            broken += _run_model(model, cells, possible)
    print(f"{broken} broke; {LOG_FILE} tells of all")
    return int(broken > 0)


def _run_model(model: str, cells: list[PairCase], possible: set[PairCase]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="smelt-matrix-"))
    start_time, broken = time.process_time(), 0
    bench = PairRunner(model, folder / "bench")
    gc.collect()
    gc.freeze()  # what libraries made stays, and each training would look through it again
    for cell in cells:
        line = _try_pair(bench, cell, cell in possible)
        broken += "broke" in line
        if "broke" in line:
            print(f"{' '.join(cell)}: {line['broke']}", flush=True)
        with LOG_FILE.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"cell": cell, **line}) + "\n")
    cpu_seconds = time.process_time() - start_time
    print(f"{model}: {len(cells)} pairs, {broken} broke, {cpu_seconds:.0f} s of processor time", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return broken


def _try_pair(bench: PairRunner, cell: PairCase, possible: bool) -> dict[str, Any]:
    """Try a pair; return its line of the log."""
    _, first, second = cell
    start_time = time.process_time()
    record: dict[str, Any] = {}
    try:
        against = [
            str(plan_error).replace(f"{bench.folder}/", "")
            for plan_error in plan_errors(bench, first, second)
        ]
        if against:
            record["refused"] = "\n".join(against)
            assert not possible, f"the plan refuses what the stages take: {record['refused']}"
        else:
            assert possible, "the plan takes what the stages refuse"
            _run_pair(bench, cell, record)
    except Exception as error:
        record["broke"] = f"{type(error).__name__}: {error}"[:600]
        record["traceback"] = traceback.format_exc()[-3000:]
    return {**record, "seconds": round(time.process_time() - start_time, 3)}


def _run_pair(bench: PairRunner, cell: PairCase, record: dict[str, Any]) -> None:
    _, first, second = cell
    foretold = bench.plan_warnings(first, second)
    record["graph"] = is_exported(cell, EXPORT_INTERVAL) and second != "bnb-int8" and first != "bnb-int8"
    try:
        artifacts = bench.run(first, second, export=record["graph"])
    except InputError as error:
        if not foretold:
            raise
        record["foretold"] = [*foretold, str(error)]
        return
    record["warned"] = foretold
    bench.remove(*artifacts[1:])


def _read_log() -> dict[PairCase, dict[str, Any]]:
    records: dict[PairCase, dict[str, Any]] = {}
    for text in LOG_FILE.read_text(encoding="utf-8").splitlines() if LOG_FILE.exists() else ():
        with contextlib.suppress(ValueError):  # the last line of a run that was killed
            line = json.loads(text)
            model, first, second = line.pop("cell")
            records[model, first, second] = {"broke": False, **line}
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
