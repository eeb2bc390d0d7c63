"""Steps and latency measurements of the workers of one machine exclude each other."""

from threading import Event, Thread

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
