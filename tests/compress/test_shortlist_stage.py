"""The stage: what it learns, what it says of it, what stays when others follow."""

import numpy as np
import pytest

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.compress.shortlist import ShortlistSettings, ShortlistStage, learn_shortlist, shortlist_coverage
from smelt.core.errors import InputError
from smelt.data.splits import Columns, Example, Split
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.config import make_shortlist, read_shortlist
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.text_rules import SHORTLIST_FILE
from smelt.pipeline.plan.load_plan import load_plan
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

CONFIG = {"vocab_size": 8}
ROWS = [([4, 5], [5, 4, 0]), ([4, 6], [5, 6, 0]), ([7, 5], [7, 4, 0])]


def words(shortlist, source):
    return sorted({*shortlist.table[source].tolist(), *shortlist.always.tolist()})


def test_shortlist_contains_likeliest_frequent_and_source_tokens():
    shortlist = learn_shortlist(
        ROWS, CONFIG, [0, 1], ShortlistSettings(candidates_per_token=1, frequent_tokens=2)
    )
    assert shortlist.always.tolist() == [0, 1, 4]  # 0 and 4 come most often; 0 and 1 were told
    assert words(shortlist, 4) == [0, 1, 4, 5]
    assert words(shortlist, 6) == [0, 1, 4, 6]
    assert words(shortlist, 7) == [0, 1, 4, 7]
    assert words(shortlist, 3) == [0, 1, 3, 4]  # never seen: it may be copied


@pytest.mark.parametrize("other", [{"decoder_vocab_size": 9}, {"share_encoder_decoder_embeddings": False}])
def test_source_tokens_are_not_copied_with_separate_vocabularies(other):
    shortlist = learn_shortlist(
        ROWS, CONFIG | other, [0, 1], ShortlistSettings(candidates_per_token=1, frequent_tokens=2)
    )
    assert words(shortlist, 3) == [0, 1, 4]
    assert words(shortlist, 4) == [0, 1, 4, 5]


