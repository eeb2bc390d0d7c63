"""BERT. Source: transformers' modeling_bert.py."""

from __future__ import annotations

from smelt.models.families.family import ENCODER_TASKS, Family, PublishedLearningRate, TokenizerSpec

# Position ids that BERT and similar models stored before transformers 4.31.
POSITION_IDS_TENSORS = r"(.+\.)?embeddings\.position_ids"
BERT_TOKENIZER = TokenizerSpec(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    "[CLS] $A [SEP] $B:1 [SEP]:1",
    uses_token_types=True,
)


FAMILY = Family(
    name="bert",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(5e-5, 768),  # Devlin et al. 2019, appendix A.3: 2e-5 to 5e-5
    tokenizer_spec=BERT_TOKENIZER,
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"cls\..+", r"qa_outputs\..+"),
    token_types="pairs",
)
