"""A whole run on a tiny model: resume, gates, exit codes, interruption, killing."""

import gzip
import json
import sys

import pytest
from sacrebleu.metrics.bleu import BLEU

from smelt.core.remote_store import RemoteStore
from smelt.evaluate.report.schema import validate_report
from tests.support import harness
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5}
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1}
  - quantize: {scheme: int8-dynamic}
score: {quality: [chrf, bleu], generation: {max_new_tokens: 6}, latency: false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_marian(folder / "m")
    tiny.write_pairs(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def _run(home, *arguments):
    return harness.smelt("run", home / "recipe.yaml", "--quiet", *arguments)


def _outputs(folder, step):
    content = gzip.decompress((folder / "scores" / f"{step}.json.gz").read_bytes())
    return json.loads(content)["predictions"]


def _report(folder):
    report = json.loads((folder / "report.json").read_text())
    validate_report(report)
    return report


def test_run_writes_reports_and_artifacts_and_second_run_is_cached(home, tmp_path):
    first = _run(home, "--out", tmp_path / "one", "--store", tmp_path / "s")
    assert first.exit_code == 0, first.output
    report = _report(tmp_path / "one")
    assert [s["status"] for s in report["steps"]] == ["done"] * 4
    assert [s["name"] for s in report["steps"]] == ["model", "prune", "finetune", "quantize"]
    assert all(s["quality"]["bleu"]["n"] == 8 for s in report["steps"])
    assert report["steps"][1]["parameters"] < report["steps"][0]["parameters"]
    assert report["steps"][3]["size_bytes"] < report["steps"][2]["size_bytes"] / 2
    settings = report["steps"][3]["settings"]
    assert (settings["granularity"], "group_size" in settings) == ("channel", False)
    for step in report["steps"]:
        signatures = [score["signature"] for score in step["quality"].values()]
        assert all(signature.endswith(f"|device:{step['device']}") for signature in signatures)
    for name in ("report.md", "report.html", "log.txt", "recipe.yaml", "artifacts/quantize/manifest.json"):
        assert (tmp_path / "one" / name).is_file(), name
    second = _run(home, "--out", tmp_path / "two", "--store", tmp_path / "s")
    assert second.exit_code == 0
    second_report = _report(tmp_path / "two")
    assert [s["status"] for s in second_report["steps"]] == ["cached"] * 4
    for field in ("quality", "agreement", "examples", "layer_sqnr"):
        assert [s[field] for s in second_report["steps"]] == [s[field] for s in report["steps"]]
    outputs = [_outputs(tmp_path / name, "quantize") for name in ("one", "two")]
    assert outputs[0] == outputs[1]
    base, agreement = _outputs(tmp_path / "two", "model"), second_report["steps"][3]["agreement"]
    assert agreement["bleu"] == pytest.approx(BLEU().corpus_score(outputs[0], [base]).score)
    assert agreement["equal"] == 100 * sum(map(str.__eq__, outputs[0], base)) / 8
    assert report["steps"][0]["layer_sqnr"] is None
    layers = {
        (signature["name"], signature["part"]): signature["sqnr_db"]
        for signature in report["steps"][1]["layer_sqnr"]["layers"]
    }
    changed_parts = {field for (_, field), ratio in layers.items() if ratio is not None and ratio < 100}
    assert changed_parts == {"block", "feed-forward"}  # neurons were pruned
    changed = second_report["steps"][1]["examples"]["worse"] + second_report["steps"][1]["examples"]["better"]
    assert changed
    for row in changed:
        index = row["row"] - 1
        assert row["output"] == _outputs(tmp_path / "two", "prune")[index]
        assert row["baseline_output"] == base[index]
        assert row["source"] == tiny.SENTENCES[index % len(tiny.SENTENCES)]


def test_until_set_and_limit_change_run(home, tmp_path):
    result = _run(
        home,
        "--out",
        tmp_path / "r",
        "--store",
        tmp_path / "s",
        "--until",
        "prune",
        "--limit",
        3,
        "--set",
        "prune.keep_ratio=0.25",
    )
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r")
    assert [s["name"] for s in report["steps"]] == ["model", "prune"]
    assert report["steps"][1]["settings"]["keep_ratio"] == 0.25
    assert report["steps"][0]["quality"]["bleu"]["n"] == 3


def test_until_may_stop_before_baseline(home, tmp_path):
    options = ("--out", tmp_path / "r", "--store", tmp_path / "s", "--set", "baseline=quantize")
    result = _run(home, *options, "--until", "prune")
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r")
    assert report["baseline"] is None
    [warning] = [message for message in report["warnings"] if message["code"] == "no-comparison"]
    assert "'quantize'" in warning["message"]
    assert [s["against_baseline"] for s in report["steps"]] == [{}, {}]
    assert _run(home, *options).exit_code == 0
    report = _report(tmp_path / "r")
    assert report["baseline"] == "quantize"
    compared = [step["agreement"] is not None for step in report["steps"]]  # three were scored before it
    assert compared == [True, True, True, False]
    tests = [test for step in report["steps"] for test in step["against_baseline"].values()]
    assert tests
    for test in tests:  # Holm's largest factor is the number of comparisons, his smallest 1
        assert test["p_value"] <= test["p_value_holm"] <= min(1.0, len(tests) * test["p_value"])
    smallest = min(tests, key=lambda test: test["p_value"])
    assert smallest["p_value_holm"] == pytest.approx(min(1.0, len(tests) * smallest["p_value"]))


def test_teacher_of_other_branch_is_used_and_is_part_of_key(home, tmp_path):
    """The step that a setting names counts by what it is: neither its name nor its branch matters."""
    train = "max_steps: 1, batch_size: 4, num_evals: 1"
    head = (
        RECIPE.split("stages:", maxsplit=1)[0]
        .replace("model: m", f"model: {home / 'm'}")
        .replace("data.jsonl", f"{home}/data.jsonl")
    )
    tail = "score: {quality: [bleu], generation: {max_new_tokens: 6}, latency: false}"
    keys = []
    for first, second in (("tuned", "wide"), ("teacher", "wide"), ("wide", "teacher")):
        stages = f"""
  - finetune: {{{train}}}
    name: {first}
  - finetune: {{{train}, learning_rate: 0.01}}
    from: model
    name: {second}
  - distill: {{{train}, teacher: {"tuned" if first == "tuned" else "teacher"}}}
    from: model
"""
        (tmp_path / "r.yaml").write_text(f"{head}stages:{stages}{tail}")
        arguments = [
            "run",
            str(tmp_path / "r.yaml"),
            "--quiet",
            "--out",
            str(tmp_path / "r"),
            "--store",
            str(tmp_path / "s"),
        ]
        assert harness.smelt(*arguments).exit_code == 0
        keys.append(_report(tmp_path / "r")["steps"][-1]["key"])
    assert keys[0] == keys[1] != keys[2]


def test_failed_gate_gives_exit_code_3(home, tmp_path):
    result = _run(
        home,
        "--out",
        tmp_path / "r",
        "--store",
        tmp_path / "s",
        "--until",
        "prune",
        "--set",
        "gates={bleu: {min: 101, at: prune}}",
    )
    assert result.exit_code == 3
    report = _report(tmp_path / "r")
    assert report["status"] == "gate-failed"
    (gate,) = report["steps"][1]["gates"]
    assert (gate["limit"], gate["passed"]) == (101, False)


def test_training_flushes_denormals_to_zero(home, tmp_path, monkeypatch):
    from smelt.compress.finetune import Finetune

    denormals = []
    work = Finetune.__call__

    def watch(self, src, settings, ctx):
        denormals.append(sys.float_info.min / 2)
        work(self, src, settings, ctx)

    monkeypatch.setattr(Finetune, "__call__", watch)
    options = ("--out", tmp_path / "run", "--store", tmp_path / "store")
    assert _run(home, *options, "--until", "finetune").exit_code == 0
    assert denormals
    assert set(denormals) == {0.0}
    assert sys.float_info.min / 2 > 0


def test_ctrl_c_keeps_finished_steps_and_gives_exit_code_130(home, tmp_path, monkeypatch):
    from smelt.compress.finetune import Finetune

    def interrupt(self, src, settings, ctx):
        raise KeyboardInterrupt

    monkeypatch.setattr(Finetune, "__call__", interrupt)
    result = _run(home, "--out", tmp_path / "r", "--store", tmp_path / "s")
    assert result.exit_code == 130
    report = _report(tmp_path / "r")
    assert report["status"] == "interrupted"
    assert [s["status"] for s in report["steps"]] == ["done", "done", "not-reached", "not-reached"]


def test_unknown_rebuild_step_is_rejected_before_run(home, tmp_path):
    result = _run(home, "--out", tmp_path / "r", "--store", tmp_path / "s", "--rebuild", "nothing")
    assert result.exit_code == 2
    assert not (tmp_path / "s").exists()


def test_machines_share_remote_store(home, tmp_path, monkeypatch):
    url = f"file://{tmp_path / 'bucket'}"
    refusal = _run(home, "--out", tmp_path / "no" / "run", "--store", "s4://bucket")
    assert (refusal.exit_code, refusal.error.code) == (2, "unknown-protocol")
    assert not (tmp_path / "no").exists()
    reports = []
    for machine in ("one", "two"):
        result = _run(home, "--out", tmp_path / machine / "run", "--store", url, "--until", "prune")
        assert result.exit_code == 0, result.output
        assert (tmp_path / machine / ".store" / "artifacts").is_dir()
        reports.append(_report(tmp_path / machine / "run"))
    assert [[s["status"] for s in run_report["steps"]] for run_report in reports] == [
        ["done"] * 2,
        ["cached"] * 2,
    ]
    assert reports[0]["steps"][1]["quality"] == reports[1]["steps"][1]["quality"]
    assert "push-failed" not in {
        message["code"] for run_report in reports for message in run_report["warnings"]
    }

    def lost(remote, artifact, replace=False):
        raise OSError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "push", lost)
        prune = ["--until", "prune", "--set", "prune.keep_ratio=0.25"]
        result = _run(home, "--out", tmp_path / "one" / "run", "--store", url, *prune)
    assert result.exit_code == 4, result.output
    report = _report(tmp_path / "one" / "run")
    assert [s["status"] for s in report["steps"]] == ["cached", "done"]
    assert "push-failed" in {message["code"] for message in report["warnings"]}
