"""The delivery `server`: purge from a value on, publish, let Tableau load the rest, compare; or put the kept package back.

Between the publish and the end of the refresh the purged rows are missing for everybody. So whatever goes wrong there ends
with the kept package published back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import NoReturn

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.plan import Reason
from tir_dagster.changes.relation import read_tables
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError, ExtractError, TirError
from tir_dagster.files import copy_file
from tir_dagster.hyper.content import content_digest, content_digests, content_fingerprints
from tir_dagster.hyper.increment import (
    Increment,
    IncrementValue,
    Missing,
    NoIncrement,
    Purged,
    format_value,
    least_difference,
    parse_value,
    purge_from,
    rows_at,
    set_increment_value,
)
from tir_dagster.hyper.package.package import NO_VALUE, Package, read_package
from tir_dagster.hyper.purge import least_changed
from tir_dagster.hyper.replace import ExtractShape, StagedChange
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import (
    Looked,
    Published,
    RefreshContext,
    ServerLook,
    known_of,
    publishing,
    remove,
    shape_of,
)
from tir_dagster.refresh.datasource import credentials_for, fetch_shell, server_package
from tir_dagster.refresh.deliveries import RecoveredPublish
from tir_dagster.refresh.deliveries.agreement import needed_increment
from tir_dagster.refresh.deliveries.whole import PublishTarget, large_by_job, publish_over, put_back
from tir_dagster.refresh.server_content import changes_known_until
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import SHELL, Version, new_version
from tir_dagster.snowflake.versions import combined_token, probe
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, reread, server_version, settled
from tir_dagster.tableau.jobs import JobTimeoutError, JobVanishedError
from tir_dagster.tableau.outcome import PublishOutcome, PublishUnknownError
from tir_dagster.tableau.refreshes import Route, Way, find_route, may_refresh_fully, refresh_by_server
from tir_dagster.tableau.settings import Restored
from tir_dagster.tableau.tasks import (
    Schedule,
    find_schedule,
    move_schedule,
    next_slot,
    scheduled_refreshes,
    soonest_slot,
    wait_for_scheduled_run,
)

# The publish begins this long before the schedule's time, and earlier by the time that the upload may take.
LEAD_SECONDS = 20.0
_BYTES_PER_SECOND = 10_000_000
_MINUTE = timedelta(minutes=1)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Affected:
    """The smallest increment value of the changed rows, old and new, as text; and how many rows have none."""

    smallest: str | None
    nulls: int


@dataclass(frozen=True)
class Load:
    """All that a load by the server needs: what is there now, and functions of the caller."""

    place: PublishTarget
    shell: Path
    hyper: Path
    # Why everything is read anew.
    full: Reason | None
    # By the increment's column in the Hyper file: the changed rows' values.
    affected: Callable[[str], Affected]
    # By that column: the literal from which on the server shows other rows than it must; None where it shows the same,
    # `%null%` where no literal is small enough.
    differing: Callable[[str], str | None]
    # Whether an increment reads the rows of the last value once more, beside those that are there: then they are purged, too.
    reads_again: bool
    # What the server already shows of later rows: from this literal on, everything is read again; `%null%` means all.
    lag: str | None
    # Called before a publish that leaves a hole, with the Hyper file that people will see meanwhile.
    before_hole: Callable[[Path], None]
    # Whether a downloaded Hyper file has that content.
    is_hole: Callable[[Path], bool]
    # The clock on the wall, for schedules.
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Suffix:
    """The rows to read again: from this value on."""

    increment: Increment
    smallest: IncrementValue


@dataclass(frozen=True)
class Refreshed:
    """The datasource after a refresh, and when that ended by the server's clock, if the server tells."""

    datasource: FoundDatasource
    ended_at: datetime | None


def refreshed(
    client: TableauClient, datasource: FoundDatasource, log: Log, *, incremental: bool, timeout: float
) -> Refreshed:
    """Return the datasource after a refresh that begins now: one that runs already may have read too early."""
    kind = "incremental" if incremental else "full"
    log(f"waiting for jobs on the server: {kind} refresh of {datasource.shown}")
    try:
        done = refresh_by_server(client, datasource, incremental=incremental, log=log, timeout=timeout)
        return Refreshed(done.datasource, done.ended_at)
    except JobVanishedError as error:
        # Servers forget jobs; the caller compares the data.
        log(str(error))
        return Refreshed(settled(client, datasource), None)


