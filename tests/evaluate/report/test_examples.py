"""The examples that changed most: which they are, what is marked in them, and how pages show them."""

import base64
import hashlib
import re

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sklearn.metrics import confusion_matrix

from smelt.data.splits import Example, Split
from smelt.data.tags import tag_scheme
from smelt.evaluate.quality import score_labels, score_tags, score_texts
from smelt.evaluate.report import examples
from smelt.evaluate.report.examples import MAX_CHARACTERS, compare_examples, mark_differences
from smelt.evaluate.report.markdown import render_markdown
from smelt.evaluate.report.render import render_html
from smelt.evaluate.report.schema import validate_report
from tests.support.standins.sample_report import HtmlOutline, ten_step_report, with_verdict

pytestmark = pytest.mark.quick

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "tree", "house", "fast"]


def texts(seed, n=40):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=6)) for _ in range(n)]


REFERENCES = texts(0)
SPLIT = Split("rows.jsonl", tuple(Example(f"source {at}", (text,)) for at, text in enumerate(REFERENCES)))


def scored(outputs):
    score = score_texts(["bleu"], outputs, [[text] for text in REFERENCES])["bleu"]
    return {"predictions": outputs, "statistics": {"bleu": score.statistics.dump()}}


def blend(seed):
    """Outputs that share between none and all words with the references."""
    rng = np.random.default_rng(seed)
    pairs = zip(REFERENCES, texts(seed), strict=True)
    return [
        " ".join(a if rng.random() < 0.7 else b for a, b in zip(x.split(), y.split(), strict=True))
        for x, y in pairs
    ]


def test_examples_are_sorted_by_metric_difference():
    step_outputs, base = blend(1), blend(2)
    example_report = compare_examples(scored(step_outputs), scored(base), SPLIT, 10)["examples"]
    bleu = BLEU(effective_order=True)
    values = [
        [
            bleu.sentence_score(text, [reference]).score
            for text, reference in zip(side, REFERENCES, strict=True)
        ]
        for side in (step_outputs, base)
    ]
    gains = np.round(np.subtract(*values), 9)
    order = np.argsort(gains, kind="stable")
    assert [changed_example["row"] - 1 for changed_example in example_report["worse"]] == order[:5].tolist()
    assert [changed_example["row"] - 1 for changed_example in example_report["better"]] == np.argsort(
        -gains, kind="stable"
    )[:5].tolist()
    assert (example_report["num_worse"], example_report["num_better"]) == (
        (gains < 0).sum(),
        (gains > 0).sum(),
    )
    first, first_index = example_report["worse"][0], int(order[0])
    assert (first["source"], first["references"]) == (f"source {first_index}", [REFERENCES[first_index]])
    assert (first["output"], first["baseline_output"]) == (step_outputs[first_index], base[first_index])
    assert (first["value"], first["baseline_value"]) == (values[0][first_index], values[1][first_index])
    unchanged_report = compare_examples(scored(base), scored(base), SPLIT, 10)["examples"]
    assert (
        unchanged_report["num_worse"],
        unchanged_report["num_better"],
        unchanged_report["worse"],
        unchanged_report["better"],
    ) == (0, 0, [], [])
    best = compare_examples(scored(REFERENCES), scored(base), SPLIT, 10)["examples"]  # none is worse
    assert (len(best["worse"]), len(best["better"])) == (0, 10)
    worst = compare_examples(scored(base), scored(REFERENCES), SPLIT, 10)["examples"]  # none is better
    assert (len(worst["worse"]), len(worst["better"])) == (10, 0)
    assert compare_examples(scored(step_outputs), scored(base), SPLIT, 0)["examples"] is None
    assert compare_examples(scored(step_outputs), None, SPLIT, 10) == {"examples": None, "confusion": None}


def classified(predicted, gold, names):
    scores = score_labels(["accuracy", "f1"], predicted, gold)
    statistics = {name: score.statistics.dump() for name, score in scores.items()}
    return {
        "predictions": [names[class_index] for class_index in predicted],
        "statistics": statistics,
        "labels": names,
    }


