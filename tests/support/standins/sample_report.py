"""A report.json of ten steps, with branches, a skipped step and a failed one; and what a page consists of."""

from html.parser import HTMLParser

from smelt.evaluate.report.schema import validate_report
from smelt.evaluate.report.verdict import decide, pareto_front

# name, stage, parent, format, target, BLEU, p50 ms at batch 1, MB, million parameters
STEPS = [
    ("model", "model", None, "torch", None, 38.42, 84.3, 131.6, 32.9),
    ("control", "finetune", "model", "torch", None, 39.05, 84.1, 131.6, 32.9),
    ("distill", "distill", "model", "torch", None, 37.96, 52.7, 107.4, 26.8),
    ("prune", "prune", "distill", "torch", None, 37.51, 46.2, 88.2, 22.0),
    ("small", "factorize", "prune", "torch", None, 37.31, 44.8, 76.3, 19.1),
    ("quantize", "quantize", "small", "torch", "ort-cpu", 37.12, 61.5, 24.4, 19.1),
    ("onnx-int8", "onnx", "quantize", "onnx", "ort-cpu", 37.05, 14.2, 25.1, 19.1),
    ("onnx-fp32", "onnx", "small", "onnx", "ort-cpu", 37.31, 22.9, 77.0, 19.1),
    ("engine", "tensorrt", "onnx-fp32", None, None, None, None, None, None),
    ("openvino", "onnx", "small", None, None, None, None, None, None),
]


def ten_step_report():
    """A report.json of ten steps."""
    steps = [make_step(*row) for row in STEPS]
    by_name = {entry["name"]: entry for entry in steps}
    by_name["engine"].update(
        status="skipped", reason="TensorRT is not installed. pip install tensorrt adds it."
    )
    by_name["openvino"].update(
        status="error",
        error=make_message(
            "the exported decoder differs from its parent by 0.31 (limit 0.001).", "parity-failed", "error"
        ),
    )
    by_name["small"]["warnings"] = [
        make_message("decoder.layers.0.fc1: rank 200 of 256 would save nothing, left as it is")
    ]
    by_name["model"]["status"] = "cached"
    by_name["onnx-int8"]["gates"] = [
        {"metric": "bleu", "kind": "max_degradation", "limit": 1.0, "value": 1.37, "passed": False},
        {"metric": "size_bytes", "kind": "max", "limit": 40e6, "value": 25.1e6, "passed": True},
    ]
    return {
        "schema": 3,
        "recipe": {
            "model": "models/marian-small-en-de",
            "task": "translation",
            "data": {"test": "multi30k/test.jsonl.gz"},
            "seed": 0,
        },
        "environment": {
            "smelt": "0.1.0",
            "python": "3.11.9",
            "cpu": "AMD EPYC 7763",
            "cores": 2,
            "gpus": [],
            "versions": {"torch": "2.13.0"},
        },
        "status": "gate-failed",
        "baseline": "model",
        "steps": steps,
        "pareto_front": pareto_front(steps, "model"),
    }


def with_verdict(report):
    """The report with the verdict that a finished run would have."""
    return report | {"verdict": decide(validate_report(report)).model_dump(mode="json")}


def make_message(text, code="made-up", severity="warning"):
    """A warning or an error as a report has it."""
    return {"code": code, "severity": severity, "message": text}


def make_step(name, stage, parent, kind, target, bleu, p50, size, parameters):
    measured = bleu is not None
    loss = bleu - STEPS[0][5] if measured else 0
    difference = {
        "bleu": {
            "difference": loss,
            "ci95": [loss - 0.35, loss + 0.35],
            "p_value": 0.002 if abs(loss) > 0.4 else 0.21,
        },
        "chrf": {"difference": loss * 0.8, "ci95": [loss * 0.8 - 0.3, loss * 0.8 + 0.3], "p_value": 0.04},
    }
    return {
        "name": name,
        "stage": stage,
        "parent": parent,
        "status": "done",
        "reason": None,
        "error": None,
        "format": kind,
        "target": target,
        "runner": {"torch": "torch", "onnx": "onnxruntime", None: None}[kind],
        "artifact": f"artifacts/{name}" if measured else None,
        "deployable": stage != "quantize" if measured else None,
        "key": "4f" * 32 if measured else None,
        "settings": {"keep_ratio": 0.5, "targets": ["ffn"], "losses": {"logits": 1.0}} if parent else {},
        "parameters": round(parameters * 1e6) if measured else None,
        "size_bytes": round(size * 1e6) if measured else None,
        "seconds": 12.5 if measured else None,
        "peak_memory_bytes": 812_000_000 if measured else None,
        "warnings": [],
        "quality": make_scores(bleu) if measured else {},
        "latency": [make_latency(p50 * f, STEPS[0][6] * f, size) for f, size in ((1, 1), (4.6, 8))]
        if measured
        else [],
        "against_baseline": difference if measured and parent else {},
        "against_parent": {"bleu": difference["bleu"]} if measured and parent else {},
        "gates": [],
        "details": {"parity": {"largest": 0.00012}} if kind == "onnx" else {},
    }


