"""Stages on a pretended GPU: no operator mixes devices, and results are those of the CPU."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

import smelt.training.lora
import smelt.training.trainer  # noqa: F401  (imported before a GPU is pretended)
from smelt.data.splits import Columns
from smelt.pipeline.recipe.stages import load_stage
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import causal, tiny
from tests.support.standins.pretend_gpu import pretend_gpu

_ = transformers.Trainer  # likewise
TRAINING = {"learning_rate": 5e-3, "batch_size": 8, "precision": "fp32", "max_steps": 3, "num_evals": 1}
INSIDE = dict.fromkeys(
    ("logits", "hidden_states", "attention", "self_attention_relations", "cosine", "reverse_kl"), 1.0
)
UNITS = {"targets": ["heads", "ffn"], "keep_ratio": 0.5}
CASES = {
    "finetune": ("marian", {"finetune": TRAINING | {"ema_decay": 0.9}}),
    "distill": ("marian", {"distill": TRAINING | {"teacher": "model", "losses": INSIDE}}),
    "cached teacher": ("llama", {"distill": TRAINING | {"teacher": "model", "cache_logits": {"top_k": 4}}}),
    "lora": ("llama", {"finetune": TRAINING | {"lora": {"r": 2}}}),
    "learned masks": (
        "marian",
        {"finetune": TRAINING | {"learned_masks": {"keep_ratio": 0.5, "targets": ["heads", "ffn", "width"]}}},
    ),
    "gradual": ("llama", {"finetune": TRAINING | {"sparsify": {"sparsity": 0.5}}}),
    "lsq": (  # float activations: the last digits of a sum decide how blocks are rounded
        "llama",
        {
            "quantize": {"scheme": "int4", "accuracy_level": 0},
            "finetune": TRAINING | {"qat": {"scales": "lsq"}},
        },
    ),
    "gptq": ("llama", {"quantize": {"scheme": "int4", "method": "gptq"}}),
    "awq": ("llama", {"quantize": {"scheme": "int4", "method": "awq"}}),
    "units": ("marian", {"prune": UNITS | {"importance": "taylor"}}),
    "width": ("marian", {"prune": {"targets": ["width"], "keep_ratio": 0.5, "importance": "taylor"}}),
    "svd": ("llama", {"factorize": {"keep_ratio": 0.7, "optimize_for": "size"}}),
    "sparsegpt": ("llama", {"sparsify": {"sparsity": 0.5, "method": "sparsegpt"}}),
    "layers": ("marian", {"drop-layers": {"importance": "loss", "keep_ratio": 0.5}}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    pairs, lines = tiny.write_pairs(folder / "pairs.jsonl", rows=16), causal.write_lines(folder / "lines.txt")
    return {
        "marian": (tiny.write_marian(folder / "marian"), pairs, "translation"),
        "llama": (causal.write_model(folder / "llama", "llama"), lines, "language-modeling"),
    }


def run(source, chain, folder, device):
    model, file, task = source
    split = read_split(str(file), task, Columns(), file.parent)
    data, artifact = (
        dict.fromkeys(("train", "validation", "calibration"), split),
        tiny.as_artifact(model, task),
    )
    ancestors = {"model": artifact}
    for name, settings in chain.items():
        stage = load_stage(name)
        ctx = harness.make_context(folder / name, task, data, ancestors=dict(ancestors), device=device)
        stage()(artifact, stage.settings_type(**settings), ctx)
        artifact = ancestors[name] = tiny.as_artifact(ctx.out, task)
    return load_file(artifact.path / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_stage_uses_one_device_and_equals_cpu(case, sources, tmp_path):
    family, chain = CASES[case]
    with pretend_gpu() as operators:
        gpu_tensors = run(sources[family], chain, tmp_path / "gpu", "cuda")
    assert sum(operators[name] for name in ("mm", "addmm", "linear")) > 0
    expected = run(sources[family], chain, tmp_path / "cpu", "cpu")
    assert gpu_tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert gpu_tensors[name].shape == value.shape
        if not value.is_floating_point():  # a code at the border between two may be either
            assert (gpu_tensors[name] == value).float().mean() > 0.95, name
        elif not name.endswith("k_proj.bias"):  # of rounding errors only, which Adam scales up
            assert torch.allclose(gpu_tensors[name].double(), value.double(), rtol=1e-3, atol=1e-4), name
