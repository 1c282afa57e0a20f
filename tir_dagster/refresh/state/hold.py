"""The hold of an extract: while it is there, no refresh touches the datasource."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tir_dagster.errors import GuardError
from tir_dagster.refresh.state.mirror import look, write


class HeldError(GuardError):
    """The extract is on hold: somebody decided that what is published stays."""


@dataclass(frozen=True)
class Hold:
    """Who put the extract on hold, when and why."""

    since: str
    by: str
    reason: str

    def sentence(self, extract: str) -> str:
        return (
            f"{extract} is on hold since {self.since} by {self.by} ({self.reason}). Release it: tir release {extract}."
        )


class HoldFile:
    """The hold of one extract, a small file that people and programs can see."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hold.json"

    def read(self) -> Hold | None:
        """Return the hold. One that cannot be read still holds: somebody meant it."""
        look(self._path)
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        with suppress(ValueError, TypeError, KeyError):
            value = json.loads(text)
            return Hold(str(value["since"]), str(value["by"]), str(value["reason"]))
        return Hold("an unknown time", "somebody", f"{self._path} cannot be read")

    def put(self, hold: Hold) -> None:
        write(self._path, json.dumps(asdict(hold)))

    def release(self) -> bool:
        """Remove the hold; return whether there was one."""
        look(self._path)
        was_there = self._path.exists()
        if was_there:
            write(self._path, None)
        return was_there

    def check(self, extract: str) -> None:
        """Raise HeldError while the extract is on hold."""
        if hold := self.read():
            raise HeldError(f"{hold.sentence(extract)} Nothing was touched.")
