"""A model with random weights, from its config and a tokenizer, which can be trained for it.

The pieces are learned by the tokenizers library (unigram's and Marian's by SentencePiece); the special
tokens, and their positions around a text, are those of the family's own checkpoints. The same texts give the
same files in each process.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from smelt.core.errors import InputError
from smelt.core.messages import Message, warning, with_article
from smelt.data.labels import ProblemType
from smelt.data.tasks import Task, task_traits
from smelt.models.checkpoint import load_tokenizer, save_model
from smelt.models.experts import separate_experts
from smelt.models.families.family import TokenizerSpec
from smelt.models.families.registry import FAMILIES, family_of
from smelt.models.import_model import configure_embedder
from smelt.models.sentence_model import sentence_class
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from smelt.models.text_rules import SentenceRules

_NOT_SETTINGS = frozenset({"model_type", "architectures", "transformers_version"})


def create_model(
    values: Mapping[str, Any],
    tokenizer_folder: Path,
    out: Path,
    *,
    task: Task,
    seed: int,
    exact: bool = False,
    labels: Sequence[str] = (),
    problem: ProblemType | None = None,
    sentences: SentenceRules | None = None,
) -> list[Message]:
    """Write a model with random weights, drawn with `seed`, and its tokenizer into `out`.

    An image model has an image processor instead. Vocabulary size and special tokens of the config are set to
    the tokenizer's.

    Args:
        values: a Hugging Face config.
        tokenizer_folder: the folder of the tokenizer (or preprocessor_config.json).
        out: the new model folder.
        task: of the model; selects its class.
        seed: of the weights.
        exact: the vocabulary has the size of the tokenizer, also where the config's is larger.
        labels: names of a classifier's outputs.
        problem: kind of classification.
        sentences: pooling and normalization of a sentence embedder.

    Returns:
        Warnings about changes to the config.

    Raises:
        InputError: transformers cannot create a model from this config, or the tokenizer lacks a token that
            the model needs.
    """
    agreed = (
        {}
        if task_traits(task).modality == "image"
        else config_for_tokenizer(values, load_tokenizer(tokenizer_folder), task, exact)
    )
    settings = {k: v for k, v in values.items() if k not in _NOT_SETTINGS} | agreed
    if labels:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
        settings["problem_type"] = problem
    kind = str(values["model_type"])
    torch.manual_seed(seed)  # transformers' set_seed imports its trainer, and peft and bitsandbytes with it
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
        if sentences is None:
            auto_class = getattr(transformers, str(task_traits(task).auto_class))
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
        else:
            model = sentence_class(config, sentences)(config)
    except Exception as error:  # configs and models raise many kinds of exceptions
        raise InputError(
            f"model.config: transformers cannot create a model from it: {error}",
            code="wrong-config",
            setting="model.config",
        ) from error
    for name, value in agreed.items():
        if model.can_generate() and hasattr(model.generation_config, name):
            setattr(model.generation_config, name, value)
    family = family_of(model)
    if family is not None and family.suppresses_pad:
        model.generation_config.bad_words_ids = [[config.pad_token_id]]  # as its checkpoints do
    model.eval()
    separate_experts(model)
    save_model(model, [], out, tokenizer_folder, "fp32")
    (out / SHORTLIST).unlink(missing_ok=True)  # it belongs to the original model of the tokenizer
    if sentences is not None:
        configure_embedder(out, sentences)
    return [
        warning(
            "config-changed", f"{name} is {value}, as in the tokenizer; it was {values[name]} in the config."
        )
        for name, value in agreed.items()
        if values.get(name) not in (None, value)
    ]


def config_for_tokenizer(
    values: Mapping[str, Any], tokenizer: Any, task: Task, exact: bool
) -> dict[str, Any]:
    """Return the vocabulary size and the special tokens that a config needs to match `tokenizer`.

    A vocabulary larger than the tokenizer's is kept, unless it must be `exact`: some
    are padded to a round number.

    Raises:
        InputError: the tokenizer lacks a token that the model needs.
    """
    kind, size = str(values["model_type"]), len(tokenizer)
    declared = values.get("vocab_size")
    settings: dict[str, Any] = {"vocab_size": size if exact or not declared else max(size, int(declared))}
    if values.get("decoder_vocab_size"):
        settings["decoder_vocab_size"] = settings["vocab_size"]
    for role in ("pad", "eos", "bos"):
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is None and (role == "pad" or (role == "eos" and task_traits(task).generates)):
            raise InputError(
                f"model.tokenizer: the tokenizer has no {role} token, which {with_article(kind)} model"
                f" for {task} needs. Add one: tokenizer.{role}_token = ...;"
                " tokenizer.save_pretrained(FOLDER).",
                code="missing-special-token",
                setting="model.tokenizer",
            )
        settings[f"{role}_token_id"] = token
    if task_traits(task).architecture == "encoder-decoder":
        family = FAMILIES[kind]
        settings["decoder_start_token_id"] = settings[f"{family.decoder_start}_token_id"]
        if family.forces_eos:
            settings["forced_eos_token_id"] = settings["eos_token_id"]
    return settings


TokenizerKind = Literal["bpe", "unigram", "wordpiece"]
# The 256 bytes of byte-level BPE.
_BYTES = 256


def unsupported_tokenizer(family: str, kind: TokenizerKind, vocab_size: int) -> str:
    """Return why no tokenizer of this kind and size can be trained for `family`; empty if it can."""
    problem = _unsupported_tokenizer(family, kind, vocab_size)
    return problem[1] if problem else ""


def _unsupported_tokenizer(family: str, kind: TokenizerKind, vocab_size: int) -> tuple[str, str] | None:
    """Return code and text of why no such tokenizer can be trained, None if it can."""
    family_info = FAMILIES.get(family)
    tokenizer_spec = family_info.tokenizer_spec if family_info else None
    if tokenizer_spec is None:
        names = ", ".join(name for name, family in FAMILIES.items() if family.tokenizer_spec)
        return (
            "unsupported-family",
            f"no tokenizer can be trained for '{family}'; give the folder of one. Supported: {names}.",
        )
    if kind not in tokenizer_spec.allowed_models:
        return "unsupported-tokenizer", tokenizer_spec.allowed_models_reason
    min_size = (
        4
        if tokenizer_spec.sentencepiece
        else len(tokenizer_spec.special_tokens) + (_BYTES if kind == "bpe" else 1)
    )
    if vocab_size < min_size:
        byte_level = kind == "bpe" and not tokenizer_spec.sentencepiece
        explanation = ": the 256 bytes and the special tokens" if byte_level else ""
        text = f"vocab_size {vocab_size} is too small for {kind}; use at least {min_size}{explanation}."
        return "vocabulary-too-small", text
    return None


def train_tokenizer(
    texts: Iterable[str],
    out: Path,
    *,
    family: str,
    kind: TokenizerKind,
    vocab_size: int,
    max_length: int | None,
) -> None:
    """Learn a tokenizer from `texts` and write its files into `out`.

    Args:
        texts: training texts; read once.
        out: gets tokenizer.json and tokenizer_config.json, or Marian's source.spm, target.spm (the same,
            learned from both languages), vocab.json and tokenizer_config.json.
        family: the config's model_type.
        kind: bpe is byte-level (Radford et al. 2019; SentencePiece's own for Marian), unigram is Kudo
            2018, arXiv:1804.10959, wordpiece is BERT's, with its splitting at words and punctuation.
        vocab_size: maximum number of tokens, with special ones; fewer where the texts have fewer.
        max_length: maximum number of tokens of the model; None: no limit.

    Raises:
        InputError: the combination is not supported (see `unsupported_tokenizer`), or the texts are empty.
    """
    if reason := _unsupported_tokenizer(family, kind, vocab_size):
        raise InputError(f"model.tokenizer: {reason[1]}", code=reason[0], setting="model.tokenizer")
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(
            "model.tokenizer: the training samples contain no text to train a tokenizer on.",
            code="empty-data",
            setting="model.tokenizer",
        )
    tokenizer_spec = FAMILIES[family].tokenizer_spec
    assert tokenizer_spec is not None  # else an error was raised
    if tokenizer_spec.sentencepiece:
        _train_marian(lines, out, kind, vocab_size, max_length)
        return
    from transformers import PreTrainedTokenizerFast

    tokenizer = _train(lines, tokenizer_spec, kind, vocab_size)
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if tokenizer_spec.uses_token_types else [])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length or int(1e30),
        model_input_names=names,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in tokenizer_spec.token_roles.items()},
    ).save_pretrained(out)


def _train(lines: list[str], form: TokenizerSpec, kind: TokenizerKind, vocab_size: int) -> Any:
    """Return a trained `tokenizers.Tokenizer` that adds the family's special tokens around texts."""
    from tokenizers import processors

    train = {"bpe": _train_bpe, "unigram": _train_unigram, "wordpiece": _train_wordpiece}[kind]
    tokenizer = train(lines, form, vocab_size)
    tokenizer.post_processor = _special_token_processor(form, kind, processors)
    return tokenizer


def _train_bpe(lines: list[str], form: TokenizerSpec, vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer; pairs of equal frequency are merged by their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(form.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def _train_wordpiece(lines: list[str], form: TokenizerSpec, vocab_size: int) -> Any:
    """Return a WordPiece tokenizer.

    The trainer numbers `##` characters in the order of a hash table, which differs between processes, and
    merges pairs of equal frequency by their ids. So a first training only collects the characters, and the
    second gets them sorted, as if they were special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    unknown_token = form.token_roles["unk"]

    def wordpiece(vocabulary: dict[str, int]) -> Any:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown_token))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    def train(size: int, first_tokens: list[str]) -> dict[str, int]:
        tokenizer = wordpiece({})
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first_tokens, show_progress=False)
        tokenizer.train_from_iterator(lines, trainer)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        return vocabulary

    special = list(form.special_tokens)
    characters = sorted(train(0, special).keys() - {*special}, key=lambda token: (len(token), token))
    tokenizer = wordpiece(train(vocab_size, special + characters))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _train_unigram(lines: list[str], form: TokenizerSpec, vocab_size: int) -> Any:
    """Return a unigram tokenizer, its pieces learned by SentencePiece.

    The trainer of `tokenizers` sums in the order of a hash table, which differs between processes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    normalizer, special = normalizers.NFKC(), list(form.special_tokens)
    processor = _train_sentencepiece(
        [normalizer.normalize_str(line) for line in lines],
        model_type="unigram",
        vocab_size=vocab_size - len(special) + 1,  # its <unk> is one of the special tokens
        eos_id=-1,
        character_coverage=1.0,
        normalization_rule_name="identity",
    )
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    scores = [(token, 0.0) for token in special]
    scores += [(piece, score) for piece, score in pieces if piece not in ("<unk>", *special)]
    tokenizer = Tokenizer(models.Unigram(scores, special.index(form.token_roles["unk"])))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _special_token_processor(form: TokenizerSpec, kind: TokenizerKind, processors: Any) -> Any:
    # the trainers assign the first ids to the special tokens, in order
    token_ids = [(token, index) for index, token in enumerate(form.special_tokens)]
    template = processors.TemplateProcessing(
        single=form.single_template, pair=form.pair_template, special_tokens=token_ids
    )
    return (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        if kind == "bpe"
        else template
    )


def _train_sentencepiece(lines: list[str], **options: Any) -> Any:
    """Return a `sentencepiece.SentencePieceProcessor` that is trained on all of `lines`.

    Raises:
        InputError: SentencePiece cannot train on these texts.
    """
    import sentencepiece

    model_stream = io.BytesIO()  # a file's path would be stored in the model
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model_stream,
            max_sentence_length=2**30,  # longer ones are ignored
            hard_vocab_limit=False,
            pad_id=-1,
            bos_id=-1,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        raise InputError(
            f"model.tokenizer: SentencePiece cannot train on these texts: {error}",
            code="tokenizer-training-failed",
            setting="model.tokenizer",
        ) from error
    return sentencepiece.SentencePieceProcessor(model_proto=model_stream.getvalue())


def _train_marian(
    lines: list[str], out: Path, kind: TokenizerKind, vocab_size: int, max_length: int | None
) -> None:
    """Write one SentencePiece model for both sides, and the vocabulary in Marian's order (pad last)."""
    pieces = _train_sentencepiece(lines, model_type=kind, vocab_size=vocab_size - 1)
    learned_pieces = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    vocabulary = ["</s>", "<unk>", *(w for w in learned_pieces if w not in ("</s>", "<unk>")), "<pad>"]
    for name in ("source.spm", "target.spm"):
        (out / name).write_bytes(pieces.serialized_model_proto())
    (out / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(vocabulary)}, ensure_ascii=False), encoding="utf-8"
    )
    settings = {"tokenizer_class": "MarianTokenizer", "model_max_length": max_length or 512}
    (out / "tokenizer_config.json").write_text(
        json.dumps(settings | {"source_lang": "source", "target_lang": "target"}), encoding="utf-8"
    )
