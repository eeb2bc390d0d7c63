"""T5, BART and mBART through the stages that change a torch model, against transformers itself."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from smelt.compress.drop_layers.layer_selection import keep_layers
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import find_groups
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, load_tokenizer, save_model, write_text_rules
from smelt.models.text_rules import TextRules
from smelt.tasks.encode_split import encode_split
from smelt.tasks.samples import collate
from tests.support import harness
from tests.support.models import seq2seq, tiny

MADE = {
    "t5": seq2seq.write_t5,
    "t5-gated": lambda folder: seq2seq.write_t5(folder, gated=True),
    "bart": seq2seq.write_bart,
    "mbart": lambda folder: seq2seq.write_bart(folder, kind="mbart", scale_embedding=True),
}
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
    mask = batch.pop("labels") != -100
    with torch.no_grad():
        return model.eval()(**batch, use_cache=False).logits[mask]


def theirs(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)


def test_loaded_and_saved_model_equals_transformers(folder, tmp_path):
    model, edits = load_model(folder)
    expected = teacher_forced(theirs(folder), folder)
    torch.testing.assert_close(teacher_forced(model, folder), expected)
    assert float(expected.std()) > 0.5, "all outputs are alike: the test shows nothing"
    save_model(model, edits, tmp_path, folder)
    reloaded, edits = load_model(tmp_path)
    assert edits == []
    torch.testing.assert_close(teacher_forced(reloaded, tmp_path), expected)
    torch.testing.assert_close(teacher_forced(theirs(tmp_path), tmp_path), expected)


def test_pruned_model_equals_model_with_silenced_units(folder, tmp_path):
    settings = PruneSettings(
        targets=["heads", "ffn"], keep_ratio=0.5, importance="magnitude", reconstruct=False
    )
    ctx = run(Prune(), folder, settings, tmp_path / "out")
    pruned, _ = load_model(ctx.out)
    original = theirs(folder)
    attentions, blocks = find_groups(pruned)
    assert {g.count(pruned) for g in attentions} == {2}
    assert {b.count(pruned) for b in blocks} == {24}
    for group in attentions:
        silence(original, pruned, group.structure.query, group.structure.out)
    for block in blocks:
        silence(original, pruned, block.structure.up, block.structure.down)
    torch.testing.assert_close(
        teacher_forced(pruned, ctx.out), teacher_forced(original, folder), atol=1e-4, rtol=1e-4
    )
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]


def silence(original, pruned, first, second):
    """In `original`, zero what comes out of the units that `pruned` no longer has."""
    old, new = (m.get_submodule(first).weight.detach() for m in (original, pruned))
    is_kept = (old[:, None] == new[None]).all(-1).any(1)
    assert 0 < int(is_kept.sum()) == len(new) < len(old)
    with torch.no_grad():
        original.get_submodule(second).weight[:, ~is_kept] = 0


def test_t5_layers_can_lose_different_heads_in_two_prunings(t5, tmp_path):
    settings = PruneSettings(targets=["heads"], keep_ratio=0.5, importance="magnitude", reconstruct=False)
    once = run(Prune(), t5, settings, tmp_path / "once")
    model, _ = load_model(once.out)
    tables = [
        m.relative_attention_bias.weight for m in model.modules() if hasattr(m, "relative_attention_bias")
    ]
    assert [tuple(t.shape) for t in tables] == [(8, 2)] * 4  # two blocks on each side, each with its own
    assert not all(torch.equal(*tables[index : index + 2]) for index in (0, 2))
    twice = run(Prune(), once.out, settings, tmp_path / "twice")
    pruned, _ = load_model(twice.out)
    attentions, _ = find_groups(pruned)
    assert {g.count(pruned) for g in attentions} == {1}
    original = theirs(t5)
    for group in attentions:
        silence(original, pruned, group.structure.query, group.structure.out)
    torch.testing.assert_close(
        teacher_forced(pruned, twice.out), teacher_forced(original, t5), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("expected_layers", [[1], [0], [0, 1]])
def test_t5_student_keeps_position_bias_of_first_block(t5, tmp_path, expected_layers):
    model, edits = load_model(t5)
    for stack in ("encoder_layers", "decoder_layers"):
        edits, kept_layers = keep_layers(
            model, edits, stack, expected_layers, "uniform", stage="distill", prefix="student."
        )
        assert kept_layers == expected_layers
    save_model(model, edits, tmp_path, t5)
    original, student = theirs(t5), theirs(tmp_path)
    for side in ("encoder", "decoder"):
        table = original.get_submodule(side).block[0].layer[0].SelfAttention.relative_attention_bias
        blocks = original.get_submodule(side).block
        if expected_layers == [1]:
            blocks[1].layer[0].SelfAttention.relative_attention_bias = table
            blocks[1].layer[0].SelfAttention.has_relative_attention_bias = True
        original.get_submodule(side).block = torch.nn.ModuleList([blocks[i] for i in expected_layers])
    torch.testing.assert_close(teacher_forced(student, tmp_path), teacher_forced(original, t5))
    assert (student.config.num_layers, student.config.num_decoder_layers) == (
        len(expected_layers),
        len(expected_layers),
    )


def test_finetuning_applies_and_stores_prefix(folder, tmp_path):
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
