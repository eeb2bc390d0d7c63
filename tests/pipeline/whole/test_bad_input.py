"""Whatever is wrong with what a user brings is said in words, with exit code 2 and without a traceback."""

import json
import shutil
import struct
import time

import every_family
import pytest
import tiny
from click.testing import CliRunner

from smelt.cli import main
from smelt.core.files import sha256_of

HEAD = "model: m\ntask: text-classification\ndata: {train: data.jsonl, test: data.jsonl}\n"
RECIPE = HEAD + "stages: [{prune: {keep: 0.5}}]\nscore: {quality: [accuracy], latency: false}\n"
PAIRS = "model: t\ntask: translation\ndata: {train: pairs.jsonl, test: pairs.jsonl}\n"
# Nine lines that stand for a billion words.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
TRANSLATE = PAIRS + "stages: [{prune: {keep: 0.5}}]\nscore: {quality: [bleu], latency: false}\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    tiny.bert(folder / "m")
    tiny.marian(folder / "t")
    tiny.labelled(folder / "data.jsonl", 8)
    tiny.pairs(folder / "pairs.jsonl", 8)
    return folder


@pytest.fixture
def home(template, tmp_path):
    shutil.copytree(template, tmp_path / "home")
    (tmp_path / "home" / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "home"


def _smelt(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert "did not foresee" not in result.output
    return result


def _refused(home, recipe, *words, command="plan"):
    """Expect exit code 2 and a message with all `words`."""
    if recipe is not None:
        (home / "recipe.yaml").write_text(recipe)
    more = ["--out", home / "r", "--quiet"] if command == "run" else []
    result = _smelt(command, home / "recipe.yaml", *more)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in result.output
    return result.output


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("[prnue]", ("recipe.yaml:4: ", "unknown stage 'prnue'", "Did you mean 'prune'?")),
        ("[{prune: {kep: 1}}]", ("stages[0].prune.kep: unknown", "Did you mean 'keep'?")),
        ("[{prune: {keep: half}}]", ("expected a number", "read 'half'")),
        ("[{prune: {keep: 1.5}}]", ("read 1.5",)),
        ("[{prune: [1]}]", ("expected a mapping of settings",)),
        ("[onnx, prune]", ("prune works on torch models, but its parent step 'onnx' gives onnx",)),
        ("[tensorrt]", ("tensorrt works on onnx models", "put one of these before it: onnx")),
        ("[quantize, prune]", ("prune cannot work after 'quantize'",)),
        ("prune", ("expected a list of stages",)),
        ("[{prune: {}, from: nowhere}]", ("no step 'nowhere'",)),
    ],
)
def test_stages_that_cannot_be(home, stages, words):
    _refused(home, f"{HEAD}stages: {stages}\n", *words)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            "[{distill: {student: {decoder_layers: 1}}}]",
            ("stages[0].distill.student.decoder_layers: a bert model has no such stack; it has layers.",),
        ),
        ("[{distill: {student: {layers: 3}}}]", ("student.layers: the student cannot keep 3 layers of 2.",)),
        ("[{distill: {student: {layers: [1, 0]}}}]", ("expected rising numbers from 0 to 1, read [1, 0].",)),
        (
            "[{distill: {student: {layers: 1}}}, prune, {distill: {student: {layers: 2}}}]",
            ("stages[2].distill.student.layers: the student cannot keep 2 layers of 1.",),
        ),
    ],
)
def test_stages_that_do_not_fit_the_model(home, stages, words):
    _refused(home, f"{HEAD}stages: {stages}\n", "recipe.yaml:4: ", *words)


