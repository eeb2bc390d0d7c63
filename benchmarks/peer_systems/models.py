"""Models of published sizes with random weights from a seed, and what is fed to them.

    python -m peer_systems.models WORK FOLDER OTHER

OTHER is a folder that a tokenizer is taken from (opus), or a text file that one is trained on (llama).
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20
OPUS_VOCABULARY, BERT_VOCABULARY, LLAMA_VOCABULARY = 58_101, 30_522, 32_000


def token_rows(count: int, length: int, words: int, seed: int = SEED) -> list[list[int]]:
    """Return random rows of token ids, without the first thousand, where special tokens lie."""
    token_ids: list[list[int]] = (
        np.random.default_rng(seed).integers(1000, words - 1, (count, length)).tolist()
    )
    return token_ids


def opus(folder: Path, tokenizer: Path) -> None:
    """A Marian of opus-mt's size; its vocabulary is the given one, filled up."""
    import torch
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    pad = OPUS_VOCABULARY - 1
    config = MarianConfig(
        vocab_size=OPUS_VOCABULARY,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="swish",
        max_position_embeddings=512,
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=0,
        bos_token_id=0,
        forced_eos_token_id=None,
        decoder_start_token_id=pad,
        tie_word_embeddings=True,
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[pad] = 0  # Marian's decoder starts from nothing
        model.final_logits_bias.normal_(0, 0.1)
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]], pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, max_length=512
    )
    model.save_pretrained(folder)
    for name in ("source.spm", "target.spm"):
        shutil.copy(tokenizer / name, folder / name)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = settings["added_tokens_decoder"]
    special[str(pad)] = special.pop(str(max(map(int, special))))  # its last one is pad
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    pieces = json.loads((tokenizer / "vocab.json").read_text(encoding="utf-8"))
    known = {piece: number for piece, number in pieces.items() if piece != "<pad>"}
    taken = set(known.values())
    known |= {f"filler{number}": number for number in range(pad) if number not in taken}
    (folder / "vocab.json").write_text(json.dumps(known | {"<pad>": pad}), encoding="utf-8")


def bert(folder: Path, _: Path) -> None:
    """A BERT-base with a head of two classes, between which random rows are about evenly split."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model = BertForSequenceClassification(BertConfig(vocab_size=BERT_VOCABULARY, num_labels=2)).eval()
    with torch.inference_mode():
        rows = torch.tensor(token_rows(64, 64, BERT_VOCABULARY, SEED + 1))
        shift = model(rows, attention_mask=torch.ones_like(rows)).logits.mean(0)
    with torch.no_grad():
        model.classifier.bias -= shift
    model.save_pretrained(folder)
    letters = [mark + chr(code) for mark in ("", "##") for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    filler = [f"filler{number}" for number in range(BERT_VOCABULARY - len(special) - len(letters))]
    words = folder / "vocab.txt"
    words.write_text("\n".join([*special, *letters, *filler]) + "\n", encoding="utf-8")
    BertTokenizerFast(str(words), model_max_length=512).save_pretrained(folder)


def llama(folder: Path, texts: Path) -> None:
    """A Llama of 100 million parameters; its tokenizer (BPE on bytes) is trained on `texts`."""
    import tokenizers
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # as trained ones: an exporter removes weights of 1, and ORT then fuses no norm
            torch.nn.init.normal_(parameter, 1, 0.1)
    model.save_pretrained(folder)
    reader = tokenizers.Tokenizer(tokenizers.models.BPE())
    reader.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=LLAMA_VOCABULARY, special_tokens=["<s>", "</s>"])
    with gzip.open(texts, "rt", encoding="utf-8") as lines:
        reader.train_from_iterator(lines, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=reader, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)


def main(work: str, folder: str, other: str) -> None:
    """Make the model of `work`."""
    import torch

    torch.manual_seed(SEED)
    Path(folder).mkdir(parents=True, exist_ok=True)
    {"opus": opus, "bert": bert, "llama": llama}[work](Path(folder), Path(other))


if __name__ == "__main__":
    main(*sys.argv[1:])
