"""Models that answer prompts, through the command line: training, compression, export, scores, predict."""

import gzip
import json

import numpy as np
import onnxruntime
import pytest

from smelt.evaluate.metrics.rouge import UnicodeTokenizer
from smelt.export.generation_graph.graph_builder import GraphBuilder
from smelt.export.package import text_graph
from smelt.models.checkpoint import load_tokenizer
from tests.support import harness
from tests.support.expected_errors import command_error, error_codes
from tests.support.models import causal, chat_templates
from tests.support.processes import forked_workers
from tests.support.standins import fake_workers
from tests.support.standins.triton_stand_in import ask_text_model

PAIRS = [
    ("Where does the man walk?", "on the grass"), ("What is cold?", "the river"),
    ("Who sleeps?", "The cat sleeps."), ("Who sings?", "she sings a song"),
    ("Where is the house?", "near the river"), ("What is red?", "a hat"),
]  # fmt: skip
METRICS = ["rougeL", "token_f1", "exact_match", "response_perplexity", "bleu", "chrf", "acc", "acc_norm"]
RECIPE = """
model: m
task: text-generation
data: {train: train.jsonl, validation: train.jsonl, test: test.jsonl%s}
stages:
  - %s
  - prune: {targets: [ffn], keep_ratio: 0.9, importance: taylor, calibration_samples: 6}
  - quantize: {scheme: int4, method: gptq, group_size: 16, calibration_samples: 6}
  - onnx: {target: ort-cpu}
score:
  quality: [%s]
  generation: {max_new_tokens: 10}
  latency: %s
"""
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LATENCY = "{batch_sizes: [2], rounds: 3, texts: 2, min_round_ms: 1, threads: 1, steps: all}"
TRAINING = "epochs: 90, learning_rate: 5.0e-3, batch_size: 6, num_evals: 1"


