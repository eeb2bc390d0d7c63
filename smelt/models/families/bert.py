"""BERT. Source: transformers' modeling_bert.py."""

from __future__ import annotations

from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    ResidualStream,
    Stack,
    TokenizerSpec,
)

# Position ids that BERT and similar models stored before transformers 4.31.
POSITION_IDS_TENSORS = r"(.+\.)?embeddings\.position_ids"
BERT_TOKENIZER = TokenizerSpec(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    "[CLS] $A [SEP] $B:1 [SEP]:1",
    uses_token_types=True,
)


def encoder_stack(prefix: str) -> tuple[Stack, ...]:
    """Return BERT's blocks in a model whose base model is named `prefix`."""
    at = "attention"
    attention = Attention(
        f"{at}.self",
        query=f"{at}.self.query",
        key=f"{at}.self.key",
        value=f"{at}.self.value",
        out=f"{at}.output.dense",
        heads_attribute="num_attention_heads",
        head_dim_attribute="attention_head_size",
        all_head_size_attribute="all_head_size",
        heads_key="num_attention_heads",
    )
    block = FeedForward("", "intermediate.dense", "output.dense", "intermediate_size", "hidden_act")
    embeddings = f"{prefix}.embeddings"
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    stream = ResidualStream(
        tuple(f"{embeddings}.{table}.weight" for table in tables),
        part_norms=("attention.output.LayerNorm", "output.LayerNorm"),
        pre_norm=False,
        embedding_norm=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "num_hidden_layers", f"{prefix}.encoder.layer", (attention,), block, stream),)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    return encoder_stack("bert")


FAMILY = Family(
    name="bert",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(5e-5, 768),  # Devlin et al. 2019, appendix A.3: 2e-5 to 5e-5
    head_modules=("bert.pooler.dense", "classifier"),
    tokenizer_spec=BERT_TOKENIZER,
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"cls\..+", r"qa_outputs\..+"),
    token_types="pairs",
)