def make_scores(bleu):
    common = {"higher_is_better": True, "n": 1000}
    return {
        "bleu": {
            "value": bleu,
            "unit": "BLEU",
            "ci95": [bleu - 1.31, bleu + 1.28],
            "signature": "nrefs:1|bs:1000|tok:13a|version:2.6.0",
            **common,
        },
        "chrf": {
            "value": bleu + 24.5,
            "unit": "chrF",
            "ci95": [bleu + 23.6, bleu + 25.4],
            "signature": "nrefs:1|nc:6|nw:0",
            **common,
        },
    }


def make_latency(p50, baseline, size):
    ratio = baseline / p50
    return {
        "batch_size": size,
        "threads": 1,
        "texts": 16,
        "input_tokens": 14.2,
        "output_tokens": 15.1,
        "p50_ms": p50,
        "p90_ms": p50 * 1.3,
        "p99_ms": p50 * 1.7,
        "cpu_ms": p50 * 1.04,
        "throughput": 1000 * size / p50,
        "unit": "sentences/s",
        "speedup": ratio,
        "speedup_ci95": [ratio * 0.96, ratio * 1.05],
        "stable": True,
        "reason": None,
        "parts": {
            "tokenizing_ms": 0.3,
            "encoding_ms": p50 * 0.2,
            "time_to_first_token_ms": 0.3 + p50 * 0.25,
            "time_per_output_token_ms": p50 * 0.05,
            "further_tokens": 14.6,
            "detokenizing_ms": 0.2,
        },
        "rounds_ms": [p50 * 0.99, p50, p50 * 1.02],
        "rounds": [make_round(f, baseline / p50 / f) for f in (0.99, 1.0, 1.02)],
    }


def make_round(factor, ratio):
    return {
        "counted": True,
        "speedup": ratio,
        "baseline_ms": 84.3,
        "processor_share": 0.99 / factor,
        "baseline_processor_share": 0.99,
        "lost_share": 0.02,
        "other_processors": 0.05,
        "cpu_steal": 0.0,
        "pressure": 0.01,
    }


def make_gate(metric, passed):
    """A gate of a step, judged."""
    return {"metric": metric, "kind": "max_degradation", "limit": 2.0, "value": 1.37, "passed": passed}


def make_rounds(*speedups):
    """Rounds of times on an idle machine that do not count."""
    idle = {"counted": False, "processor_share": 1.0, "baseline_processor_share": 1.0, "lost_share": 0.4}
    idle |= {"baseline_ms": 100.0, "other_processors": 0.5, "cpu_steal": 0.0, "pressure": None}
    return [idle | {"speedup": speedup} for speedup in speedups]


def mark_disturbed(row):
    """Make one row of times one that was disturbed."""
    row.update(stable=False, cause="busy")
    row.update(reason="other work took the processor in 9 of 9 rounds, up to 46 % of the time")


def report_with_unscored_step():
    """The sample with an engine that was built where nothing can run it."""
    report = ten_step_report()
    reason = "scoring needs a CUDA GPU that torch can use, and there is none here"
    engine = report["steps"][8]
    engine.update(status="done", reason=reason, format="tensorrt", target="tensorrt", size_bytes=40_000_000)
    engine["gates"] = [
        {
            "metric": "bleu",
            "kind": "max_degradation",
            "limit": 1.0,
            "value": None,
            "passed": None,
            "reason": reason,
        },
        {"metric": "size_bytes", "kind": "max", "limit": 90e6, "value": 40e6, "passed": True, "reason": None},
    ]
    return report


class HtmlOutline(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    VOID = frozenset({"meta", "br", "rect", "circle", "path", "line", "wbr", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.values, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.values += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
