"""Opens packages by Optimum's classes; reads a request as JSON, prints the answers as JSON.

A request: {"packages": [{"folder", "kind", "texts", "merged", "generation"}, ...]}.
"""

import json
import logging
import sys
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.path.pop(0)  # this folder

from optimum import onnxruntime as optimum  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


def answer(folder, kind, texts, merged=None, generation=None):
    """Return texts of a model that generates, the probabilities of a classifier, or hidden states."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
    if kind in ("seq2seq", "causal"):
        rows.pop("token_type_ids", None)
        name = "ORTModelForSeq2SeqLM" if kind == "seq2seq" else "ORTModelForCausalLM"
        options = {} if merged is None else {"use_merged": merged}
        model = getattr(optimum, name).from_pretrained(folder, **options)
        tokens = model.generate(**rows, **(generation or {}))
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)
    if kind == "classifier":
        model = optimum.ORTModelForSequenceClassification.from_pretrained(folder)
        return model(**rows).logits.softmax(-1).tolist()
    model = optimum.ORTModelForFeatureExtraction.from_pretrained(folder)
    return [model(**rows).last_hidden_state.tolist(), rows["attention_mask"].tolist()]


print(json.dumps([answer(**package) for package in json.load(sys.stdin)["packages"]]))
