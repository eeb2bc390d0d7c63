"""Embeddings as pairs: the best projection, by hand; heads that are the same matrix; what follows."""

import pytest
import torch
from onnx import numpy_helper

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.plan_layers import plan_layers
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.trim_vocabulary.select_tokens import TrimVocabularySettings
from smelt.compress.trim_vocabulary.stage import TrimVocabulary
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.export.graph_files import read_graph
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model, save_model
from smelt.models.hidden_width import hidden_axes
from smelt.models.layers import LowRankEmbedding, LowRankLinear
from smelt.runtimes.graph_walk import iter_initializers
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import every_family, tiny
from tests.support.pairs.matrix import matrix_cells


def thin(family, out, layers=3, **settings):
    """A model of a family with its embedding as a pair, and what the step said."""
    chosen = FactorizeSettings(targets=["embeddings"], **{"frequency_weighted": False} | settings)
    ctx = every_family.run_stage(
        Factorize(), chosen, every_family.model_with_layers(family, layers), family, out
    )
    return load_model(ctx.out)[0], ctx


def table_of(model):
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, LowRankEmbedding)
    return embedding


@pytest.mark.parametrize("family", every_family.DISTINCT_FAMILIES)
def test_factorized_embedding_is_best_rank_approximation_in_every_family(family, tmp_path):
    source = every_family.model_with_layers(family, 3)
    thin_model, ctx = thin(family, tmp_path / "out", rank=9)
    original, edits = load_model(source)
    matrix = original.get_input_embeddings().weight
    tied = original.get_output_embeddings()
    tied = tied is not None and tied.weight is matrix
    u, sigma, vt = torch.linalg.svd(matrix.detach(), full_matrices=False)
    error = float(sigma[9:].norm() / sigma.norm())
    assert list(ctx.details["relative_error"].values()) == [pytest.approx(error, abs=1e-4)]
    with torch.no_grad():
        matrix.copy_((u[:, :9] * sigma[:9]) @ vt[:9])
    near = tmp_path / "near"
    near.mkdir()
    save_model(original, edits, near, source)
    expected = harness.logits(load_model(near)[0])
    torch.testing.assert_close(harness.logits(thin_model), expected, rtol=2e-3, atol=2e-3)
    head = thin_model.get_output_embeddings()
    if tied:
        assert isinstance(head, LowRankLinear)
        assert head.up.weight is table_of(thin_model).table.weight
    words, width = matrix.shape
    saved = words * width - 9 * (words + width * (2 if tied else 1))
    assert ctx.details["parameters_before"] - ctx.details["parameters_after"] == saved > 0


def test_frequency_weighting_lowers_error_of_frequent_tokens(tmp_path):
    original, _ = load_model(every_family.model_with_layers("marian", 3))
    rows = original.get_input_embeddings().weight.detach()
    lost = {}
    for weighted in (False, True):
        thin_model, ctx = thin("marian", tmp_path / str(weighted), rank=9, frequency_weighted=weighted)
        with torch.no_grad():
            lost[weighted] = (table_of(thin_model)(torch.arange(len(rows))) - rows).square().sum(dim=1)
    model, _ = load_model(every_family.model_with_layers("marian", 3))
    counts = _counted_by_hand(model, tmp_path)
    assert ctx.details["calibration"]["samples"] > 0
    dropped = torch.linalg.svdvals((counts + 1).sqrt().unsqueeze(1) * rows)[9:].square().sum()
    assert float((counts + 1) @ lost[True]) == pytest.approx(float(dropped), rel=1e-4)
    assert float((counts + 1) @ lost[False]) > 1.03 * float(dropped)
    assert float(lost[True].sum()) > float(lost[False].sum())


def test_all_samples_are_counted_unless_calibration_samples_is_set(tmp_path):
    rows = [Example(tiny.SENTENCES[i % len(tiny.SENTENCES)], ("x",)) for i in range(300)]
    data = {"train": Split("rows", tuple(rows))}
    for more, counted in (({}, 300), ({"calibration_samples": 40}, 40)):
        settings = FactorizeSettings(targets=["embeddings"], rank=7, **more)
        out = tmp_path / str(counted)
        ctx = harness.run_stage(
            Factorize(), settings, tiny.write_marian(tmp_path / f"m{counted}"), out, data=data
        )
        assert ctx.details["calibration"]["samples"] == counted


