"""Adapters: what trains, what is stored, and where there can be none."""

import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.plan_layers import quantize_module, quantized_weight_bits
from smelt.compress.quantize.qat import prepare_qat
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core import system
from smelt.core.errors import InputError, MissingDependencyError
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.models.edits import apply_edits, mark_masked, read_edits
from smelt.models.layers import LowRankCorrectedLinear
from smelt.models.model_size import count_parameters
from smelt.quantization.layers import QuantizedMatrix
from smelt.tasks.read_split import read_split
from smelt.training.lora import LoraAdapters, QuantizedLoraLinear, find_lora_layers
from smelt.training.settings import LoraSettings
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import causal, every_family, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
SHORT = {"max_steps": 15, "batch_size": 4, "learning_rate": 1e-2, "precision": "fp32", "lora": {"r": 2}}


def changed(before, after):
    """Which parameters are others, by name, and the rank of what was added to each matrix."""
    old, changed_ranks = dict(before.named_parameters()), {}
    for name, parameter in after.named_parameters():
        difference = (parameter - old[name]).detach()
        if float(difference.abs().max()) > 0:
            matrix = difference.dim() == 2
            changed_ranks[name] = (
                int(torch.linalg.matrix_rank(difference.double(), rtol=1e-4)) if matrix else None
            )
    return changed_ranks


def test_quantized_lora_layer_adds_scaled_low_rank_product():
    torch.manual_seed(0)
    base = quantize_module(torch.nn.Linear(32, 16), "int4")
    layer, x = QuantizedLoraLinear(base, LoraSettings(r=2, alpha=6)), torch.randn(3, 32)
    torch.nn.init.normal_(layer.pair.up.weight)
    torch.testing.assert_close(layer(x), base(x) + 3 * layer.pair(x))


def test_rank_stabilized_scale_is_alpha_by_the_root_of_the_rank():
    base = quantize_module(torch.nn.Linear(32, 16), "int4")
    layer = QuantizedLoraLinear(base, LoraSettings(r=4, alpha=6, use_rslora=True))
    assert layer.scaling == 3.0
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    adapters = LoraAdapters(model, LoraSettings(r=4, alpha=6, use_rslora=True))
    assert {adapted.scaling["default"] for adapted in adapters.layers.values()} == {3.0}


