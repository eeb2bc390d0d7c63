"""Pruning: the scores recomputed by hand, and cutting against masking."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from smelt.compress.prune.importances import registry
from smelt.compress.prune.importances.magnitude import magnitude_scores
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import (
    count_kept_heads,
    count_kept_neurons,
    cut_heads,
    cut_neurons,
    find_groups,
    linear_with_inputs,
    update_config,
)
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, save_model
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny
from tests.support.models.pruning_models import bert_model, example_batch, factorized_model, marian_model


def outputs(model):
    with torch.no_grad():
        return model(**example_batch(model)).logits


def best(scores, num_kept):
    """The units with the highest scores, rising."""
    return scores.topk(num_kept).indices.sort().values


def mask_units(model, heads, neurons):
    """Silence units by zeroing their outgoing weights."""
    with torch.no_grad():
        for group, removed in heads.values():
            width = group.head_dim(model)
            for head in removed:
                linear_with_inputs(model, group.structure.out).weight[
                    :, head * width : (head + 1) * width
                ] = 0
        for block, removed in neurons.values():
            linear_with_inputs(model, block.structure.down).weight[:, removed] = 0


@pytest.mark.parametrize("build", [marian_model, bert_model, factorized_model])
def test_pruned_model_equals_masked_model_after_reload(build, tmp_path):
    model = build()
    attentions, blocks = find_groups(model)
    scores = magnitude_scores(model, attentions, blocks)
    settings = PruneSettings(keep_ratio={"heads": 0.5, "ffn": 0.25})
    heads = {g.name: (g, scores.heads[g.name].argsort()[:2].tolist()) for g in attentions}
    neurons = {
        b.name: (
            b,
            scores.neurons[b.name].argsort()[: b.count(model) - count_kept_neurons(b.count(model), settings)],
        )
        for b in blocks
    }
    edits = [
        {"op": "low_rank", "module": n, "rank": m.rank}
        for n, m in model.named_modules()
        if type(m).__name__ == "LowRankLinear"
    ]
    untouched = outputs(model)
    mask_units(model, heads, neurons)
    masked = outputs(model)
    for group in attentions:
        cut_heads(
            model,
            edits,
            group,
            best(scores.heads[group.name], count_kept_heads(group.count(model), settings)),
        )
    for block in blocks:
        cut_neurons(
            model,
            edits,
            block,
            best(scores.neurons[block.name], count_kept_neurons(block.count(model), settings)),
        )
    edits = update_config(model, edits)
    assert (masked - untouched).abs().max() > 1e-3
    torch.testing.assert_close(outputs(model), masked, rtol=1e-4, atol=1e-5)
    assert all(g.count(model) == 2 for g in attentions)
    assert {b.count(model) for b in blocks} <= {16, 8}
    (tmp_path / "out").mkdir()
    (tmp_path / "src").mkdir()
    save_model(model, edits, tmp_path / "out", tmp_path / "src")
    reloaded, _ = load_model(tmp_path / "out")
    torch.testing.assert_close(outputs(reloaded), masked, rtol=1e-4, atol=1e-5)


def test_pruned_translator_generates_same_tokens_with_cache():
    model = marian_model()
    attentions, blocks = find_groups(model)
    scores = magnitude_scores(model, attentions, blocks)
    for group in attentions:
        cut_heads(
            model,
            [],
            group,
            best(
                scores.heads[group.name], count_kept_heads(group.count(model), PruneSettings(keep_ratio=0.75))
            ),
        )
    batch = {k: v for k, v in example_batch(model).items() if k != "decoder_input_ids"}
    with_cache, without = (
        model.generate(**batch, max_new_tokens=8, num_beams=1, do_sample=False, use_cache=c)
        for c in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_default_targets_and_keep_ratio_depend_on_settings():
    settings = PruneSettings()
    assert (settings.targets, settings.keep_ratio, settings.reconstruct) == (["ffn"], 0.75, True)
    for more in ({"budget": {"parameters": 0.8}}, {"keep_ratio": {"heads": 0.5, "ffn": 0.5}}):
        assert PruneSettings.model_validate(more).targets == ["heads", "ffn"]
    assert PruneSettings(keep_ratio={"heads": 0.5}).targets == ["heads"]
    assert PruneSettings(targets=["ffn"], budget={"parameters": 0.8}).targets == ["ffn"]
    assert PruneSettings(keep_ratio={"ffn": 0.5}, importance="magnitude").targets == ["ffn"]


@pytest.mark.quick
def test_kept_counts_are_rounded_to_multiple_of():
    assert count_kept_heads(4, PruneSettings(keep_ratio=0.1)) == 1
    assert count_kept_heads(8, PruneSettings(keep_ratio={"heads": 0.75, "ffn": 0.5})) == 6
    assert [count_kept_heads(n, PruneSettings(keep_ratio=0.5)) for n in (1, 3, 5, 7)] == [
        1,
        2,
        3,
        4,
    ]  # a half counts up
    assert count_kept_neurons(1024, PruneSettings(keep_ratio=0.3)) == 304
    assert count_kept_neurons(1024, PruneSettings(keep_ratio=0.001)) == 8
    assert count_kept_neurons(6, PruneSettings(keep_ratio=0.9)) == 6
    assert count_kept_neurons(40, PruneSettings(keep_ratio=0.5)) == 24


def run(folder, out, data=None, task="translation", **settings):
    more = {name: settings.pop(name) for name in ("threads", "device", "progress") if name in settings}
    return harness.run_stage(Prune(), PruneSettings(**settings), folder, out, task, data, seed=1, **more)


def test_too_few_units_to_prune_warn(tmp_path):
    folder = causal.write_model(tmp_path / "llama", "llama")  # two key-value heads
    magnitude = {"importance": "magnitude", "reconstruct": False, "task": "language-modeling"}
    ctx = run(folder, tmp_path / "a", targets=["heads"], keep_ratio=0.75, **magnitude)
    assert set(ctx.details["kept_heads"].values()) == {2}
    assert message_codes(ctx.warnings) == ["nothing-to-remove"]
    assert "keep_ratio: {heads: 0.5}" in ctx.warnings[0].message
    assert run(folder, tmp_path / "b", targets=["heads"], keep_ratio=0.5, **magnitude).warnings == []
    assert run(folder, tmp_path / "c", targets=["heads"], keep_ratio=1.0, **magnitude).warnings == []
    (warning,) = run(
        folder, tmp_path / "d", targets=["ffn"], keep_ratio=0.9, multiple_of=48, **magnitude
    ).warnings
    assert warning.code == "nothing-to-remove"
    assert all(number in warning.message for number in ("0.9", "96", "48", "keep_ratio: {ffn: 0.5}"))
    whole_multiple = run(folder, tmp_path / "e", targets=["ffn"], keep_ratio=0.9, multiple_of=96, **magnitude)
    assert whole_multiple.warnings[0].code == "nothing-to-remove"
    assert "2 of 2" in whole_multiple.warnings[0].message
    assert "ffn:" not in whole_multiple.warnings[0].message


def test_keeping_more_than_requested_warns(tmp_path):
    folder = causal.write_model(tmp_path / "llama", "llama")
    magnitude = {"importance": "magnitude", "reconstruct": False, "task": "language-modeling"}
    few = run(folder, tmp_path / "few", targets=["heads", "ffn"], keep_ratio=0.01, **magnitude)
    assert message_codes(few.warnings) == ["minimum-kept"] * 2
    numbers = [re.findall(r"[\d.]+", warning.message.rstrip(".")) for warning in few.warnings]
    assert numbers == [["0.01", "2", "1", "2", "2"], ["0.01", "96", "8", "2", "2"]]
    assert run(folder, tmp_path / "more", targets=["ffn"], keep_ratio=0.05, **magnitude).warnings == []


def rows():
    return Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES)))


def test_taylor_uses_configured_threads_and_restores_them(tmp_path):
    folder = tiny.write_bert(tmp_path / "bert")
    before, thread_counts = torch.get_num_threads(), []
    run(
        folder, tmp_path / "out", {"train": rows()}, "text-classification", threads=before + 1,
        progress=lambda done, total, note="": thread_counts.append(torch.get_num_threads()),
    )  # fmt: skip
    assert set(thread_counts) == {before + 1}
    assert torch.get_num_threads() == before


def test_taylor_uses_configured_device(tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr(
        "smelt.compress.prune.importances.scores.torch_device",
        lambda wanted: devices.append(wanted) or "cpu",
    )
    source = tiny.write_bert(tmp_path / "m")
    run(
        source, tmp_path / "a", {"train": rows()}, "text-classification", device="cuda", reconstruct=False
    )  # fmt: skip
    assert devices == ["cuda"]
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with raises_code("no-gpu", InputError):
            run(tmp_path / "m", tmp_path / "b", {"train": rows()}, "text-classification", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_taylor_on_gpu_equals_cpu(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    state_dicts = []
    for device in ("cpu", "cuda"):
        data = {"train": rows()}
        ctx = run(folder, tmp_path / device, data, "text-classification", device=device, reconstruct=False)
        state_dicts.append(load_model(ctx.out)[0].state_dict())
    assert all(torch.equal(state_dicts[0][name], state_dicts[1][name]) for name in state_dicts[0])


def test_required_splits_depend_on_importance_and_reconstruct():
    taylor, magnitude = PruneSettings(), PruneSettings(importance="magnitude")
    assert Prune.needs_with(magnitude, ()) == set()
    assert Prune.needs_with(magnitude, {"train", "calibration"}) == {"calibration"}  # to refit what stays
    alone = PruneSettings(importance="magnitude", reconstruct=False)
    assert Prune.needs_with(alone, {"train"}) == set()
    explicit = PruneSettings(importance="magnitude", reconstruct=True)  # said, and not only the default
    assert Prune.needs_with(explicit, ()) == {"train"}
    assert Prune.needs_with(taylor, ()) == {"train"}
    assert Prune.needs_with(taylor, {"train", "calibration"}) == {"calibration"}


def test_equal_ffn_widths_are_stored_in_config(tmp_path):
    marian_model().save_pretrained(tmp_path / "model")
    ctx = run(tmp_path / "model", tmp_path / "out", targets=["ffn"], keep_ratio=0.5, importance="magnitude")
    assert not (ctx.out / "structure.json").exists()
    plain = AutoModelForSeq2SeqLM.from_pretrained(ctx.out).eval()
    pruned, edits = load_model(ctx.out)
    assert (edits, plain.config.encoder_ffn_dim, plain.config.decoder_ffn_dim) == ([], 32, 24)
    torch.testing.assert_close(outputs(plain), outputs(pruned))
    assert ctx.details["parameters_before"] - ctx.details["parameters_after"] == 2 * (32 + 24) * (32 + 1 + 32)


def test_each_importance_has_module_with_scorer_per_target():
    folder = Path(registry.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} == {*IMPORTANCES, "registry", "scores", "__init__"}
    for importance in IMPORTANCES.values():
        functions = {importance.scorer(target).__name__ for target in importance.targets}
        module = import_module(f"smelt.compress.prune.importances.{importance.name}")
        public = {f"score_{kind}" for kind in ("units", "width", "channels")}
        assert functions == {name for name in public if hasattr(module, name)}
