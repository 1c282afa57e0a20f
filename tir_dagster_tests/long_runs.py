"""What the long runs share: results that stay when a run is stopped, so that the next start goes on, and their place in docs/survival.md."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.docs import filled
from tir_dagster.orchestration.interrupts import StoppedError

SURVIVAL = Path(__file__).parents[1] / "docs" / "survival.md"
# As shells give it to a process that Ctrl-C ended.
STOPPED = 130


@dataclass
class Kept:
    """Results of a run that has not come to its end, a line of JSON each, below a line that says what was asked for."""

    path: Path
    asked: dict[str, Any]
    results: list[Any] = field(default_factory=list)

    @staticmethod
    def of(path: Path, asked: dict[str, Any]) -> Kept:
        """Return what is kept of a run that was asked for the same; begin anew if there is none."""
        kept = Kept(path, asked)
        if path.is_file():
            first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
            if _value(first) == asked:
                # The last line is cut if the process was killed while it wrote.
                kept.results = [value for line in lines if (value := _value(line)) is not None]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in (asked, *kept.results)), encoding="utf-8")
        return kept

    def add(self, result: Any) -> None:
        self.results.append(result)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result) + "\n")

    def finish(self) -> None:
        """Let the next start begin anew."""
        self.path.unlink(missing_ok=True)


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def ran_to_its_end(run: Callable[[], None], *, command: str) -> bool:
    """Run; return False if Ctrl-C or SIGTERM stopped it: what it has done stays, and its servers and disks are gone."""

    def stop(*_: Any) -> None:
        # A second one must not end the cleaning up.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run()
    except (KeyboardInterrupt, StoppedError):
        print(f"\nStopped; what was done is kept. The same command goes on from there: {command}", file=sys.stderr)
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return True


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def write_survival(name: str, text: str) -> None:
    """Put the text between the comments of that name in docs/survival.md."""
    SURVIVAL.write_text(filled(SURVIVAL.read_text(encoding="utf-8"), name, text), encoding="utf-8")
