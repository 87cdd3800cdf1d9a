from steelyard.measure.whole_step import Runnable, whole_step


def test_programs_take_turns() -> None:
    calls: list[str] = []
    programs = [
        Runnable(run=lambda name=name: calls.append(name), operator_seconds=1.0) for name in "ab"
    ]
    whole_step(programs, rounds=3)
    assert calls[-6:] == list("ababab")
    assert calls.count("a") == calls.count("b") > 3


def test_the_interval_covers_every_program() -> None:
    def run() -> int:
        return sum(range(20000))

    # The same work, said to be a thousand times less in one of them.
    found = whole_step(
        [
            Runnable(run=run, operator_seconds=1.0),
            Runnable(run=run, operator_seconds=1e-3),
        ]
    )
    assert 0 < found.low <= found.value <= found.high
    assert found.high / found.low > 30
