"""The refresh from end to end, step by step, over the rooms: look, detect, apply, publish. No Dagster in here.

Each step leaves something durable, so that a crash after any line is mended by the next run:
planned → staged (change set) → applied and verified (version) → published (intent) → confirmed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tir_dagster.changes.change_set import NO_SLICE_KEY, ChangeSet, counts_from_json
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.plan import Mode, Plan, Reason, Situation, plan_refresh
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.durable import need_space
from tir_dagster.errors import TirError
from tir_dagster.hyper.casts import check_key
from tir_dagster.hyper.content import (
    Prints,
    bring_forward,
    content_digest,
    content_sums,
    slice_digests,
    slice_rows,
    sums_from_json,
    sums_to_json,
)
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.hyper.package.package import Package, read_package
from tir_dagster.hyper.purge import Applied
from tir_dagster.hyper.replace import Shape, replaced_rows
from tir_dagster.refresh.apply import SHELL, apply_change_set, bytes_per_row, new_version
from tir_dagster.refresh.deliveries.agreement import check_agreement, check_query_agreement, check_replaceable
from tir_dagster.refresh.deliveries.by_patch import ByPatch
from tir_dagster.refresh.deliveries.by_server import ByServer
from tir_dagster.refresh.deliveries.republish import ServerLook, credentials_for, deliver, fetch_shell
from tir_dagster.refresh.deliveries.server_load import needed_increment
from tir_dagster.refresh.detect import Base, Settled, Survey, make_change_set, readable_version, survey
from tir_dagster.refresh.look import Looking
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.lease import Lease, LeaseLostError, lease
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import Version, VersionStore
from tir_dagster.refresh.steps import (
    Looked,
    Prepared,
    Published,
    Stages,
    crash_after,
    known_of,
    remove,
    shape_of,
    shape_to_json,
)
from tir_dagster.refresh.verification import Verification
from tir_dagster.refresh.verify import slices_in_turn, verify_loaded, verify_replaced, verify_slices
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.versions import SourceVersion, column_names
from tir_dagster.spark.java import require_java
from tir_dagster.spec.extract import ExtractSpec, check_columns, needed_columns
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import shown_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Log = Callable[[str], None]
# Under it, a folder of its own for every refresher: what is downloaded, compared and sent.
WORK = "work"


class Refresher:
    """One extract's refresh, with everything it talks to passed in."""

    def __init__(
        self,
        spec: ExtractSpec,
        *,
        snowflake: SnowflakeAccess,
        tableau: TableauAccess,
        spark: Callable[[], SparkSession],
        home: Path,
        log: Log = lambda _: None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.folder = home / "extracts" / spec.name
        self.change_sets = ChangeSetStore(self.folder / "change_sets")
        self.versions = VersionStore(self.folder / "versions")
        self.stages = Stages()
        self.snowflake = for_extract(snowflake, spec)
        self.tableau = for_datasource(tableau, spec)
        self._spark = spark
        self.log = log
        self.env = os.environ if env is None else env
        self._by_server = ByServer(self)
        self._by_patch = ByPatch(self)
        self._fetched: tuple[str, Path | None, Path] | None = None
        self._lease: Lease | None = None
        # Its own: a process that slept through the end of its lease must not write into the next one's files.
        self.work = self.folder / WORK / uuid.uuid4().hex[:12]
        self.warnings: list[str] = []
        # Set where the server itself had to load everything.
        self.full_reason: str | None = None
        # What the last publish sent to the server.
        self.sent_bytes = 0
        # What whoever planned under the same lease already knows: detection goes on from there.
        self.prepared: Prepared | None = None

    def begin(self) -> None:
        """A new refresh by the same refresher: times and warnings start anew."""
        self.stages, self.warnings, self.prepared, self.full_reason, self.sent_bytes = Stages(), [], None, None, 0

    def lend(self, log: Log, spark: Callable[[], SparkSession]) -> None:
        """From here on, tell this log, and use this Spark."""
        self.log, self._spark = log, spark

    def take_prepared(self) -> Prepared | None:
        taken, self.prepared = self.prepared, None
        return taken

    @contextmanager
    def leased(self, purpose: str, *, wait_seconds: float) -> Iterator[None]:
        path, outer = self.folder / "lease.json", self._lease
        with lease(path, purpose=purpose, wait_seconds=wait_seconds, on_wait=self.log) as held:
            self._lease = held
            if outer is None:
                self._sweep()
            try:
                yield
            finally:
                self._lease = outer

    def _sweep(self) -> None:
        """Only the holder of the lease works: what others have left is of no use to anybody."""
        for left in (self.folder / WORK).glob("*"):
            if left != self.work:
                remove(left)

    @contextmanager
    def _swept(self) -> Iterator[None]:
        """Trouble with files: perhaps somebody took over and swept them, which is what people shall read then."""
        try:
            yield
        except LeaseLostError:
            raise
        except (OSError, TirError) as error:
            if lost := self._lost():
                raise LeaseLostError(f"{lost} Before that: {error}") from error
            raise

    def _lost(self) -> LeaseLostError | None:
        try:
            self.check_lease()
        except LeaseLostError as lost:
            return lost
        except OSError:
            # Nobody can tell; the trouble at hand is reason enough.
            pass
        return None

    def check_lease(self) -> None:
        """Before anything that others would see: a process that slept for a minute may have lost its turn."""
        if self._lease is not None:
            self._lease.check()

    # Look

    def look(self, confirmed: Confirmation | None, *, mend: bool = True) -> Looked:
        """What the server holds, and what a crash may have left; a publish that landed unnoticed is confirmed now.

        Without the lease nothing may be mended: what looks like a crash can be a run at work.
        """
        with self._swept(), self.stages.timed("look"), TableauClient(self.tableau) as client:
            return Looking(self, client, self._by_server, self._by_patch, mend=mend).look(confirmed)

    def known_version(self, version_id: str) -> Version | None:
        """The version, if it is still there."""
        return next((version for version in self.versions.versions() if version.id == version_id), None)

    def settled_versions(self) -> list[Version]:
        """Versions that were confirmed at some time: their change sets are no longer pending; the newest first."""
        pending = {one.id for one in self.change_sets.pending()}
        return [one for one in reversed(self.versions.versions()) if one.manifest["change_set"] not in pending]

    # Plan

    def survey(self, looked: Looked) -> Survey:
        with self._swept(), self.stages.timed("survey"), self.snowflake.kept_open():
            surveyed = survey(
                self.spec,
                self.snowflake,
                columns=self._columns(looked),
                settled=_settled(looked.confirmed),
                log=self.log,
            )
            self._check_stored_key(looked, surveyed)
            return surveyed

    def _check_stored_key(self, looked: Looked, surveyed: Survey) -> None:
        """Raise ExtractError before the first load into an extract whose own types cannot tell the keys apart."""
        confirmed = looked.confirmed
        if confirmed is not None and confirmed.known.definition == surveyed.known.definition:
            return
        shell, hyper = self.shell(looked)
        if shell is None or hyper is None:
            return
        stored = {column.name: column for column in describe(hyper).columns}
        names = _shape(surveyed.relation, shell).names
        for column in surveyed.relation.key:
            if found := stored.get(names.get(column.name, column.name)):
                check_key(column, found)

    def _columns(self, looked: Looked) -> tuple[str, ...]:
        """Which columns the extract has: the datasource's own if people built it, else the spec's, else all."""
        if self.spec.query is not None:
            return self._agree_on_query(looked)
        table = TableName.parse(self.spec.main_table)
        # Before the package is downloaded: it may be large, and a spec that does not fit the source needs no package.
        known = column_names(self.snowflake, table)
        check_columns(self.spec, known)
        shell, hyper = self.shell(looked)
        self._by_patch.refuse_document(shell, looked)
        if shell is None:
            self._check_replaceable(looked, hyper, self.spec.columns or known, known)
            return self.spec.columns
        package = read_package(shell)
        names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
        assert looked.server.found is not None, "a shell is downloaded from there"
        check_agreement(
            package,
            shown=looked.server.found.shown,
            table=table,
            source_columns=known,
            wanted=[name if name in names else name.upper() for name in needed_columns(self.spec)],
            only=[name if name in names else name.upper() for name in self.spec.columns],
        )
        self._check_increment(package, hyper)
        return tuple(name for name in known if name in names)

    def _agree_on_query(self, looked: Looked) -> tuple[str, ...]:
        """A datasource that people built must show this very query, with all its columns."""
        shell, hyper = self.shell(looked)
        self._by_patch.refuse_document(shell, looked)
        if shell is not None:
            assert looked.server.found is not None, "a shell is downloaded from there"
            relation, package = relation_of(self.spec, self.snowflake), read_package(shell)
            check_query_agreement(
                package,
                shown=looked.server.found.shown,
                query=self.spec.query or "",
                columns=[column.name for column in relation.columns],
            )
            self._check_increment(package, hyper)
        elif self._may_be_anybodys(looked, hyper):
            shown = [column.name for column in relation_of(self.spec, self.snowflake).columns]
            self._check_replaceable(looked, hyper, shown, shown)
        return ()

    def _may_be_anybodys(self, looked: Looked, hyper: Path | None) -> bool:
        """Whether what is published may never have been ours."""
        return hyper is not None and (looked.confirmed is None or looked.elsewhere is not None)

    def _check_replaceable(
        self, looked: Looked, hyper: Path | None, wanted: Sequence[str], known: Sequence[str]
    ) -> None:
        """Refuse to replace a Hyper file of other columns: it may be dear to somebody."""
        if self.spec.datasource.replace or hyper is None or not self._may_be_anybodys(looked, hyper):
            return
        assert looked.server.found is not None, "the file is downloaded from there"
        check_replaceable(
            self.spec.name,
            looked.server.found.shown,
            there=[column.name for column in describe(hyper).columns],
            wanted=[name if name in known else name.upper() for name in wanted],
        )

    def _check_increment(self, package: Package, hyper: Path | None) -> None:
        """Refused now rather than after Spark has read everything."""
        if self.spec.delivery == "server" and hyper is not None:
            needed_increment(self.spec.name, package, hyper)

    def plan(
        self,
        looked: Looked,
        surveyed: Survey,
        mode: Mode,
        slices: Sequence[str] = (),
        *,
        hinted: bool = False,
        owed: Reason | None = None,
    ) -> Plan:
        """`owed` is why everything has to be loaded, where whoever asks knows of a reason."""
        pending = self.change_sets.pending()
        return plan_refresh(
            Situation(
                extract=self.spec.name,
                mode=mode,
                policy=self.spec.policy,
                now=surveyed.known,
                confirmed=looked.confirmed.known if looked.confirmed else None,
                base_present=looked.base is not None,
                foreign=looked.foreign,
                elsewhere=looked.elsewhere,
                forgotten=looked.confirmed is None and bool(self.settled_versions()),
                pending=tuple(one.id for one in pending),
                owed=owed
                or next((Reason[one.reason] for one in pending if one.decision == "full" and one.reason), None),
                slices=tuple(slices),
                hinted=hinted,
                opaque=surveyed.relation.why_full,
                same_rows=mode != "full" and self._holds_same_rows(looked, surveyed),
                restless=surveyed.relation.view is not None and surveyed.relation.view.restless,
                unsought=surveyed.relation.unsought,
            )
        )

    def _holds_same_rows(self, looked: Looked, surveyed: Survey) -> bool:
        """Whether the extract equals the source of then under the columns of now, though DDL ran on it since.

        Time Travel shows old rows under the current columns: after a rename, a drop or an add it shows something else than
        was read then, and after a comment it does not. Only for extracts that show all that a refresh by key relies on.
        """
        confirmed, relation = looked.confirmed, surveyed.relation
        if confirmed is None or looked.base is None or looked.foreign:
            return False
        if confirmed.known.ddl in (None, surveyed.known.ddl) or confirmed.known.schema != surveyed.known.schema:
            return False
        hidden = relation.watermark is not None and relation.watermark not in relation.columns
        if hidden or relation.aggregated or relation.why_full is not None:
            return False
        self.log("DDL ran on the source since the last refresh: comparing what the extract shows with the rows of then")
        try:
            return Verification(self, confirmed).equals_source().passed
        except SnowflakeError as error:
            if error.errno not in BEYOND_TIME_TRAVEL:
                raise
            return False

    # Detect

    def detect(
        self,
        looked: Looked,
        surveyed: Survey,
        plan: Plan,
        *,
        ident: str,
        resync: Sequence[str | None],
        compare: Sequence[str | None] = (),
        allow_empty: bool,
        hints: Sequence[Hint] = (),
        reports: Iterable[int] = (),
    ) -> tuple[Plan, ChangeSet | None]:
        """Read what changed and make it durable."""
        crash_after("planned")
        self.check_lease()
        self.change_sets.clean()
        base = None
        if looked.base is not None and looked.confirmed is not None:
            slices = counts_from_json(looked.base.manifest["slice_rows"])
            base = Base(looked.confirmed, looked.base.extract, shape_of(looked.base), slices)
        self._need_room(looked)
        with self.stages.timed("spark"):
            require_java(os.environ)
            self.log("starting Spark")
            spark = self._spark()
        with self.stages.timed("detect"), self.snowflake.kept_open():
            plan, made = make_change_set(
                surveyed,
                plan,
                ident=ident,
                access=self.snowflake,
                spark=spark,
                store=self.change_sets,
                base=base,
                confirmed=looked.confirmed,
                resync=resync,
                compare=compare,
                hints=hints,
                reports=reports,
                allow_empty=allow_empty,
                log=self.log,
            )
        crash_after("staged")
        return plan, made

    def _need_room(self, looked: Looked) -> None:
        """Room for the next version and its package; told now rather than when the disk is full half-way."""
        self._prune(looked.confirmed)
        found, base = looked.server.found, looked.base
        size = base.extract.stat().st_size if base else (found.size_mb or 0) * 1_000_000 if found else 0
        need_space(self.folder, 2 * size)

    # Apply

    def apply(self, looked: Looked, change_set: ChangeSet) -> tuple[Version, Applied]:
        """A new version of the extract, verified against the source at the change set's own version."""
        folder = self.change_sets.path(change_set.id)
        self.check_lease()
        self._prune(looked.confirmed)
        with self._swept(), new_version(self.versions) as workspace:
            with self.stages.timed("shell"), self.snowflake.kept_open():
                shell, template = self.shell(looked)
                relation = relation_of(self.spec, self.snowflake, columns=self._columns(looked))
                shape = _shape(relation, shell)
                if shell is not None:
                    shutil.copyfile(shell, workspace.folder / SHELL)
            with self.stages.timed("apply"):
                applied = apply_change_set(
                    workspace,
                    change_set,
                    folder,
                    shape=shape,
                    base=looked.base,
                    # Only a package that people built fixes the types; what we made ourselves may change with the source.
                    template=template if shell is not None else None,
                    rebuild_factor=self.spec.thresholds.rebuild_factor,
                )
            crash_after("applied")
            self.log(f"{applied.purged:,} rows purged, {applied.appended:,} appended: verifying against the source")
            with self.stages.timed("verify"):
                sums = self._verified_content(workspace.extract, change_set, looked.base, shape)
                verified = self._verify_slices(workspace.extract, change_set, looked.base, relation, shape, sums)
            manifest = {
                "extract": self.spec.name,
                "change_set": change_set.id,
                "change_sets": [*change_set.settles, change_set.id],
                "base": change_set.base,
                "source_version": change_set.source_version,
                "server_version": looked.server.version_text,
                "known": change_set.known.__dict__,
                "watermark": change_set.watermark,
                "reports": change_set.reports,
                "fingerprint": content_digest(sums),
                "content_sums": sums_to_json(sums),
                "slice_digests": slice_digests(sums),
                "verified": verified,
                "rows": applied.after,
                "rows_purged": applied.purged,
                "rows_appended": applied.appended,
                "slice_rows": slice_rows(sums),
                "bytes_per_row": bytes_per_row(workspace.extract, looked.base, change_set),
                "shape": shape_to_json(shape),
            }
            version = self.versions.commit(
                workspace, manifest, after=looked.confirmed.version if looked.confirmed else None
            )
        crash_after("verified")
        return version, applied

    def _verified_content(self, extract: Path, change_set: ChangeSet, base: Version | None, shape: Shape) -> Prints:
        """Verify what was replaced (L1); return the sums of the whole content, brought forward from the base's."""
        if change_set.decision == "full" or base is None:
            sums = content_sums(extract, shape)
            verify_loaded(sums, change_set)
            return sums
        folder = self.change_sets.path(change_set.id)
        verify_replaced(extract, change_set, folder, shape)
        # Versions of earlier releases have no sums.
        kept = base.manifest.get("content_sums")
        before = sums_from_json(kept) if kept is not None else content_sums(base.extract, shape)
        replaced = replaced_rows(change_set, folder, shape)
        purged, appended = (content_sums(file, shape, replaced) for file in (base.extract, extract))
        return bring_forward(before, purged=purged, appended=appended)

    def _verify_slices(
        self,
        extract: Path,
        change_set: ChangeSet,
        base: Version | None,
        relation: Relation,
        shape: Shape,
        sums: Prints,
    ) -> dict[str, str]:
        """Compare slices in turn with the source (L2), or all that were touched; return at which version each last was."""
        rows, settings = slice_rows(sums), self.spec.verify
        kept = base.manifest.get("verified", {}) if base is not None and change_set.decision == "incremental" else {}
        verified = {name: version for name, version in kept.items() if name in rows}
        read = SourceVersion.parse(change_set.source_version)
        pinned = readable_version(self.snowflake, relation.tables, read, change_set.known.token)
        if relation.why_full is not None or pinned is None:
            # Asked again, such a query may rightly answer something else, and such a table does.
            return verified
        chosen = set(slices_in_turn(verified, rows, settings.slices_per_run))
        if settings.each == "slices":
            chosen |= set(rows) if change_set.decision == "full" else {*change_set.purged, *change_set.appended}
        verify_slices(
            extract,
            self.spec.name,
            [None if name == NO_SLICE_KEY else name for name in chosen],
            shape=shape,
            table_sql=relation.shown(pinned),
            query=self.snowflake.query,
        )
        return {**verified, **dict.fromkeys(sorted(chosen & rows.keys()), change_set.source_version)}

    def shell(self, looked: Looked) -> tuple[Path | None, Path | None]:
        """The package around the extract, and the file whose column types a full refresh keeps; downloaded if need be."""
        found, base, confirmed = looked.server.found, looked.base, looked.confirmed
        if found is None:
            return None, None
        if base is not None and confirmed is not None and self._is_the_servers(looked, base):
            # The local version is provably the server's: nothing to download. Without a shell we made it ourselves.
            shell = base.folder / SHELL
            return (shell if shell.is_file() else None), base.extract
        if base is not None and looked.bare:
            return None, base.extract
        version = looked.server.version_text or ""
        # While this process did not hold the lease, another one may have swept it.
        if self._fetched is None or self._fetched[0] != version or not self._fetched[2].is_file():
            self.log("downloading the datasource's package")
            with TableauClient(self.tableau) as client:
                shell, hyper = fetch_shell(client, found, self.work / "download", log=self.log)
            self._fetched = (version, None if read_package(shell).is_bare else shell, hyper)
        return self._fetched[1], self._fetched[2]

    def _is_the_servers(self, looked: Looked, base: Version) -> bool:
        """Whether the base and its shell are provably what the server holds, the refresh events included."""
        same = looked.confirmed is not None and looked.server.version_text == looked.confirmed.server_version
        return same and (self.spec.delivery != "server" or bool(base.manifest.get("from_server")))

    # Publish

    def publish(self, looked: Looked, version: Version) -> Published:
        """Bring the version to the server over exactly what was looked at; intent before, confirmation after."""
        with self._swept():
            published = self._publish(looked, version)
        # Whoever took over looks at what is there: a confirmation from here would be an old one by then.
        self.check_lease()
        return published

    def _publish(self, looked: Looked, version: Version) -> Published:
        if self.spec.delivery == "server":
            return self._by_server.publish(looked, version)
        if self._by_patch.fits(looked, version):
            return self._by_patch.publish(looked, version)
        keyed = self._by_patch.keyed(version)
        self.intend(looked, version, keyed=keyed)
        crash_after("intended")
        shell = version.folder / SHELL
        with (
            self.stages.timed("publish"),
            self._by_patch.whole(version) as hyper,
            TableauClient(self.tableau) as client,
        ):
            self.sent_bytes = hyper.stat().st_size
            delivered = deliver(
                client,
                self.spec,
                looked.server,
                hyper=hyper,
                shell=shell if shell.is_file() else None,
                rows=version.manifest["rows"],
                credentials=credentials_for(self.spec, looked.server.found, self.env),
                folder=self.work / "publish",
                home=self.folder,
                log=self.log,
                check=self.check_lease,
                landed=lambda: crash_after("landed"),
            )
            warnings = delivered.warnings
            if delivered.doubtful:
                warnings += self._by_patch.check_delivered(client, delivered.found, version)
        crash_after("published")
        self.warnings += warnings
        confirmation = self.confirmation_of(version, ServerLook(looked.server.project, delivered.found), keyed=keyed)
        return Published(confirmation, delivered.found, warnings)

    def intend(
        self, looked: Looked, version: Version, *, hole: str | None = None, patch: bool = False, keyed: bool = False
    ) -> None:
        self.check_lease()
        intent = Intent(
            extract=self.spec.name,
            change_set=version.manifest["change_set"],
            version=version.id,
            base_server_version=looked.server.version_text,
            fingerprint=version.manifest["fingerprint"],
            known=known_of(version),
            hole=hole,
            patch=patch,
            keyed=keyed,
        )
        self.change_sets.intend(intent)

    def confirmation_of(self, version: Version, server: ServerLook, *, keyed: bool = False) -> Confirmation:
        assert server.found is not None
        manifest = version.manifest
        return Confirmation(
            extract=self.spec.name,
            version=version.id,
            source_version=manifest["source_version"],
            known=known_of(version),
            watermark=manifest["watermark"],
            datasource_id=server.found.id,
            server_version=server.version_text or "",
            fingerprint=manifest["fingerprint"],
            rows=manifest["rows"],
            change_sets=tuple(manifest["change_sets"]),
            keyed=keyed,
            reports=tuple(manifest.get("reports", ())),
            datasource=shown_place(server.found.name, server.project.path, self.tableau.where),
        )

    def settle(self, confirmation: Confirmation) -> None:
        """After the confirmation is on record: its change sets are no longer pending, old versions go."""
        crash_after("confirmed")
        if self._lost():
            # It is on record: whoever took over finds that out by itself, and may be at work on its own intent.
            return
        self.change_sets.settle(confirmation.change_sets)
        self._prune(confirmation)
        remove(self.work)
        self._fetched = None

    def _prune(self, confirmed: Confirmation | None) -> None:
        """Old versions go: also before a new one, or a publish that is refused again and again would fill the disk."""
        intent = self.change_sets.intent()
        protected = {one.version for one in (confirmed, intent) if one is not None}
        self.versions.prune(self.spec.keep.versions, protected=protected, most_bytes=self.spec.keep.size)


def _settled(confirmed: Confirmation | None) -> Settled | None:
    if confirmed is None:
        return None
    return Settled(confirmed.known.token, SourceVersion.parse(confirmed.source_version))


def for_extract(access: SnowflakeAccess, spec: ExtractSpec) -> SnowflakeAccess:
    asked = {name: value for name, value in vars(spec.snowflake).items() if value}
    table = TableName.parse(spec.main_table)
    return replace(access, database=quote(table.database), schema=quote(table.schema), **asked)


def for_datasource(access: TableauAccess, spec: ExtractSpec) -> TableauAccess:
    return replace(
        access,
        server_url=spec.datasource.server or access.server_url,
        site=access.site if spec.datasource.site is None else spec.datasource.site,
    )


def _shape(relation: Relation, shell: Path | None) -> Shape:
    key = tuple(column.name for column in relation.key)
    loose = relation.unrepeatable
    if shell is None:
        return Shape(relation.columns, key, relation.slices, loose=loose)
    package = read_package(shell)
    names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
    return Shape(relation.columns, key, relation.slices, names, loose)
