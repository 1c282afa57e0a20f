"""The delivery `server`: what must be read again is purged and published, and Tableau's own refresh loads it.

Between the publish and the end of the refresh the purged rows are missing for everybody. So whatever goes wrong there ends
with the kept package published back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time
from pathlib import Path

from tir_dagster.changes.plan import Reason
from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.find import reread, settled
from tir_dagster.datasource.found import FoundDatasource, FoundProject, ServerVersion, server_version
from tir_dagster.datasource.increment_refresh import Route, Way, find_route, start_incremental_refresh
from tir_dagster.datasource.jobs import JobVanishedError, start_refresh, wait_for_job
from tir_dagster.datasource.keep import ConnectionCredential, keep, restore
from tir_dagster.datasource.republish import ServerLook, fetch_shell
from tir_dagster.datasource.schedules import (
    find_schedule,
    move_schedule,
    next_slot,
    soonest_slot,
    wait_for_scheduled_run,
)
from tir_dagster.datasource.tasks import scheduled_refreshes
from tir_dagster.datasource.transfer import publish
from tir_dagster.errors import DatasourceError
from tir_dagster.extract.increment import (
    Increment,
    IncrementValue,
    Missing,
    NoIncrement,
    Purged,
    find_increment,
    format_value,
    parse_value,
    purge_from,
    set_increment_value,
)
from tir_dagster.extract.package import Package, read_package, write_package
from tir_dagster.spec import ExtractSpec

# A schedule is told this long before its time, and the purge is published that long before it.
LEAD_SECONDS = 20.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class Affected:
    """The smallest increment value among the changed rows, old images and new, as text; how many have none."""

    smallest: str | None
    nulls: int


@dataclass(frozen=True)
class Load:
    """All that a load by the server needs: what is there now, and questions only the caller can answer."""

    spec: ExtractSpec
    look: ServerLook
    shell: Path
    hyper: Path
    credentials: Sequence[ConnectionCredential]
    folder: Path
    full: Reason | None
    # By the increment's column in the Hyper file: the changed rows' values.
    affected: Callable[[str], Affected]
    # What the server already shows of later rows: from this literal on, everything is read again.
    lag: str | None
    # Told before a publish that leaves a hole: the Hyper file that people will see meanwhile.
    before_hole: Callable[[Path], None]
    # Whether a downloaded Hyper file is that one.
    is_hole: Callable[[Path], bool]


@dataclass(frozen=True)
class Loaded:
    """What the server shows after its refresh, downloaded; `since` is the literal from which on it read its source."""

    found: FoundDatasource
    shell: Path
    hyper: Path
    warnings: tuple[str, ...]
    reason: Reason | None
    since: str | None


def load_by_server(client: TableauClient, load: Load, *, log: Log) -> Loaded:
    """Let the server read what changed, and download the result; the caller compares it with the source."""
    found = load.look.found
    if found is None:
        raise DatasourceError(
            f"{load.spec.name}: there is no datasource {load.spec.datasource.name!r} in project {load.look.project.path!r}, "
            "and the delivery `server` needs one that Tableau refreshes. Publish it from Tableau, or use `republish`."
        )
    package = read_package(load.shell)
    increment = find_increment(package, load.hyper)
    if isinstance(increment, NoIncrement) and increment.why is Missing.NOT_INCREMENTAL:
        raise DatasourceError(f"{load.spec.name}: {increment.sentence} Or use the delivery `republish`.")
    warnings = tuple(task.warning for task in scheduled_refreshes(client, found))
    suffix = _suffix(load, increment)
    if isinstance(suffix, Reason):
        log(f"a full refresh on the server, because {suffix.value}")
        _refresh_fully(client, found)
        return _download(client, load, found, warnings, reason=suffix, since=None)
    if suffix is None:
        log("no row changes: nothing for the server to load")
        return _download(client, load, found, warnings, reason=None, since=None)
    load_rest = _Incremental(client, load, package, suffix, found, log)
    reason = load_rest.run()
    since = None if reason else format_value(suffix.smallest)
    return _download(client, load, load_rest.found, warnings, reason=reason, since=since)


@dataclass(frozen=True)
class _Suffix:
    """The rows to read again: from this value on."""

    increment: Increment
    smallest: IncrementValue


def _suffix(load: Load, increment: Increment | NoIncrement) -> _Suffix | Reason | None:
    if load.full is not None:
        return load.full
    if isinstance(increment, NoIncrement):
        return Reason.FIRST_LOAD if increment.why is Missing.NEVER_EXTRACTED else Reason.EXTRACT_EMPTIED
    affected = load.affected(increment.column)
    if affected.nulls:
        return Reason.NULL_INCREMENT
    texts = [text if increment.kind.value == "integer" else f"#{text}#" for text in (affected.smallest,) if text]
    texts += [load.lag] if load.lag else []
    values = [parse_value(text, increment.kind, load.spec.name) for text in texts]
    # All of one kind, so they compare.
    return _Suffix(increment, min(values)) if values else None


def _refresh_fully(client: TableauClient, found: FoundDatasource) -> None:
    started = start_refresh(client, found, incremental=False)
    _wait(client, started.job_id, f"full refresh of {found.shown}")


def _wait(client: TableauClient, job_id: str, what: str) -> None:
    try:
        wait_for_job(client, job_id, what=what)
    except JobVanishedError:
        # Servers forget jobs; what it did shows in the data, which the caller compares.
        return


def _download(
    client: TableauClient,
    load: Load,
    found: FoundDatasource,
    warnings: tuple[str, ...],
    *,
    reason: Reason | None,
    since: str | None,
) -> Loaded:
    now = settled(client, found)
    shell, hyper = fetch_shell(client, now, load.folder / "loaded")
    return Loaded(now, shell, hyper, warnings, reason, since)


class _Incremental:
    """Purge, publish, refresh; and back to what was there if the refresh fails."""

    def __init__(
        self, client: TableauClient, load: Load, package: Package, suffix: _Suffix, found: FoundDatasource, log: Log
    ) -> None:
        self._client, self._load, self._package, self._suffix = client, load, package, suffix
        self.found, self._log = found, log
        self._hole_since: float | None = None
        self._purged: Purged | None = None

    def run(self) -> Reason | None:
        """Give the reason when it had to be a full refresh after all."""
        # Before anything is purged: a server that has no way to refresh incrementally must not get a hole.
        route = find_route(self._client, self.found)
        slot = self._slot(route)
        if slot is not None:
            self._wait_for(slot)
        purged = purge_from(
            self._load.hyper,
            self._load.folder / "purged.hyper",
            column=self._suffix.increment.column,
            smallest=self._suffix.smallest,
        )
        self._purged = purged
        if purged.largest is None:
            self._log(f"a full refresh on the server, because {Reason.EXTRACT_EMPTIED.value}")
            _refresh_fully(self._client, self.found)
            return Reason.EXTRACT_EMPTIED
        # The server goes on after its last value: where that is small enough already, nobody need see a hole.
        value = self._suffix.increment.value
        reaches = purged.largest <= value < self._suffix.smallest  # type: ignore[operator]
        try:
            if purged.purged or not reaches:
                self._publish(purged.largest)
            self._refresh(slot)
        except DatasourceError as error:
            raise self._put_back(error) from error
        except BaseException:
            # Told to stop: people get their rows back before we go.
            if self._hole_since is not None:
                with suppress(DatasourceError):
                    self._restore()
            raise
        return None

    def _slot(self, route: Route) -> datetime | None:
        """When the server's schedule refreshes it; None when it can be asked at once."""
        asked, now = self._load.spec.datasource.schedule, datetime.now(UTC)
        if asked is None and route.way is not Way.SCHEDULE:
            return None
        schedule = find_schedule(self._client, self.found)
        slot = (
            next_slot(time.fromisoformat(asked), self._load.spec.slices.zone, now=now) if asked else soonest_slot(now)
        )
        move_schedule(self._client, schedule, slot)
        return slot

    def _wait_for(self, slot: datetime) -> None:
        """Purged at that time and not before: until then people see everything."""
        left = (slot - datetime.now(UTC)).total_seconds() - LEAD_SECONDS
        if left > 0:
            self._log(f"waiting for the server's schedule at {slot:%Y-%m-%d %H:%M} UTC ({left:.0f} s)")
            self._client.retry.sleep(left)

    def _publish(self, largest: IncrementValue) -> None:
        load, assert_purged = self._load, self._purged
        assert assert_purged is not None
        target = load.folder / f"{load.spec.name}.tdsx"
        set_increment_value(self._package, target, hyper=load.folder / "purged.hyper", value=largest)
        load.before_hole(load.folder / "purged.hyper")
        self._log(
            f"publishing without {assert_purged.purged:,} rows from {self._suffix.smallest} on: Tableau reads them again"
        )
        # From here on, also if the answer gets lost: whoever puts back looks at the server first.
        self._hole_since = self._client.retry.clock()
        self.found = _publish_over(self._client, target, load, self.found, expected=load.look.version)

    def _refresh(self, slot: datetime | None) -> None:
        what = f"incremental refresh of {self.found.shown}"
        if slot is not None:
            wait_for_scheduled_run(self._client, self.found, slot=slot, before=server_version(self.found))
            return
        started = start_incremental_refresh(self._client, self.found)
        self._log(f"waiting for job {started.job_id} ({what})")
        _wait(self._client, started.job_id, what)

    def _put_back(self, error: DatasourceError) -> DatasourceError:
        """The error to raise, when what was there before is there again, or could not be brought back."""
        if self._hole_since is None:
            return DatasourceError(f"{error} The datasource is as it was.")
        purged = self._purged
        assert purged is not None
        try:
            landed = self._restore()
        except DatasourceError as second:
            return DatasourceError(
                f"{error} People do not see {purged.purged:,} rows now, and the kept package could not be published back: {second} "
                "The next refresh does that first: run it as soon as the server answers."
            )
        if not landed:
            return DatasourceError(f"{error} The datasource is as it was.")
        seconds = self._client.retry.clock() - self._hole_since
        return DatasourceError(
            f"{error} The datasource is as it was before: for {seconds:.0f} s people did not see {purged.purged:,} rows."
        )

    def _restore(self) -> bool:
        """Put the kept package back over our own publish; False when that never landed."""
        now = reread(self._client, self.found)
        version = server_version(now) if now else None
        if version == self._load.look.version:
            return False
        if now is not None and version != server_version(self.found):
            # The answer to our publish got lost, or somebody else came after us: the content tells.
            _, hyper = fetch_shell(self._client, now, self._load.folder / "restored")
            if not self._load.is_hole(hyper):
                raise DatasourceError("Somebody else changed the datasource meanwhile; it was left as it is.")
        self.found = put_back(self._client, self._load, self._package, self.found)
        return True


def put_back(client: TableauClient, load: Load, package: Package, found: FoundDatasource) -> FoundDatasource:
    """Publish the kept package over what we published ourselves."""
    target = load.folder / f"{load.spec.name}.tdsx"
    write_package(package, target, hyper=load.hyper)
    now = reread(client, found)
    return _publish_over(client, target, load, found, expected=server_version(now) if now else None)


def _publish_over(
    client: TableauClient, target: Path, load: Load, found: FoundDatasource, *, expected: ServerVersion | None
) -> FoundDatasource:
    project: FoundProject = load.look.project
    try:
        published = publish(
            client,
            target,
            project=project,
            name=load.spec.datasource.name,
            overwrite=True,
            expected=expected,
            connections=load.credentials,
        )
    finally:
        target.unlink(missing_ok=True)
    return restore(client, published, keep(found)).found
