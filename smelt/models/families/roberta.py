"""RoBERTa: BERT's blocks, positions counted from the pad id. Source: transformers' modeling_roberta.py.

`RobertaEmbeddings.create_position_ids_from_input_ids` begins at pad_token_id + 1; roberta-base has 514 rows
for 512 tokens. Its table of token types has one row, which is added to all tokens.
"""

from __future__ import annotations

from smelt.models.families.bert import POSITION_IDS_TENSORS
from smelt.models.families.family import (
    ENCODER_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)

ROBERTA_TOKENIZER = TokenizerSpec(
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


FAMILY = Family(
    name="roberta",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 768),  # Liu et al. 2019, appendix: 1e-5 to 3e-5
    position_encoding=PositionEncoding(offset_by_pad_id=True),
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=ROBERTA_TOKENIZER,
    # the classifier does not use the encoder's pooler
    unused_tensors=(POSITION_IDS_TENSORS, r"(roberta\.)?pooler\.dense\.(weight|bias)"),
    other_head_tensors=(r"lm_head\..+", r"qa_outputs\..+"),
    token_types="zero",
)
