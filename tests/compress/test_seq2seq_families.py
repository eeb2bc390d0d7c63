"""T5, BART and mBART through the stages that change a torch model, against transformers itself."""

import harness
import pytest
import seq2seq
import tiny
import torch
from transformers import AutoModelForSeq2SeqLM

from smelt.compress.distill.layer_selection import keep_layers
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import find_groups
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, load_tokenizer, save_model, write_text_rules
from smelt.models.edits import read_edits
from smelt.models.text_rules import TextRules
from smelt.quantization.layers import QuantizedEmbedding
from smelt.training.samples import collate, encode_split

MADE = {
    "t5": seq2seq.write_t5,
    "t5-gated": lambda folder: seq2seq.write_t5(folder, gated=True),
    "bart": seq2seq.write_bart,
    "mbart": lambda folder: seq2seq.write_bart(folder, kind="mbart", scale_embedding=True),
}
GROUPS = {"int4": {"group_size": 16}}
ROWS = Split(
    "rows", tuple(Example(s, (t,)) for s, t in zip(tiny.SENTENCES, tiny.SENTENCES[4:], strict=False))
)


@pytest.fixture(scope="module", params=MADE)
def folder(request, tmp_path_factory):
    return MADE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["t5", "t5-gated"])
def t5(request, tmp_path_factory):
    return MADE[request.param](tmp_path_factory.mktemp(request.param))


def run(stage, folder, settings, out):
    return harness.run_stage(stage, settings, folder, out, "summarization", ROWS, seed=3)


def teacher_forced(model, folder):
    """Teacher-forced logits on padded rows."""
    ctx = harness.make_context(folder, "summarization")
    rows = encode_split(ROWS, model.config, load_tokenizer(folder), ctx)
    batch = collate(rows, load_model(folder)[0].config)
    kept = batch.pop("labels") != -100
    with torch.no_grad():
        return model.eval()(**batch, use_cache=False).logits[kept]


def theirs(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)


def test_loading_equals_transformers_and_survives_saving(folder, tmp_path):
    model, edits = load_model(folder)
    expected = teacher_forced(theirs(folder), folder)
    torch.testing.assert_close(teacher_forced(model, folder), expected)
    assert float(expected.std()) > 0.5, "all outputs are alike: the test shows nothing"
    save_model(model, edits, tmp_path, folder)
    again, edits = load_model(tmp_path)
    assert edits == []
    torch.testing.assert_close(teacher_forced(again, tmp_path), expected)
    torch.testing.assert_close(teacher_forced(theirs(tmp_path), tmp_path), expected)


@pytest.mark.parametrize("importance", ["taylor", "magnitude"])
def test_pruned_model_equals_the_whole_one_whose_units_give_nothing(folder, tmp_path, importance):
    settings = PruneSettings(
        targets=["heads", "ffn"], keep_ratio=0.5, importance=importance, reconstruct=False
    )
    ctx = run(Prune(), folder, settings, tmp_path / "out")
    pruned, _ = load_model(ctx.out)
    whole = theirs(folder)
    attentions, blocks = find_groups(pruned)
    assert {g.count(pruned) for g in attentions} == {2}
    assert {b.count(pruned) for b in blocks} == {24}
    for group in attentions:
        silence(whole, pruned, group.structure.query, group.structure.out)
    for block in blocks:
        silence(whole, pruned, block.structure.up, block.structure.down)
    torch.testing.assert_close(
        teacher_forced(pruned, ctx.out), teacher_forced(whole, folder), atol=1e-4, rtol=1e-4
    )
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]


def silence(whole, pruned, first, second):
    """In `whole`, zero what comes out of the units that `pruned` no longer has."""
    old, new = (m.get_submodule(first).weight.detach() for m in (whole, pruned))
    kept = (old[:, None] == new[None]).all(-1).any(1)
    assert 0 < int(kept.sum()) == len(new) < len(old)
    with torch.no_grad():
        whole.get_submodule(second).weight[:, ~kept] = 0