def own_refreshes(
    client: TableauClient, datasource: FoundDatasource, route: Route | None = None, schedule: Schedule | None = None
) -> tuple[str, ...]:
    """Return a warning for each refresh that Tableau runs by a schedule, except the schedule that is moved from here."""
    task_id = route.task.id if route is not None and route.task is not None else None
    tasks = [
        task for task in scheduled_refreshes(client, datasource) if schedule is None or task.schedule_id != schedule.id
    ]
    return tuple(task.needed_warning if task.id == task_id else task.warning for task in tasks)


class SuffixLoad:
    """Purges, publishes and refreshes; if the refresh fails, it puts the old package back."""

    def __init__(
        self, client: TableauClient, load: Load, package: Package, suffix: Suffix, datasource: FoundDatasource, log: Log
    ) -> None:
        self._client, self._load, self._package, self._suffix = client, load, package, suffix
        self._datasource, self._log = datasource, log
        self._hole = load.place.folder / "purged.hyper"
        self._patience = load.place.spec.datasource.job_timeout
        self._hole_since: float | None = None
        self._missing = 0
        self.warnings: tuple[str, ...] = ()
        # The last value, from which the server goes on.
        self.read_from = suffix.increment

    def run(self) -> Refreshed | Reason:
        """Return the datasource after its refresh; or the reason why the server must load everything, with nothing changed."""
        # Before anything is purged: a server that has no way to refresh incrementally must not get a hole.
        route = find_route(self._client, self._datasource)
        suffix = self._suffix
        purged = self._purged(suffix.smallest)
        if self._load.reads_again and purged.largest is not None:
            again = self._purged(purged.largest)
            purged = replace(again, largest=purged.largest if again.largest is not None else None)
        crash_after("purged")
        if (reason := self._reason_for_all(purged)) is not None:
            return reason
        schedule = self._schedule(route)
        self.warnings = own_refreshes(self._client, self._datasource, route, schedule)
        try:
            return self._publish_and_refresh(purged, schedule)
        except DatasourceError as error:
            raise self._put_back(error) from error
        except BaseException:
            # Interrupted: put the rows back before the process ends.
            if self._hole_since is not None:
                with suppress(TirError):
                    self._restore()
            raise

    def _purged(self, smallest: IncrementValue) -> Purged:
        return purge_from(self._load.hyper, self._hole, column=self._suffix.increment.column, smallest=smallest)

    def _reason_for_all(self, purged: Purged) -> Reason | None:
        """Return why the server must load everything. Unconfirmed content is purged only if the server cannot do that."""
        full = self._load.full
        if purged.largest is None:
            return full or Reason.EXTRACT_EMPTIED
        if full is None or not self._needs_publish(purged):
            return None
        return None if full is Reason.FIRST_LOAD and not may_refresh_fully(self._client) else full

    def _publish_and_refresh(self, purged: Purged, schedule: Schedule | None) -> Refreshed:
        """Publish and refresh; do all that takes long before waiting for the schedule."""
        needed = self._needs_publish(purged)
        slot = self._moved(schedule) if schedule is not None else None
        if slot is not None:
            self._wait_for(slot, self._hole.stat().st_size if needed else 0)
        if needed:
            self._publish(purged)
        if schedule is None or slot is None:
            return refreshed(self._client, self._datasource, self._log, incremental=True, timeout=self._patience)
        if self._load.now() >= slot:
            # The upload took longer than expected, and the scheduled refresh may have run too early.
            slot = self._moved(schedule, soon=True)
            self._log(f"published after the schedule's time: moved to {slot:%Y-%m-%d %H:%M} UTC")
        return self._refreshed_at(schedule, slot)

    def _needs_publish(self, purged: Purged) -> bool:
        """Whether a publish is needed: not if nothing is purged and the server's last value is small enough already."""
        value = self._suffix.increment.value
        reaches = purged.largest <= value < self._suffix.smallest  # type: ignore[operator]
        return bool(purged.purged) or not reaches

    def _schedule(self, route: Route) -> Schedule | None:
        """Return the schedule that refreshes the datasource; None if a refresh can be started directly."""
        if self._load.place.spec.datasource.schedule is None and route.way is not Way.SCHEDULE:
            return None
        return find_schedule(self._client, self._datasource)

    def _moved(self, schedule: Schedule, *, soon: bool = False) -> datetime:
        """Move the schedule; return when it runs next."""
        spec, now = self._load.place.spec, self._load.now()
        time_of_day = None if soon else spec.datasource.schedule
        # A slot within a minute could pass before the server knows of it.
        slot = (
            next_slot(time.fromisoformat(time_of_day), spec.slices.zone, now=now + _MINUTE)
            if time_of_day
            else soonest_slot(now)
        )
        move_schedule(self._client, schedule, slot)
        return slot

    def _wait_for(self, slot: datetime, upload_bytes: int) -> None:
        """Wait until shortly before the slot: until then people see all rows."""
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
        first = purged.largest if self._load.reads_again else self._suffix.smallest
        self._log(f"publishing without {purged.purged:,} rows from {first} on: Tableau reads them again")
        self.read_from = replace(self.read_from, value=purged.largest)
        # From here on, even if the answer is lost: putting back looks at the server first.
        self._hole_since, self._missing = self._client.retry.clock(), purged.purged
        servers = self._package.servers
        restored = publish_over(self._client, package, self._load.place, self._datasource, servers=servers)
        self._datasource, self.warnings = restored.datasource, self.warnings + restored.warnings

    def _refreshed_at(self, schedule: Schedule, slot: datetime) -> Refreshed:
        run = wait_for_scheduled_run(
            self._client,
            self._datasource,
            slot=slot,
            before=server_version(self._datasource),
            failures=schedule.failures,
            job_timeout=self._patience,
        )
        return Refreshed(settled(self._client, self._datasource), run.at)

    def _put_back(self, error: DatasourceError) -> DatasourceError:
        """Put the old package back; return the error to raise, which says what people see now."""
        if self._hole_since is None:
            return DatasourceError(f"{error} Nothing was purged from the datasource.")
        try:
            outcome = self._restore()
        except TirError as second:
            return DatasourceError(
                f"{error} People may not see {self._missing:,} rows now, and the kept package could not be published back: {second} "
                "The next refresh does that first: run it as soon as the server answers."
            )
        if outcome is PublishOutcome.NOT_LANDED and isinstance(error, (PublishUnknownError, JobTimeoutError)):
            return DatasourceError(
                f"{error} If the server still publishes it, people do not see {self._missing:,} rows until the next refresh, which"
                " looks for it first: run it soon."
            )
        if outcome is PublishOutcome.NOT_LANDED:
            return DatasourceError(f"{error} The datasource is as it was.")
        if outcome is PublishOutcome.FOREIGN:
            return DatasourceError(
                f"{error} Nothing was put back, because somebody else, or the server itself, changed or removed the datasource meanwhile. The next refresh starts from what is there."
            )
        seconds = self._client.retry.clock() - self._hole_since
        return DatasourceError(
            f"{error} The datasource is as it was before: for {seconds:.0f} s people did not see {self._missing:,} rows."
        )

    def _restore(self) -> PublishOutcome:
        """Put the kept package back over our own publish, and over nothing else."""
        place = self._load.place
        now = reread(self._client, self._datasource)
        version = server_version(now) if now else None
        if version == place.look.version:
            return PublishOutcome.NOT_LANDED
        if now is None:
            return PublishOutcome.FOREIGN
        if version != server_version(self._datasource):
            # The answer to our publish was lost, or somebody else published after us: compare the content.
            _, hyper = fetch_shell(self._client, now, place.folder / "restored", log=place.log)
            if not self._load.is_hole(hyper):
                return PublishOutcome.FOREIGN
        put_back(self._client, place, now, shell=self._load.shell, hyper=self._load.hyper)
        return PublishOutcome.LANDED