@pytest.mark.parametrize("classes", [3, 77])
def test_classifier_report_has_confusions_and_changed_examples(classes):
    rng = np.random.default_rng(0)
    gold = rng.integers(0, classes, 300)
    base, step_classes = (
        np.where(rng.random(300) < 0.6, gold, rng.integers(0, classes, 300)) for _ in range(2)
    )
    names = [f"класс {class_index}" for class_index in range(classes)]
    split = Split(
        "x", tuple(Example(f"text {class_index}", label=int(label)) for class_index, label in enumerate(gold))
    )
    sides = [classified(entry.tolist(), gold.tolist(), names) for entry in (step_classes, base)]
    comparison = compare_examples(*sides, split, 10)
    matrix, baseline_matrix = (
        confusion_matrix(gold, entry, labels=range(classes)) for entry in (step_classes, base)
    )
    if classes == 3:
        assert comparison["confusion"]["counts"] == matrix.tolist()
        assert (comparison["confusion"]["labels"], comparison["confusion"]["largest"]) == (names, [])
    else:
        np.fill_diagonal(matrix, 0)
        largest = comparison["confusion"]["largest"]
        assert [entry["count"] for entry in largest] == sorted(matrix.ravel().tolist())[::-1][: len(largest)]
        for entry in largest:
            class_index = names.index(entry["label"]), names.index(entry["predicted"])
            assert (entry["count"], entry["baseline_count"]) == (
                matrix[class_index],
                baseline_matrix[class_index],
            )
        assert comparison["confusion"]["counts"] == []
    flipped = np.flatnonzero((base == gold) & (step_classes != gold)).tolist()
    assert [entry["row"] - 1 for entry in comparison["examples"]["worse"]] == flipped[:5]
    assert comparison["examples"]["num_worse"] == len(flipped)
    assert comparison["examples"]["num_better"] == ((base != gold) & (step_classes == gold)).sum()
    first = comparison["examples"]["better"][0]
    assert first["references"] == [first["output"]] == [names[gold[first["row"] - 1]]]


def test_long_texts_are_truncated_around_first_difference():
    common_text, base = "word " * 300, list(REFERENCES)
    base[3], step_outputs = f"{common_text}was here", list(base)
    step_outputs[3] = f"{common_text}is gone"
    references = [[text] for text in base]
    sides = []
    for outputs in (step_outputs, base):
        score = score_texts(["chrf"], outputs, references)["chrf"]
        sides.append({"predictions": outputs, "statistics": {"chrf": score.statistics.dump()}})
    row_examples = [
        Example("long " * 200 if row_index == 3 else "s", tuple(texts))
        for row_index, texts in enumerate(references)
    ]
    [cut_example] = compare_examples(*sides, Split("x", tuple(row_examples)), 10)["examples"]["worse"]
    assert cut_example["cut"]
    assert cut_example["output"].startswith("…word")
    assert (cut_example["output"][-7:], cut_example["baseline_output"][-8:]) == ("is gone", "was here")
    assert len(cut_example["source"]) == MAX_CHARACTERS + 1
    step_outputs[3] = (
        f"{common_text}was here and much more {common_text}"  # the other output is its beginning
    )
    score = score_texts(["chrf"], step_outputs, references)["chrf"]
    longer_score = {"predictions": step_outputs, "statistics": {"chrf": score.statistics.dump()}}
    [longer_example] = compare_examples(longer_score, sides[1], Split("x", tuple(row_examples)), 10)[
        "examples"
    ]["worse"]
    assert longer_example["baseline_output"].endswith("was here")
    assert "was here and much more" in longer_example["output"]
    assert max(len(cut_example["output"]), len(cut_example["baseline_output"])) <= MAX_CHARACTERS + 1


@pytest.mark.parametrize(("one", "other", "lost", "new"), [
    ("The cat sat.", "The dog sat.", ["cat"], ["dog"]),
    # the space between two changes belongs to them
    ("a b c d", "a x y d", ["b c"], ["x y"]),
    ("猫坐在垫子上", "猫坐在椅子上", ["垫"], ["椅"]), ("लड़का तेज़ दौड़ा", "लड़का धीरे दौड़ा", ["तेज़"], ["धीरे"]),
    ("", "new text", [], ["new text"]),
])  # fmt: skip
def test_differing_words_are_marked(one, other, lost, new):
    pair = mark_differences(one, other)
    assert ["".join(text for _, text in side) for side in pair] == [one, other]
    assert [[text for differs, text in side if differs] for side in pair] == [lost, new]


def changed(row, output="out", baseline="out put", source="in", value=1.0):
    entry = {"row": row, "source": source, "references": ["wanted"], "output": output}
    return entry | {"baseline_output": baseline, "baseline_value": 50.0, "value": value}


def report_with(worse, better=(), confusion=None, task="translation"):
    report = ten_step_report()
    report["recipe"]["task"] = task
    counts = {"n": 1000, "num_worse": len(worse), "num_better": len(better)}
    for step in report["steps"][1:8]:
        step["examples"] = {"metric": "bleu", "worse": list(worse), "better": list(better), **counts}
        step["agreement"] = {"n": 1000, "equal": 61.25, "bleu": 71.5, "chrf": 82.25}
        step["confusion"] = confusion
    return report


