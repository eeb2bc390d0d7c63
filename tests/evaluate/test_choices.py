"""Accuracy of choices by their likelihood, against the numbers of lm-evaluation-harness."""

import causal
import numpy as np
import pytest
import tiny
from expected_errors import raises_code

from smelt.core.errors import InputError
from smelt.core.stage import no_progress
from smelt.data.splits import Example, Split
from smelt.evaluate.quality import score_choices
from smelt.evaluate.significance import compare_steps
from smelt.pipeline.execute import scoring
from smelt.runtimes.registry import open_runner

WORDS = causal.TEXT.split()


def _example(at):
    choices = [" " + " ".join(WORDS[(5 * at + 7 * k) % 40 :][: 1 + (at + k) % 3]) for k in range(3)]
    return Example(f"What is number {at}?", choices=tuple(choices), answer=at % 3, references=(choices[0],))


# lm-eval 0.4.13 on these models and rows: output_type multiple_choice, choices without their first space,
# target_delimiter " "; Llama with add_bos_token. The log-likelihoods of the first two rows, acc, acc_norm.
HARNESS = {
    "gpt2": ([[-13.0015, -16.9204, -56.2793], [-21.3374, -58.1139, -21.1959]], 8 / 24, 6 / 24),
    "llama": ([[-13.9353, -22.9765, -61.4405], [-16.3196, -56.2144, -24.8401]], 9 / 24, 6 / 24),
}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_equal_those_of_the_harness(tmp_path, monkeypatch, family):
    causal.write_model(tmp_path, family)
    (tmp_path / "text.json").write_text('{"prompt_template": "{prompt}"}')
    losses = []
    monkeypatch.setattr(
        "smelt.evaluate.quality.score_choices",
        lambda metrics, found, *more: losses.extend(found) or score_choices(metrics, found, *more),
    )
    split = Split("x", tuple(map(_example, range(24))))
    with open_runner(tiny.as_artifact(tmp_path, "text-generation")) as runner:
        found = scoring._choice_scores(("acc", "acc_norm"), runner, split, 8, no_progress)
    theirs, acc, acc_norm = HARNESS[family]
    assert -np.array(losses[:2]) == pytest.approx(np.array(theirs), abs=2e-4)
    assert found["acc"].value == pytest.approx(100 * acc)
    assert found["acc_norm"].value == pytest.approx(100 * acc_norm)


def test_choices_of_differing_number_and_paired_test():
    losses, choices = [[3.0, 4.0], [1.0, 2.0, 6.0]] * 8, [[" a", " bcdef"], [" ab", " c", " defghi"]] * 8
    found = score_choices(["acc", "acc_norm"], losses, choices, [1, 2] * 8, "x")
    assert found["acc"].value == 0  # the first is the most likely one of each
    assert found["acc_norm"].value == pytest.approx(50)  # 4/5 is below 3, but 6/6 is above 1/2
    assert found["acc"].chance == pytest.approx(100 * (1 / 2 + 1 / 3) / 2)
    right = score_choices(["acc"], [[2.0, 1.0], [3.0, 2.0, 1.0]] * 8, choices, [1, 2] * 8, "x")["acc"]
    assert compare_steps(right.statistics, found["acc"].statistics)["p_value"] == pytest.approx(2 / 2**16)
    with raises_code("unknown-metric", InputError):
        score_choices(["accuracy"], losses, choices, [1, 2] * 8, "x")