@dataclass(frozen=True)
class LoadedByServer:
    """What the server shows after its refresh, downloaded; and why it loaded everything, if it did."""

    datasource: FoundDatasource
    shell: Path
    hyper: Path
    warnings: tuple[str, ...]
    reason: Reason | None = None
    # When the refresh ended, by the server's clock.
    ended_at: datetime | None = None
    # The increment from which it went on.
    read_from: Increment | None = None


def load_by_server(client: TableauClient, load: Load, *, log: Log) -> LoadedByServer:
    """Let the server read what changed, and download the result; the caller compares it with the source."""
    place, datasource = load.place, load.place.look.datasource
    if datasource is None:
        raise DatasourceError(
            f"{place.spec.name}: there is no datasource {place.spec.datasource.name!r} in project {place.look.project.path!r}, "
            "and the delivery `server` needs one that Tableau refreshes. Publish it from Tableau, or use `republish`."
        )
    package = read_package(load.shell)
    increment = needed_increment(place.spec.name, package, load.hyper)
    suffix = _suffix(load, increment)
    if isinstance(suffix, Reason):
        return _load_all(client, load, datasource, suffix, log)
    if suffix is None:
        log("the server shows these rows already: nothing for it to load")
        return _as_it_is(client, load, settled(client, datasource))
    loading = SuffixLoad(client, load, package, suffix, datasource, log)
    outcome = loading.run()
    if isinstance(outcome, Reason):
        return _load_all(client, load, datasource, outcome, log)
    loaded = _download(client, load, outcome.datasource, loading.warnings)
    warnings = loaded.warnings + _full_instead(client, package, loaded)
    return replace(loaded, warnings=warnings, ended_at=outcome.ended_at, read_from=loading.read_from)


