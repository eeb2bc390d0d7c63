"""Removed experts: by the published formula, recomputed on transformers' modules; routing is kept."""

import json

import pytest
import torch
import transformers

from smelt.calibration import samples
from smelt.compress.drop_experts import DropExperts, DropExpertsSettings
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.rotate.stage import Rotate, RotateSettings
from smelt.core.messages import message_codes
from smelt.export.package.huggingface import write_published_names
from smelt.models.checkpoint import load_model
from smelt.models.model_size import count_parameters, read_model_size
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family

FAMILY = "mixtral"
SETTINGS = DropExpertsSettings(keep_ratio=0.5, calibration_samples=4)


@pytest.fixture
def source():
    return every_family.model_with_layers(FAMILY, 2)


def plain_model(folder, copy):
    """What transformers alone reads of `folder`, with the names of published files."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    write_published_names(copy)
    model, info = transformers.MixtralForCausalLM.from_pretrained(copy, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


def paper_saliency(model, batches):
    """Equation 9 of REAP, token by token: S_j = 1 / |X_j| sum of g_j(x) ||f_j(x)||_2; and |X_j|."""
    routed = {}

    def see(name):
        def hook(experts, inputs):
            states, selected, weights = inputs
            for token, (indices, gates) in enumerate(zip(selected.tolist(), weights, strict=True)):
                for expert, gate in zip(indices, gates, strict=True):
                    one = torch.tensor([[expert]])
                    output = type(experts).forward(experts, states[[token]], one, torch.ones(1, 1))
                    routed.setdefault((name, expert), []).append(float(gate * output.norm()))

        return hook

    lists = {n: m for n, m in model.named_modules() if n.endswith(".mlp.experts")}
    for name, module in lists.items():
        module.register_forward_pre_hook(see(name))
    with torch.no_grad():
        for batch in batches:
            model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False)
    number = model.config.num_local_experts
    terms = {name: [routed.get((name, expert), []) for expert in range(number)] for name in lists}
    reap = {name: [sum(t) / max(1, len(t)) for t in values] for name, values in terms.items()}
    return reap, {name: [len(t) for t in values] for name, values in terms.items()}


@pytest.mark.parametrize("importance", ["reap", "frequency"])
def test_saliency_equals_formula_on_modules_of_transformers(importance, source, tmp_path, monkeypatch):
    seen = []
    original = samples.load_calibration_samples
    monkeypatch.setattr(
        samples, "load_calibration_samples", lambda *args: seen.append(original(*args)) or seen[-1]
    )
    settings = SETTINGS.model_copy(update={"importance": importance})
    ctx = every_family.run_stage(DropExperts(), settings, source, FAMILY, tmp_path / "out")
    reap, counts = paper_saliency(plain_model(source, tmp_path / "plain"), seen[0].batches)
    expected = reap if importance == "reap" else counts
    assert ctx.details["saliency"].keys() == expected.keys()
    for name, scores in ctx.details["saliency"].items():
        assert scores == pytest.approx(expected[name], rel=2e-3)
        best = sorted(range(4), key=lambda expert: -expected[name][expert])[:2]
        assert ctx.details["kept_experts"][name] == sorted(best)


def test_smaller_model_is_original_that_never_selects_removed_experts(source, tmp_path):
    ctx = every_family.run_stage(DropExperts(), SETTINGS, source, FAMILY, tmp_path / "out")
    assert json.loads((ctx.out / "config.json").read_text())["num_local_experts"] == 2
    masked, _ = load_model(source)
    for path, indices in ctx.details["kept_experts"].items():
        router = masked.get_submodule(path.replace(".experts", ".gate"))
        removed = [index for index in range(4) if index not in indices]

        def select(router, inputs, result, removed=removed):
            logits = result[0].clone()
            logits[:, removed] = -torch.inf
            weights, indices = logits.softmax(-1).topk(router.top_k)
            return result[0], weights / weights.sum(-1, keepdim=True), indices

        router.register_forward_hook(select)
    smaller, _ = load_model(ctx.out)
    assert torch.allclose(harness.logits(smaller), harness.logits(masked), atol=1e-5)
    assert torch.allclose(
        harness.logits(plain_model(ctx.out, tmp_path / "plain")), harness.logits(smaller), atol=1e-5
    )


def test_edits_of_kept_experts_get_new_names(source, tmp_path):
    settings = FactorizeSettings(rank=12, optimize_for="size", calibration_samples=4)
    factorized = every_family.run_stage(Factorize(), settings, source, FAMILY, tmp_path / "low-rank").out
    ctx = every_family.run_stage(DropExperts(), SETTINGS, factorized, FAMILY, tmp_path / "out")
    before, after = load_model(factorized)[0], load_model(ctx.out)[0]
    for path, indices in ctx.details["kept_experts"].items():
        for new, old in enumerate(indices):
            states = (m.get_submodule(f"{path}.{n}").state_dict() for m, n in ((after, new), (before, old)))
            first, second = states
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)


def test_size_of_config_counts_every_expert(source, tmp_path):
    for folder in (source, every_family.run_stage(
        DropExperts(), SETTINGS, source, FAMILY, tmp_path / "out"
    ).out):  # fmt: skip
        config = json.loads((folder / "config.json").read_text())
        size = read_model_size(folder, config)
        assert size.parameters == count_parameters(folder)
        blocks = sum(p.numel() for n, p in load_model(folder)[0].named_parameters()
                     if ".layers." in n and p.dim() == 2 and not n.endswith("gate.weight"))  # fmt: skip
        assert size.block_weights == blocks


def test_too_few_experts_and_models_without_are_refused():
    config = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    errors, _ = DropExperts.check_model(DropExpertsSettings(keep_ratio=0.1), config)
    assert message_codes(errors) == ["too-few-experts"]
    errors, result = DropExperts.check_model(DropExpertsSettings(keep_ratio=0.75), config)
    assert (errors, result["num_local_experts"]) == ([], 6)
    errors, _ = DropExperts.check_model(DropExpertsSettings(), {"model_type": "llama"})
    assert message_codes(errors) == ["does-not-fit-model"]


def test_hidden_states_that_routers_read_are_not_narrowed_or_rotated(source):
    config = json.loads((source / "config.json").read_text())
    errors, _ = Prune.check_model(PruneSettings(targets=["width"]), config)
    assert message_codes(errors) == ["fixed-width"]
    masks = {"targets": ["width"], "learning_rate": 5.0}
    errors, _ = Finetune.check_model(FinetuneSettings(learned_masks=masks), config)
    assert message_codes(errors) == ["fixed-width"]
    masks = {"targets": ["heads"], "parts": ["ffn"], "learning_rate": 5.0}
    errors, _ = Finetune.check_model(FinetuneSettings(learned_masks=masks), config)
    assert message_codes(errors) == ["does-not-fit-model"]
    errors, _ = Rotate.check_model(RotateSettings(), config)
    assert message_codes(errors) == ["fixed-basis"]


def test_stage_refuses_too_few_experts(source, tmp_path):
    with raises_code("too-few-experts"):
        every_family.run_stage(
            DropExperts(), DropExpertsSettings(keep_ratio=0.25), source, FAMILY, tmp_path / "out"
        )
