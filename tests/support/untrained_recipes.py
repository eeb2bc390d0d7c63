"""Recipes that start from a config without weights, and how they are run."""

import json

from tests.support import harness
from tests.support.models import tiny

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 64, "max_position_embeddings": 32}
BART = {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"max_position_embeddings": 64, "dropout": 0.0}
RECIPE_HEAD = "data: {train: data.jsonl, validation: data.jsonl, test: data.jsonl}\nthreads: 1\n"
RECIPE_HEAD += "score: {latency: false}\n"
CLASSIFIER = f"""
model: {{config: bert.json, tokenizer: {{train: wordpiece, vocab_size: 120}}}}
task: text-classification
{RECIPE_HEAD}stages:
  - finetune: {{max_steps: 60, batch_size: 8, num_evals: 1, learning_rate: 3.0e-3, precision: fp32}}
  - quantize
"""


def run_recipe(home, text, out="run", *more):
    """Run the recipe `text` in `home`; return the steps of its report by name, the report itself as ''."""
    (home / "recipe.yaml").write_text(text)
    harness.smelt("run", home / "recipe.yaml", "--out", home / out, "--quiet", *more, code=0)
    report = json.loads((home / out / "report.json").read_text())
    return {step["name"]: step for step in report["steps"]} | {"": report}


def write_config_and_data(folder):
    """Write the config of a small BERT and ten rows of data into `folder`."""
    (folder / "bert.json").write_text(json.dumps(BERT))
    tiny.write_labeled(folder / "data.jsonl", 10)
    return folder
