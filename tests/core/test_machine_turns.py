"""Steps and latency measurements of the workers of one machine exclude each other."""

from contextlib import contextmanager
from threading import Event, Thread

from smelt.core.locks import MachineTurns
from smelt.pipeline.execute.latency_scores import LatencyScores
from tests.support.harness import smelt
from tests.support.search_recipes import small, write


def test_measurement_waits_for_steps_and_blocks_new_ones(tmp_path):
    first, other, order = MachineTurns(tmp_path), MachineTurns(tmp_path), []
    waiting, held_back = Event(), Event()

    def next_step():
        with first.step(lambda holder: held_back.set()):
            order.append("next step")

    def measure():
        with other.measurement(lambda line: waiting.set()):
            thread = Thread(target=next_step)
            thread.start()
            assert held_back.wait(60)
            order.append("measurement")
        thread.join(60)

    thread = Thread(target=measure)
    with first.step(order.append):
        thread.start()
        assert waiting.wait(60)
        order.append("step")
    thread.join(60)
    assert order == ["step", "measurement", "next step"]


def test_measurement_wait_is_limited_and_ignores_dead_steps(tmp_path):
    first, other, lines = MachineTurns(tmp_path), MachineTurns(tmp_path, max_wait_s=0), []
    with first.step(lines.append):
        (lock,) = tmp_path.glob("*/*.step.lock")
        record = lock.read_bytes()
        with other.measurement(lines.append):
            assert len(lines) == 1
    lock.write_bytes(record)  # of a killed process: nobody holds the lock
    with other.measurement(lines.append):
        assert len(lines) == 1


def test_trial_takes_turns_for_steps_and_measurements(tmp_path, monkeypatch):
    events = []
    for kind in ("step", "measurement"):

        @contextmanager
        def recorded(self, report, kind=kind):
            events.append(f"{kind} begins")
            yield
            events.append(f"{kind} ends")

        monkeypatch.setattr(MachineTurns, kind, recorded)
    monkeypatch.setattr(
        LatencyScores, "measure", lambda self, timed, *more: events.append(tuple(timed)) or {}
    )
    text = small(**{"  - onnx\n": "", "  - prune: {targets: [ffn], keep_ratio: {search: [0.5, 0.9]}}\n": ""})
    text = text.replace("[latency, size]\n  maximize: quality", "size").replace(
        "max_degradation: 1.0", "max_degradation: 90"
    )
    options = ("--trials", 1, "--limit", 2, "--out", tmp_path / "out")
    lines = smelt("search", write(tmp_path, text), *options, code=0).output.splitlines()
    starts, *steps, score, end_line = [line for line in lines if line.startswith("trial 0: ")]
    assert starts.endswith(": starts")
    assert [line.split(": ")[1].split()[0] for line in steps] == ["model", "quantize"]
    assert score.startswith("trial 0: quantize: bleu ")
    assert "size" in end_line
    measured = events.index(("model", "quantize"))
    assert (events[measured - 1], events[measured + 1]) == ("measurement begins", "measurement ends")
    assert events[: measured - 1] == ["step begins", "step ends"] * ((measured - 1) // 2)
    assert measured > 4
