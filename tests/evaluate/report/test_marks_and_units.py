"""What every rendering marks or names: significant differences, disturbed times, gates, small sizes."""

import pytest

from smelt.evaluate.report import view
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.step_schema import ScoreDifference
from smelt.evaluate.report.verdict import decide
from smelt.evaluate.report.verdict_facts import verdict_facts
from tests.support.standins.sample_report import make_scores, mark_disturbed, ten_step_report, with_verdict

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    """The sample, in which onnx-int8 is recommended within its gate."""
    sample = ten_step_report()
    for step in sample["steps"]:
        for difference in step["against_baseline"].values():
            difference["p_value"] = 0.21
    sample["steps"][6]["gates"] = [_gate(undecided=False)]
    return sample


def _gate(undecided):
    gate = {"metric": "bleu", "kind": "max_degradation", "limit": 2.0, "value": 1.37, "passed": True}
    return gate | {"undecided": undecided}


def _facts(report):
    return {fact.label: fact for fact in verdict_facts(validate_report(with_verdict(report)))}


@pytest.mark.parametrize(
    ("ends", "p_value", "significant"),
    [
        ((-0.99, 0.01), 0.019, False),  # few outputs differ: the interval is wider than the test
        ((-0.99, 0.0), 0.019, False),
        ((-0.99, -0.01), 0.019, True),
        ((-0.99, -0.01), 0.06, False),
        (None, 0.019, True),
    ],
)
def test_difference_is_significant_only_if_its_interval_excludes_zero(report, ends, p_value, significant):
    change = {"difference": -0.49, "ci95": ends, "p_value": p_value}
    difference = ScoreDifference(**change)
    assert view.is_significant(difference) is significant
    assert ("*" in view.difference_and_interval_text(difference, "bleu")) is significant
    report["steps"][6]["gates"] = []  # the verdict follows the same rule
    report["steps"][6]["against_baseline"]["bleu"] = change
    assert (decide(validate_report(report)).step == "onnx-int8") is not significant


def test_every_rendering_explains_the_asterisk(report):
    for render in (render_table, render_markdown, render_html):
        text = " ".join(render(report).replace("\\", "").replace("&lt;", "<").split())
        assert view.SIGNIFICANCE_LEGEND in text


@pytest.mark.parametrize("undecided", [True, False])
def test_gate_that_is_undecided_on_validation_is_named_next_to_its_result_on_test(report, undecided):
    report["judged_on"] = "validation"
    step = report["steps"][6]
    step["gates"] = [_gate(undecided) | {"value": 0.29}]
    report["steps"][0]["test"] = {"quality": make_scores(38.0), "against_baseline": {}, "gates": []}
    step["test"] = {
        "quality": make_scores(37.0),
        "against_baseline": step["against_baseline"],
        "gates": [_gate(undecided=False) | {"value": 0.49}],
    }
    gates = _facts(report)["gates"]
    *_, within_limit, passed = view.GATE_VERDICTS
    assert gates.value == (within_limit if undecided else passed)
    assert "0.49" in gates.rest
    assert ("0.29" in gates.rest) is undecided
    assert (passed in gates.rest) is undecided
    terminal = " ".join(render_table(with_verdict(report)).split())
    assert gates.text in terminal


def test_gate_that_failed_on_validation_is_the_reason_even_if_it_passes_on_test(report):
    report["judged_on"] = "validation"
    for step in report["steps"][1:8]:
        step["gates"] = [_gate(undecided=False) | {"passed": False, "value": 2.5}]
    closest = next(
        step for step in report["steps"] if step["name"] == decide(validate_report(report)).closest
    )
    before = decide(validate_report(report)).text
    closest["test"] = {
        "quality": make_scores(38.0),
        "against_baseline": closest["against_baseline"],
        "gates": [_gate(undecided=False) | {"value": 0.49}],
    }
    verdict = decide(validate_report(report))
    assert (verdict.reason, verdict.text) == ("gates-failed", before)


def test_disturbed_median_is_marked_in_every_rendering(report):
    row = report["steps"][7]["latency"][0]
    row["p50_ms"] = 23.4
    for render in (render_table, render_markdown, render_html):
        assert "23.4?" not in render(report)
    mark_disturbed(row)
    for render in (render_table, render_markdown, render_html):
        assert "23.4?" in render(report)
    for speedup in (3.6, None):  # in the table of steps, and in that of latency
        row["speedup"] = speedup
        assert render_markdown(report).count("23.4?") == 2


def test_smaller_step_that_cannot_be_deployed_is_named_if_no_step_is_faster_or_smaller(report):
    report["steps"] = [step for step in report["steps"] if step["name"] in ("model", "control")]
    report["pareto_front"] = []
    report["steps"][1]["latency"] = []
    assert "quantize" not in decide(validate_report(report)).text
    quantize = ten_step_report()["steps"][5] | {"parent": "model"}
    report["steps"].append(quantize)
    verdict = decide(validate_report(report))
    assert (verdict.reason, verdict.step) == ("nothing-gained", None)
    assert "quantize" in verdict.text
    quantize["size_bytes"] = report["steps"][0]["size_bytes"]
    assert "quantize" not in decide(validate_report(report)).text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((8_354,), "8.35 kB"),
        ((11_300_000, 4_400_000), "11.3 → 4.40 MB"),
        ((9_120, 2_280), "9.12 → 2.28 kB"),
        ((1_250_000, 45_000), "1,250 → 45.0 kB"),
        ((100_000,), "0.10 MB"),
    ],
)
def test_sizes_have_three_digits_in_kilobytes_or_megabytes(sizes, text):
    assert view.size_text(*sizes) == text


def test_small_sizes_are_not_shown_as_zero(report):
    report["steps"][0]["size_bytes"], report["steps"][6]["size_bytes"] = 9_120, 2_280
    report["steps"][6]["gates"] = [
        _gate(undecided=False) | {"metric": "size_bytes", "kind": "max", "limit": 4000.0, "value": 2280.0}
    ]
    facts = _facts(report)
    assert facts["size"].value == "9.12 → 2.28 kB"
    assert "2.28 kB" in facts["gates"].rest
    for render in (render_table, render_markdown, render_html):
        assert "2.28 kB" in render(report)
    assert view.megabytes(4_400_000) == "4.40"


@pytest.mark.parametrize("cpu_speedup", [5.1, None])
def test_speed_of_disturbed_step_is_by_cpu_time_where_that_is_known(report, cpu_speedup):
    row = report["steps"][6]["latency"][0]
    mark_disturbed(row)
    row.update(cpu_speedup=cpu_speedup, cpu_speedup_ci95=cpu_speedup and [4.8, 5.3])
    report["steps"][7]["latency"] = []  # nothing to compare with: the smallest is recommended
    for step in report["steps"][1:6]:
        step["artifact"] = None
    verdict = validate_report(with_verdict(report)).verdict
    assert verdict.step == "onnx-int8"
    if cpu_speedup:
        report = with_verdict(report)
        report["verdict"]["reason"] = "smallest"
        [speed] = [fact for fact in verdict_facts(validate_report(report)) if fact.label == "speed"]
        assert "5.1×" in speed.value
        assert "[4.80, 5.30]" in speed.rest
    else:
        assert "×" not in _facts(report)["speed"].text
