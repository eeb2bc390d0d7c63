"""Convolutions become thinner ones: the operations that were asked for, saved, trained, exported."""

import pytest
import torch
from torch import nn

from smelt.compress.factorize import ranks as rank_rules
from smelt.compress.factorize.convolutions import convolution_ranks, factorize_convolution
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.errors import InputError
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.operations import count_operations
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import images

WIDE = {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 1]}
CONVS = {
    "square": nn.Conv2d(16, 24, 3, padding=1),
    "strided, no bias": nn.Conv2d(12, 20, 5, stride=2, padding=2, bias=False),
    "dilated, oblong": nn.Conv2d(8, 12, (3, 5), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return images.write_model(tmp_path_factory.mktemp("conv") / "model", "resnet", **WIDE)


def counted(conv, side=24):
    """Return multiply-accumulates a place of the output, by hooks, and the output."""
    total = 0

    def count(module, inputs, output):
        nonlocal total
        total += module.weight[0].numel() * output.numel()

    for module in conv.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    with torch.no_grad():
        out = conv(torch.randn(1, next(conv.parameters()).shape[1], side, side))
    return total / out[0, 0].numel(), out


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize(("method", "ranks"), [("tucker", (5, 6)), ("tucker", (6,)), ("cp", (7,))])
def test_factorized_convolution_approximates_kernel_with_expected_macs(name, method, ranks):
    conv = CONVS[name]
    new, error = factorize_convolution(conv, method, ranks, 0)
    x = torch.randn(2, conv.in_channels, 17, 19, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        relative_error = (new(x) - conv(x)).norm() / (
            conv(x) - (0 if conv.bias is None else conv.bias[:, None, None])
        ).norm()
    assert new(x).shape == conv(x).shape
    assert float(relative_error) == pytest.approx(
        error, rel=0.3
    )  # of white noise the kernel's error is the output's
    of_one = (
        rank_rules.cp_macs(conv, 7)
        if method == "cp"
        else rank_rules.tucker2_macs(conv, ranks[0] if len(ranks) == 2 else None, ranks[-1])
    )
    assert sum(
        p.numel() for n, p in new.named_parameters() if "weight" in n
    ) == rank_rules.count_factorized_weights(conv, method, ranks)
    assert counted(new, 60)[0] == pytest.approx(of_one, rel=0.15)  # but for the borders


@pytest.mark.parametrize(("method", "rank"), [("tucker", 12), ("cp", 108)])
def test_full_rank_factorization_is_lossless(method, rank):
    conv = nn.Conv2d(12, 16, 3)
    new, error = factorize_convolution(conv, method, (12, 16) if method == "tucker" else (rank,), 0)
    x = torch.randn(1, 12, 9, 9)
    assert error < 1e-3
    assert torch.allclose(new(x), conv(x), atol=1e-3)


@pytest.mark.parametrize("method", ["tucker", "cp"])
def test_keep_ratio_applies_to_flops_and_report_counts_them(method, source, tmp_path):
    settings = FactorizeSettings(method=method, keep_ratio=0.5)
    ctx = harness.run_stage(Factorize(), settings, source, tmp_path / "out", images.TASK)
    before, after = ctx.details["flops_before"], ctx.details["flops_after"]
    assert after < before
    convs = dict(harness.load_output_model(harness.make_context(source)).named_modules())
    for name, ranks in ctx.details["ranks"].items():
        conv = convs[name]
        inner = ranks[0] if len(ranks) == 2 else None
        now = (
            rank_rules.cp_macs(conv, *ranks)
            if method == "cp"
            else rank_rules.tucker2_macs(conv, inner, ranks[-1])
        )
        assert 0.3 < now / rank_rules.convolution_macs(conv) <= 0.5
    assert "resnet.embedder.embedder.convolution" in {**ctx.details["ranks"], **ctx.details["left_alone"]}


def test_counted_macs_equal_manual_count(tmp_path):
    folder = images.write_model(tmp_path / "m", "resnet", hidden_sizes=[8], depths=[1], embedding_size=8)
    model = harness.load_output_model(harness.make_context(folder))
    # 7 x 7 of stride 2 on 16 x 16, then a pool of stride 2: two layers of 3 x 3 on 4 x 4, and two labels
    assert count_operations(model, (16, 16)) == 8 * 3 * 49 * 64 + 2 * (8 * 8 * 9 * 16) + 8 * 2


@pytest.mark.parametrize("settings", [{"energy": 0.7}, {"rank": "vbmf"}, {"rank": 3}])
def test_convolution_ranks_follow_settings(settings):
    conv = nn.Conv2d(32, 24, 3)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # of rank 4 in both, and a little noise
        low = torch.einsum(
            "tq,qrde,sr->tsde",
            torch.randn(24, 4, generator=draw),
            torch.randn(4, 4, 3, 3, generator=draw),
            torch.randn(32, 4, generator=draw),
        )
        conv.weight.copy_(low + 0.05 * torch.randn(low.shape, generator=draw))
    ranks = convolution_ranks(conv, FactorizeSettings(method="tucker", **settings))
    expected = {"energy": (1, 5), "rank": (4, 5) if settings.get("rank") == "vbmf" else (3, 4)}
    low_end, high_end = expected[next(iter(settings))]
    assert all(low_end <= rank < high_end for rank in ranks)
    assert len(ranks) == 2
    assert convolution_ranks(conv, FactorizeSettings(method="cp", **settings)) == (max(ranks),)
    assert len(convolution_ranks(nn.Conv2d(3, 24, 7), FactorizeSettings(method="tucker", **settings))) == 1


def test_factorized_convolutions_can_be_saved_trained_and_exported(source, tmp_path):
    method = "tucker"
    rows = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
    settings = FactorizeSettings(method=method, keep_ratio=0.5)
    first = harness.run_stage(Factorize(), settings, source, tmp_path / "1", images.TASK, rows)
    training = FinetuneSettings(max_steps=2, batch_size=4, num_evals=1, precision="fp32")
    second = harness.run_stage(Finetune(), training, first.out, tmp_path / "2", images.TASK, rows)
    third = harness.run_stage(Onnx(), OnnxSettings(), second.out, tmp_path / "3", images.TASK, rows)
    assert third.details["graphs"]["model"]["operators"]["Conv"] > 6 + len(first.details["ranks"])
    if not first.details["left_alone"]:
        refactorized = harness.run_stage(Factorize(), settings, first.out, tmp_path / "4", images.TASK, rows)
        assert refactorized.warnings[0].code == "already-factorized"
        structures = [(ctx.out / "structure.json").read_text() for ctx in (first, refactorized)]
        assert structures[0] == structures[1]
    with raises_code("no-layer-selected", InputError):
        harness.run_stage(
            Factorize(),
            settings.model_copy(update={"include": ["*.fc"]}),
            source,
            tmp_path / "5",
            images.TASK,
        )


def test_vit_patch_projection_can_be_factorized(tmp_path):
    """Its forward asks the convolution of its patches for a weight, whose type it takes."""
    source = images.write_model(tmp_path / "vit")
    settings = FactorizeSettings(method="tucker", keep_ratio=0.5)
    thin = harness.run_stage(Factorize(), settings, source, tmp_path / "thin", images.TASK)
    name = "vit.embeddings.patch_embeddings.projection"
    assert list(thin.details["ranks"]) == [name]
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before, after = load_model(source)[0], harness.load_output_model(thin)
    outputs = []
    after.get_submodule(name).register_forward_hook(lambda m, args, result: outputs.append(result))
    with torch.no_grad():
        assert after(pixels).logits.shape == before(pixels).logits.shape
        original_output = before.get_submodule(name)(pixels)
    assert 0 < float((outputs[0] - original_output).norm() / original_output.norm()) < 1


def test_convolution_without_savings_is_skipped(source, tmp_path):
    settings = FactorizeSettings(method="tucker", energy=1.0)
    ctx = harness.run_stage(Factorize(), settings, source, tmp_path / "out", images.TASK)
    assert ctx.details["ranks"] == {}
    assert ctx.details["flops_after"] == ctx.details["flops_before"]
    assert "saves no operations" in next(iter(ctx.details["left_alone"].values()))
    assert ctx.warnings[0].code == "no-rank-saves"
    assert "6" in ctx.warnings[0].message


def test_conflicting_convolution_settings_are_rejected():
    with raises_setting_codes("settings-conflict"):
        FactorizeSettings(rank="vbmf")
    with raises_setting_codes("unused-setting"):
        FactorizeSettings(method="cp", parameter_budget=0.5)
    for settings, family in ((FactorizeSettings(method="cp"), "bert"), (FactorizeSettings(), "resnet")):
        (error,), _ = Factorize.check_model(settings, {"model_type": family})
        assert (error.setting, error.code) == ("method", "does-not-fit-model")
