"""Load a suffix by the server: purge from a value on, publish, refresh at once or at the schedule's time, or put back.

Between the publish and the end of the refresh the purged rows are missing for everybody. So whatever goes wrong there ends
with the kept package published back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from enum import Enum
from pathlib import Path

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError, TirError
from tir_dagster.hyper.increment import Increment, IncrementValue, Purged, purge_from, set_increment_value
from tir_dagster.hyper.package.package import Package
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.refresh.deliveries.overwrite import Place, publish_over, put_back
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, reread, server_version, settled
from tir_dagster.tableau.jobs import JobVanishedError
from tir_dagster.tableau.refreshes import Route, Way, find_route, may_refresh_fully, refresh_by_server
from tir_dagster.tableau.schedules import (
    Schedule,
    find_schedule,
    move_schedule,
    next_slot,
    soonest_slot,
    wait_for_scheduled_run,
)
from tir_dagster.tableau.tasks import scheduled_refreshes

# A schedule is told at least this long before its time; the publish begins that long before it, and as much earlier as
# the upload may take.
LEAD_SECONDS = 20.0
_BYTES_PER_SECOND = 10_000_000
_MINUTE = timedelta(minutes=1)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Affected:
    """The smallest increment value among the changed rows, old images and new, as text; how many have none."""

    smallest: str | None
    nulls: int


@dataclass(frozen=True)
class Load:
    """All that a load by the server needs: what is there now, and questions only the caller can answer."""

    place: Place
    shell: Path
    hyper: Path
    # Why everything is read anew.
    full: Reason | None
    # By the increment's column in the Hyper file: the changed rows' values.
    affected: Callable[[str], Affected]
    # By that column: the literal from which on the server shows other rows than it must; None where it shows the same,
    # `%null%` where no literal is small enough.
    differing: Callable[[str], str | None]
    # What the server already shows of later rows: from this literal on, everything is read again; `%null%` means all.
    lag: str | None
    # Told before a publish that leaves a hole: the Hyper file that people will see meanwhile.
    before_hole: Callable[[Path], None]
    # Whether a downloaded Hyper file is that one.
    is_hole: Callable[[Path], bool]
    # The clock on the wall, for schedules.
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Suffix:
    """The rows to read again: from this value on."""

    increment: Increment
    smallest: IncrementValue


def refreshed(
    client: TableauClient, found: FoundDatasource, log: Log, *, incremental: bool, timeout: float
) -> FoundDatasource:
    """The datasource after a refresh that began after this call: one that runs already may have read too early."""
    kind = "incremental" if incremental else "full"
    log(f"waiting for jobs on the server: {kind} refresh of {found.shown}")
    try:
        return refresh_by_server(client, found, incremental=incremental, log=log, timeout=timeout).found
    except JobVanishedError as error:
        # Servers forget jobs; what it did shows in the data, which the caller compares.
        log(str(error))
        return settled(client, found)


def own_refreshes(
    client: TableauClient, found: FoundDatasource, route: Route | None = None, schedule: Schedule | None = None
) -> tuple[str, ...]:
    """A warning for each refresh that Tableau runs by its clock; a schedule that is moved from here is none of them."""
    run = route.task.id if route is not None and route.task is not None else None
    tasks = [task for task in scheduled_refreshes(client, found) if schedule is None or task.schedule_id != schedule.id]
    return tuple(task.needed_warning if task.id == run else task.warning for task in tasks)


class _Back(Enum):
    """What became of the datasource after something went wrong."""

    UNTOUCHED = "our publish never landed"
    RESTORED = "the kept package is there again"
    OTHERS = "somebody else, or the server itself, changed or removed it meanwhile"


class SuffixLoad:
    """Purge, publish, refresh; and back to what was there if the refresh fails."""

    def __init__(
        self, client: TableauClient, load: Load, package: Package, suffix: Suffix, found: FoundDatasource, log: Log
    ) -> None:
        self._client, self._load, self._package, self._suffix = client, load, package, suffix
        self._found, self._log = found, log
        self._hole = load.place.folder / "purged.hyper"
        self._patience = load.place.spec.datasource.job_timeout
        self._hole_since: float | None = None
        self._missing = 0
        self.warnings: tuple[str, ...] = ()

    def run(self) -> FoundDatasource | Reason:
        """The datasource after its refresh; or the reason why the server must load everything, and nothing was touched."""
        # Before anything is purged: a server that has no way to refresh incrementally must not get a hole.
        route = find_route(self._client, self._found)
        suffix = self._suffix
        purged = purge_from(self._load.hyper, self._hole, column=suffix.increment.column, smallest=suffix.smallest)
        if (reason := self._reason_for_all(purged)) is not None:
            return reason
        schedule = self._schedule(route)
        self.warnings = own_refreshes(self._client, self._found, route, schedule)
        try:
            return self._publish_and_refresh(purged, schedule)
        except DatasourceError as error:
            raise self._put_back(error) from error
        except BaseException:
            # Told to stop: people get their rows back before we go.
            if self._hole_since is not None:
                with suppress(TirError):
                    self._restore()
            raise

    def _reason_for_all(self, purged: Purged) -> Reason | None:
        """Why the server must load everything after all. What we never confirmed is purged only where it cannot."""
        full = self._load.full
        if purged.largest is None:
            return full or Reason.EXTRACT_EMPTIED
        if full is None or not self._needs_publish(purged):
            return None
        return None if full is Reason.FIRST_LOAD and not may_refresh_fully(self._client) else full

    def _publish_and_refresh(self, purged: Purged, schedule: Schedule | None) -> FoundDatasource:
        """All that takes long is done before the wait for the schedule, so that it does not come too early."""
        needed = self._needs_publish(purged)
        slot = self._moved(schedule) if schedule is not None else None
        if slot is not None:
            self._wait_for(slot, self._hole.stat().st_size if needed else 0)
        if needed:
            self._publish(purged)
        if schedule is None or slot is None:
            return refreshed(self._client, self._found, self._log, incremental=True, timeout=self._patience)
        if self._load.now() >= slot:
            # The upload took longer than thought, and the schedule may have come to nothing.
            slot = self._moved(schedule, soon=True)
            self._log(f"published after the schedule's time: moved to {slot:%Y-%m-%d %H:%M} UTC")
        return self._refreshed_at(slot)

    def _needs_publish(self, purged: Purged) -> bool:
        """The server goes on after its last value: where that is small enough already, nobody need see a hole."""
        value = self._suffix.increment.value
        reaches = purged.largest <= value < self._suffix.smallest  # type: ignore[operator]
        return bool(purged.purged) or not reaches

    def _schedule(self, route: Route) -> Schedule | None:
        """The schedule that refreshes it; None when the server can be asked at once."""
        if self._load.place.spec.datasource.schedule is None and route.way is not Way.SCHEDULE:
            return None
        return find_schedule(self._client, self._found)

    def _moved(self, schedule: Schedule, *, soon: bool = False) -> datetime:
        """When it runs next, now that it has been moved there."""
        spec, now = self._load.place.spec, self._load.now()
        asked = None if soon else spec.datasource.schedule
        # One that is due within a minute could pass before the server knows of it.
        slot = next_slot(time.fromisoformat(asked), spec.slices.zone, now=now + _MINUTE) if asked else soonest_slot(now)
        move_schedule(self._client, schedule, slot)
        return slot

    def _wait_for(self, slot: datetime, upload_bytes: int) -> None:
        """Purged at that time and not before: until then people see everything."""
        left = (slot - self._load.now()).total_seconds() - LEAD_SECONDS - upload_bytes / _BYTES_PER_SECOND
        if left > 0:
            self._log(f"waiting for the server's schedule at {slot:%Y-%m-%d %H:%M} UTC ({left:.0f} s)")
            self._client.retry.sleep(left)

    def _publish(self, purged: Purged) -> None:
        self._load.before_hole(self._hole)
        assert purged.largest is not None, "everything would be loaded otherwise"
        name = f"{self._load.place.spec.name}.tdsx"
        # After the last time that Hyper opened the file, which writes to it.
        package = set_increment_value(self._package, name, hyper=self._hole, value=purged.largest)
        self._log(
            f"publishing without {purged.purged:,} rows from {self._suffix.smallest} on: Tableau reads them again"
        )
        # From here on, also if the answer gets lost: whoever puts back looks at the server first.
        self._hole_since, self._missing = self._client.retry.clock(), purged.purged
        done = publish_over(self._client, package, self._load.place, self._found)
        self._found, self.warnings = done.found, self.warnings + done.warnings

    def _refreshed_at(self, slot: datetime) -> FoundDatasource:
        before = server_version(self._found)
        wait_for_scheduled_run(self._client, self._found, slot=slot, before=before, job_timeout=self._patience)
        return settled(self._client, self._found)

    def _put_back(self, error: DatasourceError) -> DatasourceError:
        """The error to raise, when what was there before is there again, or could not be brought back."""
        if self._hole_since is None:
            return DatasourceError(f"{error} Nothing was purged from the datasource.")
        try:
            back = self._restore()
        except TirError as second:
            return DatasourceError(
                f"{error} People may not see {self._missing:,} rows now, and the kept package could not be published back: {second} "
                "The next refresh does that first: run it as soon as the server answers."
            )
        if back is _Back.UNTOUCHED:
            return DatasourceError(f"{error} The datasource is as it was.")
        if back is _Back.OTHERS:
            return DatasourceError(
                f"{error} The datasource was left as it is now, because {back.value}. The next refresh starts from that."
            )
        seconds = self._client.retry.clock() - self._hole_since
        return DatasourceError(
            f"{error} The datasource is as it was before: for {seconds:.0f} s people did not see {self._missing:,} rows."
        )

    def _restore(self) -> _Back:
        """Put the kept package back over our own publish, and over nothing else."""
        place = self._load.place
        now = reread(self._client, self._found)
        version = server_version(now) if now else None
        if version == place.look.version:
            return _Back.UNTOUCHED
        if now is None:
            return _Back.OTHERS
        if version != server_version(self._found):
            # The answer to our publish got lost, or somebody else came after us: the content tells.
            _, hyper = fetch_shell(self._client, now, place.folder / "restored", log=place.log)
            if not self._load.is_hole(hyper):
                return _Back.OTHERS
        put_back(self._client, place, now, shell=self._load.shell, hyper=self._load.hyper)
        return _Back.RESTORED
