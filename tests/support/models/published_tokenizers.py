"""Tokenizer folders with the files that published checkpoints of each family have, trained on the spot.

The tiny models of the other modules hold a finished tokenizer.json. Here transformers has to build the
tokenizer from vocabularies, merges or SentencePiece models while loading, with all that it adds on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Texts = Sequence[str]


def _write_config(folder: Path, family: str, kind: str, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    options = {"tokenizer_class": kind, "model_max_length": 64, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def _write_wordpiece(folder: Path, texts: Texts, size: int, lowercase: bool) -> None:
    from tokenizers import BertWordPieceTokenizer

    wordpiece = BertWordPieceTokenizer(lowercase=lowercase)
    wordpiece.train_from_iterator(texts, vocab_size=size, min_frequency=1, show_progress=False)
    wordpiece.save_model(str(folder))


def _write_byte_bpe(folder: Path, texts: Texts, size: int, special: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=256 + size, special_tokens=special, show_progress=False)
    bpe.save_model(str(folder))


def _write_sentencepiece(path: Path, texts: Texts, size: int, kind: str = "unigram", **settings: Any) -> None:
    import sentencepiece

    prefix = path.with_suffix(".made")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(prefix), vocab_size=size, model_type=kind,
        hard_vocab_limit=False, minloglevel=2, **settings,
    )  # fmt: skip
    Path(f"{prefix}.model").rename(path)
    Path(f"{prefix}.vocab").unlink()


def bert(folder: Path, texts: Texts, size: int) -> Path:
    _write_wordpiece(folder, texts, size, lowercase=True)
    return _write_config(
        folder, "bert", "BertTokenizer", do_lower_case=True, clean_up_tokenization_spaces=True
    )


def distilbert(folder: Path, texts: Texts, size: int) -> Path:
    _write_wordpiece(folder, texts, size, lowercase=False)
    return _write_config(folder, "distilbert", "DistilBertTokenizer", do_lower_case=False)


_ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def roberta(folder: Path, texts: Texts, size: int) -> Path:
    _write_byte_bpe(folder, texts, size, _ROBERTA_TOKENS)
    return _write_config(folder, "roberta", "RobertaTokenizer")


def bart(folder: Path, texts: Texts, size: int) -> Path:
    _write_byte_bpe(folder, texts, size, _ROBERTA_TOKENS)
    return _write_config(folder, "bart", "BartTokenizer", add_prefix_space=True)


def gpt2(folder: Path, texts: Texts, size: int) -> Path:
    _write_byte_bpe(folder, texts, size, ["<|endoftext|>"])
    return _write_config(folder, "gpt2", "GPT2Tokenizer", clean_up_tokenization_spaces=True)


def opt(folder: Path, texts: Texts, size: int) -> Path:
    """GPT-2's pieces with a first token before each text, which is the last one too."""
    _write_byte_bpe(folder, texts, size, _ROBERTA_TOKENS[:4])
    special_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    return _write_config(
        folder, "opt", "GPT2Tokenizer", add_bos_token=True, pad_token="<pad>", **special_tokens
    )


def qwen2(folder: Path, texts: Texts, size: int) -> Path:
    _write_byte_bpe(folder, texts, size, [])
    vocab_size = len(json.loads((folder / "vocab.json").read_text()))
    chat_tokens = {"<|endoftext|>": vocab_size, "<|im_start|>": vocab_size + 1, "<|im_end|>": vocab_size + 2}
    added = {
        str(i): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                 "single_word": False}
        for token, i in chat_tokens.items()
    }  # fmt: skip
    special_tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    return _write_config(folder, "qwen2", "Qwen2Tokenizer", added_tokens_decoder=added, **special_tokens)


def t5(folder: Path, texts: Texts, size: int) -> Path:
    _write_sentencepiece(folder / "spiece.model", texts, size, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return _write_config(folder, "t5", "T5Tokenizer", extra_ids=100, eos_token="</s>", pad_token="<pad>")


def mbart(folder: Path, texts: Texts, size: int) -> Path:
    """mBART-25, whose language code stands at the end of a text."""
    _write_sentencepiece(folder / "sentencepiece.bpe.model", texts, size)
    return _write_config(folder, "mbart", "MBartTokenizer", src_lang="en_XX", tgt_lang="de_DE")


def mbart50(folder: Path, texts: Texts, size: int) -> Path:
    """mBART-50, whose language code stands before a text; the languages are said in text.json."""
    _write_sentencepiece(folder / "sentencepiece.bpe.model", texts, size)
    (folder / "text.json").write_text('{"source_language": "de_DE", "target_language": "ro_RO"}')
    return _write_config(folder, "mbart", "MBart50Tokenizer", src_lang="en_XX", tgt_lang="de_DE")


def xlm_roberta(folder: Path, texts: Texts, size: int) -> Path:
    _write_sentencepiece(folder / "sentencepiece.bpe.model", texts, size)
    return _write_config(folder, "xlm-roberta", "XLMRobertaTokenizer")


def deberta_v2(folder: Path, texts: Texts, size: int) -> Path:
    """DeBERTa-v3, whose SentencePiece model has the special tokens except for the mask."""
    _write_sentencepiece(
        folder / "spm.model", texts, size, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip
    return _write_config(folder, "deberta-v2", "DebertaV2Tokenizer", do_lower_case=False, vocab_type="spm")


def llama(folder: Path, texts: Texts, size: int) -> Path:
    """Llama 2: SentencePiece BPE that falls back on bytes, a first token before each text."""
    _write_sentencepiece(folder / "tokenizer.model", texts, 259 + size, kind="bpe", byte_fallback=True)
    return _write_config(folder, "llama", "LlamaTokenizer", legacy=False, add_bos_token=True)


def llama3(folder: Path, texts: Texts, size: int) -> Path:
    """Llama 3: byte-level, as PreTrainedTokenizerFast, with special tokens named in the text."""
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=256 + size, special_tokens=marks, show_progress=False)
    inner = bpe._tokenizer
    inner.post_processor = processors.TemplateProcessing(
        single=f"{marks[0]} $A", pair=f"{marks[0]} $A {marks[0]} $B", special_tokens=[(marks[0], 0)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=marks[0], eos_token=marks[1], model_max_length=64,
        clean_up_tokenization_spaces=True,
    )  # fmt: skip
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def marian(folder: Path, texts: Texts, size: int) -> Path:
    """A model for several languages: source and target cut otherwise, one vocabulary for both."""
    import sentencepiece

    half = len(texts) // 2
    vocabulary = {"</s>": 0, "<unk>": 1, ">>deu<<": 2, ">>fra<<": 3}
    for name, split_texts in (("source.spm", texts[:half]), ("target.spm", texts[half:])):
        _write_sentencepiece(folder / name, split_texts, size, pad_id=-1, bos_id=-1)
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        for i in range(len(model)):
            vocabulary.setdefault(model.id_to_piece(i), len(vocabulary))
    vocabulary.setdefault("\U0001f642", len(vocabulary))  # no piece of either model, yet a word
    (folder / "vocab.json").write_text(json.dumps({**vocabulary, "<pad>": len(vocabulary)}))
    return _write_config(folder, "marian", "MarianTokenizer", source_lang="eng", target_lang="mul")


MAKERS: dict[str, Callable[[Path, Texts, int], Path]] = {
    f.__name__: f
    for f in (
        marian,
        t5,
        bart,
        mbart,
        mbart50,
        bert,
        distilbert,
        roberta,
        xlm_roberta,
        deberta_v2,
        gpt2,
        opt,
        llama,
        llama3,
        qwen2,
    )
}
