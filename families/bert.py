"""BERT. Source: transformers' modeling_bert.py."""

from __future__ import annotations

from smelt.families.family import Attention, Config, Family, FeedForward, Rate, Stack, TokenizerForm
from smelt.families.stream import Stream

# Numbers 0, 1, 2 ... that BERT and its relatives stored before transformers 4.31.
POSITION_IDS = r"(.+\.)?embeddings\.position_ids"
TOKENIZER = TokenizerForm(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    "[CLS] $A [SEP] $B:1 [SEP]:1",
    types=True,
)


def encoder_stack(prefix: str) -> tuple[Stack, ...]:
    """Return BERT's blocks in a model whose body is called `prefix`."""
    at = "attention"
    attention = Attention(
        f"{at}.self",
        query=f"{at}.self.query",
        key=f"{at}.self.key",
        value=f"{at}.self.value",
        out=f"{at}.output.dense",
        heads="num_attention_heads",
        width="attention_head_size",
        size="all_head_size",
        setting="num_attention_heads",
    )
    block = FeedForward("", "intermediate.dense", "output.dense", "intermediate_size", "hidden_act")
    embeddings = f"{prefix}.embeddings"
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    stream = Stream(
        tuple(f"{embeddings}.{table}.weight" for table in tables),
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        norms_first=False,
        opening=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "num_hidden_layers", f"{prefix}.encoder.layer", (attention,), block, stream),)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    return encoder_stack("bert")


FAMILY = Family(
    name="bert",
    kind="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding=("word_embeddings.weight",),
    width="hidden_size",
    rate=Rate(5e-5, 768),  # Devlin et al. 2019, appendix A.3: 2e-5 to 5e-5
    head=("bert.pooler.dense", "classifier"),
    new_tokenizer=TOKENIZER,
    unread=(POSITION_IDS,),
    other_heads=(r"cls\..+", r"qa_outputs\..+"),
    token_types="pairs",
)
