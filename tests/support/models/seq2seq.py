"""Tiny T5, BART and mBART models with real tokenizers, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models.tiny import SENTENCES
from tests.support.shared_folders import written_once

PREFIX = "summarize: "


@written_once
def write_t5(folder: Path, gated: bool = False, seed: int = 0, **config: Any) -> Path:
    """Write a random T5 into `folder`: v1.0, or with `gated` v1.1 (gated FFN, a head of its own)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=70, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*SENTENCES, PREFIX] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=40,
    ).save_pretrained(folder)
    values = {
        "vocab_size": tokenizer.get_vocab_size(),
        "d_model": 32,
        "d_kv": 6,  # heads times width is not the model's width, as in T5 v1.1 small
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": 0,
    }
    if gated:
        values |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**(values | config)))
    if gated:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    _randomize_weights(model, 0.2)
    with torch.no_grad():
        model.shared.weight.normal_(0, 1.0)
        for name, parameter in model.named_parameters():
            if not gated and name.endswith(("o.weight", "wo.weight")):
                parameter.mul_(3)  # or a model whose embedding is its head repeats the decoder's start
    for side in (model.encoder, model.decoder):
        with torch.no_grad():
            side.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(0, 2.0)
    model.save_pretrained(folder)
    GenerationConfig(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    return folder


@written_once
def write_bart(folder: Path, seed: int = 0, kind: str = "bart", **config: Any) -> Path:
    """Write a random BART (or with kind mbart an mBART-50) into `folder`."""
    import torch
    import transformers

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    size = _write_byte_tokenizer(folder, special) if kind == "bart" else _write_mbart_tokenizer(folder)
    values = {
        "vocab_size": size,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 48,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    torch.manual_seed(seed)
    name = "Bart" if kind == "bart" else "MBart"
    model_config = getattr(transformers, f"{name}Config")(**(values | config))
    model = getattr(transformers, f"{name}ForConditionalGeneration")(model_config)
    _randomize_weights(model, 0.3)
    model.save_pretrained(folder)
    forced = {"forced_bos_token_id": 0} if kind == "bart" else {}
    transformers.GenerationConfig(
        decoder_start_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
        bos_token_id=0,
        forced_eos_token_id=2,
        **forced,
    ).save_pretrained(folder)
    return folder


def _write_byte_tokenizer(folder: Path, special: list[str]) -> int:
    """Write BART's kind of tokenizer, byte-level BPE between <s> and </s>; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        mask_token="<mask>", model_max_length=40,
    ).save_pretrained(folder)  # fmt: skip
    return tokenizer.get_vocab_size()


def _write_mbart_tokenizer(folder: Path) -> int:
    """Write an mBART-50 tokenizer, which knows languages by their codes; return its size."""
    from transformers import MBart50Tokenizer

    tokens = sorted({w for s in SENTENCES for w in s.split()})
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(f"▁{token}", -3.0) for token in tokens]
    tokenizer = MBart50Tokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="de_DE", model_max_length=40)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _randomize_weights(model: Any, spread: float) -> None:
    """Draw all matrices widely; the defaults make every output the same."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
