"""Accuracy of choices by their likelihood, against the numbers of lm-evaluation-harness."""

import numpy as np
import pytest
import torch
import transformers

from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.evaluate.quality import score_choices
from smelt.evaluate.significance import compare_steps
from smelt.models.checkpoint import load_tokenizer
from smelt.pipeline.execute.scores import text
from smelt.runtimes.registry import open_runner
from smelt.stage import no_progress
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny

WORDS = causal.TEXT.split()


def _example(index):
    choices = [" " + " ".join(WORDS[(5 * index + 7 * k) % 40 :][: 1 + (index + k) % 3]) for k in range(3)]
    return Example(
        f"What is number {index}?", choices=tuple(choices), answer=index % 3, references=(choices[0],)
    )


# lm-eval 0.4.13 on these models and rows: output_type multiple_choice, choices without their first space,
# target_delimiter " "; Llama with add_bos_token. The log-likelihoods of the first two rows, acc, acc_norm.
HARNESS = {
    "gpt2": ([[-13.0015, -16.9204, -56.2793], [-21.3374, -58.1139, -21.1959]], 8 / 24, 6 / 24),
    "llama": ([[-13.9353, -22.9765, -61.4405], [-16.3196, -56.2144, -24.8401]], 9 / 24, 6 / 24),
}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_equal_lm_evaluation_harness(tmp_path, monkeypatch, family):
    causal.write_model(tmp_path, family)
    (tmp_path / "text.json").write_text('{"prompt_template": "{prompt}"}')
    losses = []
    monkeypatch.setattr(
        "smelt.evaluate.quality.score_choices",
        lambda metrics, choices, *more: losses.extend(choices) or score_choices(metrics, choices, *more),
    )
    split = Split("x", tuple(map(_example, range(24))))
    with open_runner(tiny.as_artifact(tmp_path, "text-generation")) as runner:
        scores = text.score_given_choices(("acc", "acc_norm"), runner, split, 8, no_progress)
    harness_losses, acc, acc_norm = HARNESS[family]
    assert -np.array(losses[:2]) == pytest.approx(np.array(harness_losses), abs=2e-4)
    assert scores["acc"].value == pytest.approx(100 * acc)
    assert scores["acc_norm"].value == pytest.approx(100 * acc_norm)


def _harness_loss(words, model, context, continuation):
    """`_encode_pair` and the log-likelihood of lm-eval 0.4.13, written from its description."""
    spaces = len(context) - len(context.rstrip())
    context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
    ids, begin = words(context + continuation)["input_ids"], len(words(context)["input_ids"])
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return -sum(float(log_probs[position - 1, ids[position]]) for position in range(begin, len(ids)))


@pytest.mark.parametrize("kind", ["byte-level", "space before each text"])
def test_prompt_and_choice_are_tokenized_like_harness(tmp_path, kind):
    causal.write_model(tmp_path, "llama")
    tokenizer = (
        load_tokenizer(tmp_path) if kind == "byte-level" else causal.write_metaspace_tokenizer(tmp_path)
    )
    (tmp_path / "text.json").write_text('{"prompt_template": "{prompt}"}')
    prompts = ["The sky is", "Which color? ", "Name it:\n\n", "A: "]
    choices = (" in the sun", " blue", " river", "s")
    split = Split(
        "x",
        tuple(Example(p, choices=choices, answer=example_index) for example_index, p in enumerate(prompts)),
    )
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    expected = [[_harness_loss(tokenizer, model, prompt, choice) for choice in choices] for prompt in prompts]
    losses = []
    with (
        pytest.MonkeyPatch.context() as patch,
        open_runner(tiny.as_artifact(tmp_path, "text-generation")) as runner,
    ):
        patch.setattr(
            "smelt.evaluate.quality.score_choices", lambda metrics, choices, *_: losses.extend(choices) or {}
        )
        text.score_given_choices(("acc",), runner, split, 8, no_progress)
    assert np.array(losses) == pytest.approx(np.array(expected), abs=1e-3)


def test_choices_of_differing_number_and_paired_test():
    losses, choices = [[3.0, 4.0], [1.0, 2.0, 6.0]] * 8, [[" a", " bcdef"], [" ab", " c", " defghi"]] * 8
    scores = score_choices(["acc", "acc_norm"], losses, choices, [1, 2] * 8, "x")
    assert scores["acc"].value == 0  # the first is the most likely one of each
    assert scores["acc_norm"].value == pytest.approx(50)  # 4/5 is below 3, but 6/6 is above 1/2
    assert scores["acc"].chance == pytest.approx(100 * (1 / 2 + 1 / 3) / 2)
    right = score_choices(["acc"], [[2.0, 1.0], [3.0, 2.0, 1.0]] * 8, choices, [1, 2] * 8, "x")["acc"]
    assert compare_steps(right.statistics, scores["acc"].statistics)["p_value"] == pytest.approx(2 / 2**16)
    with raises_code("unknown-metric", InputError):
        score_choices(["accuracy"], losses, choices, [1, 2] * 8, "x")