def test_coverage_equals_manual_count():
    table = np.zeros((8, 1), dtype=np.int64)
    table[[4, 5], 0] = [5, 6]
    shortlist = make_shortlist(table, np.array([0, 1]), 8)
    rows = [([4, 5], [5, 6, 0]), ([4], [5, 7, 7, 0, 0])]
    # of 3 words all, of 5 words 3; 0, 1, 5, 6 are on the first list, 0, 1, 5 on the second
    assert shortlist_coverage(shortlist, rows, CONFIG) == {"covered": 0.75, "whole": 0.5, "words": 3.5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shortlist")
    source = tiny.write_marian(folder / "model")
    split = read_split(str(tiny.write_pairs(folder / "rows.jsonl", 20)), "translation", Columns(), folder)
    return harness.run_stage(
        ShortlistStage(), ShortlistSettings(frequent_tokens=4), source, folder / "out", data=split
    )


def test_model_is_unchanged_and_details_report_coverage(made):
    import torch

    before, _ = load_model(made.out.parent / "model")
    after, edits = load_model(made.out)
    assert edits == []
    assert torch.equal(harness.logits(after), harness.logits(before))
    config = after.config.to_dict()
    shortlist = read_shortlist(made.out, config)
    tokenizer = load_tokenizer(made.out)
    assert {tokenizer.eos_token_id, tokenizer.unk_token_id} <= set(shortlist.always.tolist())
    details = made.details
    assert details["rows"] == 20
    assert details["always"] == len(shortlist.always)
    assert details["size_bytes"] == shortlist.table.nbytes + shortlist.always.nbytes
    # with 20 words for each of a row's tokens nothing that was seen is missing
    assert details["validation"]["covered"] == 1.0
    assert details["validation"]["words"] < details["vocabulary"] == 62


def test_later_stages_keep_shortlist(made, tmp_path):
    training = FinetuneSettings(max_steps=1, batch_size=4, num_evals=0, precision="fp32")
    folder = made.out
    for stage, settings in (
        (Finetune(), training),
        (Prune(), PruneSettings(keep_ratio=0.5, importance="magnitude")),
        (Quantize(), QuantizeSettings()),
        (Onnx(), OnnxSettings(generation_graph=False)),
    ):
        folder = every_family.run_stage(stage, settings, folder, "marian", tmp_path / stage.name).out
        assert (folder / SHORTLIST_FILE).read_bytes() == (made.out / SHORTLIST_FILE).read_bytes(), stage.name


def test_shortlist_supports_quantized_model(made, tmp_path):
    codes = every_family.run_stage(
        Quantize(), QuantizeSettings(), made.out.parent / "model", "marian", tmp_path / "q"
    )
    shortlist_ctx = every_family.run_stage(
        ShortlistStage(), ShortlistSettings(), codes.out, "marian", tmp_path / "s"
    )
    assert (shortlist_ctx.out / SHORTLIST_FILE).is_file()
    assert (shortlist_ctx.out / "structure.json").read_text() == (codes.out / "structure.json").read_text()


def test_few_samples_and_low_coverage_warn(made, tmp_path):
    train = Split("made", tuple(Example(s, references=(s,)) for s in tiny.SENTENCES[:2]))
    other = Split("made", tuple(Example(s, references=(tiny.SENTENCES[5],)) for s in tiny.SENTENCES[6:]))
    data = {"train": train, "validation": other}
    settings = ShortlistSettings(candidates_per_token=1, frequent_tokens=2)
    ctx = harness.run_stage(ShortlistStage(), settings, made.out.parent / "model", tmp_path, data=data)
    covered = ctx.details["validation"]["covered"]
    assert covered < 0.9
    limited, uncovered = ctx.warnings
    assert (limited.code, uncovered.code) == ("limited-rows", "tokens-not-covered")
    assert " 2 " in limited.message
    assert f"{1 - covered:.1%}" in uncovered.message
    blind = harness.run_stage(
        ShortlistStage(), settings, made.out.parent / "model", tmp_path / "b", data={"train": train}
    )
    assert blind.warnings[1].code == "no-validation-data"


def test_max_train_samples_limits_samples(made, tmp_path, monkeypatch):
    data = made.data
    source = made.out.parent / "model"
    some = harness.run_stage(
        ShortlistStage(), ShortlistSettings(max_train_samples=5), source, tmp_path / "some", data=data
    )
    assert some.details["rows"] == 5
    monkeypatch.setattr("smelt.compress.shortlist._MAX_PAIRS", 1000)
    few = harness.run_stage(ShortlistStage(), ShortlistSettings(), source, tmp_path / "few", data=data)
    assert 0 < few.details["rows"] < 20
    assert few.warnings[0].code == "rows-left-out"


def test_learning_reports_progress():
    messages = []
    learn_shortlist(
        ROWS,
        CONFIG,
        [0, 1],
        ShortlistSettings(iterations=3),
        lambda done, total, what: messages.append((done, total)),
    )
    assert messages == [(0, 3), (1, 3), (2, 3)]


def test_shortlist_needs_training_samples_and_text_generation_task(tmp_path):
    assert ShortlistStage.needs_with(ShortlistSettings()) == {"train"}
    tiny.write_bert(tmp_path / "model")
    tiny.write_labeled(tmp_path / "data.jsonl")
    (tmp_path / "recipe.yaml").write_text(
        "model: model\ntask: text-classification\ndata: {train: data.jsonl, test: data.jsonl}\n"
        "stages:\n  - shortlist: {}\n"
    )
    with raises_code("unsupported-task", InputError) as caught:
        load_plan(tmp_path / "recipe.yaml")
    assert all(
        text in str(caught.value)
        for text in ("shortlist", "text-classification", "summarization, translation")
    )
