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
from tir_dagster.loading.landing import Listing, Place, chosen, unfinished
from tir_dagster.loading.ledger import Changed, Committed, Ledger, prepare, read_ledger
from tir_dagster.loading.merge_sql import Places
from tir_dagster.loading.preview import Checker, Preview
from tir_dagster.loading.selection import Chosen, Known, choose, in_turn, news
from tir_dagster.loading.staging import Staged, StagePlan, Stager, Unit, units_of
from tir_dagster.loading.tables import Bookkeeping, Target, check_supported, target_of
from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal
from tir_dagster.spec.load import LoadSpec

_SHOWN_FILES = 5


@dataclass(frozen=True)
class Loaded:
    """What a load did. Without an id there was nothing to do."""

    load_id: str = ""
    files: tuple[Chosen, ...] = ()
    rows: int = 0
    rejected: int = 0
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    changed: Changed | None = None
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, status: str) -> list[str]:
        return [one.file.path for one in self.files if one.status == status]


def new_load_id() -> str:
    """Ids sort by the moment they were made."""
    return f"{datetime.now(UTC):%Y%m%dt%H%M%S%f}-{secrets.token_hex(3)}"


class Loader:
    """One load spec with plain objects; `after` is told each step that is done."""

    def __init__(
        self,
        spec: LoadSpec,
        *,
        access: SnowflakeAccess,
        stager: Stager,
        log: Callable[[str], None] = lambda _: None,
        after: Callable[[str], None] = lambda _: None,
    ) -> None:
        asked = {name: value for name, value in vars(spec.snowflake).items() if value}
        self.spec = spec
        self.access = replace(access, **asked)
        self.books = Bookkeeping.of(spec)
        self.place = Place.of(spec.files.path)
        self._stager, self._log, self._after = stager, log, after
        self._seconds: dict[str, float] = {}

    # Which files

    def listing(self) -> Listing:
        """The files that are there, and which of them are not complete, as far as one look can tell."""
        everything = self.place.listed()
        files = chosen(everything, self.place, self.spec.files)
        return Listing(files, unfinished(files, everything, self.spec.files))

    def ledger(self) -> Ledger:
        return read_ledger(self.access, self.books, below=self.place.below)

    def preview(self) -> Preview:
        """What a load would do with each new file, and say of its rows: all are read here, and nothing is touched."""
        with self.access.kept_open():
            plan = self._plan(self.ledger(), {})
            if not plan:
                return Preview()
            checker, problem = Checker(self.spec, plan), ""
            try:
                self._check(plan, checker)
            except LoadError as error:
                problem = str(error)
        warnings = () if problem else tuple(self._warnings(plan, checker.staged, samples=False))
        return Preview(tuple(plan), checker.rows, checker.rejected, checker.rejects, warnings, problem)

    def _check(self, plan: Sequence[Chosen], checker: Checker) -> None:
        target = self._target()
        units = self._units(plan)
        if not units:
            return
        self._log(f"reading {len(units)} parts")
        staged = checker.read(self._stage_plan(target, ""), units, target)
        self._check_files(plan, staged)
        check_rows(self.spec, plan, staged, good=checker.rows.total(), bad=checker.rejected.total())

    def _plan(self, ledger: Ledger, only: Mapping[str, str]) -> list[Chosen]:
        found = self.listing()
        # Whoever names files has seen that they are complete.
        found = self._named(found, only) if only else self._settled(found, ledger.known)
        files = in_turn(self.spec, found, ledger.known)
        if waiting := len(news(found.files, ledger.known)) - len(news(files, ledger.known)):
            self._log(f"{waiting} new files wait: they are not complete, or must not overtake one that is not")
        return choose(self.spec, files, ledger.known, digest=self.place.digest, newest=ledger.newest)

    def _named(self, found: Listing, only: Mapping[str, str]) -> Listing:
        """These files; where a folder is the whole content, with the others in their folders.

        One that no longer looks as it did when it was named may be half written.
        """
        whole = self.spec.mode == "truncate" and self.spec.snapshot == "folder"
        folders = {path.rpartition("/")[0] for path in only} if whole else set()
        files = [file for file in found.files if file.path in only or file.folder in folders]
        other = frozenset(file.path for file in files if only.get(file.path, "") not in ("", file.stamp))
        return Listing(files, found.unfinished | other)

    def _settled(self, found: Listing, known: Mapping[str, Known]) -> Listing:
        """With those as unfinished that are still being written; S3 shows an object only when it is whole."""
        if self.spec.files.complete == "marker" or self.place.is_s3:
            return found
        now = datetime.now(UTC)
        ages = [(now - file.modified).total_seconds() for file in news(found.files, known)]
        young = [age for age in ages if 0 <= age < self.spec.files.settle]
        if not young:
            return found
        self._log(f"waiting {self.spec.files.settle - min(young):.1f} s until the newest files have settled")
        time.sleep(self.spec.files.settle - min(young))
        before = {file.path: file.stamp for file in found.files}
        again = self.listing()
        return Listing(again.files, frozenset(file.path for file in again.files if before.get(file.path) != file.stamp))

    # The load

    def run(self, only: Mapping[str, str] | Sequence[str] = ()) -> Loaded:
        """Load what is new, or only these of it, each if its stamp is still the one named. LoadError says why nothing was."""
        named = only if isinstance(only, Mapping) else dict.fromkeys(only, "")
        # For what comes before the commit; that one has a connection of its own, which may be opened again.
        with self.access.kept_open():
            plan, target, newest = self._prepared(named)
        if target is None:
            return Loaded(seconds=self._seconds)
        places = Places(target, self.books, new_load_id())
        staged = self._stage(places, plan)
        plan = _with_digests(plan, staged)
        self._after("staged")
        with self._timed("commit"):
            done = self._committer(places, newest).commit(plan, staged)
        self._after("committed")
        self._remove(f"{self.spec.name}/{places.load_id}")
        return self._loaded(done, plan, staged)

    def _prepared(self, only: Mapping[str, str]) -> tuple[list[Chosen], Target | None, str | None]:
        """The files to load, where to, and the newest one loaded so far; no target if there are none."""
        with self._timed("look"):
            ledger = self.ledger()
            plan = self._plan(ledger, only)
        if not plan:
            return [], None, None
        self._log(f"{len(plan)} new files: {_named(plan)}")
        target = self._target()
        with self._told():
            graves = self.spec.in_order and target.order is not None
            prepare(self.access.query, self.books, target, exists=ledger.exists, graves=graves)
        if ledger.exists and any(one.status == "LOADED" for one in plan):
            # What loads that died have left; another one at work would find rows missing and stop.
            self._remove(self.spec.name)
        return plan, target, ledger.newest

    def _committer(self, places: Places, newest: str | None) -> Committer:
        return Committer(
            self.spec,
            places,
            access=self.access,
            newest=newest,
            below=self.place.below,
            log=self._log,
            after=self._after,
        )

    def _loaded(self, done: Committed, plan: Sequence[Chosen], staged: Sequence[Staged]) -> Loaded:
        counts = {
            "inserted": done.inserted,
            "updated": done.updated,
            "deleted": done.deleted,
            "rejected": done.rejected,
        }
        self._log(", ".join(f"{count:,} {what}" for what, count in counts.items()))
        return Loaded(
            done.load_id,
            tuple(plan),
            rows=done.rows,
            changed=done.changed,
            warnings=tuple(self._warnings(plan, staged)),
            seconds=self._seconds,
            **counts,
        )

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
        target = target_of(self.spec, [(str(row[0]), str(row[1])) for row in rows if str(row[2]).upper() == "COLUMN"])
        check_supported(target)
        return target

    # Staging

    def _stage(self, places: Places, plan: Sequence[Chosen]) -> list[Staged]:
        if all(one.status != "LOADED" for one in plan):
            return []
        folder = f"@{self.books.stage.sql}/{self.spec.name}/{places.load_id}"
        with self._timed("stage"):
            units = self._units(plan)
            self._log(f"staging {len(units)} parts")
            staged = self._stager(self._stage_plan(places.target, folder), units)
        self._check_files(plan, staged)
        self._check_units(units, staged)
        return staged

    def _stage_plan(self, target: Target, folder: str) -> StagePlan:
        return StagePlan(
            self.access,
            self.place,
            self.spec.files,
            target.wanted,
            folder,
            target.needed(),
            target.flag,
            self.spec.delete_values,
        )

    def _units(self, plan: Sequence[Chosen]) -> list[Unit]:
        """The parts in which files are read; Spark itself reads whole files only."""
        parts = self.spec.files.format == "parquet" and self.spec.files.through == "pyarrow"
        return [
            unit
            for number, one in enumerate(plan)
            if one.status == "LOADED"
            for unit in units_of(self.place, number, one.file.path, is_parquet=parts and one.file.size > 0)
        ]

    def _check_units(self, units: Sequence[Unit], staged: Sequence[Staged]) -> None:
        """A part of which nobody told anything is not an empty one."""
        wanted = sorted((unit.number, unit.part) for unit in units)
        if wanted == sorted((one.number, one.part) for one in staged):
            return
        raise LoadError(
            f"{self.spec.name}: {len(wanted)} parts of files were to be staged, and {len(staged)} were told of, not the same "
            "ones. Nothing was loaded; look for lost tasks in Spark's log, then run again."
        )

    def _check_files(self, plan: Sequence[Chosen], staged: Sequence[Staged]) -> None:
        """Nothing is loaded of files that could not be read, look different, or changed meanwhile."""
        if problems := list(dict.fromkeys(one.problem for one in staged if one.problem)):
            raise LoadError(f"{self.spec.name}: {' '.join(problems[:_SHOWN_FILES])}")
        drifted = [one for one in staged if one.drift and (self.spec.drift == "stop" or self._intolerable(one))]
        if drifted:
            by_path = {plan[one.number].file.path: one.drift for one in drifted}
            said = "; ".join(f"{path}: {', '.join(drift)}" for path, drift in list(by_path.items())[:_SHOWN_FILES])
            tolerate = (
                ", or set `drift: tolerate`: then what is not expected is left out, and what is missing becomes NULL, also where "
                "the table has a value"
            )
            raise LoadError(
                f"{self.spec.name}: {said}. Nothing was loaded. Fix the file, or change `columns` in the load's spec"
                f"{'' if any(self._intolerable(one) for one in drifted) else tolerate}."
            )
        for one in plan:
            now = self.place.look(one.file.path)
            if now is None or now.stamp != one.file.stamp:
                how = "was removed" if now is None else "changed"
                raise LoadError(
                    f"{self.spec.name}: {one.file.path} {how} while it was read. Nothing was loaded; run again when it is whole."
                )

    def _intolerable(self, staged: Staged) -> bool:
        """Whether a key is missing, a column is of a type that holds no such values, or nothing expected was found."""
        named = [*self.spec.key, *filter(None, (self.spec.order_by, self.spec.delete_flag))]
        needed = {name.casefold() for name in named} & {name.casefold() for name in staged.missing}
        others = [said for said in staged.drift if not said.endswith((" is missing", " is not expected"))]
        return bool(others) or bool(needed)

    def _warnings(self, plan: Sequence[Chosen], staged: Sequence[Staged], *, samples: bool = True) -> Iterator[str]:
        for one in staged:
            path = plan[one.number].file.path
            if one.drift:
                yield f"{path}: {', '.join(one.drift)}"
            if samples:
                yield from one.samples
        for file in plan:
            if file.status == "LOADED" and file.file.size == 0:
                yield f"{file.file.path}: it is empty (0 bytes); no row came from it"

    # Edges

    def _remove(self, folder: str) -> None:
        """What is left in the stage costs room, nothing else: a failure here is no failure of the load."""
        try:
            self.access.query(f"REMOVE {literal(f'@{self.books.stage.sql}/{folder}/')}")
        except (SnowflakeError, OSError) as failure:
            self._log(f"the staged files of {folder} were not removed: {failure}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SnowflakeError as failure:
            raise LoadError(
                f"{self.spec.name}: the tables that loads are listed in cannot be made: {failure} The role needs CREATE TABLE "
                f"and CREATE STAGE in {self.books.database}.{self.books.schema}, or name another schema as `bookkeeping`."
            ) from None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - begun, 3)


def _with_digests(plan: Sequence[Chosen], staged: Sequence[Staged]) -> list[Chosen]:
    told = {one.number: one.digest for one in staged if one.digest}
    return [replace(one, digest=told.get(number, one.digest)) for number, one in enumerate(plan)]


def _named(plan: Sequence[Chosen]) -> str:
    shown = [one.file.path.rpartition("/")[2] for one in plan[:_SHOWN_FILES]]
    return ", ".join(shown) + (" …" if len(plan) > _SHOWN_FILES else "")
