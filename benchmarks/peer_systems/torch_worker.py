"""PyTorch with transformers: eager, `torch.compile`, and torch.ao's dynamic int8."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from peer_systems.worker import Case, Job, Opened, Rows, main, nothing_to_make

CLASSES = {
    "marian": "AutoModelForSeq2SeqLM",
    "opus": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForSequenceClassification",
    "llama": "AutoModelForCausalLM",
}


def serve(job: Job) -> Opened:
    """Load the model in float32, or with int8 weights and activations quantized as they come."""
    torch.set_num_threads(job["threads"])
    model_class = getattr(transformers, CLASSES[job["work"]])
    model = model_class.from_pretrained(job["model"], dtype=torch.float32).eval()
    if job["variant"] == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if job["work"] == "bert":
        forward = torch.compile(model) if job["variant"] == "compile" else model
        return lambda rows, case: _classify(forward, rows), version
    if job["work"] == "marian":
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
        return lambda rows, case: _translate(model, tokenizer, rows, case), version
    return lambda rows, case: _continue(model, rows, case), version


@torch.inference_mode()
def _classify(model: Any, rows: Rows) -> Rows:
    ids = torch.tensor(rows)
    return list(model(ids, attention_mask=torch.ones_like(ids)).logits.tolist())


@torch.inference_mode()
def _translate(model: Any, tokenizer: Any, texts: Rows, case: Case) -> Rows:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = {"num_beams": case["beams"], "do_sample": False, "max_new_tokens": case["new_tokens"]}
    return list(tokenizer.batch_decode(model.generate(**inputs, **wanted), skip_special_tokens=True))


@torch.inference_mode()
def _continue(model: Any, rows: Rows, case: Case) -> Rows:
    """Return exactly `new_tokens` tokens for each row, without the prompt or the start token."""
    ids = torch.tensor(rows)
    count = case["new_tokens"]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=case["beams"],
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
    )
    return list(out[:, -count:].tolist())


if __name__ == "__main__":
    main(nothing_to_make, serve)