@pytest.mark.parametrize(
    ("family", "stages", "words"),
    [
        ("mpnet", "[{prune: {what: [heads]}}]", "stages[0].prune.what: the heads of a mpnet model cannot be"),
        (
            "modernbert",
            "[{distill: {student: {layers: [1]}}}]",
            "stages[0].distill.student.layers: a modernbert student keeps the first layer",
        ),
    ],
)
def test_stages_that_do_not_fit_the_family(home, family, stages, words):
    every_family.make(home / "other", family)
    recipe = f"{HEAD}stages: {stages}\n".replace("model: m", "model: other")
    _refused(home, recipe, "recipe.yaml:4: ", words)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (RECIPE + "modle: m\n", ("modle: unknown key", "Did you mean 'model'?")),
        (RECIPE + "seed: soon\n", ("recipe.yaml:6: seed: expected a whole number", "read 'soon'")),
        (RECIPE.replace("text-cl", "txt-cl"), ("Did you mean 'text-classification'?",)),
        (RECIPE.replace("test: data", "test: date"), ("no such file", "Did you mean 'data.jsonl'?")),
        (RECIPE.replace("model: m", "model: n"), ("no such folder",)),
        ("model: [", ("not valid YAML",)),
        ("", ("expected a recipe", "an empty file")),
        ("#" * 10_000_000, ("larger than 1,000,000 bytes",)),
        ("\0", ("the character '\\x00' is not allowed",)),
        (BOMB, ("more than 20,000 values once its aliases (*name) are expanded",)),
        ("[" * 100_000, ("nested more than 40 levels",)),
    ],
)  # fmt: skip
def test_recipes_that_are_none(home, recipe, words):
    started = time.process_time()
    _refused(home, recipe, *words)
    assert time.process_time() - started < 3


EVERYTHING_WRONG = """\
modle: x
model: m
task: text-classification
data:
  train: train.csv
  validation: validation.jsonl
  test: data.jsno
  split: {test: 2}
  windows: {length: 8}
stages:
  - prune: {keep: 2, importnce: taylor}
  - distill: {student: {decoder_layers: 1}, epochs: half, teacher: nobody}
    name: small
  - onnx: {target: tensort}
    from: smal
  - prnue: {}
  - quantize: {scheme: int8-dynamc}
    from: small
  - prune: {}
  - tensorrt: {}
  - finetune: {epochs: 1}
    name: small
score:
  quality: [accuracy, f2, accuracy]
  latency: {threads: 0}
  generation: {beams: 0}
baseline: smal
gates:
  accuracy: {max_drop: -1, at: nobody}
  mse: {min: 3}
  speedup: {max: 3}
  size_bytes: {}
seed: 1.5
device: cud
threads: many
"""
# By the line that each stands in: a part of the message.
ITS_MISTAKES = [
    (1, "modle: unknown key"),
    (2, "no tokenizer; expected tokenizer.json or vocab.txt"),
    (5, "train.csv:3: the label 'seven' is not one of the model's 2 labels"),
    (6, "validation.jsonl:2: column 'text' must be text, read 7"),
    (6, "validation.jsonl:3: broken JSON"),
    (7, "no such file (data for 'test'). Did you mean 'data.jsonl'?"),
    (8, "data.split.test: expected a number between 0 and 1"),
    (9, "data.windows: is for language-modeling"),
    (11, "stages[0].prune.keep: expected a number between 0 and 1 (0 excluded), read 2."),
    (11, "stages[0].prune.importnce: unknown"),
    (12, "stages[1].distill.student.decoder_layers: a bert model has no such stack"),
    (12, "stages[1].distill.epochs: expected a number above 0, read 'half'."),
    (12, "stages[1].distill.teacher: no earlier step 'nobody'."),
    (14, "stages[2].onnx.target: expected one of"),
    (15, "stages[2].from: no step 'smal'."),
    (16, "stages[3].prnue: unknown stage 'prnue'."),
    (17, "stages[4].quantize.scheme: expected one of"),
    (19, "stages[5].prune: prune cannot work after 'quantize', which left quantized codes"),
    (20, "stages[6].tensorrt: tensorrt works on onnx models, but its parent step 'prune-2' gives torch"),
    (22, "stages[7].name: 'small' is already the name of the step in line 12."),
    (24, "score.quality[1]: 'f2' is no metric."),
    (24, "score.quality[2]: 'accuracy' is named twice."),
    (25, "score.latency.threads: expected a whole number"),
    (26, "score.generation.beams: expected a whole number"),
    (27, "baseline: no step 'smal'."),
    (29, "gates.accuracy.max_drop: expected a number of at least 0, read -1."),
    (29, "gates.accuracy.at: no step 'nobody'."),
    (30, "gates.mse.min: does not fit 'mse', which takes max_drop or max."),
    (31, "gates.speedup.max: does not fit 'speedup', which takes min."),
    (32, "gates.size_bytes: no limit; give max"),
    (33, "seed: expected a whole number"),
    (34, "device: expected one of"),
    (35, "threads: expected a whole number"),
]