def test_dora_scales_rows_to_trained_lengths_and_merges_exactly():
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first_logits = harness.logits(model)
    adapters = LoraAdapters(model, LoraSettings(r=2, alpha=4, use_dora=True))
    torch.testing.assert_close(harness.logits(model), first_logits)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    name, layer = next(iter(adapters.layers.items()))
    direction = before[f"{name}.weight"] + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    lengths = layer.lora_magnitude_vector["default"].weight
    expected = (lengths / direction.norm(dim=1))[:, None] * direction  # Liu et al. 2024, equation 5
    adapted_logits = harness.logits(model)
    for _ in range(2):
        with adapters.as_stored():
            torch.testing.assert_close(model.get_submodule(name).weight, expected)
            torch.testing.assert_close(harness.logits(model), adapted_logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(harness.logits(model), adapted_logits)
    adapters.finalize()
    torch.testing.assert_close(model.get_submodule(name).weight, expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "alpha": 3}, {"use_dora": True}], ids=["lora", "rslora", "dora"]
)
def test_saved_adapter_is_read_by_peft(tmp_path, settings):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    rows = read_split(
        str(tiny.write_labeled(tmp_path / "r.jsonl")), "text-classification", Columns(), tmp_path
    )
    source = tiny.write_bert(tmp_path / "model")
    lora = {"r": 2, "save_adapter": True} | settings
    ctx = harness.run_stage(
        Finetune(),
        FinetuneSettings(**(SHORT | {"lora": lora})),
        source,
        tmp_path / "out",
        "text-classification",
        rows,
    )
    base = AutoModelForSequenceClassification.from_pretrained(source)
    original_logits = harness.logits(base)
    model = PeftModel.from_pretrained(base, ctx.out / "adapter").eval()
    merged = harness.load_output_model(ctx)
    torch.testing.assert_close(harness.logits(model), harness.logits(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(harness.logits(merged), original_logits, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "zeros"), [({"use_dora": True}, 1), ({"use_dora": True}, 2), ({"save_adapter": True}, 2)]
)
def test_rows_of_zeros_and_sparse_layers_are_rejected(settings, zeros):
    """One zero row has no direction; a masked layer would get other zeros in peft."""
    model, _ = load_model(every_family.model_with_layers("bert", 2))
    layer = model.get_submodule("bert.encoder.layer.0.attention.self.query")
    with torch.no_grad():
        layer.weight[0] = 0
    if zeros == 2:
        mark_masked(layer)
    with raises_code("unsupported-layer"):
        LoraAdapters(model, LoraSettings(r=2, **settings))


@pytest.mark.parametrize("changes", [{"phases": [{"losses": {"logits": 1.0}}]}, {"student": {"layers": 1}}])
def test_adapter_of_weights_that_are_not_stored_is_rejected(changes):
    assert DistillSettings(lora={"save_adapter": True}).lora.save_adapter
    with raises_setting_codes("settings-conflict"):
        DistillSettings(lora={"save_adapter": True}, **changes)


def test_dora_of_quantized_layers_is_rejected(coded):
    model, _ = load_model(coded("int4"))
    with raises_code("unsupported-layer"):
        LoraAdapters(model, LoraSettings(r=2, use_dora=True))


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_adapters_of_every_family_start_at_zero_and_merge_exactly(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    names, before = [name for name, _ in model.named_parameters()], harness.logits(model)
    adapters = LoraAdapters(model, LoraSettings(r=2))
    assert torch.equal(harness.logits(model), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    heads = ("classifier", "head", "pre_classifier", "pooler", "bert.pooler", "albert.pooler")
    assert all("lora_" in name or name.startswith(heads) for name in trained)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    adapted_logits = harness.logits(model)
    assert not torch.allclose(adapted_logits, before, atol=1e-3)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with adapters.as_stored():
        torch.testing.assert_close(harness.logits(model), adapted_logits, rtol=1e-3, atol=1e-3)
        assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    adapters.finalize()
    torch.testing.assert_close(harness.logits(model), adapted_logits, rtol=1e-3, atol=1e-3)
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model, "peft_config")


@pytest.fixture
def rows(tmp_path):
    return tiny.read_pairs(tmp_path)


def test_lora_changes_only_linear_layers_within_rank(tmp_path, rows):
    source = tiny.write_marian(tmp_path / "model")
    ctx = harness.run_stage(Finetune(), FinetuneSettings(**SHORT), source, tmp_path / "out", data=rows)
    ranks = changed(load_model(source)[0], harness.load_output_model(ctx))
    assert len(ranks) == 2 * 6 + 2 * 10  # four products of each attention, two of each feed-forward part
    assert set(ranks.values()) == {2}
    details = ctx.details["lora"]
    assert details["layers"] == 32
    assert (
        details["optimizer_bytes"]
        == 12 * details["trained_weights"]
        < details["optimizer_bytes_of_all_weights"]
    )
    start, *later = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert min(later) < 0.9 * start


def test_oversized_adapters_warn(tmp_path):
    model, _ = load_model(tiny.write_bert(tmp_path / "model"))  # products of 32 x 32, and 32 x 64
    assert LoraAdapters(model, LoraSettings(r=15)).warnings() == []
    reloaded, _ = load_model(tmp_path / "model")
    (warning,) = LoraAdapters(reloaded, LoraSettings(r=16)).warnings()
    assert warning.code == "no-size-reduction"
    assert all(value in warning.message for value in ("r: 16", "8 of 12", "below 16"))


def test_checkpoint_is_scored_as_stored(tmp_path, rows):
    scored_names = []

    def score(artifact, split):
        model, _ = load_model(artifact.path)
        scored_names.append(set(dict(model.named_parameters())))
        return {"bleu": float(len(scored_names))}

    source = tiny.write_marian(tmp_path / "model")
    settings = FinetuneSettings(**(SHORT | {"metric_for_best_model": "bleu", "num_evals": 2, "max_steps": 2}))
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows, score=score)
    names = set(dict(load_model(source)[0].named_parameters()))
    assert scored_names == [names] * 3
    assert ctx.details["training"]["kept_step"] == 2


@pytest.mark.parametrize(("stage", "settings"), [
    (ShareWeights(), ShareWeightsSettings(targets=["ffn"])),
    (Factorize(), FactorizeSettings(method="svd", optimize_for="size", rank=6)),
])  # fmt: skip
def test_sharing_and_low_rank_structure_is_kept(tmp_path, rows, stage, settings):
    before = harness.run_stage(
        stage, settings, tiny.write_marian(tmp_path / "model"), tmp_path / "a", data=rows
    )
    ctx = harness.run_stage(
        Distill(), DistillSettings(**SHORT), before.out, tmp_path / "b", data=rows,
        ancestors={"model": tiny.as_artifact(tmp_path / "model")},
    )  # fmt: skip
    before_model, after_model = load_model(before.out)[0], load_model(ctx.out)[0]
    assert [n for n, _ in before_model.named_parameters()] == [n for n, _ in after_model.named_parameters()]
    assert changed(before_model, after_model)
    assert set(changed(before_model, after_model).values()) == {2}


def test_shared_layer_has_one_adapter(tmp_path, rows):
    shared_ctx = harness.run_stage(
        ShareWeights(),
        ShareWeightsSettings(targets=["ffn"]),
        tiny.write_marian(tmp_path / "model"),
        tmp_path / "a",
    )
    model = harness.load_output_model(shared_ctx)
    first_name, second_name = (f"model.encoder.layers.{n}.fc1" for n in (0, 1))
    assert model.get_submodule(first_name) is model.get_submodule(second_name)
    adapters = LoraAdapters(model, LoraSettings(r=2))
    assert hasattr(model.get_submodule(first_name), "lora_A")
    assert model.get_submodule(first_name) is model.get_submodule(second_name)
    with adapters.as_stored():
        assert not hasattr(model.get_submodule(second_name), "lora_A")
        assert model.get_submodule(first_name) is model.get_submodule(second_name)


def test_classifier_head_is_trained_with_lora(tmp_path):
    rows = read_split(
        str(tiny.write_labeled(tmp_path / "r.jsonl")), "text-classification", Columns(), tmp_path
    )
    source = tiny.write_bert(tmp_path / "model")
    settings = FinetuneSettings(**(SHORT | {"lora": {"r": 1, "targets": ["attention"]}}))
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", "text-classification", rows)
    ranks = changed(load_model(source)[0], harness.load_output_model(ctx))
    assert {"classifier.weight", "classifier.bias"} < set(ranks)
    assert not [name for name in ranks if "intermediate" in name]
    assert ranks["bert.encoder.layer.0.attention.self.query.weight"] == 1


@pytest.fixture
def coded(tmp_path, rows):
    """Return a function: the folder of a small translator in a scheme."""

    def make(scheme):
        source, out = tmp_path / "model", tmp_path / scheme
        if not source.exists():
            tiny.write_marian(source)
        return harness.run_stage(Quantize(), QuantizeSettings(scheme=scheme), source, out, data=rows).out

    return make


def codes_of(model):
    return {n: p.clone() for n, p in model.named_parameters() if n.endswith((".qat", ".scales"))}


@pytest.mark.parametrize("scheme", ["bnb-nf4", "int4"])
def test_quantized_base_is_unchanged_and_adapters_are_stored(tmp_path, rows, coded, scheme):
    source, scored_logits = coded(scheme), []

    def score(artifact, split):
        scored_logits.append(harness.logits(load_model(artifact.path)[0]))
        return {"bleu": float(len(scored_logits))}

    settings = FinetuneSettings(**(SHORT | {"metric_for_best_model": "bleu", "num_evals": 1}))
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows, score=score)
    before, model = load_model(source)[0], harness.load_output_model(ctx)
    assert ctx.details["lora"]["beside_codes"] == ctx.details["lora"]["layers"] == 32
    assert "latent_weights" not in ctx.details
    pairs = [m.adapter for m in load_model(ctx.out)[0].modules() if isinstance(m, LowRankCorrectedLinear)]
    thin = sum(p.numel() for pair in pairs for p in pair.parameters())
    matrices = [m for m in load_model(source)[0].modules() if isinstance(m, QuantizedMatrix)]
    weights = sum(len(m.codes) * m.width for m in matrices)
    codes = quantized_weight_bits(load_model(source)[0])
    assert ctx.details["bits_per_weight"] == pytest.approx(codes + 32 * thin / weights, abs=2e-3)
    floats = sum(p.numel() for p in load_model(tmp_path / "model")[0].parameters())
    optimizer_bytes = ctx.details["lora"]["optimizer_bytes_of_all_weights"]
    assert (
        0.9 * 12 * floats < optimizer_bytes <= 12 * floats
    )  # but for tables of positions, which never train
    assert [edit["op"] for edit in read_edits(ctx.out)].count("adapter") == 32
    start, *_, last = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert last < 0.9 * start
    # what was scored last is what is stored, and what was scored first computes as the codes alone
    torch.testing.assert_close(
        scored_logits[-1], harness.logits(model), rtol=1e-5, atol=1e-5
    )  # other kernels train
    torch.testing.assert_close(scored_logits[0], harness.logits(before), rtol=1e-5, atol=1e-5)
    files = load_file(ctx.out / "model.safetensors")
    assert {tensor.dtype for name, tensor in files.items() if ".adapter." in name} == {torch.float32}
    assert {name.replace(".coded", ""): tensor.tolist() for name, tensor in codes_of(model).items()} == {
        name: tensor.tolist() for name, tensor in codes_of(before).items()
    }
    added = {n: tuple(p.shape) for n, p in model.named_parameters() if ".adapter." in n}
    pairs = sum(p.numel() for n, p in model.named_parameters() if ".adapter." in n)
    assert count_parameters(ctx.out) == count_parameters(source) + pairs
    assert len(added) == 2 * 32
    assert {shape[0] for name, shape in added.items() if name.endswith("down.weight")} == {2}