def _suffix(load: Load, increment: Increment | NoIncrement) -> Suffix | Reason | None:
    if load.full is not None:
        return _suffix_of_all(load, load.full, increment)
    if isinstance(increment, NoIncrement):
        return Reason.FIRST_LOAD if increment.why is Missing.NEVER_EXTRACTED else Reason.EXTRACT_EMPTIED
    affected = load.affected(increment.column)
    if affected.nulls or load.lag == NO_VALUE:
        return Reason.NULL_INCREMENT
    texts = [text if increment.kind.value == "integer" else f"#{text}#" for text in (affected.smallest,) if text]
    texts += [load.lag] if load.lag else []
    values = [parse_value(text, increment.kind, load.place.spec.name) for text in texts]
    # All of one kind, so they compare.
    return Suffix(increment, min(values)) if values else None


# For these reasons our state is unknown, not the datasource's rows: it may still show most of them.
_UNKNOWN_TO_US = (
    Reason.FIRST_LOAD,
    Reason.STATE_LOST,
    Reason.FOREIGN_PUBLISH,
    Reason.DATASOURCE_CHANGED,
    Reason.DEFINITION_CHANGED,
)


def _suffix_of_all(load: Load, full: Reason, increment: Increment | NoIncrement) -> Suffix | Reason | None:
    if full not in _UNKNOWN_TO_US or isinstance(increment, NoIncrement):
        return full
    first = load.differing(increment.column)
    if first is None or first == NO_VALUE:
        return full if first else None
    return Suffix(increment, parse_value(first, increment.kind, load.place.spec.name))


def _load_all(
    client: TableauClient, load: Load, datasource: FoundDatasource, reason: Reason, log: Log
) -> LoadedByServer:
    """Run a full refresh on the server; it leaves no hole, so it begins at once, whatever schedule the spec names."""
    spec = load.place.spec
    if load.full is None and spec.policy == "incremental_only" and reason is not Reason.FIRST_LOAD:
        raise DatasourceError(
            f"{spec.name}: Tableau would have to load everything, because {reason.value} ({reason.name}), and the policy is "
            "incremental_only. Nothing was touched. Run tir refresh --full, or set policy: auto."
        )
    if not may_refresh_fully(client):
        raise DatasourceError(
            f"{spec.name}: Tableau would have to load everything, because {reason.value} ({reason.name}), and {client.where} does"
            " not allow that to be started over REST. Nothing was touched. Allow refreshes by hand in the site's settings, or"
            " use the delivery `republish`."
        )
    log(f"a full refresh on the server, because {reason.value}")
    warnings = own_refreshes(client, datasource)
    patience = load.place.spec.datasource.job_timeout
    done = refreshed(client, datasource, log, incremental=False, timeout=patience)
    return replace(_download(client, load, done.datasource, warnings, reason=reason), ended_at=done.ended_at)


