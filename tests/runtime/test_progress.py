"""Progress without a bar."""

import logging

from robustkpca.evaluation.loop import evaluate
from robustkpca.runtime import progress
from robustkpca.runtime.progress import Lines
from robustkpca.suites.suite import load_suite


def test_a_line_from_time_to_time():
    """At most one in 30 s; the time left by the mean speed since the first call; none at the end."""
    now, said = [0.0], []
    lines = Lines(said.append, lambda: now[0])
    for second in range(0, 101):
        now[0] = float(second)
        lines("m  pgd", 100 + second, 200)
    assert said == ["m  pgd: 65 %, 0:01:10 left", "m  pgd: 80 %, 0:00:40 left", "m  pgd: 95 %, 0:00:10 left"]
    Lines(said.append, lambda: now[0])("m", 0, 200)
    assert len(said) == 3


def test_hours_and_work_that_stands_still():
    now, said = [0.0], []
    lines = Lines(said.append, lambda: now[0])
    lines("m", 1, 100_000)
    now[0] = 40
    lines("m", 1, 100_000)
    now[0] = 100
    lines("m", 1001, 100_000)
    assert said == ["m: 0 %", "m: 1 %, 2:45:00 left"]


def test_evaluate_tells_the_logger(linear, linear_samples, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with caplog.at_level(logging.INFO, "robustkpca"):
        evaluate([linear], linear_samples, [load_suite("fgsm")], tmp_path / "run", batch_size=4)
    assert any("oracle  fgsm: " in record.message for record in caplog.records)