def test_missing_samples_disable_frequency_weighting_with_warning(tmp_path):
    source = every_family.model_with_layers("bert", 3)
    results = {}
    for name, settings in (("unsaid", {}), ("meant", {"frequency_weighted": False})):
        chosen = FactorizeSettings(targets=["embeddings"], rank=7, **settings)
        ctx = harness.run_stage(Factorize(), chosen, source, tmp_path / name, "text-classification", {})
        results[name] = load_model(ctx.out)[0], ctx.warnings
    assert "no-calibration-data" in message_codes(results["unsaid"][1])
    assert not results["meant"][1]
    assert torch.equal(*(harness.logits(model) for model, _ in results.values()))
    assert Factorize.needs_with(FactorizeSettings(targets=["embeddings"]), ["train"]) == {"train"}
    assert Factorize.needs_with(FactorizeSettings(targets=["embeddings"])) == frozenset()
    assert Factorize.needs_with(FactorizeSettings(targets=["embeddings"], frequency_weighted=True)) == {
        "train"
    }


def _counted_by_hand(model, space):
    """How often each token is read, or written, in the texts that every_family takes."""
    from smelt.data.splits import Columns
    from smelt.models.checkpoint import load_tokenizer
    from smelt.tasks.read_split import read_split
    from tests.support.models import tiny

    file = tiny.write_pairs(space / "again.jsonl")
    split = read_split(str(file), "translation", Columns(), space)
    tokenizer = load_tokenizer(every_family.model_with_layers("marian", 3))
    counts = torch.zeros(model.get_input_embeddings().num_embeddings)
    for example in split.examples:
        ids = tokenizer(example.text)["input_ids"]
        for reference in example.references:
            written = tokenizer(text_target=reference)["input_ids"]
            counts += torch.bincount(torch.tensor([*ids, *written]), minlength=len(counts))
    return counts


def test_graph_stores_factorized_table_once(tmp_path):
    family = "marian"
    thin_model, ctx = thin(family, tmp_path / "out", rank=9)
    folder = every_family.run_stage(Quantize(), QuantizeSettings(), ctx.out, family, tmp_path / "codes").out
    codes, _ = load_model(folder)
    assert codes.get_output_embeddings().up.matrix is codes.get_input_embeddings().table.matrix
    every_family.run_stage(Onnx(), OnnxSettings(), folder, family, tmp_path / "graphs")
    words = table_of(thin_model).num_embeddings
    for path in sorted((tmp_path / "graphs").glob("*.onnx")):
        tables = [t for t in iter_initializers(read_graph(path).graph) if tuple(t.dims) == (words, 9)]
        # an encoder's and a decoder's in one graph are one place of the file next to it
        assert len({numpy_helper.to_array(t).tobytes() for t in tables}) == 1, path.name
        assert len(tables) == 1 or path.name.startswith("generate"), path.name


def test_float_output_layer_keeps_tied_table_float(tmp_path):
    model, _ = thin("qwen2", tmp_path / "out", rank=9)
    planned = {layer.name: layer.scheme for layer in plan_layers(model, QuantizeSettings(output_layer=False))}
    assert {"lm_head.down", "model.embed_tokens.table", "model.embed_tokens.up"} <= set(planned)
    assert "lm_head.up" not in planned


@pytest.mark.parametrize(
    ("family", "later"), matrix_cells(["t5", "bart", "gemma", "bert"], ["vocabulary", "prune"])
)
def test_later_stages_process_factorized_embedding(family, later, tmp_path):
    _, ctx = thin(family, tmp_path / "thin", rank=9)
    stage, settings = {
        "vocabulary": (TrimVocabulary(), TrimVocabularySettings(coverage=0.8)),
        "prune": (Prune(), PruneSettings(importance="taylor", calibration_samples=4)),
    }[later]
    later_ctx = every_family.run_stage(stage, settings, ctx.out, family, tmp_path / "later")
    model, _ = load_model(later_ctx.out)
    pair = table_of(model)
    assert (pair.num_embeddings, pair.rank) == (model.config.vocab_size, 9)
    assert harness.logits(model).isfinite().all()
    head = model.get_output_embeddings()
    if isinstance(head, LowRankLinear):
        assert head.up.weight is pair.table.weight


