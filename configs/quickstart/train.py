"""The recipe of the example model: a small Marian trained from nothing on endless phrases.

`python -m smelt.configs.quickstart.train --steps N --out DIR` writes a folder that
`MarianMTModel.from_pretrained` and `MarianTokenizer.from_pretrained` load. It needs Babel (for
the phrases), SentencePiece and sacrebleu. Seeds are fixed; the last digits still depend on the
processor and on the number of threads.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click
import sacrebleu
import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer

from smelt.configs.quickstart.phrases import phrases

HERE = Path(__file__).parent
SEED = 17
PIECES = 1_600
"""Most pieces of the joint SentencePiece vocabulary (the language yields fewer); <pad> is extra."""
VOCABULARY_PHRASES = 40_000
CHUNK_PHRASES = 20_000
"""Phrases generated at a time; batches of like lengths are cut from one chunk."""
TARGET_TOKENS = 1_400
"""Target tokens a step, padding included."""
LEARNING_RATE = 8e-4
WARM_UP_STEPS = 600
AVERAGE_DECAY = 0.99
EOS, UNK = 0, 1
MAX_LENGTH = 160
"""Longest output in tokens; the longest phrases have about 80."""


@dataclass(frozen=True)
class Batch:
    """Token ids of a batch, each of shape (phrases, longest phrase), padded with <pad>."""

    source: Tensor
    target: Tensor


def write_vocabulary(out: Path) -> None:
    """Train one SentencePiece model for both languages and write it in Marian's three files."""
    rows = islice(phrases("train", SEED), VOCABULARY_PHRASES)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for row in rows for text in row.values()),
        model_writer=model,
        model_type="unigram",
        vocab_size=PIECES,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=False,
        # Single digits: the model copies or converts numbers digit by digit.
        split_digits=True,
        bos_id=-1,
        eos_id=0,
        unk_id=1,
        num_threads=1,
        minloglevel=2,
    )
    for name in ("source.spm", "target.spm"):
        (out / name).write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<pad>"])}
    (out / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, indent=0) + "\n")