def test_second_lora_training_adds_rank_and_qat_continues(tmp_path, rows, coded):
    first = harness.run_stage(
        Finetune(), FinetuneSettings(**SHORT), coded("bnb-nf4"), tmp_path / "a", data=rows
    ).out
    second = harness.run_stage(Finetune(), FinetuneSettings(**SHORT), first, tmp_path / "b", data=rows)
    model = harness.load_output_model(second)
    ranks = {m.adapter.rank for m in model.modules() if isinstance(m, LowRankCorrectedLinear)}
    assert ranks == {4}
    start = second.details["training"]["validations"][0]["loss"]
    plain = {name: value for name, value in SHORT.items() if name != "lora"} | {"max_steps": 2}
    through = harness.run_stage(Finetune(), FinetuneSettings(**plain), second.out, tmp_path / "c", data=rows)
    assert through.details["latent_weights"] == "codes"
    assert through.details["training"]["validations"][0]["loss"] < start
    assert {
        m.adapter.rank
        for m in harness.load_output_model(through).modules()
        if isinstance(m, LowRankCorrectedLinear)
    } == {4}


def test_adapter_above_full_rank_is_stored_at_full_rank(coded):
    coded_folder = coded("int4")
    model, edits = load_model(coded_folder)
    adapters = LoraAdapters(model, LoraSettings(r=40), edits)  # products of 32 x 32, 32 x 64 and 64 x 32
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".pair.up." in name:
                parameter.normal_(0, 0.2)
    adapted_logits = harness.logits(model)
    adapters.finalize()
    torch.testing.assert_close(harness.logits(model), adapted_logits, rtol=1e-3, atol=1e-3)
    assert {m.adapter.rank for m in model.modules() if isinstance(m, LowRankCorrectedLinear)} == {32}
    room, _ = load_model(coded_folder)
    apply_edits(room, edits[-1:])  # a file of it can be read


