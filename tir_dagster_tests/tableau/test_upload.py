"""What the server says that it has of a file, where no stand-in can be made to say it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tableauserverclient.config import config

from tir_dagster.files import VirtualFile
from tir_dagster.tableau.failures import UnknownOutcomeError
from tir_dagster.tableau.transfer import _Upload

PIECE = config.CHUNK_SIZE_MB


class Scripted(_Upload):
    """An upload of three pieces to a server that answers so; None is no answer at all."""

    def __init__(self, file: Path, answers: Iterator[int | None]) -> None:
        client: Any = SimpleNamespace(call=lambda _, doing: f"an id to {doing}")
        super().__init__(client, VirtualFile.of(file), "publish it", None)
        self._answers = answers

    def _append(self, piece: Any) -> int:
        answer = next(self._answers)
        if answer is None:
            raise UnknownOutcomeError("cut")
        return answer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "large"
    with made.open("wb") as opened:
        opened.truncate(3 * PIECE * 1024 * 1024)
    return made


def test_a_piece_that_was_sent_again_counts_once(file: Path) -> None:
    answers = iter([PIECE, None, PIECE, 2 * PIECE, 3 * PIECE, 3 * PIECE])
    assert Scripted(file, answers).run()
    assert next(answers, "none left") == "none left", "the last one is the look whether it came twice"


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([PIECE, None, PIECE, 3 * PIECE], id="with it"),
        pytest.param([PIECE, None, PIECE, 2 * PIECE, 4 * PIECE], id="with the next"),
        pytest.param([PIECE, None, PIECE, 2 * PIECE, 3 * PIECE, 4 * PIECE], id="after the last"),
    ],
)
def test_a_piece_that_came_late_after_it_was_sent_again_is_noticed(file: Path, answers: list[int | None]) -> None:
    script = iter(answers)
    with pytest.raises(UnknownOutcomeError, match=r"a piece of the file twice|MB of the file instead of"):
        Scripted(file, script).run()
    assert next(script, "none left") == "none left"
