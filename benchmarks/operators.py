"""Where an artifact's time goes: the operators of its graphs, by ONNX Runtime's own profile.

    python benchmarks/operators.py WORK ARTIFACT --data ../shared --batch 8 --rounds 3

WORK is one of peers.py's, whose inputs are fed. One thread. Times are of the clock, so compare shares. An
operator that holds a graph (Loop, If) is left out: its nodes are listed one by one. `outside` is what the
profile does not see: Python, tokenizers, and what ONNX Runtime does between nodes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import onnxruntime
from peer_systems.smelt_worker import serve
from peer_systems.workloads import WORKS, Case, batches, case_request, cases_of, read_rows

CONTROL_FLOW_OPERATORS = ("Loop", "If", "Scan")


class ProfiledSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session that writes a profile, whoever opens it."""

    opened: list[ProfiledSession] = []  # noqa: RUF012 -- shared on purpose
    folder = ""

    def __init__(self, path: Any, sess_options: Any = None, *rest: Any, **more: Any) -> None:
        options = sess_options or onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = f"{self.folder}/{len(self.opened)}"
        super().__init__(path, options, *rest, **more)
        self.opened.append(self)


def operator_times(events: list[dict[str, Any]], since: float) -> tuple[Counter[str], Counter[str]]:
    """Return the microseconds and the runs of each operator, of the events that began after `since`."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in events:
        name = event.get("args", {}).get("op_name")
        timed = event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
        if timed and name not in CONTROL_FLOW_OPERATORS and event["ts"] >= since:
            spent[name] += event["dur"]
            count[name] += 1
    return spent, count


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-beams", dest="beams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [case for case in cases_of(options.work, 32) if case.batch == options.batch]
    (case,) = [one for one in cases if (one.beams, one.threads, one.workers) == (options.beams, 1, 1)]
    with tempfile.TemporaryDirectory() as folder:
        ProfiledSession.folder = folder
        onnxruntime.InferenceSession = ProfiledSession
        print(_table(options, case))


def _table(options: argparse.Namespace, case: Case) -> str:
    rows = read_rows(options.data / "data/multi30k_en_de/test.jsonl.gz") if case.work == "marian" else []
    fed = batches(case, [row["source"] for row in rows])
    run, _ = serve({"work": case.work, "artifact": str(options.artifact), "threads": 1})
    for batch in fed:
        run(batch, case_request(case))
    warm = {id(session): session.get_profiling_start_time_ns() for session in ProfiledSession.opened}
    since, began = time.time_ns(), time.perf_counter()  # the profile counts from a moment of the day
    for _ in range(options.rounds):
        for batch in fed:
            run(batch, case_request(case))
    total_us = 1e6 * (time.perf_counter() - began)
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for session in ProfiledSession.opened:
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        more, runs = operator_times(events, (since - warm[id(session)]) / 1000)
        spent, count = spent + more, count + runs
    per = options.rounds * case.rows
    lines = [f"| operator | ms a {case.unit} | share | runs a {case.unit} |", "|:--|--:|--:|--:|"]
    rest = Counter({**spent, "outside": total_us - sum(spent.values())})
    for name, micro in rest.most_common():
        if micro > 0.01 * total_us:
            lines.append(
                f"| {name} | {micro / per / 1000:.3f} | {micro / total_us:.0%} | {count[name] / per:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