def test_all_mistakes_of_a_recipe_come_at_once_and_nothing_else(home):
    """One mistake of every kind. Whoever mends what is said here has a recipe that plans."""
    (home / "train.csv").write_text("text;label\na;0\nb;seven\n")
    (home / "validation.jsonl").write_text('{"text": "a", "label": 0}\n{"text": 7, "label": 1}\n{"text": \n')
    (home / "m" / "vocab.txt").unlink()
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    (home / "recipe.yaml").write_text(EVERYTHING_WRONG)
    result = _smelt(
        "plan", home / "recipe.yaml", "--until", "nowhere", "--set", "prune.x", "--set", "nobody.keep=1"
    )  # fmt: skip
    assert result.exit_code == 2
    said = result.output.removeprefix("error: ").splitlines()
    for line, words in ITS_MISTAKES:
        start = f"{home / 'recipe.yaml'}:{line}: "
        found = [text for text in said if text.startswith(start) and words in text]
        assert found, f"line {line}: {words}"
        said.remove(found[0])
    assert [text.split(": ")[0] for text in said] == ["--set prune.x", "--set nobody.keep=1", "--until"]


def test_mended_recipe_plans(home):
    """What the recipe with every mistake is when each is mended as its message says."""
    text = EVERYTHING_WRONG.split("stages:", maxsplit=1)[0].replace("modle: x\n", "")
    text = text.replace("train.csv", "data.jsonl").replace("validation.jsonl", "data.jsonl")
    text = text.replace("jsno", "jsonl").replace("  split: {test: 2}\n  windows: {length: 8}\n", "")
    text += """
stages:
  - prune: {keep: 0.5, importance: taylor}
  - distill: {student: {layers: 1}, epochs: 1, teacher: model}
    name: small
  - onnx: {target: ort-cpu}
  - quantize: {scheme: int8-dynamic}
    from: small
  - onnx: {}
score: {quality: [accuracy, f1], latency: {threads: 1}}
baseline: small
gates: {accuracy: {max_drop: 1, at: small}, speedup: {min: 3}, size_bytes: {max: 10}}
"""
    (home / "recipe.yaml").write_text(text)
    assert _smelt("plan", home / "recipe.yaml").exit_code == 0


def test_broken_parts_do_not_hide_each_other(home):
    (home / "data.jsonl").write_text('{"text": "a", "label": 0}\n{"text": \n')
    (home / "m" / "model.safetensors").unlink()
    _refused(
        home,
        RECIPE.replace("prune", "prnue").replace("test: data", "test: date") + "seed: -1\n",
        "no weights in this folder", "data.jsonl:2: broken JSON", "Did you mean 'data.jsonl'",
        "unknown stage 'prnue'", "seed: expected",
    )  # fmt: skip
    # without a task the rows cannot be read, but their files can be looked for
    _refused(
        home, RECIPE.replace("text-cl", "txt-cl").replace("test: data", "test: date"),
        "unknown task", "Did you mean 'data.jsonl'",
    )  # fmt: skip


