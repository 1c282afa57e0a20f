"""One load from the listing to the commit: choose files, stage them, check, and change the table in one transaction."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tir_dagster.errors import LoadError
from tir_dagster.loading.commit import Committer, check_rows
from tir_dagster.loading.landing import LandingPlace, Listing, chosen, unfinished
from tir_dagster.loading.ledger import Committed, Ledger, prepare, read_ledger
from tir_dagster.loading.preview import CheckedRows, Preview, check_units
from tir_dagster.loading.selection import Chosen, Known, choose, in_turn, news
from tir_dagster.loading.staging import Staged, StagePlan, Stager, Unit, units_of
from tir_dagster.loading.tables import Bookkeeping, LoadTables, Target, target_of
from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal
from tir_dagster.spec.load import LoadSpec

_SHOWN_FILES = 5


@dataclass(frozen=True)
class LoadResult(Committed):
    """The result of a load. Without an id there was nothing to do."""

    files: tuple[Chosen, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, status: str) -> list[str]:
        return [chosen.file.path for chosen in self.files if chosen.status == status]


def new_load_id() -> str:
    """Return a new id; ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%dt%H%M%S%f}-{secrets.token_hex(3)}"


class Loader:
    """Runs one load spec; `after` is called with the name of each step that is done."""

    def __init__(
        self,
        spec: LoadSpec,
        *,
        access: SnowflakeAccess,
        stager: Stager,
        log: Callable[[str], None] = lambda _: None,
        after: Callable[[str], None] = lambda _: None,
    ) -> None:
        settings = {name: value for name, value in vars(spec.snowflake).items() if value}
        self.spec = spec
        self.access = replace(access, **settings)
        self.books = Bookkeeping.of(spec)
        self.place = LandingPlace.of(spec.files.path)
        self._stager, self._log, self._after = stager, log, after
        self._seconds: dict[str, float] = {}

    # Which files

    def listing(self) -> Listing:
        """Return the files that are there, and which of them are not complete, as far as one listing shows it."""
        everything = self.place.listed()
        files = chosen(everything, self.place, self.spec.files)
        return Listing(files, unfinished(files, everything, self.spec.files))

    def ledger(self) -> Ledger:
        return read_ledger(self.access, self.books, below=self.place.below)

    def preview(self) -> Preview:
        """Return what a load would do with each new file and its rows: all are read, and nothing is changed."""
        with self.access.kept_open():
            plan = self._plan(self.ledger(), {})
            if not plan:
                return Preview()
            checked, problem = CheckedRows(), ""
            try:
                target = self._target()
                if units := self._units(plan):
                    self._log(f"reading {len(units)} parts")
                    checked = check_units(StagePlan(self.access, self.place, self.spec, target), units)
                    self._check_files(plan, checked.staged)
                    counts = {"good": checked.rows.total(), "bad": checked.rejected.total()}
                    check_rows(self.spec, plan, checked.staged, **counts)
            except LoadError as error:
                problem = str(error)
        warnings = () if problem else tuple(self._warnings(plan, checked.staged, samples=False))
        rejects = checked.first_rejects(plan)
        return Preview(tuple(plan), checked.rows, checked.rejected, rejects, warnings, problem)

    def _plan(self, ledger: Ledger, only: Mapping[str, str]) -> list[Chosen]:
        listing = self.listing()
        # Named files are complete: somebody has checked that.
        listing = self._named(listing, only) if only else self._settled(listing, ledger.known)
        files = in_turn(self.spec, listing, ledger.known)
        if waiting := len(news(listing.files, ledger.known)) - len(news(files, ledger.known)):
            self._log(f"{waiting} new files wait: they are not complete, or come after a file that is not complete")
        return choose(self.spec, files, ledger.known, digest=self.place.digest, newest=ledger.newest)

    def _named(self, listing: Listing, only: Mapping[str, str]) -> Listing:
        """Return the named files; if a folder is the whole content, also the others in their folders.

        A file that changed since it was named counts as not complete.
        """
        whole = self.spec.mode == "truncate" and self.spec.snapshot == "folder"
        folders = {path.rpartition("/")[0] for path in only} if whole else set()
        files = [file for file in listing.files if file.path in only or file.folder in folders]
        changed = frozenset(file.path for file in files if only.get(file.path, "") not in ("", file.stamp))
        return Listing(files, listing.unfinished | changed)

    def _settled(self, listing: Listing, known: Mapping[str, Known]) -> Listing:
        """Return the listing, with files that are still being written as unfinished; S3 shows complete objects only."""
        if self.spec.files.complete == "marker" or self.place.is_s3:
            return listing
        now = datetime.now(UTC)
        ages = [(now - file.modified).total_seconds() for file in news(listing.files, known)]
        young = [age for age in ages if 0 <= age < self.spec.files.settle]
        if not young:
            return listing
        self._log(f"waiting {self.spec.files.settle - min(young):.1f} s until the newest files no longer change")
        time.sleep(self.spec.files.settle - min(young))
        before = {file.path: file.stamp for file in listing.files}
        again = self.listing()
        return Listing(again.files, frozenset(file.path for file in again.files if before.get(file.path) != file.stamp))

    # The load

    def run(self, only: Mapping[str, str] | None = None) -> LoadResult:
        """Load the new files, or only those with these paths and stamps; an empty stamp takes the file as it is.

        Raise LoadError if nothing was loaded.
        """
        # One connection for all before the commit; the commit has its own, which may have to be opened again.
        with self.access.kept_open():
            plan, target, newest = self._prepared(only or {})
        if target is None:
            return LoadResult(seconds=self._seconds)
        self._after("chosen")
        tables = LoadTables.of(target, self.books, new_load_id())
        staged = self._stage(tables, plan)
        plan = _with_digests(plan, staged)
        self._after("staged")
        with self._timed("commit"):
            committer = Committer(
                self.spec,
                tables,
                access=self.access,
                newest=newest,
                below=self.place.below,
                log=self._log,
                after=self._after,
            )
            committed = committer.commit(plan, staged)
        self._after("committed")
        self._remove(f"{self.spec.name}/{tables.load_id}")
        self._after("unstaged")
        return self._loaded(committed, plan, staged)

    def _prepared(self, only: Mapping[str, str]) -> tuple[list[Chosen], Target | None, str | None]:
        """Return the files to load, their target, and the newest order key loaded so far; no target without files."""
        with self._timed("look"):
            ledger = self.ledger()
            plan = self._plan(ledger, only)
        if not plan:
            return [], None, None
        names = [chosen.file.path.rpartition("/")[2] for chosen in plan[:_SHOWN_FILES]]
        self._log(f"{len(plan)} new files: {', '.join(names)}{' …' if len(plan) > _SHOWN_FILES else ''}")
        target = self._target()
        try:
            graves = self.spec.in_order and target.order is not None
            prepare(self.access.query, self.books, target, exists=ledger.exists, graves=graves)
        except SnowflakeError as failure:
            home = self.books.ledger
            raise LoadError(
                f"{self.spec.name}: the tables for the records of loads cannot be created: {failure} The role needs CREATE TABLE "
                f"and CREATE STAGE in {home.database}.{home.schema}, or name another schema as `bookkeeping`."
            ) from None
        if ledger.exists and any(chosen.status == "LOADED" for chosen in plan):
            # Staged files of loads that died; a load that still runs would find rows missing and stop.
            self._remove(self.spec.name)
        return plan, target, ledger.newest

    def _loaded(self, committed: Committed, plan: Sequence[Chosen], staged: Sequence[Staged]) -> LoadResult:
        warnings = tuple(self._warnings(plan, staged))
        result = LoadResult(**vars(committed), files=tuple(plan), warnings=warnings, seconds=self._seconds)
        counts = (f"{getattr(result, what):,} {what}" for what in ("inserted", "updated", "deleted", "rejected"))
        self._log(", ".join(counts))
        return result

    def _target(self) -> Target:
        table = TableName.parse(self.spec.table)
        try:
            rows = self.access.query(f"DESCRIBE TABLE {table.sql}")
        except SnowflakeError as failure:
            if failure.errno not in MISSING_OBJECT:
                raise
            body = ", ".join(f"{name} {kind}" for name, kind in self.spec.columns.items()) or "…"
            raise LoadError(
                f"{self.spec.name}: {table} does not exist, or the role may not see it. Create it: CREATE TABLE {table.sql} ({body})."
            ) from None
        return target_of(self.spec, [(str(row[0]), str(row[1])) for row in rows if str(row[2]).upper() == "COLUMN"])

    # Staging

    def _stage(self, tables: LoadTables, plan: Sequence[Chosen]) -> list[Staged]:
        if all(chosen.status != "LOADED" for chosen in plan):
            return []
        folder = f"@{self.books.stage.sql}/{self.spec.name}/{tables.load_id}"
        with self._timed("stage"):
            units = self._units(plan)
            self._log(f"staging {len(units)} parts")
            staged = self._stager(StagePlan(self.access, self.place, self.spec, tables.target, folder), units)
        self._check_files(plan, staged)
        self._check_units(units, staged)
        return staged

    def _units(self, plan: Sequence[Chosen]) -> list[Unit]:
        """Return the parts in which the files are read; Spark's own reader reads whole files only."""
        parts = self.spec.files.format == "parquet" and self.spec.files.through == "pyarrow"
        return [
            unit
            for number, chosen in enumerate(plan)
            if chosen.status == "LOADED"
            for unit in units_of(self.place, number, chosen.file.path, is_parquet=parts and chosen.file.size > 0)
        ]

    def _check_units(self, units: Sequence[Unit], staged: Sequence[Staged]) -> None:
        """Raise if a part has no result: that is not the same as an empty part."""
        expected = sorted((unit.number, unit.part) for unit in units)
        if expected == sorted((unit.number, unit.part) for unit in staged):
            return
        raise LoadError(
            f"{self.spec.name}: {len(expected)} parts of files had to be staged, and Spark returned {len(staged)} results that do "
            "not match them. Nothing was loaded; look for lost tasks in Spark's log, then run again."
        )

    def _check_files(self, plan: Sequence[Chosen], staged: Sequence[Staged]) -> None:
        """Raise if a file could not be read, has other columns than expected, or changed meanwhile."""
        if problems := list(dict.fromkeys(unit.problem for unit in staged if unit.problem)):
            raise LoadError(f"{self.spec.name}: {' '.join(problems[:_SHOWN_FILES])}")
        drifted = [unit for unit in staged if unit.drift and (self.spec.drift == "stop" or self._intolerable(unit))]
        if drifted:
            by_path = {plan[unit.number].file.path: ", ".join(unit.drift) for unit in drifted}
            differences = "; ".join(f"{path}: {drift}" for path, drift in list(by_path.items())[:_SHOWN_FILES])
            tolerate = (
                ", or set `drift: tolerate`: then what is not expected is left out, and what is missing becomes NULL, also where "
                "the table has a value"
            )
            raise LoadError(
                f"{self.spec.name}: {differences}. Nothing was loaded. Fix the file, or change `columns` in the load's spec"
                f"{'' if any(self._intolerable(unit) for unit in drifted) else tolerate}."
            )
        for chosen_file in plan:
            now = self.place.look(chosen_file.file.path)
            if now is None or now.stamp != chosen_file.file.stamp:
                how = "was removed" if now is None else "changed"
                raise LoadError(
                    f"{self.spec.name}: {chosen_file.file.path} {how} while it was read. Nothing was loaded; run again when it is complete."
                )

    def _intolerable(self, staged: Staged) -> bool:
        """Whether a key column is missing, a column has an unfit type, or no expected column was found."""
        needed = {name.casefold() for name in (*self.spec.key, self.spec.order_by, self.spec.delete_flag) if name}
        return staged.unfit or not needed.isdisjoint(name.casefold() for name in staged.missing)

    def _warnings(self, plan: Sequence[Chosen], staged: Sequence[Staged], *, samples: bool = True) -> Iterator[str]:
        for unit in staged:
            path = plan[unit.number].file.path
            if unit.drift:
                yield f"{path}: {', '.join(unit.drift)}"
            if samples:
                yield from unit.samples
        for chosen_file in plan:
            if chosen_file.status == "LOADED" and chosen_file.file.size == 0:
                yield f"{chosen_file.file.path}: it is empty (0 bytes); no row came from it"

    # Edges

    def _remove(self, folder: str) -> None:
        """Remove staged files; if that fails, the load does not: files that are left only cost space."""
        try:
            self.access.query(f"REMOVE {literal(f'@{self.books.stage.sql}/{folder}/')}")
        except (SnowflakeError, OSError) as failure:
            self._log(f"the staged files of {folder} were not removed: {failure}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - begun, 3)


def _with_digests(plan: Sequence[Chosen], staged: Sequence[Staged]) -> list[Chosen]:
    digests = {unit.number: unit.digest for unit in staged if unit.digest}
    return [replace(entry, digest=digests.get(number, entry.digest)) for number, entry in enumerate(plan)]
