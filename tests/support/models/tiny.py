"""Tiny models with working tokenizers, made on the spot: what tests run the real code on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tests.support.shared_folders import written_once

SENTENCES = [
    "a man in a red hat walks", "two dogs run on the grass", "the cat sleeps in the sun", "she sings a song",
    "ein mann mit rotem hut geht", "zwei hunde laufen auf dem gras", "die katze liegt in der sonne",
    "sie singt ein lied", "the old house stands near the river", "das alte haus steht am fluss",
]  # fmt: skip


@written_once
def write_marian(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a random Marian with a real SentencePiece tokenizer into `folder`; return it."""
    import sentencepiece
    import torch
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    folder.mkdir(parents=True, exist_ok=True)
    written = io.BytesIO()  # a file's path would be stored in the model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_writer=written,
        vocab_size=61,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=-1,
        bos_id=-1,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokens = ["</s>", "<unk>"]
    tokens += [
        w for i in range(pieces.get_piece_size()) if (w := pieces.id_to_piece(i)) not in ("<unk>", "</s>")
    ]
    tokens.append("<pad>")
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(written.getvalue())
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(tokens)}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "MarianTokenizer",
                "model_max_length": 40,
                "source_lang": "en",
                "target_lang": "de",
            }
        )
    )
    pad = len(tokens) - 1
    values = {
        "vocab_size": len(tokens),
        "decoder_vocab_size": len(tokens),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 48,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": 0,
        "scale_embedding": True,
    }
    torch.manual_seed(seed)
    model = MarianMTModel(MarianConfig(**(values | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0, 0.3)  # the default of 0.02 makes every output the same
        model.model.shared.weight[pad] = 0
    model.save_pretrained(folder)
    GenerationConfig(
        bad_words_ids=[[pad]],
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        max_length=40,
    ).save_pretrained(folder)
    return folder


@written_once
def write_bert(folder: Path, seed: int = 0, labels: int = 2, **config: Any) -> Path:
    """Write a random BERT classifier with a WordPiece tokenizer into `folder`; return it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    tokens = sorted({w for s in SENTENCES for w in s.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 32, "do_lower_case": True})
    )
    values = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "num_labels": labels,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = BertForSequenceClassification(BertConfig(**(values | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def as_artifact(folder: Path, task: str = "translation", **details: Any) -> Any:
    """Present a model folder as a torch artifact."""
    from smelt.core.artifact import Artifact, Manifest

    manifest = Manifest(
        key="0" * 64,
        format="torch",
        task=task,
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
        details=details,
    )
    return Artifact(folder, manifest)


def write_pairs(path: Path, rows: int = 8) -> Path:
    """Write `rows` translation rows as JSON lines."""
    lines = [
        {"source": SENTENCES[i % len(SENTENCES)], "target": SENTENCES[(i + 4) % len(SENTENCES)]}
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_pairs(folder: Path) -> Any:
    """Write pairs into `folder` (`write_pairs`) and return them as a split."""
    from smelt.data.splits import Columns
    from smelt.tasks.read_split import read_split

    return read_split(str(write_pairs(folder / "rows.jsonl")), "translation", Columns(), folder)


def write_labeled(path: Path, rows: int = 8) -> Path:
    """Write `rows` classification rows as JSON lines."""
    lines = [{"text": SENTENCES[i % len(SENTENCES)], "label": i % 2} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