def _write(name, content):
    def change(home):
        path = home / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def _config(**values):
    def change(home):
        path = home / "m" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _header(change_header):
    """Write the header of the weights anew; what follows it stays."""

    def change(home):
        path = home / "m" / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change_header(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return change


EMBEDDING = "bert.embeddings.word_embeddings.weight"


def _swap_shape(header):
    header[EMBEDDING]["shape"].reverse()


def _wrong_bytes(header):
    header["classifier.weight"]["shape"] = [3, 32]


def _no_offsets(header):
    del header["classifier.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda home: (home / "m" / "model.safetensors").unlink(), ("no weights in this folder",)),
        (lambda home: (home / "m" / "model.safetensors").rename(home / "m" / "pytorch_model.bin"),
         ("pickle files (pytorch_model.bin), which can run any code",)),
        (lambda home: (home / "m" / "vocab.txt").unlink(), ("no tokenizer",)),
        (lambda home: (home / "m" / "config.json").unlink(), ("no config.json in this folder",)),
        (_write("m/config.json", "{'single': 'quotes'}"), ("config.json: broken JSON: ",)),
        (_write("m/config.json", b"\xff\xfe"), ("config.json: broken JSON: ",)),
        (_write("m/config.json", "[1, 2]"), ("expected a JSON object with a model_type",)),
        (_config(model_type="mamba"), ("model_type 'mamba' is no family of models that this version knows",)),
        (_write("m/model.safetensors", b"\xff" * 64), ("not a safetensors file",)),
        (_write("m/model.safetensors", struct.pack("<Q", 2**63) + b"{}"), ("not a safetensors file",)),
        (_write("m/model.safetensors", struct.pack("<Q", 12) + b'{"a": [1, 2]' + b"x" * 20),
         ("not a safetensors file",)),
        (_header(_no_offsets), ("not a safetensors file",)),
        (_header(_wrong_bytes), ("a damaged header: the tensor 'classifier.weight' is said to be F32 [3, 32]",)),  # noqa: E501
        (_header(_swap_shape), (f"the tensor '{EMBEDDING}' is [32,", "and config.json asks for [", "(vocab_size")),  # noqa: E501
        (_config(vocab_size=20), ("config.json asks for [20, 32]",)),
        (_write("m/tokenizer_config.json", "{"), ("tokenizer_config.json: broken JSON",)),
        (_write("m/vocab.txt", "\n".join(f"w{i}" for i in range(900))),
         ("the tokenizer does not belong to this model: it gives token ids up to 899, and the embedding has",)),  # noqa: E501
    ],
)  # fmt: skip
def test_model_folders_that_are_none(home, change, words):
    change(home)
    _refused(home, None, "recipe.yaml:1: model: ", *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", ("data.jsonl: no rows in this file",)),
        ('{"text": "a", "label": 0}\n{"text": "a" "label": 0}', ("data.jsonl:2: broken JSON",)),
        ('["a", 0]', ("data.jsonl:1: expected a JSON object with named columns",)),
        ('{"txet": "a", "label": 0}', ("data.jsonl:1: no column 'text'; there are: txet, label", "'txet'?")),
        ('{"text": "a"}', ("no column 'label'",)),
        ('{"text": 7, "label": 0}', ("data.jsonl:1: column 'text' must be text, read 7",)),
        ('{"text": null, "label": 0}', ("column 'text' must be text, read None",)),
        ('{"text": "a", "label": {"x": 1}}', ("column 'label' must be",)),
        ('{"text": "a", "label": true}', ("column 'label' must be", "read True")),
        ('{"text": "a", "label": 0}\n{"text": "b", "label": 7}', ("data.jsonl:2: the label 7 is not one of the model's",)),  # noqa: E501
        ('{"text": "a", "label": "LABEL_O"}', ("the label 'LABEL_O'", "Did you mean 'LABEL_")),
        ('{"text": "half \\ud83d", "label": 0}', ("column 'text' holds '\\ud83d', half of a surrogate pair",)),  # noqa: E501
        ('{"text": "a", "label": 0}\n' + "\x1b[2J{", ("data.jsonl:2: broken JSON", "\\x1b[2J")),
        ('{"te\\u001b[31mxt": "a", "label": 0}', ("there are: te\\x1b[31mxt, label",)),
        ('{"text": "a", "label": "\\u202eevil"}', ("the label '\\u202eevil'",)),
    ],
)  # fmt: skip
def test_rows_that_are_none(home, rows, words):
    (home / "data.jsonl").write_text(rows)
    said = _refused(home, None, *words)
    assert not set(said) & {"\x1b", "\u202e", "\0"}


