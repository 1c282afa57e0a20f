"""What the extracts of one home share: the version of an unchanged source, and the changed keys that one of them has read.

Only to save work: without these files, or where they cannot be written, each extract pins and reads for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from tir_dagster.files import private_folder, replaced_file
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import literal
from tir_dagster.snowflake.versions import SourceVersion, Span

# Far less than any retention of Time Travel, and than the day for which Snowflake keeps a result.
FRESH_SECONDS = 3600.0
_MOST_PINS = 200
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)

T = TypeVar("T")


@dataclass(frozen=True)
class Pin:
    """A version at which tables were in these states, quiet for so long, and the extracts that show it."""

    states: Mapping[str, str]
    quiet: float
    version: str
    extracts: Sequence[str]
    at: float

    def same(self, states: Mapping[str, str], quiet: float) -> set[str]:
        """Return the tables of these that are still as they were at this version."""
        return {table for table, state in states.items() if self.quiet == quiet and self.states.get(table) == state}


def shared_pin(
    pins: Sequence[Pin], states: Mapping[str, str], quiet: float, *, after: SourceVersion | None
) -> Pin | None:
    """Return the first pin, later than a version, at which all these tables were as they are now; None if there is none.

    A table that is as it was at an earlier pin was so at this one, too.
    """
    since = time.time() - FRESH_SECONDS
    for pin in sorted(pins, key=lambda pin: pin.version):
        if pin.at < since or not pin.same(states, quiet) or (after is not None and pin.version <= str(after)):
            continue
        earlier = (other.same(states, quiet) for other in pins if other.version <= pin.version)
        if set().union(*earlier) == states.keys():
            return pin
    return None


@dataclass(frozen=True)
class SharedSource:
    """The shared files of one extract, for its account and role."""

    home: Path
    access: SnowflakeAccess
    extract: str

    def pinned(self, states: Mapping[str, str], quiet: float, *, after: SourceVersion | None) -> SourceVersion | None:
        """Return the version that another extract has pinned while the tables were in these states, if there is one."""
        pin = shared_pin(self._pins(), states, quiet, after=after)
        return SourceVersion.parse(pin.version) if pin else None

    def agree(
        self, states: Mapping[str, str], quiet: float, version: SourceVersion, *, after: SourceVersion | None
    ) -> SourceVersion:
        """Return the version that all extracts use for these states: the first that one of them pinned, or this one."""

        def agreed() -> SourceVersion:
            pins = self._pins()
            pin = shared_pin(pins, states, quiet, after=after)
            own = pin or Pin({}, quiet, str(version), (), time.time())
            used = replace(own, states={**own.states, **states}, extracts=sorted({*own.extracts, self.extract}))
            pins = [used, *(other for other in pins if other is not pin)][:_MOST_PINS]
            with replaced_file(self._pin_file) as beside:
                beside.write_text(json.dumps([asdict(pin) for pin in pins]), encoding="utf-8")
            return SourceVersion.parse(used.version)

        return self._alone(self._pin_file, agreed, lambda: version)

    def changes(self, select: str, span: Span) -> str:
        """Return a SELECT of the same rows: from the result that an extract at the same versions has read, or will read now.

        Where no other extract shows the old version, or a version is not kept, the SELECT itself.
        """
        if not (span.old.kept and span.new.kept and self._others_show(span.old)):
            return select
        # Row access policies may depend on the user and the role.
        access = self.access
        reader = (access.account, access.host, access.port, access.user, access.role, access.choices)
        file = self._folder / f"changes-{_digest(repr((reader, select)))}.json"

        def read() -> str:
            with suppress(*_UNREADABLE):
                note = json.loads(file.read_text(encoding="utf-8"))
                if time.time() - note["at"] < FRESH_SECONDS:
                    return _scan(note["query"])
            query = self.access.run(select)
            self._remove_old()
            with replaced_file(file) as beside:
                beside.write_text(json.dumps({"query": query, "at": time.time()}), encoding="utf-8")
            return _scan(query)

        return self._alone(file, read, lambda: select)

    def _others_show(self, version: SourceVersion) -> bool:
        return any(pin.version == str(version) and {*pin.extracts} - {self.extract} for pin in self._pins())

    def _pins(self) -> list[Pin]:
        with suppress(*_UNREADABLE):
            return [Pin(**pin) for pin in json.loads(self._pin_file.read_text(encoding="utf-8"))]
        return []

    @property
    def _folder(self) -> Path:
        return self.home / "shared"

    @property
    def _pin_file(self) -> Path:
        # Versions are times of the account's own clock.
        return self._folder / f"pins-{_digest(repr((self.access.account, self.access.host, self.access.port)))}.json"

    def _alone(self, file: Path, action: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Run the action while no other process works with the file; the other one if this disk has no locks or no room."""
        try:
            with _locked(private_folder(self._folder) / f"{file.stem}.lock"):
                return action()
        except OSError:
            return otherwise()

    def _remove_old(self) -> None:
        for file in self._folder.glob("changes-*"):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > 2 * FRESH_SECONDS:
                    file.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file; it ends with the process."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _scan(query: str) -> str:
    return f"SELECT * FROM TABLE(RESULT_SCAN({literal(query)}))"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
