"""Words go from tokenizer, embedding and head together, on every family, and texts keep their results."""

import json
import shutil

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file

from smelt.compress.distill.settings import TeacherSettings
from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.shortlist import ShortlistSettings, ShortlistStage
from smelt.compress.trim_vocabulary.select_tokens import TrimVocabularySettings, read_kept_tokens
from smelt.compress.trim_vocabulary.stage import TrimVocabulary
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.generation.config import read_shortlist
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.families.registry import FAMILIES
from smelt.models.split_words import encode_words
from smelt.models.tokenizer import as_text_tokenizer
from smelt.tasks.read_split import read_split
from smelt.tasks.registry import task_spec
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, taggers, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

ROWS = {
    "translation": tiny.write_pairs,
    "summarization": tiny.write_pairs,
    "text-classification": tiny.write_labeled,
}


def _split(task, folder, rows=None):
    name = "rows.txt" if task == "language-modeling" else "rows.jsonl"
    path = folder / name
    (causal.write_lines(path, 2) if task == "language-modeling" else ROWS[task](path))
    split = read_split(str(path), task, Columns(), folder)
    return split if rows is None else split.select(rows)


def _run(family, folder, seen=None, layers=2, source=None, **settings):
    """Trim by the rows `seen` of a split (all), with the whole of it for validation."""
    task = FAMILIES[family].tasks[0]
    source = source or every_family.model_with_layers(family, layers)
    data = {"train": _split(task, folder, seen), "validation": _split(task, folder)}
    return source, harness.run_stage(
        TrimVocabulary(), TrimVocabularySettings(**settings), source, folder / "out", task, data
    )


# what the tiny vocabularies of these lack: characters with which a word can be said that goes
OTHER_TOKENS = {"bert": {"zwei": "##m"}, "mbart": {"▁zwei": "a", "▁walks": "m"}, "m2m_100": {"v": "st"}}
OTHER_TOKENS["distilbert"] = OTHER_TOKENS["bert"]


def _source(family, folder):
    """Return a model of the family with a word in its vocabulary that can be said with others."""
    source = every_family.model_with_layers(family, 2)
    if family not in OTHER_TOKENS:
        return source
    shutil.copytree(source, folder)
    other = OTHER_TOKENS[family]
    if (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text().splitlines()
        (folder / "vocab.txt").write_text("\n".join(other.get(line, line) for line in lines))
        return folder
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    if isinstance(vocab, dict):
        data["model"]["vocab"] = {other.get(token, token): index for token, index in vocab.items()}
        data["model"]["merges"] = [["s", "t"]]
    else:
        data["model"]["vocab"] = [[other.get(token, token), score] for token, score in vocab]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def _logits(folder, ids):
    model, _ = load_model(folder)
    ids = torch.tensor([ids])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more).logits, model


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_texts_of_kept_tokens_have_same_tokens_and_logits(family, tmp_path):
    source, ctx = _run(
        family, tmp_path, seen=[0, 1], source=_source(family, tmp_path / "source"), multiple_of=1
    )
    kept_ids = read_kept_tokens(ctx.out).ids
    assert ctx.details["vocabulary_after"] == len(kept_ids) < ctx.details["vocabulary_before"]
    new = {old: token_id for token_id, old in enumerate(kept_ids)}
    before, after = load_tokenizer(source), load_tokenizer(ctx.out)
    rows = [task_spec(ctx.task).token_rows(ctx.data["train"], tokenizer) for tokenizer in (before, after)]
    assert [[new[token_id] for token_id in row] for row in rows[0]] == rows[1]
    assert ctx.details["train"]["changed"] == 0
    assert ctx.details["validation"]["unknown_after"] == ctx.details["validation"]["unknown"]
    assert after.convert_ids_to_tokens(list(range(len(kept_ids)))) == before.convert_ids_to_tokens(kept_ids)
    assert after.all_special_tokens == before.all_special_tokens
    (old_logits, original), (new_logits, trimmed) = (
        _logits(f, row[0][:9]) for f, row in ((source, rows[0]), (ctx.out, rows[1]))
    )
    assert torch.allclose(
        new_logits, old_logits[..., kept_ids] if original.can_generate() else old_logits, atol=1e-4
    )
    assert trimmed.get_input_embeddings().num_embeddings == len(kept_ids)
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]


def _configs(*models):
    """Yield the configs of the models side by side, and what they generate by."""
    yield tuple(model.config for model in models)
    if models[0].can_generate():
        yield tuple(model.generation_config for model in models)


