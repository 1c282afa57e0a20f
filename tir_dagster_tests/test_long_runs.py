"""What torture, soak and histories share: a run that is stopped goes on where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tir_dagster_tests.histories import played, sentence
from tir_dagster_tests.long_runs import Kept, ran_to_its_end


def test_results_stay_when_a_run_is_stopped_and_go_when_it_has_ended(tmp_path: Path):
    file = tmp_path / "new" / "run.jsonl"
    Kept.of(file, {"seed": 1}).add({"n": 1})
    with file.open("a") as lines:
        lines.write('{"n": 2')  # killed while it wrote
    again = Kept.of(file, {"seed": 1})
    assert again.results == [{"n": 1}]
    again.add({"n": 3})
    assert Kept.of(file, {"seed": 1}).results == [{"n": 1}, {"n": 3}]
    assert Kept.of(file, {"seed": 2}).results == [], "something else was asked for"
    again.finish()
    assert not file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_and_handlers_are_put_back(number, capsys):
    before = signal.getsignal(number)
    assert not ran_to_its_end(lambda: os.kill(os.getpid(), number), command="make torture")
    assert "goes on from there: make torture" in capsys.readouterr().err
    assert signal.getsignal(number) is before
    assert ran_to_its_end(lambda: None, command="")


def test_histories_go_on_with_the_numbers_that_are_left(tmp_path: Path):
    file, lines, numbers = tmp_path / "h.jsonl", [], []

    def stops_at_two(number: int, count: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        numbers.append((number, count))

    with pytest.raises(KeyboardInterrupt):
        played("pure", Kept.of(file, {}), 17, 5, stops_at_two, tell=lines.append)
    kept = Kept.of(file, {})
    assert sentence("Pure", kept, 17, "2 queries").startswith("Pure: 10 of 17 histories of 2 queries in ")
    played("pure", kept, 17, 5, lambda *piece: numbers.append(piece), tell=lines.append)
    assert numbers == [(0, 5), (1, 5), (2, 5), (3, 2)]
    assert lines == ["pure: 17 of 17 histories, about 0 min left"]
    assert sentence("Pure", kept, 17, "2 queries").startswith("Pure: 17 histories of 2 queries in ")
