"""Losses that go on from the layer that is tried are, to the bit, those of whole runs."""

import pytest
import torch

from smelt.calibration.prefix_cache import PrefixCachedModel
from smelt.compress.drop_layers.select_layers import without_layers
from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import family_of
from tests.support.models import every_family


@pytest.mark.parametrize(
    ("family", "what"),
    [("marian", None), ("t5", ["attention", "ffn"]), ("modernbert", None), ("llama", ["attention", "ffn"])],
)
def test_resumed_losses_equal_full_forward(what, family, tmp_path, monkeypatch):
    losses, real, source = [], PrefixCachedModel.resume_each, every_family.model_with_layers(family, 3)

    def resume_each(cached, called):
        resumed = real(cached, called)

        def both(model, batch):
            resumed_loss = resumed(model, batch)
            with torch.inference_mode():
                losses.append((float(resumed_loss), float(called(model, batch))))
            return resumed_loss

        return both

    monkeypatch.setattr(PrefixCachedModel, "resume_each", resume_each)
    settings = {"keep_ratio": 0.5, "calibration_samples": 8, "importance": "loss"} | (
        {} if what is None else {"targets": what}
    )
    ctx = every_family.run_stage(
        DropLayers(), DropLayersSettings(**settings), source, family, tmp_path / "out"
    )
    assert len(ctx.details["dropped"]) >= 1
    assert all(resumed == full_loss for resumed, full_loss in losses)
    assert len({full_loss for _, full_loss in losses}) > 2


@pytest.mark.parametrize(("family", "is_computed"), [("marian", False), ("t5", True)])
def test_removed_layer_is_not_executed(family, is_computed):
    model, _ = load_model(every_family.model_with_layers(family, 3))
    stacks, calls, plain = family_of(model).stacks(model.config.to_dict()), [], set()
    layer = model.get_submodule(stacks[-1].module_path)[1]
    next(m for m in layer.modules() if isinstance(m, torch.nn.Linear)).register_forward_pre_hook(
        lambda *_: calls.append(1)
    )
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(3):
            with without_layers(model, stacks, {(stacks[-1].name, 1)}, plain):
                model(input_ids=ids, decoder_input_ids=ids)
    assert len(calls) == (3 if is_computed else 1)  # once, since nobody knew
