"""The table of peers.py, drawn of results that are made up."""

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import operators
import pytest
from peer_systems.models import token_rows
from peer_systems.process import _reason
from peer_systems.systems import ENVIRONMENTS, systems_of
from peer_systems.table import Result, draw_tables, fastest_text, median_and_range, ratios, reference_of
from peer_systems.workloads import WORKS, Case, batches, cases_of, quality

pytestmark = pytest.mark.quick


def result(name: str, precision: str, cpu: list[float], ours: bool = False, **more: object) -> Result:
    """One system; of smelt's the fast one takes 1, 2, 4 s in three rounds, the slow one 2, 3, 5 s."""
    beside = [{"smelt-fast": fast, "smelt-slow": slow} for fast, slow in ((1, 2), (2, 3), (4, 5))]
    rounds = [
        {"cpu_s": taken, "wall_s": 2 * taken, "ours": other}
        for taken, other in zip(cpu, beside, strict=False)
    ]
    return Result(name, precision, ours, texts=10, rounds=rounds, **more)  # type: ignore[arg-type]


SMELT = [
    result("smelt-fast", "int8", [1, 2, 4], ours=True),
    result("smelt-slow", "int8", [2, 3, 5], ours=True),
]
QUICK = result("quick", "int8", [0.5, 1.0, 1.0], quality="BLEU 35.10")
LATE = result("late", "int8", [3, 3, 6])


def test_a_ratio_is_of_the_two_times_of_one_round() -> None:
    assert ratios(QUICK, "smelt-fast") == [0.5, 0.5, 0.25]
    assert ratios(LATE, "smelt-fast") == [3, 1.5, 1.5]
    assert ratios(LATE, "never-ran") == []


def test_a_system_stands_beside_the_fastest_of_smelt_of_its_precision() -> None:
    assert reference_of(QUICK, [*SMELT, QUICK]) == "smelt-fast"
    assert reference_of(result("float", "fp32", [1]), [*SMELT, QUICK]) is None


def test_the_spread_is_the_median_and_the_range() -> None:
    assert median_and_range([3.0, 1.0, 2.5]) == "2.50 [1.00, 3.00]"
    assert median_and_range([]) == "-"


def test_who_is_faster_is_said_either_way() -> None:
    assert fastest_text([*SMELT, LATE]).startswith(
        "In int8 smelt wins: late takes 1.50 [1.50, 3.00] of smelt-fast's time"
    )
    assert "In int8 smelt loses: quick takes 0.50 [0.25, 0.50]" in fastest_text([*SMELT, LATE, QUICK])
    assert fastest_text([QUICK]) == "Nothing to compare."


def test_every_row_is_drawn_also_what_is_missing() -> None:
    gone = Result("gone", "int8", ours=False, missing="not installed: ERROR: No matching distribution")
    page = draw_tables({"A case": [*SMELT, QUICK, gone]}, {"A case": "10 rows a round."})
    lines = page.splitlines()
    assert lines[0] == "### A case"
    times = "100.00 [50.00, 100.00] | 200.00 | 0.50 [0.25, 0.50] of smelt-fast"
    assert f"| quick | int8 | {times} | 3 | BLEU 35.10 |" in lines
    assert "| gone | int8 | - | - | - | - | not installed: ERROR: No matching distribution |" in lines
    assert any(line.startswith("| **smelt-fast** | int8 | 200.00 [100.00, 400.00] |") for line in lines)


def test_the_last_line_that_names_an_error_is_the_reason() -> None:
    output = "Collecting it\nERROR: No wheel\nnotice: pip can be updated\n"
    assert _reason(output) == "ERROR: No wheel"
    assert _reason("") == "no output"


def test_quality_counts_tokens_to_the_first_other_one_and_labels() -> None:
    opus = Case("opus", 1, 2, new_tokens=4)
    assert quality(opus, [[1, 2, 9, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]], []).startswith(
        "3.0 of 4"
    )
    bert = Case("bert", 1, 2)
    text = quality(bert, [[1.0, -1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, 1.0]], [])
    assert text == "1 of 2 labels, logits off by 141.4 %"
    assert quality(bert, [[1.0, -1.0]], None, []) == "not compared"
    assert quality(
        Case("marian", 1, 1), ["ein Mann geht durch den Park"], None, ["ein Mann geht durch den Park"]
    ) == ("BLEU 100.00")


@pytest.mark.parametrize("work", WORKS)
def test_all_rows_of_a_case_are_fed_once(work: str) -> None:
    texts = [f"{'long ' * (number % 7)}text {number}" for number in range(64)]
    for case in cases_of(work, 64):
        fed = batches(case, texts)
        assert {len(batch) for batch in fed} == {case.batch}
        assert sum(len(batch) for batch in fed) == case.rows
        if work not in ("marian", "sst2"):  # which are fed texts, and their tokens
            assert {len(row) for batch in fed for row in batch} == {case.length}
    assert token_rows(2, 3, 2000) == token_rows(2, 3, 2000)


@pytest.mark.parametrize("work", WORKS)
def test_every_system_has_an_environment_and_what_it_begins_with(work: str, tmp_path) -> None:
    given = systems_of(work, [f"{work}:own:int8:{tmp_path}", f"other:own:int8:{tmp_path}"])
    names = [one.name for one in given]
    assert len(set(names)) == len(names)
    assert [one.artifact for one in given if one.artifact] == [tmp_path]
    for one in given:
        assert one.is_smelt or one.environment in ENVIRONMENTS
        assert one.begins_with is None or one.begins_with in names
    pinned = [wish for wishes in ENVIRONMENTS.values() for wish in wishes]
    assert [wish for wish in pinned if "==" not in wish] == []


def test_an_operator_that_holds_others_is_not_counted_twice() -> None:
    def event(name: str, start: int, took: int) -> dict:
        return {
            "cat": "Node",
            "name": f"{name}_kernel_time",
            "ts": start,
            "dur": took,
            "args": {"op_name": name},
        }

    events = [event("MatMul", 5, 100), event("MatMul", 20, 7), event("Loop", 21, 50), event("Add", 30, 2)]
    spent, count = operators.operator_times(events, since=10)
    assert dict(spent) == {"MatMul": 7, "Add": 2}
    assert dict(count) == {"MatMul": 1, "Add": 1}
