"""The table of layers, worst blocks first, in the page and in Markdown; a failed comparison is a warning."""

import json

import pytest

from smelt.core.errors import RunError
from smelt.evaluate import layer_sqnr, token_divergence
from smelt.evaluate.report import sensitivity
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.execute.run_result import step_row
from tests.support import harness
from tests.support.models import tiny
from tests.support.standins.sample_report import HtmlOutline, ten_step_report


def layer(name, part, db, removed=False):
    return {"name": name, "part": part, "sqnr_db": db, "removed": removed}


@pytest.fixture(name="report")
def _report():
    report = ten_step_report()
    layers = [
        layer("<b>emb</b>", "embeddings", None),
        *(layer(f"h.{layer_index}", "block", 30.0 - 2 * layer_index) for layer_index in range(10)),
        layer("h.9", "self-attention", 8.25),
        layer("h.9", "feed-forward", 9.0),
        layer("h.10", "block", 3.5, removed=True),
    ]
    values = {"samples": 16, "output_sqnr_db": 11.24, "layers": layers, "reason": None}
    report["steps"][1]["layer_sqnr"] = values
    other = [layer("h.0", "block", 1.0)]
    report["steps"][2]["layer_sqnr"] = values | {"layers": other, "output_sqnr_db": None}
    report["steps"][3]["layer_sqnr"] = {
        "samples": 0, "output_sqnr_db": None, "layers": [], "reason": "its outputs have another width",
    }  # fmt: skip
    return report


def test_worst_blocks_are_listed_first_with_weakest_part(report):
    table = sensitivity.find_layer_table(validate_report(report))
    assert [row.name for row in table.worst] == [
        "h.0",
        "h.10",
        *(f"h.{layer_index}" for layer_index in range(9, 3, -1)),
    ]
    nine = next(row for row in table.worst if row.name == "h.9")
    assert (table.weakest_part(nine, 0).part, table.weakest_part(nine, 1)) == ("self-attention", None)
    assert [sensitivity.shade(ratio) for ratio in (None, nine.ratios[0])] == [0, 70]  # 12 of 40 dB
    page = render_html(report)
    outline = HtmlOutline(page)
    assert outline.open == []
    texts = " ".join(outline.texts)
    for part in ("self-attention 8.2", "removed, 3.5", "equal", "its outputs have another width"):
        assert part in texts
    assert "<b>emb" not in page
    lines = [line for line in render_markdown(report).splitlines() if "h.10 removed, 3.5, h.9 12.0" in line]
    assert [line.split("|")[2].strip() for line in lines] == ["11.2"]
    assert step_row(report["steps"][1])["output_sqnr_db"] == 11.24
    report["steps"][3]["layer_sqnr"]["reason"] = None  # a model without blocks
    _, summary_rows = sensitivity.summary_rows(sensitivity.find_layer_table(validate_report(report)))
    assert summary_rows[2] == [report["steps"][3]["name"], "equal", "–"]


def test_failed_layer_comparison_does_not_fail_step(tmp_path, monkeypatch):
    def fail(*_):
        raise RunError("no", code="broke")

    monkeypatch.setattr(layer_sqnr.LayerComparison, "compare", fail)
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    (tmp_path / "r.yaml").write_text(
        "model: m\ntask: translation\ndata: {train: rows.jsonl, test: rows.jsonl}\n"
        "stages: [{prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}}]\n"
        "score: {quality: [chrf], generation: {max_new_tokens: 3}, latency: false}\n"
    )
    out = tmp_path / "out"
    assert harness.smelt("run", tmp_path / "r.yaml", "--quiet", "--out", out).exit_code == 0
    report = json.loads((out / "report.json").read_text())
    assert [step["status"] for step in report["steps"]] == ["done"] * 2
    assert "comparison-failed" in [message["code"] for message in report["warnings"]]
    tokens = report["steps"][1]["agreement"]
    assert tokens["kl_divergence"] > 0
    assert "KL divergence, nats per token" in (out / "report.md").read_text()
    monkeypatch.undo()
    monkeypatch.setattr(token_divergence.TokenComparison, "__init__", fail)  # its result is stored
    harness.smelt("run", tmp_path / "r.yaml", "--quiet", "--out", out, "--set", "score.sqnr_samples=0")
    report = json.loads((out / "report.json").read_text())
    assert [step["layer_sqnr"] for step in report["steps"]] == [None, None]
    assert report["steps"][1]["agreement"] == tokens
    assert "comparison-failed" not in [message["code"] for message in report["warnings"]]
    off = ("--set", "score.sqnr_samples=0", "--set", "score.kl_samples=0")
    harness.smelt("run", tmp_path / "r.yaml", "--quiet", "--out", out, *off)
    assert "kl_divergence" not in json.loads((out / "report.json").read_text())["steps"][1]["agreement"]