def test_files_that_are_no_text(home):
    (home / "data.jsonl").write_bytes(b'{"text": "\xff\xfe", "label": 0}')
    _refused(home, None, "data.jsonl: not UTF-8 text at byte 10. Convert the file to UTF-8.")
    (home / "data.csv").write_text("text,label\na,0\nb\n")
    _refused(
        home, RECIPE.replace("data.jsonl", "data.csv"), "data.csv:3: this row does not have as many fields"
    )


@pytest.mark.parametrize(
    "row",
    ['{"source": "a", "target": ""}', '{"source": "a", "target": " \\n"}', '{"source": "a", "targets": []}',
     '{"source": "a", "targets": ["b", ""]}'],
)  # fmt: skip
def test_an_empty_target_is_refused_with_its_line(home, row):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(row + "\n")
    _refused(home, TRANSLATE, "pairs.jsonl:9: the target is empty; a model would learn to say nothing")


def test_references_in_the_wrong_type_are_refused(home):
    (home / "pairs.jsonl").write_text('{"source": "a", "targets": "b"}\n')
    _refused(home, TRANSLATE, "pairs.jsonl:1: column 'targets' must be a list of texts, read 'b'")
    (home / "pairs.jsonl").write_text('{"source": ["a"], "target": "b"}\n')
    _refused(home, TRANSLATE, "pairs.jsonl:1: column 'source' must be text, read ['a']")


def test_a_marian_whose_vocabulary_is_larger_than_its_embedding_is_refused(home):
    path = home / "t" / "vocab.json"
    words = json.loads(path.read_text())
    path.write_text(json.dumps(words | {"one-more": len(words)}))
    _refused(home, TRANSLATE, "the tokenizer does not belong to this model", f"up to {len(words)}, and")


def test_a_tokenizer_that_knows_few_of_the_tokens_is_warned_about(home):
    (home / "m" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    result = _smelt("plan", home / "recipe.yaml")
    assert result.exit_code == 0
    assert "the tokenizer knows 6 tokens and the embedding has" in result.output


def test_texts_beyond_the_limit_are_a_warning_and_with_strict_an_error(home):
    long = json.dumps({"text": "a man " * 40, "label": 1}) + "\n"
    with (home / "data.jsonl").open("a") as stream:
        stream.write(long)
    result = _smelt("run", home / "recipe.yaml", "--until", "model", "--out", home / "r", "--quiet")
    assert result.exit_code == 0, result.output
    report = json.loads((home / "r" / "report.json").read_text())
    said = "1 of 9 texts were longer than the model's limit and were cut"
    assert report["steps"][0]["warnings"] == [said]
    assert said in (home / "r" / "report.html").read_text().replace("&#39;", "'")
    _refused(
        home, RECIPE + "strict: true\n",
        "data.jsonl (train): 1 rows hold texts of more than 32 tokens, the model's limit (strict: true): line 9.",  # noqa: E501
        "data.jsonl (test): 1 rows", command="run",
    )  # fmt: skip


def test_a_target_beyond_the_limit_is_too_long_under_strict_too(home):
    with (home / "pairs.jsonl").open("a") as stream:
        stream.write(json.dumps({"source": "a man", "target": "ein mann " * 40}) + "\n")
    words = ("(train): 1 rows hold texts of more than 40 tokens", "line 9.")
    _refused(home, TRANSLATE + "strict: true\n", *words, command="run")


def test_a_shape_deep_inside_is_named_before_any_stage_works(home):
    from safetensors.numpy import load_file, save_file

    path = home / "m" / "model.safetensors"
    tensors = load_file(path)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    _refused(home, None, f"the tensor '{name}' is [63, 32], and its place is [64, 32].", command="run")
    assert not (home / "r" / "report.json").exists()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_attention_heads": 5}, "multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_configs_that_transformers_makes_nothing_of(home, values, word):
    _config(**values)(home)
    _refused(home, None, "config.json", word, command="run")


def test_a_config_that_names_no_class_of_models_is_refused(home):
    path = home / "t" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["pipeline"]}))
    _refused(home, TRANSLATE, "'architectures' is ['pipeline']; expected one class", command="run")


