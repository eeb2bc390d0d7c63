"""What going through a large model block by block costs: memory and processor time, on random Llama shapes.

    .venv/bin/python benchmarks/block_cost.py 10M 100M           # and 1.1B, which writes 2.2 GB
    .venv/bin/python benchmarks/block_cost.py 1.1B --stages wanda

Each stage runs in a process of its own, on a bfloat16 checkpoint in shards, as if it were a large one (read
and written block by block). The rows are windows of 128 tokens of ../shared/data/wikitext2 (or --text).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

SHARED = Path(__file__).parent.parent.parent / "shared"
WINDOW = 128
SHAPES: dict[str, dict[str, int]] = {
    "10M": {"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 896},
    "100M": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
    },
    "1.1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "intermediate_size": 5632,
    },
}
# of the largest shape few blocks, for what grows with their number
SHAPES |= {f"1.1B/{n}": SHAPES["1.1B"] | {"num_hidden_layers": n} for n in (1, 2, 4)}
VOCABULARY = {"10M": 8000, "100M": 32000, "1.1B": 32000}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "wanda": ("sparsify", {"method": "wanda"}),
    "sparsegpt": ("sparsify", {"method": "sparsegpt"}),
    "whitened-svd": ("factorize", {"keep_ratio": 0.8, "optimize_for": "size"}),
    "prune": ("prune", {"targets": ["ffn"], "importance": "magnitude"}),
    "gptq": ("quantize", {"scheme": "int4", "method": "gptq"}),
    "int4": ("quantize", {"scheme": "int4"}),
}


def write_llama(shape: str, text: Path, folder: Path) -> tuple[int, int]:
    """Write a random Llama in shards, a block a file; return the parameters of all and of one block."""
    import torch
    import transformers
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    from smelt.models.train_tokenizer import train_tokenizer

    folder.mkdir()
    lines = gzip.decompress(text.read_bytes()).decode().splitlines()[:2000]
    train_tokenizer(lines, folder, family="llama", kind="bpe", vocab_size=2000, max_length=WINDOW)
    config = transformers.LlamaConfig(
        **SHAPES[shape], num_key_value_heads=4, vocab_size=VOCABULARY[shape.partition("/")[0]],
        max_position_embeddings=WINDOW, tie_word_embeddings=not shape.startswith("1.1B"),
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        block = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        groups.setdefault(block, {})[name] = tuple(parameter.shape)
    torch.manual_seed(0)
    places: dict[str, str] = {}
    for number, names in enumerate(groups.values(), start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        drawn = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.02 for n, s in names.items()}
        save_file({n: t.bfloat16() for n, t in drawn.items()}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    whole = sum(p.numel() for p in model.parameters())
    return whole, sum(p.numel() for p in model.model.layers[0].parameters())


def peak_bytes() -> int:
    """Return the most memory that this process has had; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def run_stage(folder: Path, stage: str, text: Path, rows: int, threads: int) -> dict[str, float]:
    """Run one stage in this process; return seconds of processor time and of the clock, and bytes."""
    sys.path.insert(0, str(Path(__file__).parent))
    import techniques_bench
    import torch  # noqa: F401 - what is imported is counted apart
    import transformers.models.llama.modeling_llama  # noqa: F401

    from smelt.core.stage import Context
    from smelt.data.examples import read_split
    from smelt.data.splits import Columns
    from smelt.models import streamed_model
    from smelt.pipeline.recipe.stages import load_stage

    streamed_model.LARGE_BYTES = 0
    word, settings = STAGES[stage]
    cls: Any = load_stage(word)
    split = read_split(str(text), "language-modeling", Columns(), text.parent).take(3000)
    out = folder.parent / "out"
    out.mkdir()
    ctx = Context(
        out, "language-modeling", {"train": split}, 0, {}, score=lambda *_: {}, threads=threads, device="cpu"
    )
    before = peak_bytes()
    cpu, clock = time.process_time(), time.monotonic()
    source = techniques_bench.artifact(folder, "language-modeling")
    settings = settings | ({"calibration_samples": rows} if stage != "int4" else {})  # rtn does not calibrate
    cls()(source, cls.settings_type.model_validate(settings), ctx)
    return {
        "cpu_s": time.process_time() - cpu,
        "clock_s": time.monotonic() - clock,
        "imported_bytes": before,
        "peak_bytes": peak_bytes(),
    }


@click.command()
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
@click.option("--stages", default=",".join(STAGES), show_default=True)
@click.option(
    "--text", type=click.Path(path_type=Path), default=SHARED / "data" / "wikitext2" / "train.txt.gz"
)
@click.option("--rows", default=16, show_default=True, help=f"windows of {WINDOW} tokens")
@click.option("--threads", default=1, show_default=True)
@click.option("--worker", type=click.Path(path_type=Path), hidden=True)
def main(
    shapes: tuple[str, ...], stages: str, text: Path, rows: int, threads: int, worker: Path | None
) -> None:
    """Print a row for each shape and stage."""
    if worker is not None:
        click.echo(json.dumps(run_stage(worker, stages, text, rows, threads)))
        return
    columns = ("shape", "parameters", "file, MB", "block in float32, MB", "stage", "processor time, s",
               "on the clock, s", "imports, MB", "peak, MB")  # fmt: skip
    click.echo(f"| {' | '.join(columns)} |\n|{'--|' * len(columns)}")
    for shape in shapes:
        for stage in (name for name in STAGES if name in stages):
            with tempfile.TemporaryDirectory() as space:
                whole, block = write_llama(shape, text, Path(space) / "model")
                call = [sys.executable, __file__, shape, "--worker", str(Path(space) / "model"), "--stages"]
                more = [stage, "--text", str(text), "--rows", str(rows), "--threads", str(threads)]
                done = subprocess.run([*call, *more], check=True, capture_output=True, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
            size = f"{whole:,} | {2 * whole / 1e6:.0f} | {4 * block / 1e6:.0f}"
            memory = f"{found['imported_bytes'] / 1e6:.0f} | {found['peak_bytes'] / 1e6:.0f}"
            click.echo(
                f"| {shape} | {size} | {stage} | {found['cpu_s']:.1f} | {found['clock_s']:.0f} | {memory} |"
            )


if __name__ == "__main__":
    main()
