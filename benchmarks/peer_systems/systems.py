"""Which systems there are, what each does, and the environment of each, with exact versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
STOCK = (TORCH, "transformers==5.23.0", "onnx==1.23.2", "numpy==2.4.6")
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "stock": (*STOCK, "onnxruntime==1.31.1", "onnxscript==0.7.2", "sympy==1.14.0", "sentencepiece==0.2.3"),
    "ctranslate2": (*STOCK, "ctranslate2==4.8.5", "sentencepiece==0.2.3"),
    "openvino": ("openvino==2026.4.1", "nncf==3.4.0", "onnx==1.23.2", "numpy==2.4.6"),
    "optimum": (
        TORCH,
        "optimum==2.1.0",
        "optimum-onnx==0.1.0",
        "onnxruntime==1.32.0",
        "transformers==4.57.6",
        "sentencepiece==0.2.3",
    ),
    "olive": (*STOCK, "olive-ai==0.13.0", "requests==2.34.2", "onnxruntime==1.32.0", "onnxscript==0.7.2"),
    "genai": (*STOCK, "onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx-ir==1.1.0"),
    "llamacpp": ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0", "numpy==2.4.6"),
}
"""What pip installs in each. torch is constrained, so that a looser wish elsewhere cannot change it."""
COMPILED = ("llamacpp",)
"""Environments whose packages pip compiles for this machine's processor; another one may not run them."""

OPENVINO_INT8, OPENVINO_INT8_BF16 = "int8, OpenVINO fp32", "int8, OpenVINO bf16"


@dataclass(frozen=True)
class System:
    """A row of the table.

    environment: a name of `ENVIRONMENTS`, or "smelt" for the Python that runs peers.py.
    precision: fp32, bf16, int8 or int4, with ", shortlist" where the source text restricts the output
    vocabulary, and with OpenVINO's precision of what int8 does not cover: which artifacts of smelt it is set
    beside. begins_with: the system whose files it makes its own of.
    artifact: one of smelt's that was made elsewhere.
    """

    work: str
    name: str
    environment: str
    worker: str
    variant: str
    precision: str
    begins_with: str | None = None
    artifact: Path | None = None

    @property
    def is_smelt(self) -> bool:
        return self.environment == "smelt"

    @property
    def has_workers(self) -> bool:
        """Whether it batches the rows of a call itself, and computes several batches at the same time."""
        return self.is_smelt or self.environment == "ctranslate2"


def _smelt(work: str) -> list[System]:
    """smelt's: SCHEME in ONNX Runtime, or SCHEME@TARGET."""
    variants = {"fp32": "fp32", "int8-dynamic": "int8"}
    if work == "marian":
        variants |= {f"{scheme}-shortlist": f"{kind}, shortlist" for scheme, kind in variants.items()}
    if work in ("bert", "sst2"):
        variants |= {"int8-static": "int8", "fp32@openvino-bf16": "bf16"}
        variants |= {
            f"int8-static@{target}": OPENVINO_INT8 for target in ("openvino", "openvino-int8-attention")
        }
        variants |= {"int8-static@openvino-bf16": OPENVINO_INT8_BF16}
    else:
        variants |= {"int4": "int4"}
    return [
        System(work, f"smelt-{variant}", "smelt", "smelt_worker", variant, kind)
        for variant, kind in variants.items()
    ]


def _torch(work: str, compiled: bool = False) -> list[System]:
    kinds = {"eager": "fp32", **({"compile": "fp32"} if compiled else {}), "int8": "int8"}
    return [
        System(work, f"torch-{variant}", "stock", "torch_worker", variant, kind)
        for variant, kind in kinds.items()
    ]


def _ctranslate2(work: str) -> list[System]:
    name, worker, first = "ctranslate2", "ctranslate2_worker", "ctranslate2-fp32"
    systems = [
        System(work, first, name, worker, "float32", "fp32"),
        System(work, "ctranslate2-int8", name, worker, "int8", "int8", first),
    ]
    if work != "marian":
        return systems
    return systems + [
        System(
            work, f"{one.name}-vmap", name, worker, f"{one.variant}-vmap", f"{one.precision}, shortlist",
            "smelt-fp32-shortlist",
        )
        for one in systems
    ]  # fmt: skip


def _optimum(work: str) -> list[System]:
    return [
        System(work, "optimum-fp32", "optimum", "optimum_worker", "fp32", "fp32"),
        System(work, "optimum-int8", "optimum", "optimum_worker", "int8", "int8", "optimum-fp32"),
    ]


def _bert(work: str) -> list[System]:
    plain, nncf = "onnxruntime-fp32", "openvino-nncf-int8"
    return [
        System(work, plain, "stock", "onnxruntime_worker", "fp32", "fp32"),
        System(work, "onnxruntime-dynamic", "stock", "onnxruntime_worker", "dynamic", "int8", plain),
        System(work, "onnxruntime-static", "stock", "onnxruntime_worker", "static", "int8", plain),
        System(work, "openvino-fp32", "openvino", "openvino_worker", "fp32", "fp32", plain),
        System(work, "openvino-bf16", "openvino", "openvino_worker", "bf16", "bf16", plain),
        System(work, nncf, "openvino", "openvino_worker", "int8-fp32", OPENVINO_INT8, plain),
        System(work, f"{nncf}-bf16", "openvino", "openvino_worker", "int8-bf16", OPENVINO_INT8_BF16, nncf),
        System(work, "olive-dynamic", "olive", "olive_worker", "dynamic", "int8"),
        System(work, "olive-static", "olive", "olive_worker", "static", "int8"),
    ]


def _llama() -> list[System]:
    genai, cpp, work = "genai_worker", "llamacpp_worker", "llama"
    return [
        System(work, "genai-fp32", "genai", genai, "fp32", "fp32"),
        System(work, "genai-int8", "genai", genai, "int8", "int8"),
        System(work, "genai-int4", "genai", genai, "int4", "int4"),
        System(work, "llamacpp-F32", "llamacpp", cpp, "F32", "fp32"),
        System(work, "llamacpp-Q8_0", "llamacpp", cpp, "Q8_0", "int8", "llamacpp-F32"),
        System(work, "llamacpp-Q4_0", "llamacpp", cpp, "Q4_0", "int4", "llamacpp-F32"),
    ]


def systems_of(work: str, artifacts: Sequence[str] = ()) -> list[System]:
    """Return all systems of `work`, smelt's first.

    Args:
        work: marian, opus, bert, sst2 or llama.
        artifacts: further ones of smelt, each WORK:NAME:PRECISION:FOLDER.
    """
    entries = [entry.split(":", 3) for entry in artifacts]
    more = [
        System(work, f"smelt-{name}", "smelt", "smelt_worker", name, kind, artifact=Path(folder).resolve())
        for work_name, name, kind, folder in entries
        if work_name == work
    ]
    theirs = {
        "marian": lambda: _torch(work) + _ctranslate2(work) + _optimum(work),
        "opus": lambda: _torch(work) + _ctranslate2(work),
        "bert": lambda: _torch(work, compiled=True) + _bert(work) + _optimum(work),
        "sst2": lambda: _torch(work, compiled=True) + _bert(work) + _optimum(work),
        "llama": lambda: _torch(work) + _llama(),
    }
    return _smelt(work) + more + theirs[work]()
