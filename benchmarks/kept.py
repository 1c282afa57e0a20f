"""What a run has measured so far: a file with a line for each value, written as soon as it exists, for a run that goes on later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tir_dagster.errors import TirError


class KeptValues:
    """The values of a run, after a line with what it was asked for, the machine, the versions and the date."""

    def __init__(
        self, file: Path, asked: Mapping[str, Any], setting: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        self._file = file
        # As it will be read again: lists instead of tuples.
        self.head: dict[str, Any] = {"asked": json.loads(json.dumps(asked)), **setting}
        self.values: list[dict[str, Any]] = []
        if resume and file.is_file():
            # A line that a crash cut in two counts for nothing.
            head, *self.values = _whole(file.read_text(encoding="utf-8").splitlines()) or [self.head]
            if head.get("asked") != self.head["asked"]:
                raise TirError(
                    f"{file} is of a run that was asked for something else: {head.get('asked')}. Ask for the same, or leave "
                    "--resume out to begin anew."
                )
            self.head = head
        self.keep_only(self.values)

    @property
    def setting(self) -> dict[str, Any]:
        """The machine, the versions and the date of the run's beginning."""
        return {name: value for name, value in self.head.items() if name != "asked"}

    def keep_only(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write the file anew: whole lines only, so that the next one begins on a line of its own."""
        self.values = [dict(value) for value in values]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(value) for value in (self.head, *self.values)]
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def add(self, value: Mapping[str, Any]) -> None:
        self.values.append(dict(value))
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")


def _whole(lines: Iterable[str]) -> list[dict[str, Any]]:
    values = []
    for line in lines:
        with suppress(ValueError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
