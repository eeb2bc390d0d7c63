"""What must still be possible after a stage: a check that a new technique calls on what it made."""

from __future__ import annotations

from pathlib import Path

from smelt.models.families.registry import FAMILIES
from tests.support import harness
from tests.support.models import every_family


def check_usable(folder: Path, family: str, space: Path) -> None:
    """Save, load, train, quantize and export the float model in `folder`, whose structure may be any.

    Args:
        folder: a folder that a stage wrote.
        family: its family.
        space: a folder for what is made here.
    """
    space.mkdir(exist_ok=True)
    check_save_and_load(folder, space / "saved")
    check_training(folder, family, space / "trained")
    check_quantization(folder, family, space / "codes")
    check_export(folder, family, space / "graphs")


def check_save_and_load(folder: Path, out: Path) -> None:
    """The model computes the same when it was saved and read again."""
    import torch

    from smelt.models.checkpoint import load_model, save_model

    model, edits = load_model(folder)
    out.mkdir()
    save_model(model, edits, out, folder)
    reloaded, same = load_model(out)
    assert same == edits
    assert torch.equal(harness.logits(reloaded), harness.logits(model))


def check_training(parent: Path, family: str, out: Path) -> None:
    """Training leaves names, shapes and edits as they are; weights change and stay numbers."""
    import torch
    from safetensors.torch import load_file

    from smelt.compress.finetune import Finetune, FinetuneSettings
    from smelt.models.edits import read_edits

    settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    every_family.run_stage(Finetune(), settings, parent, family, out)
    before, after = (load_file(folder / "model.safetensors") for folder in (parent, out))
    assert read_edits(out) == read_edits(parent)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert all(torch.isfinite(t).all() for t in after.values())
    assert any(not torch.equal(t, before[n]) for n, t in after.items())


def check_quantization(parent: Path, family: str, out: Path) -> None:
    """Every layer gets codes, and what they compute is near."""
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings
    from smelt.models.checkpoint import load_model

    ctx = every_family.run_stage(Quantize(), QuantizeSettings(), parent, family, out)
    assert ctx.details["float_linear_layers"] == []
    # of a classifier two texts are four numbers, whose spread says little
    full_logits, codes = (harness.logits(load_model(folder)[0], texts=64) for folder in (parent, out))
    assert 0 < (codes - full_logits).abs().mean() < 0.2 * full_logits.std()


def check_export(folder: Path, family: str, out: Path) -> None:
    """Each graph agrees with the model; one that does not raises."""
    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings

    ctx = every_family.run_stage(Onnx(), OnnxSettings(), folder, family, out)
    assert ctx.details["parity"].keys() == ctx.details["graphs"].keys()
    assert len(ctx.details["graphs"]) == (2 if FAMILIES[family].architecture == "seq2seq" else 1)
