"""A student of half depth for SST-2: distilled on running text first, against as many updates on the task.

    python benchmarks/general_distillation.py --model MINILM --text WIKITEXT2 --task-data SST2 --out FOLDER

The teacher of the text is the encoder itself, without its task: the student learns its hidden states and
attention scores (TinyBERT's general distillation). The teacher of the task is the encoder, fine-tuned. All
students begin with the same three layers and are scored on the test and validation rows together, of which
no training sees one.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import click
import transformers

import smelt

TASK = "text-classification"
GENERAL_LOSSES = {"logits": 0, "labels": 0, "hidden_states": 1, "attention": 1}
TASK_LOSSES = {"logits": 1, "labels": 0.5}


def write_masked_model(model: Path, out: Path) -> Path:
    """Write the encoder in `model` with an untrained head for masked tokens, which no loss uses."""
    if not out.exists():
        transformers.set_seed(0)
        transformers.AutoModelForMaskedLM.from_pretrained(model).save_pretrained(out)
        transformers.AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return out


def write_rows(source: Path, out: Path) -> dict[str, str]:
    """Write the training rows, and as test those of test and validation together, and return their paths."""
    for name, parts in {"train": ("train",), "test": ("test", "validation")}.items():
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for part in parts:
                with gzip.open(source / f"{part}.jsonl.gz", "rt", encoding="utf-8") as rows:
                    file.write(rows.read())
    return {name: str(out / f"{name}.jsonl") for name in ("train", "test")}


def run(out: Path, name: str, recipe: dict[str, Any]) -> Path:
    """Run a recipe (JSON is YAML) and return the folder of its artifacts."""
    path = out / f"{name}.yaml"
    path.write_text(json.dumps(recipe | {"score": {"latency": False} | recipe.get("score", {})}, indent=1))
    smelt.run(path, out=out / "runs" / name)
    return out / "runs" / name / "artifacts"


@click.command()
@click.option("--model", type=Path, required=True, help="a BERT encoder")
@click.option("--text", type=Path, required=True, help="folder with train.txt.gz and test.txt.gz")
@click.option("--task-data", type=Path, required=True, help="folder with JSON lines of SST-2")
@click.option("--out", type=Path, required=True)
@click.option("--teacher-steps", default=300, show_default=True)
@click.option("--general-steps", default=300, show_default=True)
@click.option("--task-steps", default=300, show_default=True)
def main(
    model: Path,
    text: Path,
    task_data: Path,
    out: Path,
    teacher_steps: int,
    general_steps: int,
    task_steps: int,
) -> None:
    """Print the accuracy of each arm."""
    out.mkdir(parents=True, exist_ok=True)
    rows = write_rows(task_data, out)
    training = {"batch_size": 16, "learning_rate": 1e-4, "num_evals": 0}
    finetune = training | {"max_steps": teacher_steps, "learning_rate": 5e-5}
    tuned = run(out, "teacher", {
        "model": str(model), "task": TASK, "data": rows, "threads": 1,
        "stages": [{"finetune": finetune, "name": "tuned"}],
    }) / "tuned"  # fmt: skip
    distill = training | {
        "student": {"layers": 3}, "losses": GENERAL_LOSSES, "batch_size": 8, "max_steps": general_steps
    }  # fmt: skip
    texts = {name: str(text / f"{name}.txt.gz") for name in ("train", "test")}
    general = run(out, "general", {
        "model": str(write_masked_model(model, out / "masked")), "task": "masked-language-modeling",
        "data": texts | {"windows": {"length": 32}}, "threads": 1,
        "stages": [
            {"drop-layers": {"layers": 3}, "name": "cut"},
            {"distill": distill, "from": "model", "name": "general"},
        ],
    })  # fmt: skip
    arms = {
        "general first": (general / "general", task_steps),
        "task only, as many updates": (general / "cut", task_steps + general_steps),
        "task only": (general / "cut", task_steps),
    }
    for number, (name, (start, steps)) in enumerate(arms.items()):
        task = training | {"teacher": {"model": str(tuned)}, "losses": TASK_LOSSES, "max_steps": steps}
        run(out, f"arm-{number}", {
            "model": str(start), "task": TASK, "data": rows, "threads": 1,
            "stages": [{"distill": task, "name": "student"}],
        })  # fmt: skip
        report = json.loads((out / "runs" / f"arm-{number}" / "report.json").read_text())
        score = report["steps"][-1]["quality"]["accuracy"]
        click.echo(f"{name}: {score['value']:.2f} {score['ci95']} n = {score['n']}")


if __name__ == "__main__":
    main()
