"""The report as Markdown."""

import re

import pytest

from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from tests.support.standins.sample_report import HtmlOutline, ten_step_report

pytestmark = pytest.mark.quick


@pytest.fixture
def report():
    return ten_step_report()


def cells_of(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_tables_are_well_formed_and_contain_numbers(report):
    text = render_markdown(report)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 6
    for block in blocks:
        assert len({len(cells_of(line)) for line in block}) == 1
        assert all(re.fullmatch(r":--|--:", cell) for cell in cells_of(block[1]))
    [gates, steps, *_] = blocks
    assert cells_of(gates[2])[1:] == ["test", "BLEU at most 1.00 worse", "1.37 worse", "**failed**"]
    body = {cells_of(line)[0].split(" ")[-1].split(";")[-1]: cells_of(line) for line in steps[2:]}
    assert len(body) == 10
    assert body["prune"][4] == r"37.51 \[36.20, 38.79\]"
    assert body["prune"][5] == r"−0.91\* \[−1.26, −0.56\]"
    assert body["prune"][6] == "46.2"
    assert body["prune"][10] == "88.2 (67 %)"
    assert body["engine"][3:6] == ["skipped", "–", "–"]
    assert "TensorRT is not installed" in text
    assert "**failed**" in text


def test_markdown_names_timing_parts_by_task(report):
    text = render_markdown(report)
    block = next(b for b in text.split("\n\n") if "time to first token" in b)
    head, _, first = block.splitlines()[:3]
    assert cells_of(head)[2:] == [
        f"{name} ms"
        for name in (
            "tokenizing",
            "encoder",
            "time to first token",
            "time per output token",
            "detokenizing",
            "graphs alone",
        )
    ]
    assert cells_of(first)[:4] == ["model", "1", "0.30", "16.9"]
    report["recipe"]["task"] = "language-modeling"
    assert "prefill ms" in render_markdown(report)
    for report_step in report["steps"]:
        for row in report_step["latency"]:
            row["parts"] = {"tokenizing_ms": 0.2, "model_ms": 3.0, "rest_ms": 0.1}
    for task, part in {"text-classification": "labels", "question-answering": "answers"}.items():
        report["recipe"]["task"] = task
        assert f"| model ms | {part} ms |" in render_markdown(report)
    assert HtmlOutline(render_html(report)).open == []


def test_markdown_table_shows_bits_per_weight_of_quantized_steps(report):
    def column():
        block = next(b for b in render_markdown(report).split("\n\n") if b.startswith("| step | stage |"))
        table_rows = [cells_of(line) for line in block.splitlines()]
        return table_rows[0][-1], [row[-1] for row in table_rows[2:]]

    assert column()[0] == "M parameters"
    report["steps"][4]["details"] = {"bits_per_weight": 4.503}
    quantized_steps = {report["steps"][4]["name"]}  # and what goes on from it
    for step in report["steps"]:
        quantized_steps |= {step["name"]} if step["parent"] in quantized_steps else set()
    head, cells = column()
    assert (head, cells.count("4.503"), cells.count("–")) == (
        "bits per weight",
        len(quantized_steps),
        10 - len(quantized_steps),
    )
    assert 1 < len(quantized_steps) < 10
    assert "<dt>bits_per_weight</dt><dd>4.503</dd>" in render_html(report)