@pytest.mark.parametrize("family", ["marian", "t5", "mbart", "roberta", "llama"])
def test_transformers_loads_trimmed_model_with_renumbered_ids(family, tmp_path):
    source, ctx = _run(family, tmp_path, seen=[0, 1])
    config = json.loads((ctx.out / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    plain = kind.from_pretrained(ctx.out).eval()
    assert torch.equal(harness.logits(plain), harness.logits(harness.load_output_model(ctx)))
    kept_ids = read_kept_tokens(ctx.out).ids
    original, _ = load_model(source)
    for config_key in (
        "pad_token_id",
        "eos_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
    ):
        for old, new in _configs(original, plain):
            number = getattr(old, config_key, None)
            if isinstance(number, int) and 0 <= number < original.config.vocab_size:
                assert kept_ids[getattr(new, config_key)] == number, config_key
    if original.can_generate():
        bad_words = original.generation_config.bad_words_ids
        assert (plain.generation_config.bad_words_ids or None) == (
            [[kept_ids.index(token_id) for token_id in phrase] for phrase in bad_words] if bad_words else None
        )
        tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        assert tied == (original.get_output_embeddings().weight is original.get_input_embeddings().weight)


def test_texts_with_removed_tokens_use_shorter_tokens_with_warning(tmp_path):
    _, ctx = _run("gpt2", tmp_path, seen=[0])
    validation = ctx.details["validation"]
    assert validation["changed"] > 0
    assert validation["tokens_after"] > validation["tokens"]
    assert 0 < validation["kept"] < 1
    assert "tokens-changed" in message_codes(ctx.warnings)
    tokenizer = load_tokenizer(ctx.out)
    text = ctx.data["validation"].examples[-1].text
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_trimmed_sentencepiece_model_tokenizes_same(kind, tmp_path):
    """The models themselves, read by sentencepiece: texts of pieces that stay, and texts of others."""
    from smelt.compress.trim_vocabulary.tokenizers import open_marian_vocabulary

    source = tmp_path / "model"
    tiny.write_marian(source)
    texts = [*tiny.SENTENCES, "unbelievable bells label the able table"]
    (tmp_path / "text").write_text("\n".join(texts * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "pieces"), vocab_size=90, model_type=kind,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for name in ("source.spm", "target.spm"):
        (source / name).write_bytes((tmp_path / "pieces.model").read_bytes())
    full_model = sentencepiece.SentencePieceProcessor(model_file=str(source / "source.spm"))
    ids = {full_model.id_to_piece(token_id): token_id for token_id in range(len(full_model))}
    (source / "vocab.json").write_text(json.dumps({**ids, "<pad>": len(ids)}))
    words = open_marian_vocabulary(source)
    used = {token_id for text in texts[:4] for token_id in full_model.encode(text)}
    kept_ids = used | words.required
    for token_id in list(kept_ids):
        kept_ids |= words.dependencies(token_id)
    assert len(kept_ids) < len(ids) - 8
    new = {old: token_id for token_id, old in enumerate(sorted(kept_ids))}
    words.write(source, new)
    after = sentencepiece.SentencePieceProcessor(model_file=str(source / "source.spm"))
    assert json.loads((source / "vocab.json").read_text()) == {
        piece: new[token_id] for piece, token_id in {**ids, "<pad>": len(ids)}.items() if token_id in new
    }
    changed = 0
    for text in texts:
        before, now = (processor.encode(text, out_type=str) for processor in (full_model, after))
        is_kept = all(ids.get(piece) in new for piece in before)
        assert not is_kept or before == now
        changed += not is_kept
        assert after.unk_id() not in after.encode(text)
    assert changed


def test_full_vocabulary_teacher_trains_trimmed_student(tmp_path):
    source, ctx = _run("marian", tmp_path, seen=[0, 1])
    settings = DistillSettings(max_steps=1, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-4)
    rows = _split("translation", tmp_path)
    trained = harness.run_stage(
        Distill(), settings, ctx.out, tmp_path / "taught", data=rows,
        ancestors={"model": tiny.as_artifact(source, "translation")},
    )  # fmt: skip
    assert trained.details["words_of_teacher"] == ctx.details["vocabulary_after"]
    in_a_folder = settings.model_copy(update={"teacher": (TeacherSettings(model=str(source)),)})
    same = harness.run_stage(Distill(), in_a_folder, ctx.out, tmp_path / "by-folder", data=rows)
    assert same.details["words_of_teacher"] == ctx.details["vocabulary_after"]
    for name, tensor in load_file(same.out / "model.safetensors").items():
        assert torch.equal(tensor, load_file(trained.out / "model.safetensors")[name])
    other = tiny.write_marian(tmp_path / "other")
    words = json.loads((other / "vocab.json").read_text())
    first, second = [token for token in words if len(token) == 1][:2]
    (other / "vocab.json").write_text(json.dumps(words | {first: words[second], second: words[first]}))
    strange = settings.model_copy(update={"teacher": (TeacherSettings(model=str(other)),)})
    with raises_code("tokenizer-mismatch", InputError) as caught:
        harness.run_stage(Distill(), strange, ctx.out, tmp_path / "strange", data=rows)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize("family", ["marian", "bert"])
def test_teacher_logits_of_kept_tokens_equal_student(family, tmp_path):
    """A student that was only trimmed has the teacher's own distribution over the words that stayed."""
    from smelt.compress.distill.teachers import map_teacher_tokens

    source, ctx = _run(family, tmp_path, seen=[0, 1])
    teacher, student = load_model(source)[0], load_model(ctx.out)[0]
    assert len(map_teacher_tokens(teacher, source, student, ctx.out)) == ctx.details["vocabulary_after"]
    last = torch.arange(ctx.details["vocabulary_after"] - 9, ctx.details["vocabulary_after"])[None]
    assert family == "bert" or last[0, 0] != read_kept_tokens(ctx.out).ids[-9]  # their numbers are others
    more = {"decoder_input_ids": last} if student.config.is_encoder_decoder else {}
    with torch.no_grad():
        teacher_logits, student_logits = (
            model(input_ids=last, **more).logits for model in (teacher, student)
        )
    assert torch.allclose(teacher_logits, student_logits, atol=1e-4)
    same = load_model(ctx.out)[0]
    assert map_teacher_tokens(same, ctx.out, student, ctx.out) is None


def test_shortlist_keeps_kept_tokens(tmp_path):
    shortlist_folder = every_family.run_stage(
        ShortlistStage(),
        ShortlistSettings(candidates_per_token=5, frequent_tokens=10),
        every_family.model_with_layers("marian", 2),
        "marian",
        tmp_path / "listed",
    ).out
    _, ctx = _run("marian", tmp_path, seen=[0, 1], source=shortlist_folder)
    kept_ids = read_kept_tokens(ctx.out).ids
    config = json.loads((shortlist_folder / "config.json").read_text())
    before = read_shortlist(shortlist_folder, config)
    after = read_shortlist(ctx.out, json.loads((ctx.out / "config.json").read_text()))
    assert {kept_ids[token_id] for token_id in after.always} == set(before.always.tolist()) & set(kept_ids)
    for new, old in enumerate(kept_ids):
        words = {kept_ids[token_id] for token_id in after.table[new].tolist()} - set(before.always.tolist())
        assert words == (set(before.table[old].tolist()) & set(kept_ids)) - set(before.always.tolist())


def test_size_and_multiple_of_are_met(tmp_path):
    _, ctx = _run("llama", tmp_path, seen=[0], size=280)
    assert ctx.details["vocabulary_after"] == 280
    (tmp_path / "more").mkdir()
    _, ctx = _run("llama", tmp_path / "more", seen=[0], multiple_of=4)
    assert ctx.details["vocabulary_after"] % 4 == 0


def test_invalid_trim_settings_are_rejected(tmp_path):
    config = load_model(every_family.model_with_layers("llama", 2))[0].config.to_dict()
    errors, _ = TrimVocabulary.check_model(TrimVocabularySettings(size=100_000), config)
    assert [(error.setting, error.code) for error in errors] == [("size", "more-than-model-has")]
    errors, _ = TrimVocabulary.check_model(
        TrimVocabularySettings(), {"model_type": "marian", "share_encoder_decoder_embeddings": False}
    )
    assert message_codes(errors) == ["unsupported-tokenizer"]
    with raises_code("size-too-small", InputError):
        _run("llama", tmp_path, size=8)
    with raises_code("missing-data", InputError) as caught:
        harness.run_stage(
            TrimVocabulary(),
            TrimVocabularySettings(),
            every_family.model_with_layers("marian", 2),
            tmp_path / "no",
        )
    assert caught.value.setting == "data.train"


def test_factorized_output_layer_keeps_rows_of_kept_tokens(tmp_path):
    source = every_family.model_with_layers("llama", 2)
    settings = FactorizeSettings(method="svd", optimize_for="size", rank=6, exclude=[])
    thin = every_family.run_stage(Factorize(), settings, source, "llama", tmp_path / "thin").out
    full_head = load_model(thin)[0].get_output_embeddings()
    trimmed_folder = every_family.run_stage(
        TrimVocabulary(), TrimVocabularySettings(coverage=0.8), thin, "llama", tmp_path / "made"
    ).out
    model, _ = load_model(trimmed_folder)
    trimmed_head = model.get_output_embeddings()
    assert torch.equal(trimmed_head.down.weight, full_head.down.weight)
    assert len(trimmed_head.up.weight) == model.config.vocab_size < len(full_head.up.weight)
    old = [tuple(row) for row in full_head.up.weight.tolist()]
    row_indices = [old.index(tuple(row)) for row in trimmed_head.up.weight.tolist()]
    assert row_indices == sorted(set(row_indices))


def test_tokens_of_words_are_kept(tmp_path):
    """A word is tokenized with the space before it, also the first of a text."""
    source = taggers.write_model(tmp_path / "m", "roberta")
    rows = [{"tokens": [text], "tags": ["O"]} for text in ("dogs", "grass", "river", "sonne")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = read_split("rows.jsonl", taggers.TASK, Columns(), tmp_path)
    ctx = harness.run_stage(
        TrimVocabulary(), TrimVocabularySettings(), source, tmp_path / "out", taggers.TASK, split
    )
    assert ctx.details["vocabulary_after"] < ctx.details["vocabulary_before"]
    words, lengths = [list(row["tokens"]) for row in rows], []
    for folder in (source, ctx.out):
        encoded = encode_words(as_text_tokenizer(load_tokenizer(folder)), words, 32)
        lengths.append([len(ids) for ids in encoded.ids])
    assert lengths[0] == lengths[1]
