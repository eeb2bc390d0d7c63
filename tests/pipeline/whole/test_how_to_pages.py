"""Every command and recipe of the how-to pages, in their order, on tiny models and a few samples."""

import csv
import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import soundfile
from safetensors.torch import load_file, save_file

from tests.support import harness
from tests.support.models import (
    causal,
    chat_templates,
    classifiers,
    embedders,
    images,
    masked,
    speech,
    tiny,
)

DOCS = Path(__file__).resolve().parents[3] / "docs" / "how-to"
_FENCE = re.compile(r"^```(yaml|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RECIPE = re.compile(r"# smelt run (\S+\.yaml)\n")
# what a page's recipe takes from the user's data, on a few samples and without latency
_SMALL = ("--limit", "8", "--set", "score.latency=false", "--quiet")


def _write_splits(folder, write, suffix=".jsonl", **options):
    folder.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(("train", "validation", "test")):
        write(folder / f"{split}{suffix}", 10 + 2 * number, **options)


def _allow_long_texts(model):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 2048}))


def _write_translation(home):
    tiny.write_marian(home / "models/my-translator", decoder_layers=3)
    _write_splits(home / "data", tiny.write_pairs)
    with gzip.open(home / "data/train.jsonl.gz", "wb") as file:
        file.write((home / "data/train.jsonl").read_bytes())
    (home / "data/train.jsonl").unlink()
    sentences = tiny.SENTENCES[:8]
    for name in ("lines.txt", "theirs.txt", "references.txt", "mine.txt"):
        (home / name).write_text("".join(f"{sentence}\n" for sentence in sentences))
    with (home / "english.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["english"], *([sentence] for sentence in sentences)])


def _write_classification(home):
    classifiers.distilbert(home / "models/my-classifier", n_layers=6)
    for name, columns in {"data.csv": ("text", "label"), "reviews.csv": ("review", "stars")}.items():
        with (home / name).open("w", newline="") as file:
            rows = [(f"{s} {i}", i % 2) for i, s in enumerate(tiny.SENTENCES * 5)]
            csv.writer(file).writerows([columns, *rows])
    rows = [{"premise": s, "hypothesis": s.upper()} for s in tiny.SENTENCES[:4]]
    (home / "data").mkdir()
    (home / "data/pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _write_encoders(home):
    model = masked.write_model(
        home / "models/bert-base-uncased", num_hidden_layers=7, max_position_embeddings=128
    )
    _allow_long_texts(model)
    masked.write_lines(home / "wiki.txt", 20)
    _write_splits(home / "data", tiny.write_labeled)
    for split in ("train", "validation", "test"):
        masked.write_lines(home / f"data/wiki-{split}.txt", 40)


def _write_images(home):
    images.write_model(home / "models/vit-base")
    for split in ("train", "test"):
        images.write_class_folders(home / "data" / split, 16)
    images.make_image(1).save(home / "photo.jpg")
    (home / "photos.txt").write_text("photo.jpg\n")


def _write_language_models(home):
    model = causal.write_model(
        home / "models/my-llama", "llama", num_hidden_layers=5, max_position_embeddings=1024
    )
    _allow_long_texts(model)
    path = (
        model / "model.safetensors"
    )  # five layers of widely drawn weights would add up the rounding of int4
    tensors = load_file(path)
    save_file({name: 0.3 * x if "layers" in name and x.dim() > 1 else x for name, x in tensors.items()}, path)
    _write_splits(home / "text", causal.write_lines, ".txt")


def _write_prompts(home):
    model = causal.write_model(home / "models/my-qwen", "qwen2", max_position_embeddings=1024)
    _allow_long_texts(model)
    (model / "chat_template.jinja").write_text(chat_templates.CHATML)
    _write_splits(home / "chats", causal.write_prompts)


def _write_sentence_embeddings(home):
    embedders.write_embedder(home / "models/all-MiniLM-L6-v2", num_hidden_layers=6)
    embedders.write_rows(home / "texts.jsonl", 40, scores=False, paired=False)
    _write_splits(home / "data", embedders.write_rows)


def _write_speech(home):
    for name in ("models/my-whisper", "digits-whisper"):
        speech.write_whisper(home / name, decoder_layers=3)
    _write_splits(home / "data", speech.write_rows)
    (home / "data/test").mkdir()
    for name in ("speech.wav", "data/test/0.flac"):
        soundfile.write(home / name, speech.make_speech(0), 16_000)


WRITERS = {
    "classification": _write_classification,
    "encoders": _write_encoders,
    "images": _write_images,
    "language-models": _write_language_models,
    "prompts": _write_prompts,
    "sentence-embeddings": _write_sentence_embeddings,
    "speech-recognition": _write_speech,
    "translation": _write_translation,
}


def _blocks(page):
    return _FENCE.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


def _recipes(page):
    """Return the page's whole recipes by file name."""
    blocks = [block for language, block in _blocks(page) if language == "yaml"]
    return {match[1]: block for block in blocks if (match := _RECIPE.match(block))}


def _commands(page):
    """Return what follows `smelt` in the page's commands."""
    blocks = [block for language, block in _blocks(page) if language == "bash"]
    return re.findall(r"^smelt (.*)$", "".join(blocks), re.MULTILINE)


def _run(command):
    command = re.sub(_PRINTF, lambda match: shlex.quote(match[1].replace("\\t", "\t")), command)
    arguments = shlex.split(command, comments=True)
    stdin = None
    if "<" in arguments:
        stdin = Path(arguments[-1]).read_text()
        arguments = arguments[: arguments.index("<")]
    if arguments[0] == "run":
        out = Path(arguments[-1] if "--out" in arguments else f"runs/{Path(arguments[1]).stem}")
        shutil.rmtree(out, ignore_errors=True)  # of the recipe that `smelt init` wrote
        arguments += _SMALL
    result = harness.smelt(*arguments, stdin=stdin)
    # 3: a gate fails, as that of a random model may
    assert result.exit_code in ((0, 3) if arguments[0] == "run" else (0,)), f"{command}\n{result.output}"


_PRINTF = r"\"\$\(printf '(.*?)'\)\""


@pytest.mark.parametrize("page", WRITERS)
def test_recipes_and_commands_of_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    WRITERS[page](tmp_path)
    recipes, commands = _recipes(page), _commands(page)
    inits = [command for command in commands if command.startswith("init")]
    runs = [command for command in commands if command.startswith("run")]
    runs += [f"run {name}" for name in recipes if not any(run.startswith(f"run {name}") for run in runs)]
    others = [command for command in commands if command not in (*inits, *runs)]
    if shown := _SHOWN_BY_PREDICT.get(page):
        others += [command for command in _commands("predict") if shown in command]
    for command in inits:
        _run(command)
    for name, text in recipes.items():  # in place of what `smelt init` wrote to the same file
        Path(name).write_text(text)
    for command in [*runs, *others]:
        _run(command)


_SHOWN_BY_PREDICT = {"classification": "runs/classify", "translation": "runs/translate"}


def test_every_page_with_recipe_is_run():
    pages = {page.stem for page in DOCS.glob("*.md") if _recipes(page.stem)}
    # these have tests of their own, in files of this folder
    assert pages - WRITERS.keys() == {
        "image-text",
        "pytorch-modules",
        "question-answering",
        "token-classification",
    }
