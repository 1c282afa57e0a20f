"""The context of one extract's refresh: its connections and state, and the values that its stages hand to each other."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes.plan import Reason, SourceState
from tir_dagster.errors import TirError
from tir_dagster.files import private_folder
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.measuring import Meter
from tir_dagster.refresh.profile import Profile
from tir_dagster.refresh.state.call_budget import CallBudget
from tir_dagster.refresh.state.change_sets import ChangeSetStore, DamagedStateError
from tir_dagster.refresh.state.history import HistoryStore
from tir_dagster.refresh.state.hold import HoldFile
from tir_dagster.refresh.state.lease import Lease, LeaseLostError, lease
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.shared import SharedSource
from tir_dagster.refresh.state.versions import Version, VersionStore
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.calls import Budget, Use
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, ServerVersion, server_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Under it, a folder of its own for every refresh: what is compared and sent.
_WORK, _DOWNLOADS = "work", "downloads"

# What each delivery does on the server: the token of a connected app asks for these scopes. Every delivery that publishes
# can also repair what an interrupted publish of another one left.
_WHOLE = frozenset({Use.LOOK, Use.DOWNLOAD, Use.UPLOAD, Use.PUBLISH, Use.SETTINGS, Use.TASKS, Use.JOBS})
USES_BY_DELIVERY: dict[str, frozenset[Use]] = {
    "republish": _WHOLE,
    "patch": _WHOLE | {Use.CHANGE_DATA},
    "server": _WHOLE | {Use.REFRESH, Use.SCHEDULES},
    "trigger": frozenset({Use.LOOK, Use.REFRESH, Use.TASKS, Use.JOBS}),
}
# The calls of one refresh that Tableau Cloud limits; `server` may have to publish twice: the purged package, and the old one back.
NEEDED_CALLS: dict[str, dict[Budget, int]] = {
    "republish": {Budget.PUBLISHES: 1},
    "patch": {Budget.PUBLISHES: 1},
    "server": {Budget.PUBLISHES: 2, Budget.REFRESHES: 1},
    "trigger": {Budget.REFRESHES: 1},
}

Log = Callable[[str], None]


@dataclass
class Stages:
    """Seconds by stage of one refresh; its profile has more details.

    `publish_server` is the part of `publish` that was spent waiting for the server.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)

    @contextmanager
    def timed(self, name: str) -> Iterator[Meter]:
        """Count the block for this stage; one inside of it, such as Spark's start, counts by itself."""
        try:
            with self.profile.timed(name) as meter:
                yield meter
        finally:
            self.add(name, self.profile.ended[-1].seconds)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)


@dataclass(frozen=True)
class RefreshContext:
    """One extract with everything that its refresh needs; each stage is a function that takes it first."""

    spec: ExtractSpec
    snowflake: SnowflakeAccess
    tableau: TableauAccess
    spark: Callable[[], SparkSession]
    # Counts the calls that the site limits.
    calls: CallBudget
    folder: Path
    # Scratch files of this refresh alone: a process that slept through the end of its lease must not write into the next one's.
    work: Path
    log: Log
    env: Mapping[str, str]
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    stages: Stages = field(default_factory=Stages)
    lease: Lease | None = None

    def client(self) -> TableauClient:
        """Return a client whose limited calls are counted."""
        return TableauClient(self.tableau, counter=self.calls)

    def of(self, table: str) -> RefreshContext:
        """Return the context of this table alone; an extract of one table is its only part, without a name."""
        return replace(self, spec=self.spec.parts[table]) if table else self

    @cached_property
    def change_sets(self) -> ChangeSetStore:
        return ChangeSetStore(self.folder / "change_sets")

    @cached_property
    def versions(self) -> VersionStore:
        return VersionStore(self.folder / "versions")

    @cached_property
    def history(self) -> HistoryStore:
        return HistoryStore(self.folder / "history")

    @cached_property
    def hold(self) -> HoldFile:
        return HoldFile(self.folder)

    @cached_property
    def shared(self) -> SharedSource:
        """What this extract shares with the others of its home, whose folders lie beside its own."""
        return SharedSource(self.folder.parent.parent, self.snowflake, self.spec.name)

    @property
    def downloads(self) -> Path:
        """Where the server's package is kept from one stage to the next; without the lease, among the scratch files."""
        return (self.folder if self.lease is not None else self.work) / _DOWNLOADS

    def check_lease(self) -> None:
        """Raise LeaseLostError if another process took over; call it before anything that others would see."""
        if self.lease is not None:
            self.lease.check()

    def known_version(self, version_id: str) -> Version | None:
        """Return the version, if it is still there."""
        return self.versions.find(version_id)

    def settled_versions(self) -> list[Version]:
        """Return the versions that were confirmed at some time, the newest first: their change sets are no longer pending."""
        pending = {change_set.id for change_set in self.change_sets.pending()}
        versions = reversed(self.versions.versions())
        return [version for version in versions if version.manifest["change_set"] not in pending]


