"""How often a commit is tried, and when it is looked for in the table, without a warehouse."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tir_dagster.errors import LoadError
from tir_dagster.loading import commit
from tir_dagster.loading.commit import Committer

CUT, REFUSED, DONE = ConnectionResetError("cut"), LoadError("refused"), "committed"


class Scripted(Committer):
    """A commit whose attempts end like this, and whose checks find this."""

    def __init__(self, attempts: list[Any], monkeypatch: pytest.MonkeyPatch, checks: list[Any]) -> None:
        unused: Any = None
        tables: Any = SimpleNamespace(books=None, load_id="1")
        access: Any = SimpleNamespace(scrub=str)
        super().__init__(unused, tables, access=access, newest=None, below="", log=lambda _: None, after=lambda _: None)
        self.attempts, self.checks = iter(attempts), iter(checks)
        monkeypatch.setattr(commit, "committed", lambda *_: _next(self.checks))

    def _commit(self, plan: Any, staged: Any) -> Any:
        return _next(self.attempts)

    def left(self) -> list[Any]:
        return [*self.attempts, *self.checks]


def _next(script: Iterator[Any]) -> Any:
    outcome = next(script)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.mark.parametrize(
    ("attempts", "checks", "end"),
    [
        pytest.param([REFUSED], [], REFUSED, id="a refusal is told at once"),
        pytest.param([CUT, DONE], [[]], DONE, id="a lost connection is tried again"),
        pytest.param([CUT], [[DONE]], DONE, id="a lost answer is found in the table"),
        pytest.param([CUT, CUT, CUT], [[], [], []], CUT, id="three times at most"),
        pytest.param([CUT, REFUSED], [[], [DONE]], DONE, id="an earlier attempt may have been committed late"),
        pytest.param([CUT, REFUSED], [[], []], REFUSED, id="a refusal after a cut is told"),
        pytest.param([CUT], [OSError("no check")], OSError, id="without a check nothing is sent again"),
    ],
)
def test_a_commit_is_repeated_only_if_it_is_certainly_not_in_the_table(
    attempts: list[Any], checks: list[Any], end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = Scripted(attempts, monkeypatch, checks)
    if end == DONE:
        assert committer.commit([], []) == DONE
    else:
        with pytest.raises(end if isinstance(end, type) else type(end)):
            committer.commit([], [])
    assert committer.left() == []