def _full_instead(client: TableauClient, before: Package, loaded: LoadedByServer) -> tuple[str, ...]:
    """Return a warning if the server ran a full refresh instead: the rows are right, but it took longer."""
    last = read_package(loaded.shell).events[-1]
    if last.kind != "create" or last.started == before.events[-1].started:
        return ()
    warning = (
        f"{client.where} refreshed all of {loaded.datasource.shown} although only an increment was asked for. Check that the"
        " datasource is set up for incremental refreshes, and that the server knows them."
    )
    return (warning,)


def _as_it_is(client: TableauClient, load: Load, datasource: FoundDatasource) -> LoadedByServer:
    warnings = own_refreshes(client, datasource)
    if server_version(datasource) == load.place.look.version:
        return LoadedByServer(datasource, load.shell, load.hyper, warnings)
    return _download(client, load, datasource, warnings)


def _download(
    client: TableauClient,
    load: Load,
    datasource: FoundDatasource,
    warnings: tuple[str, ...],
    *,
    reason: Reason | None = None,
) -> LoadedByServer:
    shell, hyper = fetch_shell(client, datasource, load.place.folder / "loaded", log=load.place.log)
    return LoadedByServer(datasource, shell, hyper, warnings, reason)


_COMPARE = (
    "Look at the server's jobs page, and compare the datasource's own filters and increment key with the spec; then run"
)