def test_t5_layers_may_lose_different_heads_and_be_pruned_twice(t5, tmp_path):
    settings = PruneSettings(targets=["heads"], keep_ratio=0.5, importance="magnitude", reconstruct=False)
    once = run(Prune(), t5, settings, tmp_path / "once")
    model, _ = load_model(once.out)
    tables = [
        m.relative_attention_bias.weight for m in model.modules() if hasattr(m, "relative_attention_bias")
    ]
    assert [tuple(t.shape) for t in tables] == [(8, 2)] * 4  # two blocks on each side, each with its own
    assert not all(torch.equal(*tables[at : at + 2]) for at in (0, 2))
    twice = run(Prune(), once.out, settings, tmp_path / "twice")
    pruned, _ = load_model(twice.out)
    attentions, _ = find_groups(pruned)
    assert {g.count(pruned) for g in attentions} == {1}
    whole = theirs(t5)
    for group in attentions:
        silence(whole, pruned, group.structure.query, group.structure.out)
    torch.testing.assert_close(
        teacher_forced(pruned, twice.out), teacher_forced(whole, t5), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kept", [[1], [0], [0, 1]])
def test_t5_student_keeps_the_position_bias_of_the_first_block(t5, tmp_path, kept):
    model, edits = load_model(t5)
    for stack in ("encoder_layers", "decoder_layers"):
        edits, found = keep_layers(model, edits, stack, kept, "uniform")
        assert found == kept
    save_model(model, edits, tmp_path, t5)
    whole, student = theirs(t5), theirs(tmp_path)
    for side in ("encoder", "decoder"):
        table = whole.get_submodule(side).block[0].layer[0].SelfAttention.relative_attention_bias
        blocks = whole.get_submodule(side).block
        if kept == [1]:
            blocks[1].layer[0].SelfAttention.relative_attention_bias = table
            blocks[1].layer[0].SelfAttention.has_relative_attention_bias = True
        whole.get_submodule(side).block = torch.nn.ModuleList([blocks[i] for i in kept])
    torch.testing.assert_close(teacher_forced(student, tmp_path), teacher_forced(whole, t5))
    assert (student.config.num_layers, student.config.num_decoder_layers) == (len(kept), len(kept))


def test_a_pruned_t5_can_be_made_a_student(t5, tmp_path):
    settings = PruneSettings(targets=["heads"], keep_ratio=0.5, importance="magnitude")
    pruned = run(Prune(), t5, settings, tmp_path / "pruned")
    model, edits = load_model(pruned.out)
    edits, _ = keep_layers(model, edits, "decoder_layers", [1], "uniform")
    expected = teacher_forced(model, pruned.out)
    (tmp_path / "student").mkdir()
    save_model(model, edits, tmp_path / "student", pruned.out)
    student, _ = load_model(tmp_path / "student")
    torch.testing.assert_close(teacher_forced(student, tmp_path / "student"), expected)


def test_distilling_a_student_lowers_its_loss(folder, tmp_path):
    def loss(steps, rate):
        settings = DistillSettings(
            student={"decoder_layers": 1}, max_steps=steps, batch_size=9, learning_rate=rate, num_evals=1,
            precision="fp32", dropout=0, lr_schedule="constant",
        )  # fmt: skip
        ctx = run(Distill(), folder, settings, tmp_path / str(steps))
        return ctx.details["training"]["validation_loss"], ctx.out

    (untrained, _), (trained, out) = loss(1, 1e-9), loss(15, 3e-3)
    assert trained < 0.8 * untrained
    student, _ = load_model(out)
    torch.testing.assert_close(teacher_forced(student, out), teacher_forced(theirs(out), out))


def test_finetuning_sees_the_prefix_and_is_kept(folder, tmp_path):
    write_text_rules(folder, TextRules(prefix=seq2seq.PREFIX))
    try:
        ids = encode_split(
            ROWS,
            load_model(folder)[0].config,
            load_tokenizer(folder),
            harness.make_context(folder, "summarization"),
        )
        tokenizer = load_tokenizer(folder)
        assert [r.input_ids for r in ids[:2]] == [
            tokenizer(seq2seq.PREFIX + e.text)["input_ids"] for e in ROWS.examples[:2]
        ]
        assert ids[0].target == tokenizer(text_target=ROWS.examples[0].references[0])["input_ids"]
        settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32")
        ctx = run(Finetune(), folder, settings, tmp_path / "out")
        assert (ctx.out / "text.json").is_file()
        assert not torch.equal(load_model(ctx.out)[0].lm_head.weight, load_model(folder)[0].lm_head.weight)
    finally:
        write_text_rules(folder, TextRules())


def test_factorized_model_is_loaded_as_it_was(folder, tmp_path):
    ctx = run(
        Factorize(), folder, FactorizeSettings(method="svd", optimize_for="size", rank=4), tmp_path / "out"
    )
    assert ctx.details["ranks"]
    assert not any("lm_head" in name or "relative" in name for name in ctx.details["ranks"])
    model, _ = load_model(ctx.out)
    whole = theirs(folder)
    with torch.no_grad():  # the best product of rank 4, put back into the whole model
        for name in ctx.details["ranks"]:
            weight = whole.get_submodule(name).weight
            u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
            weight.copy_((u[:, :4] * s[:4]) @ vt[:4])
    torch.testing.assert_close(
        teacher_forced(model, ctx.out), teacher_forced(whole, folder), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4"])
def test_quantized_model_stays_near_and_is_loaded_as_it_was(folder, tmp_path, scheme):
    ctx = run(Quantize(), folder, QuantizeSettings(scheme=scheme, **GROUPS.get(scheme, {})), tmp_path / "out")
    model, _ = load_model(ctx.out)
    floats = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert floats == []
    tables = [m for m in model.modules() if isinstance(m, QuantizedEmbedding)]
    assert len(tables) == 3
    assert len({id(t.matrix) for t in tables}) == 1
    expected, got = teacher_forced(theirs(folder), folder), teacher_forced(model, ctx.out)
    limit = {"int8-dynamic": 0.1, "int4": 0.5}[scheme]
    assert 0 < float((got - expected).abs().mean() / expected.std()) < limit
    again = tmp_path / "again"
    again.mkdir()
    save_model(model, read_edits(ctx.out), again, ctx.out)
    torch.testing.assert_close(teacher_forced(load_model(again)[0], again), got)


@pytest.mark.parametrize("name", ["t5-gated", "mbart"])
def test_training_through_codes_starts_where_the_quantized_model_stands(name, tmp_path):
    folder = MADE[name](tmp_path / "model")
    quantized = run(Quantize(), folder, QuantizeSettings(), tmp_path / "quantized").out
    still = FinetuneSettings(max_steps=1, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-12)
    ctx = run(Finetune(), quantized, still, tmp_path / "out")
    same, _ = load_model(ctx.out)
    torch.testing.assert_close(
        teacher_forced(same, ctx.out), teacher_forced(load_model(quantized)[0], quantized)
    )
    assert ctx.details["codes_changed"] == 0
