"""The front matter of a model card, as huggingface_hub reads it."""

import huggingface_hub
import pytest
from ruamel.yaml import YAML

from smelt.export.package.huggingface import card_front_matter
from smelt.export.package.package_format import OriginScore, PackageOrigin

pytestmark = pytest.mark.quick

ORIGIN = PackageOrigin(
    run="translate",
    license="apache-2.0 (its model card)",
    data="data/test.jsonl.gz",
    scores=(
        OriginScore("BLEU", "37.41 [36.10, 38.60]", None, 1000, "nrefs:1|gen:greedy", "bleu", 37.4123),
        OriginScore("chrF", "60.00 [59.00, 61.00]", None, 1000, "nc:6", "chrf", 60.0),
    ),
)


def card(task="translation", origin=ORIGIN, library="transformers"):
    return huggingface_hub.ModelCard(f"---\n{card_front_matter(task, origin, library)}---\n\n# Text\n").data


def test_scores_are_written_as_model_index():
    data = card()
    bleu, chrf = data.eval_results
    assert (bleu.metric_type, bleu.metric_value, bleu.dataset_name) == ("bleu", 37.4123, "data/test.jsonl.gz")
    assert bleu.metric_name == "BLEU 37.41 [36.10, 38.60] of 1,000"
    assert bleu.metric_args == {"signature": "nrefs:1|gen:greedy"}
    assert (chrf.metric_type, chrf.metric_value, chrf.task_type) == ("chrf", 60.0, "translation")
    assert data.model_name == "translate"
    assert (data.license, data.library_name, data.pipeline_tag) == (
        "apache-2.0",
        "transformers",
        "translation",
    )


def test_model_without_scores_has_no_model_index():
    data = card("language-modeling", PackageOrigin(), "transformers")
    assert data.eval_results is None
    assert data.license is None
    assert data.pipeline_tag == "text-generation"


def test_custom_license_has_license_name():
    content = YAML(typ="safe").load(
        card_front_matter("translation", PackageOrigin(license="Some License, v2: own"), "transformers")
    )
    assert (content["license"], content["license_name"]) == ("other", "Some-License-v2-own")
