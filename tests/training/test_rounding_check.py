"""How much of a training is lost when its weights are stored in 16 bits again."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.qat import load_trainable
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from smelt.training.checkpoints import RoundingCheck
from tests.support import harness
from tests.support.models import tiny

TASK = "text-classification"
ROWS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))


def half(folder, dtype=torch.float16):
    path = tiny.write_bert(folder) / "model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lost_share_is_ratio_of_norms(tmp_path, dtype):
    folder = half(tmp_path / "model", dtype)
    model, _ = load_model(folder)
    watch = RoundingCheck(model, folder)
    assert watch.lost_share() == 0.0
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    rounded = sum(float((p.to(dtype).float() - p).square().sum()) for p in now.values())
    changed = sum(float((p - start[n]).square().sum()) for n, p in now.items())
    assert watch.lost_share() == pytest.approx((rounded / changed) ** 0.5, rel=1e-3)
    assert rounded > 0


def test_quantized_weights_are_not_checked_for_rounding(tmp_path):
    source = tiny.as_artifact(half(tmp_path / "model"), TASK)
    ctx = harness.make_context(tmp_path / "q", TASK)
    Quantize()(source, QuantizeSettings(scheme="int4", group_size=16, exclude=["classifier"]), ctx)
    model, _ = load_trainable(tiny.as_artifact(ctx.out, TASK), ctx)
    watched = set(RoundingCheck(model, ctx.out).before)
    floats = {n for n, t in load_file(ctx.out / "model.safetensors").items() if t.dtype == torch.float16}
    assert watched == {n for n in floats if not n.endswith(".scales")}
    assert {"classifier.weight", "bert.pooler.dense.bias"} <= watched
    assert "bert.pooler.dense.weight" in dict(model.named_parameters())


def test_float32_model_is_not_checked_for_rounding(tmp_path):
    folder = tiny.write_bert(tmp_path / "model")
    assert RoundingCheck(load_model(folder)[0], folder).before == {}


@pytest.mark.parametrize(
    ("rate", "dtype", "warns"), [(1e-7, "keep", 1), (1e-2, "keep", 0), (1e-7, "fp32", 0)]
)
def test_training_undone_by_rounding_warns(tmp_path, rate, dtype, warns):
    folder = half(tmp_path / "model")
    out = tmp_path / "work" / "out"
    ctx = harness.make_context(out, TASK, data={"train": ROWS})
    settings = FinetuneSettings(
        max_steps=2, learning_rate=rate, precision="fp32", warmup_steps=0, dtype=dtype
    )
    Finetune()(tiny.as_artifact(folder, TASK), settings, ctx)
    assert message_codes(ctx.warnings).count("lost-in-rounding") == warns
    before, after = (load_file(f / "model.safetensors") for f in (folder, ctx.out))
    unchanged = sum(int((before[n].float() == after[n].float()).sum()) for n in before)
    share = unchanged / sum(t.numel() for t in before.values())
    assert share > 0.9 if warns else share < 0.5
    assert ("rounding" in ctx.details["training"]) == (dtype == "keep")


def test_merged_adapters_of_second_lora_training_are_not_checked(tmp_path):
    """Of a second QLoRA the adapters have more ranks than those that were stored, in 16 bits too."""
    codes = harness.make_context(tmp_path / "q", TASK)
    Quantize()(tiny.as_artifact(half(tmp_path / "model"), TASK), QuantizeSettings(scheme="int4"), codes)
    settings = FinetuneSettings(
        max_steps=2, batch_size=4, learning_rate=3e-3, precision="fp32", num_evals=0, lora={"r": 2}
    )
    first = harness.run_stage(Finetune(), settings, codes.out, tmp_path / "a", TASK, ROWS)
    second = harness.run_stage(Finetune(), settings, first.out, tmp_path / "b", TASK, ROWS)
    ranks = {e["rank"] for e in read_edits(second.out) if e["op"] == "adapter"}
    assert max(ranks) == 4
    assert 0 < second.details["training"]["rounding"] < 0.01  # of the head, which trains whole
    model = harness.load_output_model(first)
    adapters = {n for n, _ in model.named_parameters() if ".adapter." in n}
    assert adapters
    assert adapters <= set(RoundingCheck(model, first.out).before)  # where all trains, they are watched
    assert set(RoundingCheck(model, first.out).before) - adapters == set(
        RoundingCheck(model, first.out, True).before
    )