def refresh_context(
    spec: ExtractSpec,
    *,
    snowflake: SnowflakeAccess,
    tableau: TableauAccess,
    spark: Callable[[], SparkSession],
    home: Path,
    log: Log = lambda _: None,
    env: Mapping[str, str] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> RefreshContext:
    """Put the context of an extract's refresh together; its state lies under `home`, which may be mounted on a shared store."""
    folder = private_folder(home / "extracts") / spec.name
    access = tableau_for(tableau, spec)
    return RefreshContext(
        spec=spec,
        snowflake=snowflake_for(snowflake, spec),
        tableau=access,
        spark=spark,
        calls=CallBudget(home, access, spec.name),
        folder=folder,
        work=folder / _WORK / uuid.uuid4().hex[:12],
        log=log,
        env=os.environ if env is None else env,
        now=now,
    )


def snowflake_for(access: SnowflakeAccess, spec: ExtractSpec) -> SnowflakeAccess:
    """Return the access with the warehouse, role and tag of the spec, in the schema of the extract's main table."""
    settings = {name: value for name, value in vars(spec.snowflake).items() if value}
    table = TableName.parse(spec.main_table)
    return replace(access, database=quote(table.database), schema=quote(table.schema), **settings)


def tableau_for(access: TableauAccess, spec: ExtractSpec, uses: frozenset[Use] | None = None) -> TableauAccess:
    """Return the access to the server and site that the spec names, for these uses or else for those of its delivery."""
    return replace(
        access,
        server_url=spec.datasource.server or access.server_url,
        site=access.site if spec.datasource.site is None else spec.datasource.site,
    ).limited_to(USES_BY_DELIVERY[spec.delivery] if uses is None else uses)


@contextmanager
def leased(context: RefreshContext, purpose: str, *, wait_seconds: float) -> Iterator[RefreshContext]:
    """Hold the extract's lease; inside, use the context that is given: it knows the lease."""
    path = context.folder / "lease.json"
    with ExitStack() as stack:
        with context.stages.profile.timed("lease"):
            held = stack.enter_context(lease(path, purpose=purpose, wait_seconds=wait_seconds, on_wait=context.log))
        holding = replace(context, lease=held)
        if context.lease is None:
            # Only the holder of the lease works: scratch files of others are useless.
            for left in (context.folder / _WORK).glob("*"):
                if left != context.work:
                    remove(left)
        yield holding
        if context.lease is None:
            _remove_scratch_files(holding)


def _remove_scratch_files(context: RefreshContext) -> None:
    """Remove this run's files, and the server's package if nothing is left to publish: it may be as large as the extract."""
    remove(context.work)
    with suppress(DamagedStateError):
        if lost_lease(context) is None and not context.change_sets.pending():
            remove(context.downloads)


@contextmanager
def explaining_lost_lease(context: RefreshContext) -> Iterator[None]:
    """Say that somebody took over, and removed our files, where that is why something failed."""
    try:
        yield
    except LeaseLostError:
        raise
    except (OSError, TirError) as error:
        if lost := lost_lease(context):
            raise LeaseLostError(f"{lost} Before that: {error}") from error
        raise


def lost_lease(context: RefreshContext) -> LeaseLostError | None:
    """Return the error if the lease is known to be lost."""
    try:
        context.check_lease()
    except LeaseLostError as lost:
        return lost
    except OSError:
        # Unknown; the caller raises the error at hand.
        pass
    return None


@contextmanager
def publishing(context: RefreshContext) -> Iterator[TableauClient]:
    """Give a client for the stage `publish`; how long it waited for the server's answers and jobs is shown beside it."""
    with context.stages.timed("publish"), context.client() as client:
        try:
            yield client
        finally:
            context.stages.add("publish_server", client.waited_seconds)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# What stages hand to each other


@dataclass(frozen=True)
class ServerLook:
    """What the server holds now under the extract's name; `datasource` is None where there is nothing yet."""

    project: FoundProject
    datasource: FoundDatasource | None
    # The job of somebody else that changed the rows since the last confirmation without another version.
    after_job: str = ""

    @property
    def version(self) -> ServerVersion | None:
        return server_version(self.datasource) if self.datasource else None

    @property
    def version_text(self) -> str | None:
        """The version in a form to compare with recorded ones: what a job changed since is another version, too."""
        return f"{self.version}{self.after_job and f' {self.after_job}'}" if self.datasource else None


@dataclass(frozen=True)
class Looked:
    """What is known before anything is read: the server, the last confirmation, and the version it stands for."""

    server: ServerLook
    confirmed: Confirmation | None
    base: Version | None
    foreign: bool = False
    # Why the datasource that the spec names is not the confirmed one.
    datasource_reason: Reason | None = None
    # A publish that landed without being confirmed.
    late: Confirmation | None = None
    # A change may have arrived on the server in part.
    in_doubt: bool = False
    # As far as it was compared, what is published has the table and the types that our versions have.
    alike: bool = True
    # It was compared, and people have made no document around it that would have to be kept.
    bare: bool = False
    warnings: tuple[str, ...] = ()

    def of(self, table: str) -> Looked:
        """Return what is known of this table alone."""
        confirmed, base = self.confirmed, self.base
        return replace(
            self,
            confirmed=confirmed.of(table) if confirmed is not None and table in confirmed.tables else None,
            base=base.of(table) if base is not None and table in base.tables else None,
        )

    def has_tables_of(self, spec: ExtractSpec) -> bool:
        """Whether what is confirmed has the tables that the spec declares, and the same main one."""
        if self.confirmed is None:
            return True
        confirmed = self.confirmed.tables
        return set(confirmed) == set(spec.parts) and confirmed[0] == spec.main.table


@dataclass(frozen=True)
class Published:
    """What is on the server now."""

    confirmation: Confirmation
    datasource: FoundDatasource
    warnings: tuple[str, ...] = ()
    sent_bytes: int = 0
    # Why the server itself had to load everything.
    full_reason: Reason | None = None


def known_of(version: Version) -> SourceState:
    """Return what was known of the source when the version was made."""
    return SourceState(**version.manifest["known"])


def shape_to_json(shape: ExtractShape) -> dict[str, Any]:
    return {
        "columns": [[c.name, c.kind.value, c.precision, c.scale, c.nullable] for c in shape.columns],
        "key": list(shape.key),
        "slices": [shape.slices.column, shape.slices.by, shape.slices.zone],
        "names": dict(shape.names),
        "loose": sorted(shape.loose),
        **({"table": list(shape.table), "not_null": sorted(shape.not_null)} if shape.table else {}),
    }


def shapes_of(version: Version) -> dict[str, ExtractShape]:
    """Return how each table of the version's extract is laid out."""
    return {table: shape_of(version.of(table)) for table in version.tables}


def shape_of(version: Version) -> ExtractShape:
    """Return how the version's extract, or one table of it, is laid out, as its manifest says."""
    value = version.manifest["shape"]
    columns = tuple(Column(name, Kind(kind), *rest) for name, kind, *rest in value["columns"])
    loose = frozenset(value.get("loose", ()))
    schema, name = value.get("table", (None, None))
    return ExtractShape(
        columns,
        tuple(value["key"]),
        SliceBy(*value["slices"]),
        value["names"],
        loose,
        (schema, name) if schema else None,
        frozenset(value.get("not_null", ())),
    )
