"""KL divergence of next tokens, against torch's kl_div on the logits of transformers."""

import shutil

import pytest
import torch
from torch.nn import functional

from smelt.evaluate import token_divergence
from smelt.evaluate.token_divergence import TokenComparison, summed_divergence
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_model, load_tokenizer, save_model
from smelt.runtimes.registry import open_folder
from tests.support.graphs.exported_artifacts import exported_artifact

TEXTS = ["the cat sat on the red mat", "two dogs", "a man walks near the river"]
GENERATION = GenerationSettings(max_new_tokens=6)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function that writes an exported model with noise on its weights, once."""
    folder_by_kind = {}

    def make(kind):
        if kind in folder_by_kind:
            return folder_by_kind[kind]
        source, folder = exported_artifact(kind, "model"), tmp_path_factory.mktemp(kind)
        model, edits = load_model(source)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=draw))
        shutil.copytree(source, folder, dirs_exist_ok=True)
        save_model(model, edits, folder, source)
        return folder_by_kind.setdefault(kind, folder)

    return make


def _transformers_logits(model, words, base):
    """Return the logits of `model` and of `base` for what `base` writes, [N, V], by transformers."""
    pairs = []
    for text in TEXTS:
        ids = words(text, return_tensors="pt")["input_ids"]
        generated = base.generate(ids, max_new_tokens=6, num_beams=1, do_sample=False)
        model_inputs, first = {"input_ids": generated[:, :-1]}, ids.shape[1] - 1
        if base.config.is_encoder_decoder:
            model_inputs = {"input_ids": ids, "decoder_input_ids": generated[:, :-1]}
            first = 0 if base.generation_config.forced_bos_token_id is None else 1
        pairs.append([side_model(**model_inputs).logits[0, first:] for side_model in (model, base)])
    return (torch.cat(side) for side in zip(*pairs, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["translator", "mbart", "writer"])
def test_token_divergence_equals_torch_on_transformers_logits(kind, changed, monkeypatch):
    source = exported_artifact(kind, "model")
    base, _ = load_model(changed(kind))
    step_logits, expected = _transformers_logits(load_model(source)[0], load_tokenizer(source), base)
    p, q = expected.double().log_softmax(-1), step_logits.double().log_softmax(-1)
    token_divergences = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    with open_folder(changed(kind), "torch") as runner:
        comparison = TokenComparison(runner, TEXTS, GENERATION, 2)
        self_comparison = comparison.compare(runner)
    assert (self_comparison["kl_divergence"], self_comparison["kl_tokens"]) == (
        pytest.approx(0, abs=1e-9),
        len(token_divergences),
    )
    for format_, step in (("torch", "model"), ("onnx", "onnx")):
        with open_folder(exported_artifact(kind, step), format_) as runner:
            comparison_report = comparison.compare(runner)
        assert (
            comparison_report["kl_divergence"]
            == pytest.approx(float(token_divergences.mean()), rel=1e-4)
            != 0
        )
        assert (
            comparison_report["kl_n"],
            comparison_report["kl_tokens"],
            comparison_report["kl_reason"],
        ) == (3, len(token_divergences), None)
    # room for the logits of two tokens of each output
    monkeypatch.setattr(token_divergence, "_MAX_LOGITS_BYTES", 3 * 2 * 4 * step_logits.shape[-1])
    with open_folder(changed(kind), "torch") as runner:
        short = TokenComparison(runner, TEXTS, GENERATION, 2).compare(runner)
    assert short["kl_tokens"] == (3 if kind == "mbart" else 6) < len(token_divergences)


def test_incomparable_logits_return_reason(changed):
    base = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert summed_divergence(base.numpy(), base.numpy()) == 0
    with open_folder(changed("translator"), "torch") as runner:
        comparison = TokenComparison(runner, TEXTS, GENERATION, 2)
        original_step, original_decode = runner.decode_step, runner.text.tokenizer.decode_batch
        reasons = []
        for logit_value in (-torch.inf, torch.nan):  # of one token: a shortlist; of a broken model

            def step(state, tokens, number=logit_value):
                logits = original_step(state, tokens)
                logits[:, 3] = number
                return logits

            runner.decode_step = step
            reasons.append(comparison.compare(runner)["kl_reason"])
        runner.decode_step = original_step
        runner.text.tokenizer.decode_batch = lambda rows: [text.upper() for text in original_decode(rows)]
        reasons.append(comparison.compare(runner)["kl_reason"])
        runner.text.tokenizer.decode_batch = original_decode
        assert comparison.compare(runner)["kl_reason"] is None
    with open_folder(exported_artifact("mbart", "model"), "torch") as runner:
        comparison_report = comparison.compare(runner)
    assert (comparison_report["kl_divergence"], comparison_report["kl_n"]) == (None, None)
    assert len({*reasons, comparison_report["kl_reason"]}) == 4
    assert all({*reasons, comparison_report["kl_reason"]})