def test_page_escapes_example_texts():
    markup = "<script>alert(1)</script><em>x</em>"
    report = report_with([changed(7, markup, "plain text", markup)], [changed(8, "سلام دنیا", "שלום")])
    page = render_html(report)
    outline = HtmlOutline(page)
    assert outline.open == []
    assert outline.tags.count("script") == 1  # the page's own
    assert "em" not in outline.tags
    assert ("dir", "auto") in outline.values
    assert "سلام دنیا" in page
    # the only script that the page may run is its own
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not re.search(r"https?:|//\w|url\(|\bsrc=", page)
    for shown_text in ("71.50", "82.25", "61.25", "Row 7"):
        assert shown_text in page
    markdown = render_markdown(report)
    assert "<script" not in markdown
    assert "&lt;script&gt;" in markdown
    assert "71.50" in markdown


def test_page_without_examples_has_no_script():
    report = ten_step_report()
    assert "<script" not in render_html(report)
    assert "script-src" not in render_html(report)
    assert "## Examples" not in render_markdown(report)


def test_tags_are_shown_at_their_words():
    """As in tagged corpora such as Brown's: word/TAG."""
    words, gold = ("EU", "rejects", "German", "call", "."), ("B-ORG", "O", "B-MISC", "O", "O")
    split = Split("a.jsonl", (Example(" ".join(words), label=gold, words=words),))
    base, output = list(gold), ["B-LOC", "O", "O", "O", "O"]
    scheme = tag_scheme({*gold, *output})
    scores = [score_tags(["entity_f1"], [tags], [gold], scheme)["entity_f1"] for tags in (output, base)]
    step, baseline = (
        {"predictions": [tags], "statistics": {"entity_f1": score.statistics.dump()}}
        for tags, score in zip((output, base), scores, strict=True)
    )
    [worse] = compare_examples(step, baseline, split, 4)["examples"]["worse"]
    assert worse["source"] == "EU rejects German call ."
    assert worse["references"] == [worse["baseline_output"]] == ["EU/B-ORG rejects German/B-MISC call ."]
    assert worse["output"] == "EU/B-LOC rejects German call ."


def test_page_shows_scores_by_class():
    report = ten_step_report()
    assert 'id="classes"' not in render_html(report)
    report["recipe"]["task"] = "token-classification"
    for index, f1 in ((0, 81.25), (6, 77.35)):
        report["steps"][index]["classes"] = [
            {"label": "<ORG>", "n": 1234, "correct": 900, "precision": 88.84, "recall": 71.16, "f1": f1}
        ]
    report["steps"][6]["classes"].append(
        {"label": "LOC", "n": 9, "correct": 1, "precision": 1.0, "recall": 2.0, "f1": 3.0}
    )
    outline = HtmlOutline(render_html(report))
    assert outline.open == []
    text = " ".join(" ".join(outline.texts).split())
    assert "<ORG> 1,234 81.2 88.8 / 71.2 77.3 88.8 / 71.2 LOC 9 – 3.0 1.0 / 2.0" in text


def test_confusions_are_shown_with_change_from_baseline():
    report = report_with([], confusion={"labels": ["愉快", "<i>"], "counts": [[30, 2], [5, 3]]})
    report["recipe"]["task"] = "text-classification"
    report["steps"][0]["confusion"] = {"labels": ["愉快", "<i>"], "counts": [[31, 1], [5, 3]]}
    full_page = render_html(report)
    page = " ".join(" ".join(HtmlOutline(full_page).texts).split())
    assert "愉快 30 −1 2 +1 <i> 5 3" in page
    assert "<script" not in full_page  # no example changed: nothing to search
    assert "example-search" not in full_page
    assert "&lt;i&gt; → 愉快 5" in render_markdown(report)
    confusions = examples.largest_confusions(validate_report(report).steps[1], 3)
    assert confusions == [("<i>", "愉快", 5), ("愉快", "<i>", 2)]


def test_examples_of_recommended_step_are_shown_first():
    report = report_with([changed(7, "a", "b", "c")])
    shipped = report | {"verdict": with_verdict(report)["verdict"] | {"step": "onnx-int8"}}
    for shown_report, name in ((report, "control"), (shipped, "onnx-int8")):
        assert examples.step_shown_first(validate_report(shown_report)).name == name
        page = render_html(shown_report)
        assert page.count("<article") == 1  # the same outputs of all steps are shown once
        assert f'<details class="examples" open>\n<summary>{name}, ' in page
