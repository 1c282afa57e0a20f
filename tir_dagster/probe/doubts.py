"""The known doubts, read from the table that people read, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tir_dagster.errors import TirError
from tir_dagster.snowflake.connection import SnowflakeDownError, SnowflakeError
from tir_dagster.tableau.failures import RefusedError, ServerDownError

TABLE = "known-doubts.md"


@dataclass(frozen=True)
class Doubt:
    """A question that no document settles, and what tir_dagster does in either case."""

    key: str
    question: str
    if_so: str
    if_not: str
    settled_by: str


@dataclass(frozen=True)
class Answer:
    """Whether it is so; None if it is not known, and then the detail tells why."""

    is_so: bool | None
    detail: str = ""


def table_text() -> str:
    """The page with the doubts; docs/known-doubts.md is its copy."""
    return (files(__package__) / TABLE).read_text(encoding="utf-8")


@cache
def doubts() -> dict[str, Doubt]:
    """All doubts by their keys, in the order of the table."""
    rows = [line.strip("| ").split(" | ") for line in table_text().splitlines() if line.startswith("| `")]
    return {key.strip("`"): Doubt(key.strip("`"), *cells) for key, *cells in rows}


class Findings:
    """The answers so far. A question that fails stays open, and the probe continues with the next one."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.answers: dict[str, Answer] = {}
        self.server: dict[str, Any] = {}

    def note(self, key: str, is_so: bool | None, detail: object = "") -> None:
        assert key in doubts(), f"{key} is not in {TABLE}"
        self.answers[key] = Answer(is_so, str(detail))

    @contextmanager
    def asking(self, what: str, *keys: str) -> Iterator[None]:
        """Ask about these keys; after an error of the server, those without an answer are open, with the reason."""
        self.tell(what)
        try:
            yield
        except (ServerDownError, SnowflakeDownError):
            raise
        except TirError as error:
            for key in keys:
                if key not in self.answers:
                    self.note(key, None, code_of(error))

    def as_dict(self) -> dict[str, Any]:
        """What is known of the servers, and the answer for every key, in the order of the table."""
        not_asked = {key: Answer(None, f"not asked: {doubt.settled_by}") for key, doubt in doubts().items()}
        answers = {key: self.answers.get(key, answer) for key, answer in not_asked.items()}
        shown = {key: {"answer": answer.is_so, "detail": answer.detail} for key, answer in answers.items()}
        return {"server": self.server, "answers": shown}

    def lines(self) -> list[str]:
        """The answers for people: each with its question and what tir_dagster does accordingly."""
        lines = [f"{name}: {value}" for name, value in self.server.items()]
        for doubt in (doubt for key, doubt in doubts().items() if key in self.answers):
            answer = self.answers[doubt.key]
            if_not = doubt.if_so if doubt.if_not == "The same." else doubt.if_not
            word, does = {True: ("yes", doubt.if_so), False: ("no", if_not), None: ("unknown", "")}[answer.is_so]
            detail = f" ({answer.detail})" if answer.detail else ""
            lines += ["", f"{doubt.key}: {word}{detail}", f"    {doubt.question}{f' → {does}' if does else ''}"]
        left = [key for key in doubts() if key not in self.answers]
        return [*lines, "", f"Not asked, see docs/known-doubts.md: {', '.join(left)}"]


def code_of(error: TirError) -> str:
    """The code of an error: its words may name the server, people and their content."""
    number = getattr(error, "errno", None)
    return str(getattr(error, "code", "")) or (f"{number:06d}" if number else type(error).__name__)


def refusal(action: Callable[[], object]) -> str:
    """The code with which the server refuses the action; empty if it does not."""
    try:
        action()
    except SnowflakeDownError:
        raise
    except (RefusedError, SnowflakeError) as error:
        return code_of(error)
    return ""
