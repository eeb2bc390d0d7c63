"""Stages that change a model's structure leave one with which everything else can still be done."""

import every_family
import pytest
import what_follows

from smelt.compress.depth.settings import DepthSettings
from smelt.compress.depth.stage import Depth
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.structured import Prune, PruneSettings
from smelt.compress.share.layers import Share, ShareSettings
from smelt.compress.shortlist.stage import ShortlistSettings, ShortlistStage
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.compress.vocabulary.settings import VocabularySettings
from smelt.compress.vocabulary.stage import Vocabulary

STAGES = {
    "vocabulary": (Vocabulary(), VocabularySettings(coverage=0.8)),
    "depth": (Depth(), DepthSettings(keep=0.67, importance="loss", rows=4)),
    "depth of parts": (Depth(), DepthSettings(what=["attention", "ffn"], keep=0.67, rows=4)),
    "prune": (Prune(), PruneSettings(keep=0.5, importance="magnitude")),
    "prune width": (Prune(), PruneSettings.model_validate({"what": ["width"], "keep": 0.75, "rows": 4})),
    "factorize embeddings": (Factorize(), FactorizeSettings(what="embeddings", rank=12)),
    "prune within a budget": (
        Prune(),
        PruneSettings.model_validate({"budget": {"parameters": 0.8}, "importance": "random", "rows": 4}),
    ),
    "factorize": (Factorize(), FactorizeSettings(method="svd", aim="size", rank=6)),
    "sparsify": (Sparsify(), SparsifySettings(rows=4)),
    "share": (Share(), ShareSettings()),
    "share with differences": (Share(), ShareSettings.model_validate({"difference": {"rank": 4}})),
    "shortlist": (ShortlistStage(), ShortlistSettings(per_token=5, frequent=10)),
}


@pytest.mark.parametrize(
    ("stage", "family"),
    [
        ("vocabulary", "qwen2"),
        ("depth", "t5"),
        ("depth of parts", "marian"),
        ("prune", "bert"),
        ("prune width", "pegasus"),
        ("prune width", "opt"),
        ("factorize", "gpt2"),
        ("share", "mistral"),
        ("share with differences", "t5"),
        ("prune within a budget", "phi3"),
        ("factorize embeddings", "marian"),
        ("factorize embeddings", "gemma"),
        ("factorize embeddings", "modernbert"),
        ("sparsify", "qwen3"),
        ("shortlist", "t5"),
    ],
)
def test_what_a_stage_leaves_can_be_saved_trained_quantized_and_exported(stage, family, tmp_path):
    made = every_family.run(*STAGES[stage], every_family.of_layers(family, 3), family, tmp_path / "made").out
    what_follows.check(made, family, tmp_path / "later")