def test_controls_and_right_to_left_text_pass_through_and_are_shown_escaped(home):
    """Data may hold anything that is text; only what is shown is escaped."""
    odd = [
        "\x1b[31mred",
        "a\x00b\r\u2028",
        "\u202eright to left\u202c",
        "مرحبا بالعالم",
        "שלום",
        "\ufeff",
        "",
    ]
    lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(odd)]
    (home / "data.jsonl").write_text("\n".join(lines))
    result = _smelt("run", home / "recipe.yaml", "--out", home / "r")
    assert result.exit_code == 0, result.output
    path = home / "r" / "report.json"
    report = json.loads(path.read_text())
    assert report["steps"][0]["quality"]["accuracy"]["n"] == 7
    report["steps"][1] |= {"status": "error", "error": "said \x1b]0;owned\x07 \u202eevil שלום <b>"}
    path.write_text(json.dumps(report))
    result = _smelt("report", home / "r")
    assert result.exit_code == 0, result.output
    for shown in (result.output, (home / "r/report.md").read_text(), (home / "r/report.html").read_text()):
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
        assert "x1b" in shown
    assert "שלום &lt;b&gt;" in (home / "r" / "report.html").read_text()


@pytest.fixture(scope="module")
def finished(template):
    (template / "recipe.yaml").write_text(RECIPE)
    result = _smelt("run", template / "recipe.yaml", "--until", "model", "--out", template / "run", "--quiet")
    assert result.exit_code == 0, result.output
    return template / "run" / "artifacts" / "model"


def _manifest(**values):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _structure(text):
    """Put a structure into the artifact and list it in the manifest: as who made it would."""

    def change(folder):
        path = folder / "structure.json"
        path.write_text(text)
        content = json.loads((folder / "manifest.json").read_text())
        content["files"][path.name] = {"sha256": sha256_of(path), "size_bytes": path.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(content))

    return change


def _link(folder):
    (folder.parent / "secret.json").write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder.parent / "secret.json")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_manifest(files={"../x": {"sha256": "0", "size_bytes": 1}}), "the file name '../x' leads out of the artifact"),  # noqa: E501
        (_manifest(files={"/etc/passwd": {"sha256": "0", "size_bytes": 1}}), "'/etc/passwd' leads out"),
        (_link, "config.json: a link to"),
        (_manifest(format="pickle"), "not a manifest that this version of smelt reads"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not a manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json in this folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: this file of the artifact is missing"),  # noqa: E501
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: its bytes are not those"),
        (lambda folder: (folder / "structure.json").write_text("{}"), "structure.json: this file is not of"),
        (_structure('{"edits": [{"op": "run"}]}'), "unknown edit 'run'"),
        (_structure('{"edits": 7}'), "not a list of edits"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["predict", "eval"])
def test_artifacts_that_are_none(finished, tmp_path, change, word, command):
    folder = tmp_path / "a"
    shutil.copytree(finished, folder)
    change(folder)
    data = ["--data", finished.parents[2] / "data.jsonl"]
    result = _smelt(command, folder, *(["a cat"] if command == "predict" else data))
    assert result.exit_code == 2, result.output
    assert word in result.output


def test_what_is_no_folder_is_no_artifact(tmp_path):
    assert "no such folder" in _smelt("predict", tmp_path / "x", "a").output
    assert "no such file" in _smelt("report", tmp_path / "x").output
