"""RoBERTa: BERT's blocks, places counted from the pad id. Source: transformers' modeling_roberta.py.

`RobertaEmbeddings.create_position_ids_from_input_ids` begins at pad_token_id + 1; roberta-base has 514 rows
for 512 tokens. Its table of token types has one row, which is added to all tokens.
"""

from __future__ import annotations

from smelt.families.bert import POSITION_IDS, encoder_stack
from smelt.families.family import Config, Family, Positions, Rate, Stack, TokenizerFiles, TokenizerForm

TOKENIZER = TokenizerForm(
    ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    {
        "bos": "<s>",
        "pad": "<pad>",
        "eos": "</s>",
        "unk": "<unk>",
        "cls": "<s>",
        "sep": "</s>",
        "mask": "<mask>",
    },
    "<s> $A </s>",
    "<s> $A </s> </s> $B </s>",
)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    return encoder_stack("roberta")


FAMILY = Family(
    name="roberta",
    kind="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding=("word_embeddings.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 768),  # Liu et al. 2019, appendix: 1e-5 to 3e-5
    head=("classifier.dense", "classifier.out_proj"),
    positions=Positions(after_pad=True),
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=TOKENIZER,
    # no layer of the classifier reads the pooler of the encoder
    unread=(POSITION_IDS, r"(roberta\.)?pooler\.dense\.(weight|bias)"),
    other_heads=(r"lm_head\..+", r"qa_outputs\..+"),
    token_types="zero",
)
