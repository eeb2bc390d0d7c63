"""A tiny random Whisper with its tokenizer, and audio that is made in the test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.tiny import SENTENCES
from tests.support.shared_folders import written_once

TASK = "speech-recognition"
STATES = 50
"""States of the encoder for a window, of one second."""
_SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
            "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip


@written_once
def write_whisper(folder: Path, seed: int = 0, multilingual: bool = True, **config: Any) -> Path:
    """Write a random Whisper of English and German into `folder`; without them if not `multilingual`."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    ids = _write_tokenizer(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    values = {
        "vocab_size": len(ids), "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_source_positions": STATES, "max_target_positions": 48,
        "num_mel_bins": 16, "pad_token_id": end, "bos_token_id": end, "eos_token_id": end,
        "decoder_start_token_id": start, "begin_suppress_tokens": None, "suppress_tokens": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**(values | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    languages = {
        "language": "en",
        "lang_to_id": {name: ids[name] for name in ("<|en|>", "<|de|>")},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
    }
    GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end, max_length=40,
        no_timestamps_token_id=ids["<|notimestamps|>"], is_multilingual=multilingual,
        suppress_tokens=[ids[name] for name in _SPECIAL[1:]], begin_suppress_tokens=[end],
        return_timestamps=False, **(languages if multilingual else {}),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Write Whisper's kind of tokenizer, byte-level BPE; return the id of each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import WhisperTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=110,
        special_tokens=[],
        show_progress=False,
        initial_alphabet=sorted(set("".join(SENTENCES)) - {" "}),
    )
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    whisper = WhisperTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        model_max_length=48,
        pad_token="<|endoftext|>",
    )
    whisper.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    whisper.save_pretrained(folder)
    ids: dict[str, int] = whisper.get_vocab()
    return ids


def make_speech(number: int, seconds: float = 0.8, rate: int = 16_000) -> Any:
    """Return float32 samples: tones whose pitches depend on `number`, in noise."""
    generator = np.random.default_rng(number)
    times = np.arange(int(seconds * rate)) / rate
    pitches = 200 + 150 * generator.integers(0, 20, 4)
    steps = np.minimum((times * 4 / seconds).astype(int), 3)
    return (0.3 * np.sin(2 * np.pi * pitches[steps] * times) + generator.normal(0, 0.01, len(times))).astype(
        np.float32
    )


def write_rows(path: Path, count: int = 8, columns: Sequence[str] = ("audio", "text")) -> Path:
    """Write `count` files of audio next to `path`, and rows of JSON that name them; return `path`."""
    import soundfile

    folder = path.parent / f"{path.stem}-audio"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        soundfile.write(folder / f"{number}.wav", make_speech(number), 16_000)
        values = (f"{folder.name}/{number}.wav", SENTENCES[number % len(SENTENCES)])
        lines.append(json.dumps(dict(zip(columns, values, strict=True))))
    path.write_text("\n".join(lines) + "\n")
    return path
