"""BART. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from smelt.models.families.family import Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.layout import Config
from smelt.models.families.roberta import ROBERTA_TOKENIZER


def embedding_scale(config: Config) -> float:
    """Return the scale of the token embedding."""
    return float(config["d_model"]) ** 0.5 if config.get("scale_embedding") else 1.0


FAIRSEQ_VERSION_TENSORS = r"(model\.)?(en|de)coder\.version"
FAMILY = Family(
    name="bart",
    tasks=("summarization", "translation"),
    learning_rate=PublishedLearningRate(3e-5, 1024),  # fairseq's examples/bart, for summarization
    embedding_scale=embedding_scale,
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=ROBERTA_TOKENIZER,
    unused_tensors=(FAIRSEQ_VERSION_TENSORS,),
    decoder_start="eos",
    forces_eos=True,
)
