"""KL divergence of next tokens, against torch's kl_div on the logits of transformers."""

import shutil

import pytest
import torch
from torch.nn import functional

from smelt.evaluate import layer_sqnr
from smelt.evaluate.layer_sqnr import TokenComparison, summed_divergence
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_model, load_tokenizer, save_model
from smelt.runtimes.registry import open_folder
from tests.support.graphs.exported_artifacts import exported_artifact

TEXTS = ["the cat sat on the red mat", "two dogs", "a man walks near the river"]
GENERATION = GenerationSettings(max_new_tokens=6)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function that writes an exported model with noise on its weights, once."""
    made = {}

    def make(kind):
        if kind in made:
            return made[kind]
        source, folder = exported_artifact(kind, "model"), tmp_path_factory.mktemp(kind)
        model, edits = load_model(source)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=draw))
        shutil.copytree(source, folder, dirs_exist_ok=True)
        save_model(model, edits, folder, source)
        return made.setdefault(kind, folder)

    return make


def _transformers_logits(model, words, base):
    """Return the logits of `model` and of `base` for what `base` writes, [N, V], by transformers."""
    pairs = []
    for text in TEXTS:
        ids = words(text, return_tensors="pt")["input_ids"]
        found = base.generate(ids, max_new_tokens=6, num_beams=1, do_sample=False)
        given, first = {"input_ids": found[:, :-1]}, ids.shape[1] - 1
        if base.config.is_encoder_decoder:
            given = {"input_ids": ids, "decoder_input_ids": found[:, :-1]}
            first = 0 if base.generation_config.forced_bos_token_id is None else 1
        pairs.append([each(**given).logits[0, first:] for each in (model, base)])
    return (torch.cat(side) for side in zip(*pairs, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["translator", "mbart", "writer"])
def test_the_divergence_is_torchs_on_the_logits_of_transformers(kind, changed, monkeypatch):
    source = exported_artifact(kind, "model")
    base, _ = load_model(changed(kind))
    own, expected = _transformers_logits(load_model(source)[0], load_tokenizer(source), base)
    p, q = expected.double().log_softmax(-1), own.double().log_softmax(-1)
    rows = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    with open_folder(changed(kind), "torch") as runner:
        comparison = TokenComparison(runner, TEXTS, GENERATION, 2)
        same = comparison.compare(runner)
    assert (same["kl_divergence"], same["kl_tokens"]) == (pytest.approx(0, abs=1e-9), len(rows))
    for format_, step in (("torch", "model"), ("onnx", "onnx")):
        with open_folder(exported_artifact(kind, step), format_) as runner:
            found = comparison.compare(runner)
        assert found["kl_divergence"] == pytest.approx(float(rows.mean()), rel=1e-4) != 0
        assert (found["kl_n"], found["kl_tokens"], found["kl_reason"]) == (3, len(rows), None)
    # room for the logits of two tokens of each output
    monkeypatch.setattr(layer_sqnr, "_MAX_LOGITS_BYTES", 3 * 2 * 4 * own.shape[-1])
    with open_folder(changed(kind), "torch") as runner:
        short = TokenComparison(runner, TEXTS, GENERATION, 2).compare(runner)
    assert short["kl_tokens"] == (3 if kind == "mbart" else 6) < len(rows)


def test_what_cannot_be_compared_has_a_reason(changed):
    base = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert summed_divergence(base.numpy(), base.numpy()) == 0
    with open_folder(changed("translator"), "torch") as runner:
        comparison = TokenComparison(runner, TEXTS, GENERATION, 2)
        plain, known = runner.decode_step, runner.text.tokenizer.decode_batch
        reasons = []
        for number in (-torch.inf, torch.nan):  # of one token: a shortlist; of a broken model

            def step(state, tokens, number=number):
                logits = plain(state, tokens)
                logits[:, 3] = number
                return logits

            runner.decode_step = step
            reasons.append(comparison.compare(runner)["kl_reason"])
        runner.decode_step = plain
        runner.text.tokenizer.decode_batch = lambda rows: [text.upper() for text in known(rows)]
        reasons.append(comparison.compare(runner)["kl_reason"])
        runner.text.tokenizer.decode_batch = known
        assert comparison.compare(runner)["kl_reason"] is None
    with open_folder(exported_artifact("mbart", "model"), "torch") as runner:
        found = comparison.compare(runner)
    assert (found["kl_divergence"], found["kl_n"]) == (None, None)
    assert len({*reasons, found["kl_reason"]}) == 4
    assert all({*reasons, found["kl_reason"]})