class Server:
    """Lets the server itself load the rows.

    The version is applied and verified locally as for any delivery: Tableau must reach the same content.
    """

    def __init__(self, context: RefreshContext) -> None:
        self._context = context
        self._hole: str | None = None

    def recover(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, confirmed: Confirmation | None
    ) -> RecoveredPublish:
        """Put the kept package back if an earlier run ended while rows were missing on the server."""
        kept = self._context.known_version(confirmed.version) if confirmed is not None else None
        datasource = last.server.datasource
        # Without the kept version nothing can be put back: then everything is loaded (STATE_LOST).
        if last.outcome is not PublishOutcome.HOLE or kept is None or datasource is None:
            return last
        restored = put_back(
            client, self._place(last.server, intent.version), datasource, shell=kept.shell, hyper=kept.extract
        )
        crash_after("returned")
        self._context.log("the datasource is whole again")
        # Exactly what was put back: whatever somebody published since is not ours.
        return RecoveredPublish(PublishOutcome.NOT_LANDED, replace(last.server, datasource=restored.datasource))

    def publish(self, looked: Looked, version: Version) -> Published:
        """Let Tableau load what changed; the result must equal the version.

        Servers differ in whether an increment reads the rows of the last value once more. The rows tell it: if the first
        try shows the other way, the kept package is put back, and the second try goes that way.
        """
        reads_again = looked.confirmed is not None and looked.confirmed.reads_again
        published = self._try(looked, version, reads_again=reads_again)
        if isinstance(published, Published):
            return published
        # Over exactly what was put back: if somebody published since, nothing is published over it.
        looked = replace(looked, server=ServerLook(looked.server.project, published.datasource))
        warnings = published.warnings
        published = self._try(looked, version, reads_again=not reads_again, last=True)
        assert isinstance(published, Published), "the last try raises otherwise"
        return replace(published, warnings=warnings + published.warnings)

    def _try(self, looked: Looked, version: Version, *, reads_again: bool, last: bool = False) -> Published | Restored:
        """Load, compare and confirm; if the server reads the other way, return the kept package that was put back."""
        self._hole = None
        change_set = self._context.change_sets.get(version.manifest["change_set"])
        shape = shape_of(version)
        intend(self._context, looked, version)
        with publishing(self._context) as client:
            load = self._load(looked, version, change_set, shape, reads_again=reads_again)
            loaded = load_by_server(client, load, log=self._context.log)
        crash_after("published")
        with self._context.stages.timed("compare"):
            digests = content_digests(content_fingerprints(loaded.hyper, shape), shape)
            same = version.manifest["fingerprint"] in digests
            if not same and not last and _reads_the_other_way(loaded, version, reads_again=reads_again):
                return self._put_back_for_the_other_way(load, loaded, reads_again=reads_again)
            lag = None if same else self._lag(version, load, loaded, digests[0])
        settled = self._settled_version(version, loaded)
        crash_after("reloaded")
        server = ServerLook(looked.server.project, loaded.datasource)
        # Without a refresh, the rows show what the confirmed ones showed.
        known_until = changes_known_until(looked.confirmed) if looked.confirmed is not None else None
        confirmation = confirmation_of(
            self._context, settled, server, before=looked.confirmed, jobs_until=loaded.ended_at or known_until
        )
        if lag is not None:
            self._keep_pending(change_set)
            kept = tuple(name for name in confirmation.change_sets if name != change_set.id)
            confirmation = replace(confirmation, fingerprint=digests[0], lag=lag, change_sets=kept)
        confirmation = replace(confirmation, reads_again=reads_again)
        remove(load.place.folder)
        return Published(confirmation, loaded.datasource, loaded.warnings, full_reason=loaded.reason)

    def _put_back_for_the_other_way(self, load: Load, loaded: LoadedByServer, *, reads_again: bool) -> Restored:
        context = self._context
        found = (
            "does not read the rows of the last value again" if reads_again else "read the rows of the last value twice"
        )
        context.log(f"Tableau {found}: putting the kept package back, and loading in the other way")
        try:
            with context.client() as client:
                return put_back(client, load.place, loaded.datasource, shell=load.shell, hyper=load.hyper)
        except TirError as error:
            raise DatasourceError(
                f"{context.spec.name}: Tableau {found}, so people see wrong rows now, and the kept package could not be published back:"
                f" {error} Run again as soon as the server answers: the next refresh repairs it."
            ) from error

    def _put_back_and_tell(self, load: Load, loaded: LoadedByServer, what: str) -> NoReturn:
        """Put the old package back if rows are missing or wrong; raise with what happened."""
        name = self._context.spec.name
        if self._hole is None:
            raise DatasourceError(f"{name}: {what} Nothing is confirmed. {_COMPARE} tir refresh {name} --full.")
        with self._context.client() as client:
            put_back(client, load.place, loaded.datasource, shell=load.shell, hyper=load.hyper)
        raise DatasourceError(f"{name}: {what} The datasource is as it was before. {_COMPARE} tir refresh {name}.")

    def _load(
        self, looked: Looked, version: Version, change_set: ChangeSet, shape: ExtractShape, *, reads_again: bool
    ) -> Load:
        shell, hyper = self._servers_files(looked)
        folder = self._context.change_sets.path(change_set.id)

        def affected(column: str) -> Affected:
            sides = [version.extract, *([looked.base.extract] if looked.base else [])]
            rows = StagedChange(change_set, folder, shape).as_rows()
            least_values = [least_changed(side, column, rows) for side in sides]
            return Affected(_least(text for text, _ in least_values), sum(nulls for _, nulls in least_values))

        def before_hole(purged: Path) -> None:
            digests = content_digests(content_fingerprints(purged, shape), shape)
            self._hole = digests[0]
            # If rows were only deleted, nothing will be loaded: the purged file is already right.
            whole = version.manifest["fingerprint"] in digests
            intend(self._context, looked, version, hole=None if whole else self._hole)
            crash_after("intended")

        def is_hole(hyper: Path) -> bool:
            return content_digest(content_fingerprints(hyper, shape)) == self._hole

        return Load(
            place=self._place(looked.server, version.id),
            shell=shell,
            hyper=hyper,
            full=Reason[change_set.reason or "REQUESTED"] if change_set.decision == "full" else None,
            affected=affected,
            differing=lambda column: _first_difference(hyper, version, column),
            reads_again=reads_again,
            lag=looked.confirmed.lag if looked.confirmed else None,
            before_hole=before_hole,
            is_hole=is_hole,
            now=self._context.now,
        )

    def _place(self, server: ServerLook, version: str) -> PublishTarget:
        context, folder = self._context, self._context.work / "publish"
        folder.mkdir(parents=True, exist_ok=True)
        credentials = credentials_for(context.spec, server.datasource, context.env)
        return PublishTarget(
            context.spec,
            server,
            credentials,
            folder,
            context.folder,
            context.check_lease,
            context.log,
            large_by_job(context, version),
        )

    def _servers_files(self, looked: Looked) -> tuple[Path, Path]:
        """Return the package and the Hyper file as the server holds them; downloaded if it shows later rows than ours."""
        if looked.confirmed is not None and looked.confirmed.lag is not None and looked.server.datasource is not None:
            with TableauClient(self._context.tableau) as client:
                return fetch_shell(
                    client, looked.server.datasource, self._context.work / "download", log=self._context.log
                )
        shell, hyper = server_package(self._context, looked)
        if shell is None or hyper is None:
            raise DatasourceError(
                f"{self._context.spec.name}: the delivery `server` needs a datasource that Tableau refreshes, and there is none "
                f"{self._context.spec.datasource.name!r} in project {self._context.spec.datasource.project!r}. Publish it from Tableau, or "
                "use the delivery `republish`, which creates it."
            )
        return shell, hyper

    def _lag(self, version: Version, load: Load, loaded: LoadedByServer, digest: str) -> str:
        """Return the value from which on the server shows later rows than the version; raise if it shows other rows.

        Only the rows show it, because rows that appeared and vanished meanwhile are in no version: whatever differs now, or
        changes after the version, is at or above the literal or among the changed keys. `%null%` if no literal is small
        enough: then everything is loaded again.
        """
        tables = read_tables(self._context.spec)
        table_names = ", ".join(map(str, tables))
        before, after = read_package(load.shell), read_package(loaded.shell)
        if digest == self._hole and before.events[-1].started == after.events[-1].started:
            # The job was forgotten by the server, or began before our publish.
            self._put_back_and_tell(load, loaded, "Tableau's refresh ended without loading the rows that were purged.")
        if combined_token(probe(self._context.snowflake, tables).items()) == known_of(version).token:
            what = f"what Tableau loaded differs from {table_names}, which has not changed since."
            self._put_back_and_tell(load, loaded, what)
        column = after.increment_column
        lag = (_first_difference(loaded.hyper, version, column) if column else None) or NO_VALUE
        again = "loads everything again" if lag == NO_VALUE else f"reads again from {lag} on"
        self._context.log(f"{table_names} changed while Tableau read it: the next refresh {again}")
        return lag

    def _keep_pending(self, change_set: ChangeSet) -> None:
        """Keep the change set pending, without its applied keys, so that the next refresh has work to do.

        Rows that appeared and vanished while Tableau read are in no version, but on the server.
        """
        store = self._context.change_sets
        sentence = f"{self._context.spec.name}: the source changed while Tableau read it."
        with store.staging(change_set.id) as folder:
            store.commit(
                replace(
                    change_set,
                    decision="incremental",
                    reason=None,
                    keys=0,
                    rows=0,
                    purged={},
                    appended={},
                    sentence=sentence,
                ),
                folder,
            )

    def _settled_version(self, version: Version, loaded: LoadedByServer) -> Version:
        """Commit the version again with the server's current package, whose refresh events the next refresh needs."""
        with new_version(self._context.versions) as workspace:
            copy_file(version.extract, workspace.extract)
            copy_file(loaded.shell, workspace.folder / SHELL)
            return self._context.versions.commit(workspace, {**version.manifest, "from_server": True}, after=version.id)


def _first_difference(hyper: Path, version: Version, column: str) -> str | None:
    """Return the literal of the smallest increment value at which the server's rows differ from the version."""
    try:
        return least_difference(hyper, version.extract, column=column)
    except ExtractError:
        # Not even the columns are the same.
        return NO_VALUE


def _reads_the_other_way(loaded: LoadedByServer, version: Version, *, reads_again: bool) -> bool:
    """Whether the rows of the last value are there twice; or not at all, where they were left to the server to read again."""
    last = loaded.read_from
    if last is None or _first_difference(loaded.hyper, version, last.column) != format_value(last.value):
        return False
    wanted = rows_at(version.extract, column=last.column, value=last.value)
    found = rows_at(loaded.hyper, column=last.column, value=last.value)
    return wanted > 0 and found == (0 if reads_again else 2 * wanted)


def _least(texts: Iterable[str | None]) -> str | None:
    """Return the smallest text: dates and times sort as text, whole numbers by their value."""
    values = [text for text in texts if text is not None]
    whole = all(text.lstrip("-").isdigit() for text in values)
    return min(values, key=int if whole else str, default=None)
