"""What Optimum itself exported starts a recipe, and gives what the model in torch gives."""

import json
import shutil
from pathlib import Path

import pytest

import smelt
from tests.support.models import causal, tiny
from tests.support.processes import peer_tools

TEXTS = tiny.SENTENCES[:4]
TASKS = {
    "marian": ("text2text-generation-with-past", "translation"),
    "gpt2": ("text-generation-with-past", "language-modeling"),
}


@pytest.mark.peers
def test_graphs_exported_by_optimum_equal_the_model(tmp_path: Path) -> None:
    tiny.write_marian(tmp_path / "marian")
    causal.write_model(tmp_path / "gpt2", "gpt2")
    requests = [
        {"source": str(tmp_path / kind), "out": str(tmp_path / f"{kind}-onnx"), "task": task}
        for kind, (task, _) in TASKS.items()
    ]
    names = peer_tools.run_in_optimum("export_by_optimum.py", {"models": requests})
    assert set(names[0]) >= {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"}
    shutil.copytree(tmp_path / "marian-onnx", tmp_path / "merged-onnx")
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        (tmp_path / "merged-onnx" / name).unlink()
    data_files = {
        "translation": tiny.write_pairs(tmp_path / "d.jsonl", 6).name,
        "language-modeling": causal.write_lines(tmp_path / "d.txt", 1).name,
    }
    for kind, source in (("marian", "marian"), ("merged", "marian"), ("gpt2", "gpt2")):
        task = TASKS[source][1]
        answers, scores = [], []
        for model in (f"{kind}-onnx\ntokenizer: {source}", source):
            recipe = tmp_path / "r.yaml"
            recipe.write_text(
                f"model: {model}\ntask: {task}\ndata: {{test: {data_files[task]}}}\nstages: []\n"
                "score: {latency: false, generation: {max_new_tokens: 6}}\n"
            )
            out = tmp_path / f"run-{kind}-{len(answers)}"
            smelt.run(recipe, out=out, quiet=True)
            step = json.loads((out / "report.json").read_text())["steps"][0]
            scores.append({name: round(s["value"], 2) for name, s in step["quality"].items()})
            with smelt.load(out / "artifacts/model") as model_runner:
                generated = [
                    model_runner.generate(TEXTS, num_beams=beams, max_new_tokens=6) for beams in (1, 3)
                ]
            answers.append(generated)
        assert answers[0] == answers[1]
        assert scores[0] == scores[1]
