"""Stages that change a model's structure leave one with which everything else can still be done."""

import pytest

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.compress.shortlist import ShortlistSettings, ShortlistStage
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.compress.trim_vocabulary.select_tokens import TrimVocabularySettings
from smelt.compress.trim_vocabulary.stage import TrimVocabulary
from tests.support import usability_checks
from tests.support.models import every_family

STAGES = {
    "trim-vocabulary": (TrimVocabulary(), TrimVocabularySettings(coverage=0.8)),
    "drop-layers": (
        DropLayers(),
        DropLayersSettings(keep_ratio=0.5, importance="loss", calibration_samples=4),
    ),
    "depth of parts": (
        DropLayers(),
        DropLayersSettings(targets=["attention", "ffn"], keep_ratio=0.75, calibration_samples=4),
    ),
    "prune": (Prune(), PruneSettings(keep_ratio=0.5, importance="magnitude")),
    "prune width": (
        Prune(),
        PruneSettings.model_validate({"targets": ["width"], "keep_ratio": 0.75, "calibration_samples": 4}),
    ),
    "factorize embeddings": (Factorize(), FactorizeSettings(targets="embeddings", rank=12)),
    "factorize": (Factorize(), FactorizeSettings(method="svd", optimize_for="size", rank=6)),
    "sparsify": (Sparsify(), SparsifySettings(calibration_samples=4)),
    "share-weights": (ShareWeights(), ShareWeightsSettings()),
    "share with differences": (
        ShareWeights(),
        ShareWeightsSettings.model_validate({"low_rank_delta": {"rank": 4}}),
    ),
    "shortlist": (ShortlistStage(), ShortlistSettings(candidates_per_token=5, frequent_tokens=10)),
}


@pytest.mark.parametrize(
    ("stage", "family", "layers"),  # of each stack; one, where the stage needs no second
    [
        ("trim-vocabulary", "qwen2", 1),
        ("drop-layers", "t5", 2),
        ("depth of parts", "marian", 2),
        ("prune", "bert", 1),
        ("prune width", "pegasus", 1),
        ("factorize", "gpt2", 1),
        ("share-weights", "mistral", 2),
        ("share with differences", "gemma", 2),
        ("factorize embeddings", "marian", 1),
        ("sparsify", "qwen3", 1),
        ("shortlist", "t5", 1),
    ],
)
def test_what_a_stage_leaves_can_be_saved_trained_quantized_and_exported(stage, family, layers, tmp_path):
    source = every_family.model_with_layers(family, layers)
    made = every_family.run_stage(*STAGES[stage], source, family, tmp_path / "made").out
    usability_checks.check_usable(made, family, tmp_path / "later")