def test_shared_quantized_layer_has_one_adapter(tmp_path, rows):
    source = tiny.write_marian(tmp_path / "model")
    shared = harness.run_stage(
        ShareWeights(), ShareWeightsSettings(targets=["ffn"]), source, tmp_path / "a", data=rows
    ).out
    quantized = harness.run_stage(
        Quantize(), QuantizeSettings(scheme="int4"), shared, tmp_path / "b", data=rows
    ).out
    ctx = harness.run_stage(Finetune(), FinetuneSettings(**SHORT), quantized, tmp_path / "c", data=rows)
    model = harness.load_output_model(ctx)
    first_name, second_name = (f"model.encoder.layers.{n}.fc1" for n in (0, 1))
    assert isinstance(model.get_submodule(first_name), LowRankCorrectedLinear)
    assert model.get_submodule(first_name) is model.get_submodule(second_name)


def test_unsupported_layers_and_families_are_rejected_for_lora(tmp_path, coded):
    model, _ = load_model(coded("int4"))
    prepare_qat(model, None)
    with raises_code("unsupported-layer", InputError) as caught:
        find_lora_layers(model, ["attention"])
    assert "QatLinear" in str(caught.value)
    model, _ = load_model(causal.write_model(tmp_path / "gpt2", "gpt2"))
    model.config.model_type = "strange"
    with raises_code("unsupported-family", InputError) as caught:
        find_lora_layers(model, ["attention"])
    assert "strange" in str(caught.value)


def test_outdated_peft_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "installed_version", lambda name: "0.17.9")
    model, _ = load_model(tiny.write_bert(tmp_path / "model"))
    with raises_code("not-installed", MissingDependencyError) as caught:
        LoraAdapters(model, LoraSettings())
    assert all(text in str(caught.value) for text in ("peft", "0.17.9"))