def _rows(family):
    if family == "qwen2":
        hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "two dogs"}]
        rows = [
            {"messages": [*hello, {"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in PAIRS
        ]
    elif family == "llama":
        rows = [{"instruction": q, "input": "", "output": a} for q, a in PAIRS]
    else:
        rows = [{"prompt": q} for q, a in PAIRS]  # the response is the right choice
    answers = [response for _, response in PAIRS]
    choices = [[answers[index - 2], answers[index], answers[index - 1]] for index in range(len(PAIRS))]
    return [row | {"choices": options, "answer": 1} for row, options in zip(rows, choices, strict=True)]


def _write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_model(folder, family):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    causal.write_model(folder, family, **{positions: 96})
    if family != "qwen2":
        return
    loaded_tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    loaded_tokenizer.chat_template = chat_templates.CHATML
    loaded_tokenizer.model_max_length = 96
    loaded_tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(loaded_tokenizer))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs the recipe of a family once."""
    done = {}

    def make(family):
        if family in done:
            return done[family]
        home = tmp_path_factory.mktemp(family)
        _write_model(home / "m", family)
        rows = _rows(family)
        _write_rows(home / "train.jsonl", rows)
        _write_rows(home / "test.jsonl", rows)
        template = ', prompt_template: "Q: {prompt}\\nA:\\n"' if family == "llama" else ""
        first = f"finetune: {{{TRAINING}}}"
        if family == "gpt2":
            first = f"distill: {{losses: {{labels: 1.0, logits: 0.1}}, {TRAINING}}}"
        latency = LATENCY if family == "gpt2" else "false"
        (home / "recipe.yaml").write_text(RECIPE % (template, first, ", ".join(METRICS), latency))
        with pytest.MonkeyPatch.context() as patch:
            fake_workers.ignore_disturbance(patch)
            forked_workers.install(patch)
            harness.smelt("run", home / "recipe.yaml", "--out", home / "run", "--quiet", code=0)
        done[family] = home, json.loads((home / "run" / "report.json").read_text())
        return done[family]

    return make


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_report_scores_equal_scores_of_predict_output(run, family):
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    home, report = run(family)
    answers = [answer for _, answer in PAIRS]
    assert [step["name"] for step in report["steps"][2:]] == ["prune", "quantize", "onnx"]
    for step in (report["steps"][0], report["steps"][-1]):
        result = harness.smelt(
            "predict", home / "run" / step["artifact"], "--data", home / "test.jsonl", "--json",
            "--max-new-tokens", 10, code=0,
        )  # fmt: skip
        outputs = [json.loads(line)["output"] for line in result.stdout.splitlines()]
        quality = {name: score["value"] for name, score in step["quality"].items()}
        assert quality["bleu"] == pytest.approx(BLEU().corpus_score(outputs, [answers]).score)
        assert quality["chrf"] == pytest.approx(CHRF().corpus_score(outputs, [answers]).score)
        scorer = RougeScorer(["rougeL"], tokenizer=UnicodeTokenizer())
        rouge = [scorer.score(a, s)["rougeL"].fmeasure for a, s in zip(answers, outputs, strict=True)]
        assert quality["rougeL"] == pytest.approx(100 * sum(rouge) / len(rouge))
        hits = sum(
            s.lower().strip(". ").removeprefix("the ").removeprefix("a ").strip()
            == a.lower().strip(". ").removeprefix("the ").removeprefix("a ").strip()
            for a, s in zip(answers, outputs, strict=True)
        )
        assert quality["exact_match"] == pytest.approx(100 * hits / len(answers))
        assert quality["token_f1"] >= quality["exact_match"]
        if step["parent"] is not None:
            assert (step["agreement"]["kl_n"], step["agreement"]["kl_divergence"] > 0) == (len(PAIRS), True)
        assert list(quality) == METRICS


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_models_learn_to_answer_and_to_stop(run, family):
    _, report = run(family)
    before, after = report["steps"][0]["quality"], report["steps"][1]["quality"]
    assert after["exact_match"]["value"] >= 80 > 20 >= before["exact_match"]["value"]
    assert after["response_perplexity"]["value"] < 1.5 < before["response_perplexity"]["value"]


def _log_likelihood(folder, family, question, row, text, end=(), space=""):
    """Return the log-probability of `text` as the answer to a row by transformers, and its tokens.

    space: at the end of the prompt of Llama's template, where it does not belong to the text.
    """
    import torch

    from smelt.models.checkpoint import load_model, load_tokenizer

    model, loaded_tokenizer = load_model(folder)[0], load_tokenizer(folder)
    if family == "qwen2":
        prompt = loaded_tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=False
        )
    else:
        prompt = loaded_tokenizer(f"Q: {question}\nA:{space}" if family == "llama" else question)["input_ids"]
    rest = [*loaded_tokenizer(text, add_special_tokens=False)["input_ids"], *end]
    ids = torch.tensor([prompt + rest])
    with torch.no_grad():
        logp = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return float(logp.gather(1, ids[0, len(prompt) :, None]).sum()), len(rest)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_response_perplexity_equals_transformers(run, family):
    import math

    home, report = run(family)
    folder = home / "run" / report["steps"][1]["artifact"]
    end = [] if family == "qwen2" else [0]
    likelihoods = [
        _log_likelihood(folder, family, q, row, f"{a}<|im_end|>" if family == "qwen2" else a, end, "\n")
        for (q, a), row in zip(PAIRS, _rows(family), strict=True)
    ]
    expected = math.exp(-sum(logp for logp, _ in likelihoods) / sum(count for _, count in likelihoods))
    assert report["steps"][1]["quality"]["response_perplexity"]["value"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_choices_are_ranked_by_likelihood(run, family):
    home, report = run(family)
    rows = {}
    for step in report["steps"]:
        with gzip.open(home / "run" / "scores" / f"{step['name']}.json.gz") as file:
            statistics = json.load(file)["statistics"]
        rows[step["name"]] = {name: statistics[name]["rows"] for name in ("acc", "acc_norm")}
        assert step["quality"]["acc"]["chance"] == pytest.approx(100 / 3)
    first = report["steps"][0]
    space = "\n" if family == "llama" else ""  # the last letter of its template, which the harness moves
    for index, (question, row) in enumerate(zip((q for q, _ in PAIRS), _rows(family), strict=True)):
        logp = [
            _log_likelihood(home / "run" / first["artifact"], family, question, row, space + choice)[0]
            for choice in row["choices"]
        ]
        by_length = [value / len(choice) for value, choice in zip(logp, row["choices"], strict=True)]
        assert rows["model"]["acc"][index] == [logp.index(max(logp)), 1]
        assert rows["model"]["acc_norm"][index] == [by_length.index(max(by_length)), 1]
    assert report["steps"][1]["quality"]["acc"]["value"] == 100
    assert rows["onnx"] == rows["quantize"]  # the graph has the same weights


def test_every_step_keeps_prompt_template_and_stop_tokens(run):
    home, report = run("qwen2")
    for step in report["steps"]:
        folder = home / "run" / step["artifact"]
        assert json.loads((folder / "text.json").read_text())["prompt_template"] == "chat"
        assert (folder / "chat_template.jinja").read_text() == chat_templates.CHATML
        assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2


def test_predict_accepts_conversations(run):
    home, report = run("qwen2")
    prompt = json.dumps(_rows("qwen2")[0]["messages"][:-1])
    folder = home / "run" / report["steps"][1]["artifact"]
    result = harness.smelt("predict", folder, prompt, "--max-new-tokens", 10, code=0)
    assert result.stdout.splitlines() == [PAIRS[0][1]]
    invalid_prompt = json.dumps(_rows("qwen2")[0]["messages"])
    assert command_error(harness.smelt("predict", folder, invalid_prompt, code=2)).code == "no-user-turn"


def test_latency_counts_response_tokens(run):
    _, report = run("gpt2")
    for step in report["steps"]:
        (row,) = step["latency"]
        assert row["unit"] == "tokens/s"
        assert 0 < row["output_tokens"] <= 10


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_standalone_package_equals_artifact(run, family, tmp_path):
    import subprocess
    import sys

    home, report = run(family)
    folder = home / "run" / report["steps"][-1]["artifact"]
    harness.smelt("package", folder, "--out", tmp_path / "p", "--format", "standalone", code=0)
    prompts = [q for q, _ in PAIRS]
    if family == "qwen2":
        prompts[0] = json.dumps(_rows(family)[0]["messages"][:-1])
    expected = harness.smelt("predict", folder, *prompts, "--max-new-tokens", 10, code=0).stdout
    # a process of its own, as the user starts it: 1 s
    result = subprocess.run(
        [sys.executable, tmp_path / "p" / "infer.py", *prompts], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == expected.splitlines()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_single_file_and_triton_packages_equal_artifact(run, family, tmp_path, monkeypatch):
    """Llama with a text as prompt template, Qwen2 with a chat template and a conversation."""
    home, report = run(family)
    folder = home / "run" / report["steps"][-1]["artifact"]
    prompts = [q for q, _ in PAIRS]
    if family == "qwen2":
        prompts[0] = json.dumps(_rows(family)[0]["messages"][:-1])
    expected = harness.smelt("predict", folder, *prompts, "--max-new-tokens", 10, code=0).stdout.splitlines()
    monkeypatch.setattr(text_graph, "COMPARED_TEXTS", 300)
    for form in ("triton", "one-file"):
        harness.smelt("package", folder, "--out", tmp_path / form, "--format", form, code=0)
    responses, _ = ask_text_model(tmp_path / "triton" / "model_repository", prompts, monkeypatch)
    answers_of_triton = [
        row for response in responses for tensor in response.tensors for row in tensor.as_numpy()
    ]
    assert [row[0].decode() for row in answers_of_triton] == expected
    assert (tmp_path / "one-file" / "model_text.onnx").exists() == (family == "llama")
    if family == "llama":
        session = text_graph.open_extensions_session(str(tmp_path / "one-file" / "model_text.onnx"))
        assert session.run(["generated"], {"texts": np.array(prompts, dtype=object)})[0].tolist() == expected
        return
    loaded_tokenizer = load_tokenizer(folder)
    messages = _rows(family)[0]["messages"][:-1]
    ids = np.array(
        [loaded_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
    )
    session = onnxruntime.InferenceSession(tmp_path / "one-file" / "model.onnx")
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    sequence = session.run(["sequences"], feeds)[0][0, ids.shape[1] :]
    assert loaded_tokenizer.decode(sequence, skip_special_tokens=True) == expected[0]


def test_prompt_template_is_rendered_in_graph():
    """A template may repeat the prompt; ONNX Runtime renders it as `str.replace` does."""
    for template in ("{prompt}", "Q: {prompt}\nA:", "{prompt} {prompt}!", "a{prompt}{prompt}"):
        b = GraphBuilder()
        rendered = text_graph._render(b, template)
        b.nodes.append(text_graph._identity_node(rendered, "rendered"))
        values = [text_graph._string_value_info(name) for name in ("texts", "rendered")]
        model = text_graph._make_model(b.graph("render", values[:1], values[1:]))
        session = text_graph.open_extensions_session(model.SerializeToString())
        texts = ["", "The cat"]
        rendered_texts = session.run(None, {"texts": np.array(texts, dtype=object)})[0].tolist()
        assert rendered_texts == [template.replace("{prompt}", text) for text in texts]


@pytest.mark.parametrize(
    ("data", "rows", "code"),
    [
        ("", [{"instruction": "a", "output": "b"}], "no-chat-template"),
        ("", [{"messages": ASKED}], "no-chat-template"),
        (", prompt_template: chat", [{"prompt": "a", "response": "b"}], "no-chat-template"),
        (", prompt_template: 'Q:'", [{"prompt": "a", "response": "b"}], "missing-placeholder"),
        (
            ", prompt_template: '{prompt}'",
            [{"messages": [{"role": "system", "content": "s"}, *ASKED]}],
            "needs-chat-template",
        ),
        (", prefix: x", [{"prompt": "a", "response": "b"}], "does-not-fit-task"),
        ("", [{"text": "a"}], "missing-column"),
    ],
)  # fmt: skip
def test_prompts_not_matching_template_are_rejected_by_plan(tmp_path, data, rows, code):
    causal.write_model(tmp_path / "m", "gpt2")
    _write_rows(tmp_path / "train.jsonl", rows)
    _write_rows(tmp_path / "test.jsonl", rows)
    (tmp_path / "recipe.yaml").write_text(RECIPE % (data, "finetune", "rougeL", "false"))
    result = harness.smelt("plan", tmp_path / "recipe.yaml", code=2)
    assert code in error_codes(command_error(result))


def test_prompt_template_is_rejected_for_other_tasks(tmp_path):
    causal.write_model(tmp_path / "m", "gpt2")
    causal.write_lines(tmp_path / "t.txt", 1)
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: language-modeling\ndata: {test: t.txt, prompt_template: chat}\nstages: []\n"
    )
    result = harness.smelt("plan", tmp_path / "recipe.yaml", code=2)
    assert "does-not-fit-task" in error_codes(command_error(result))


def test_sequence_level_distillation_uses_teacher_answers(run, tmp_path):
    home, _ = run("gpt2")
    (home / "sequence.yaml").write_text(
        "model: run/artifacts/distill\ntask: text-generation\n"
        "data: {train: train.jsonl, test: test.jsonl}\n"
        "stages:\n  - distill: {student: {layers: 1}, sequence_level: {num_beams: 2, max_new_tokens: 10},"
        f" {TRAINING.replace('num_evals: 1', 'num_evals: 0')}, losses: {{labels: 1.0, logits: 0.0}}}}\n"
        "  - trim-vocabulary: {}\n"
        "score: {quality: [exact_match, rougeL], latency: false, generation: {max_new_tokens: 10}}\n"
    )
    harness.smelt("run", home / "sequence.yaml", "--out", tmp_path / "run", "--quiet", code=0)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    _, student, trimmed = report["steps"]
    assert student["details"]["sequence_level"]["written_by_the_teacher"] == len(PAIRS)
    assert student["quality"]["exact_match"]["value"] >= 60
    assert trimmed["quality"]["rougeL"]["value"] == pytest.approx(student["quality"]["rougeL"]["value"])


def test_init_proposes_text_generation_for_prompts(tmp_path):
    causal.write_model(tmp_path / "m", "gpt2")
    _write_rows(tmp_path / "train.jsonl", [{"question": q, "answer": a} for q, a in PAIRS * 4])
    out = tmp_path / "r.yaml"
    harness.smelt("init", tmp_path / "m", "--data", tmp_path / "train.jsonl", "--out", out, code=0)
    text = out.read_text()
    assert "task: text-generation" in text
    assert "columns: {prompt: question, response: answer}" in text
    harness.smelt("plan", out, code=0)