def new_model(pad: int) -> MarianMTModel:
    """An untrained model, initialized so that post-norm layers learn from the first steps."""
    config = MarianConfig(
        vocab_size=pad + 1,
        d_model=256,
        encoder_layers=4,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        activation_function="swish",
        max_position_embeddings=256,
        dropout=0.1,
        scale_embedding=True,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = MarianMTModel(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            # Small residual branches: with full ones every position's encoding becomes the same.
            last = name.endswith(("out_proj", "fc2"))
            nn.init.xavier_uniform_(module.weight, gain=0.25 if last else 1.0)
            nn.init.zeros_(module.bias)
    embedding = model.get_input_embeddings().weight
    nn.init.normal_(embedding, std=config.d_model**-0.5)
    with torch.no_grad():
        embedding[pad].zero_()
        for part in (model.model.encoder, model.model.decoder):
            positions = part.embed_positions
            positions.weight.copy_(positions.create_weight())
    return model


def batches(tokenizer: MarianTokenizer, seed: int) -> Iterator[Batch]:
    """Batches of about `TARGET_TOKENS` target tokens, of phrases of like length, without end."""
    rng = random.Random(seed)
    endless = phrases("train", seed)
    coder = tokenizer.spm_source
    vocabulary: dict[str, int] = tokenizer.encoder

    def encode(text: str) -> list[int]:
        return [vocabulary.get(p, UNK) for p in coder.encode(text, out_type=str)] + [EOS]

    pad = tokenizer.pad_token_id
    while True:
        rows = [(encode(r["source"]), encode(r["target"])) for r in islice(endless, CHUNK_PHRASES)]
        # The random part keeps batches from holding phrases of one length and template only.
        rows.sort(key=lambda row: max(map(len, row)) + 3 * rng.random())
        cut: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if (len(cut[-1]) + 1) * len(row[1]) > TARGET_TOKENS:
                cut.append([])
            cut[-1].append(row)
        rng.shuffle(cut)
        for group in cut:
            source, target = (
                pad_sequence([torch.tensor(row[i]) for row in group], True, pad) for i in range(2)
            )
            yield Batch(source, target)


def batch_loss(model: MarianMTModel, batch: Batch, pad: int) -> tuple[Tensor, float]:
    """The smoothed cross-entropy (nats a token), and the last encoder layer's spread.

    The spread is the variance across positions over the mean square, from 0 (all positions are
    encoded alike: the encoder has collapsed) to 1.
    """
    shifted = batch.target.roll(1, dims=1)
    shifted[:, 0] = pad
    output = model(
        input_ids=batch.source,
        attention_mask=batch.source.ne(pad),
        decoder_input_ids=shifted,
        use_cache=False,
    )
    loss = nn.functional.cross_entropy(
        output.logits.flatten(0, 1),
        batch.target.masked_fill(batch.target.eq(pad), -100).flatten(),
        label_smoothing=0.1,
    )
    states = output.encoder_last_hidden_state.detach()[batch.source.ne(pad)]
    return loss, float(states.var(0).mean() / states.square().mean())


def fit(model: MarianMTModel, tokenizer: MarianTokenizer, steps: int) -> MarianMTModel:
    """Train the model for a number of steps and return its moving average."""
    pad = tokenizer.pad_token_id
    embedding = model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )

    def rate(step: int) -> float:
        progress = max(0.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS))
        return min((step + 1) / WARM_UP_STEPS, 0.5 + 0.5 * math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE_DECAY)
    )
    model.train()
    begun = time.monotonic()
    for step, batch in enumerate(islice(batches(tokenizer, SEED + 1), steps), 1):
        loss, spread = batch_loss(model, batch, pad)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            embedding[pad].zero_()  # The tied output layer would train it.
        average.update_parameters(model)
        if step % 50 == 0:
            seconds = time.monotonic() - begun
            click.echo(f"{step=} loss={loss.item():.3f} {spread=:.4f} {seconds=:.0f}")
    trained: MarianMTModel = average.module
    return trained.eval()


def save(model: MarianMTModel, out: Path) -> None:
    """Write fp16 weights, and configs that load them as float32 and decode greedily."""
    pad = model.config.pad_token_id
    model.generation_config = GenerationConfig(
        num_beams=1,
        max_length=MAX_LENGTH,
        bad_words_ids=[[pad]],
        eos_token_id=EOS,
        pad_token_id=pad,
        decoder_start_token_id=pad,
    )
    model.half().save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def greedy_bleu(folder: Path) -> tuple[float, int]:
    """BLEU (sacrebleu's default, 0 to 100) of greedy decoding on the test file, and its rows."""
    tokenizer = MarianTokenizer.from_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder)
    with gzip.open(HERE / "data" / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    outputs: list[str] = []
    for start in range(0, len(rows), 50):
        sources = [row["source"] for row in rows[start : start + 50]]
        ids = model.generate(**tokenizer(sources, return_tensors="pt", padding=True))
        outputs += tokenizer.batch_decode(ids, skip_special_tokens=True)
    score = sacrebleu.corpus_bleu(outputs, [[row["target"] for row in rows]]).score
    return float(score), len(rows)


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=1_600, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=HERE / "model")
def main(steps: int, threads: int, out: Path) -> None:
    """Train the example model and write it to OUT."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    write_vocabulary(out)
    tokenizer = MarianTokenizer(
        str(out / "source.spm"), str(out / "target.spm"), str(out / "vocab.json"),
        source_lang="en", target_lang="de", model_max_length=256,
    )  # fmt: skip
    tokenizer.save_pretrained(out)
    model = new_model(tokenizer.pad_token_id)
    click.echo(f"{sum(p.numel() for p in model.parameters())} parameters")
    save(fit(model, tokenizer, steps), out)
    score, count = greedy_bleu(out)
    click.echo(f"BLEU {score:.2f} on {count} test phrases")


if __name__ == "__main__":
    main()