@pytest.mark.parametrize("family", ["bert", "marian"])
def test_hidden_axes_end_at_factorized_embedding_projection(family, tmp_path):
    model, _ = thin(family, tmp_path / "out", rank=9)
    axes = {name: (axis.dim, axis.is_input) for axis in hidden_axes(model) for name in axis.names}
    name = next(n for n, m in model.named_modules() if m is table_of(model))
    assert axes[f"{name}.up.weight"] == (0, False)
    assert f"{name}.table.weight" not in axes
    width = model.config.hidden_size
    assert all(axis.stream == "head" or _size(model, axis) == width for axis in hidden_axes(model))


def _size(model, axis):
    return dict([*model.named_parameters(), *model.named_buffers()])[axis.name].shape[axis.dim]


# 54 x 32: below 20.1; 299 x 64, which is the head too: below 44.8, and not 52.7
@pytest.mark.parametrize(("family", "rank"), [("bert", 21), ("gpt2", 46)])
def test_embedding_is_kept_when_rank_saves_nothing(family, rank, tmp_path):
    settings = FactorizeSettings(targets=["embeddings"], rank=rank, frequency_weighted=False)
    source = every_family.model_with_layers(family, 3)
    ctx = every_family.run_stage(Factorize(), settings, source, family, tmp_path / "out")
    (warning,) = ctx.details["left_alone"].values()
    assert "saves no weights" in warning
    assert "no-rank-saves" in message_codes(ctx.warnings)
    assert not (ctx.out / "structure.json").exists()


def test_energy_and_keep_ratio_determine_embedding_rank(tmp_path):
    original, _ = load_model(every_family.model_with_layers("llama", 3))
    rows = original.get_input_embeddings().weight.detach()
    squares = torch.linalg.svdvals(rows).square()
    model, _ = thin("llama", tmp_path / "energy", energy=0.6)
    rank = table_of(model).rank
    assert float(squares[:rank].sum()) >= 0.6 * float(squares.sum()) > float(squares[: rank - 1].sum())
    model, _ = thin("llama", tmp_path / "ratio", keep_ratio=0.5)
    assert table_of(model).rank == rows.numel() // (2 * sum(rows.shape))
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)  # a matrix of its own


def test_factorized_embedding_is_skipped_with_warning(tmp_path):
    _, ctx = thin("bert", tmp_path / "out", rank=9)
    settings = FactorizeSettings(targets=["embeddings"], rank=4)
    second_ctx = every_family.run_stage(Factorize(), settings, ctx.out, "bert", tmp_path / "again")
    assert table_of(harness.load_output_model(second_ctx)).rank == 9
    (warning,) = (message for message in second_ctx.warnings if message.code == "already-factorized")
    assert "bert.embeddings.word_embeddings" in warning.message


@pytest.mark.parametrize(("settings", "named"), [
    ({"targets": ["embeddings"], "method": "svd", "optimize_for": "size"}, "method and optimize_for"),
    ({"targets": ["embeddings"], "parameter_budget": 0.5}, "parameter_budget"),
    ({"frequency_weighted": False}, "frequency_weighted"),
])  # fmt: skip
def test_unused_embedding_settings_are_rejected(settings, named):
    with raises_setting_codes("unused-setting") as caught:
        FactorizeSettings.model_validate(settings)
    assert caught.value.errors()[0]["msg"].startswith(f"Value error, {named}")


def test_layers_and_embeddings_in_one_step_are_rejected():
    with raises_setting_codes("settings-conflict"):
        FactorizeSettings(targets=["embeddings", "layers"])


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_embeddings_target_is_rejected_for_image_models(family):
    settings = FactorizeSettings(targets=["embeddings"], rank=4)
    (error,), _ = Factorize.check_model(settings, {"model_type": family})
    assert (error.setting, error.code) == ("targets", "does-not-fit-model")
