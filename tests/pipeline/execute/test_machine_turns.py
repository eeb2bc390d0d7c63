"""Steps and latency measurements of the workers of one machine exclude each other."""

from contextlib import contextmanager
from threading import Event, Thread

import forked_workers
from harness import smelt
from search_recipes import small, write

from smelt.pipeline.execute.machine_turns import MachineTurns


def test_a_measurement_waits_for_running_steps_and_holds_back_new_ones(tmp_path):
    one, other, order = MachineTurns(tmp_path), MachineTurns(tmp_path), []
    waiting, held_back = Event(), Event()

    def next_step():
        with one.step(lambda holder: held_back.set()):
            order.append("next step")

    def measure():
        with other.measurement(lambda line: waiting.set()):
            thread = Thread(target=next_step)
            thread.start()
            assert held_back.wait(60)
            order.append("measurement")
        thread.join(60)

    thread = Thread(target=measure)
    with one.step(order.append):
        thread.start()
        assert waiting.wait(60)
        order.append("step")
    thread.join(60)
    assert order == ["step", "measurement", "next step"]


def test_a_measurement_does_not_wait_forever_nor_for_the_dead(tmp_path):
    one, other, lines = MachineTurns(tmp_path), MachineTurns(tmp_path, max_wait_s=0), []
    with one.step(lines.append):
        (lock,) = tmp_path.glob("*/*.step.lock")
        record = lock.read_bytes()
        with other.measurement(lines.append):
            assert len(lines) == 1
    lock.write_bytes(record)  # of a killed process: nobody holds the lock
    with other.measurement(lines.append):
        assert len(lines) == 1


def test_a_trial_takes_turns_and_is_reported_line_by_line(tmp_path, monkeypatch):
    forked_workers.install(monkeypatch)
    taken = []
    for kind in ("step", "measurement"):

        @contextmanager
        def recorded(self, report, kind=kind):
            taken.append(f"{kind} begins")
            yield
            taken.append(f"{kind} ends")

        monkeypatch.setattr(MachineTurns, kind, recorded)
    text = small(**{"  - onnx\n": "", "  - prune: {targets: [ffn], keep_ratio: {search: [0.5, 0.9]}}\n": ""})
    text = text.replace("[latency, size]\n  maximize: quality", "latency").replace(
        "max_drop: 1.0", "max_drop: 90"
    )
    text = text.replace(
        "quality: [bleu, chrf]", "quality: [bleu], latency: {rounds: 3, batch_sizes: [1], texts: 1}"
    )
    options = ("--trials", 1, "--limit", 4, "--out", tmp_path / "out")
    lines = smelt("search", write(tmp_path, text), *options, code=0).output.splitlines()
    begins, step, score, ends = [line for line in lines if line.startswith("trial 0: ")]
    assert begins.endswith(": starts")
    assert step.startswith("trial 0: quantize: ")
    assert score.startswith("trial 0: quantize: bleu ")
    assert "latency" in ends
    measured = taken.index("measurement begins")
    assert taken[measured + 1] == "measurement ends"
    assert taken[:measured] == ["step begins", "step ends"] * (measured // 2)
    assert measured >= 4
