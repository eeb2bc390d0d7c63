"""Tiny random classifiers of other families than `tiny.bert`, with tokenizers made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models.tiny import SENTENCES, write_bert
from tests.support.shared_folders import written_once

CLASS_NAMES = ["calm", "angry", "glad"]


@written_once
def distilbert(folder: Path, seed: int = 0, labels: int = 2, **config: Any) -> Path:
    """Write a random DistilBERT classifier with a WordPiece tokenizer into `folder`; return it."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    tokens = sorted({w for s in SENTENCES for w in s.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "DistilBertTokenizer", "model_max_length": 32, "do_lower_case": True})
    )
    values = {
        "vocab_size": len(vocabulary),
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
        "max_position_embeddings": 32,
        "num_labels": labels,
        "pad_token_id": 0,
    }
    return _save_model(
        DistilBertForSequenceClassification, DistilBertConfig(**(values | config)), folder, seed
    )


@written_once
def roberta(folder: Path, seed: int = 0, labels: int = 2, **config: Any) -> Path:
    """Write a random RoBERTa classifier with a trained byte-level BPE into `folder`; return it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaConfig, RobertaForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(SENTENCES, vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "RobertaTokenizer", "model_max_length": 64})
    )
    values = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 66,  # two of them lie below the first token's
        "type_vocab_size": 1,
        "num_labels": labels,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return _save_model(RobertaForSequenceClassification, RobertaConfig(**(values | config)), folder, seed)


MAKERS = {"bert": write_bert, "distilbert": distilbert, "roberta": roberta}


def _save_model(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)  # the default of 0.02 makes every output the same
    model.save_pretrained(folder)
    return folder


def write_labeled_rows(path: Path, problem: str, pairs: bool = False, rows: int = 8) -> Path:
    """Write `rows` rows as JSON lines: names of NAMES, lists of them, or numbers, by the problem type."""
    label_of = {
        "single_label_classification": lambda i: CLASS_NAMES[i % 3],
        "multi_label_classification": lambda i: [n for k, n in enumerate(CLASS_NAMES) if (i + 1) >> k & 1],
        "regression": lambda i: round(0.5 * (i % 5) - 1, 2),
    }[problem]
    lines = [{"text": SENTENCES[i % len(SENTENCES)], "label": label_of(i)} for i in range(rows)]
    if pairs:
        lines = [
            {**line, "text_pair": SENTENCES[(3 * i + 1) % len(SENTENCES)]} for i, line in enumerate(lines)
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
