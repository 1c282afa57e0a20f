"""The commit of a load: staged rows go into the session's tables, are checked, and one transaction changes the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tir_dagster.errors import LoadError
from tir_dagster.loading import merge_sql as sql
from tir_dagster.loading.ledger import (
    Changed,
    Committed,
    Run,
    beside_values,
    changed_keys,
    committed,
    count_actions,
    newest_loaded,
    record_load,
)
from tir_dagster.loading.selection import Chosen
from tir_dagster.loading.staging import REJECTED, ROWS, Staged
from tir_dagster.loading.tables import LEDGER_COLUMNS, LoadTables, create, stage_type
from tir_dagster.retries import NO_PAUSE, Repeat, RetryPolicy
from tir_dagster.snowflake.connection import SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal
from tir_dagster.spec.load import LoadSpec

# The connector's errors when the server or the session is gone: the rows are still staged, so the commit is tried again.
LOST = frozenset({250001, 250003, 251001, 251007, 290404, 390104, 390111, 390112, 390114, 625})
ATTEMPTS = RetryPolicy(tries=3, backoff=NO_PAUSE)
_FORMAT = "FILE_FORMAT=(TYPE=PARQUET USE_LOGICAL_TYPE=TRUE) MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE"
_SHOWN = 5
# A statement's text, with the values in it, has at most a million bytes; a path has at most 1,024 on S3.
FILES_PER_STATEMENT = 100

Counts = tuple[int, int, int]


class DisturbedError(LoadError):
    """Somebody else changed the table between looking at it and changing it."""


class Committer:
    """The commit of one load."""

    def __init__(
        self,
        spec: LoadSpec,
        tables: LoadTables,
        *,
        access: SnowflakeAccess,
        newest: str | None,
        below: str,
        log: Callable[[str], None],
        after: Callable[[str], None],
    ) -> None:
        self.spec, self.tables, self.access, self.books = spec, tables, access, tables.books
        # The largest order key when the files were chosen, of those whose paths begin like this.
        self._newest, self._below = newest, below
        self._log, self._after = log, after

    def commit(self, plan: Sequence[Chosen], staged: Sequence[Staged]) -> Committed:
        """Commit; after a lost connection check whether it is done, and if not, repeat it from the staged rows."""
        interrupted = False
        # The failure of a commit that is certainly not in the table; that of the check itself is not repeated.
        undone: Exception | None = None

        def attempt() -> Committed:
            nonlocal interrupted, undone
            try:
                return self._commit(plan, staged)
            except (SnowflakeError, OSError, LoadError) as failure:
                # Also after a refusal: an earlier attempt may have been committed after the last check.
                interrupted = interrupted or _passing(failure)
                if not interrupted:
                    raise
                message = self.access.scrub(str(failure))[:200]
                self._log(f"the commit was interrupted; checking whether the load is in the table ({message})")
                if loads := committed(self.access, self.books, [self.tables.load_id]):
                    return loads[0]
                undone = failure
                raise

        def may_repeat(error: Exception) -> Repeat | None:
            return Repeat() if error is undone and _passing(error) else None

        return ATTEMPTS.run(attempt, may_repeat=may_repeat)

    def _commit(self, plan: Sequence[Chosen], staged: Sequence[Staged]) -> Committed:
        with self.access.connect() as connection:

            def run(statement: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
                with connection.cursor() as cursor:
                    return [tuple(row) for row in cursor.execute(statement, params).fetchall()]

            self._make_temporary(run, staged)
            rows, rejected = self._copy(run, staged)
            check_rows(self.spec, plan, staged, good=sum(rows.values()), bad=sum(rejected.values()))
            self._list_files(run, plan, rows, rejected)
            self._after("copied")
            run("BEGIN")
            try:
                done = self._change(run, plan, rows, rejected)
                self._after("changed")
                run("COMMIT")
            except LoadError:
                # Only for our own errors: Snowflake's end the session, and with it the transaction.
                run("ROLLBACK")
                raise
            return done

    def _make_temporary(self, run: Run, staged: Sequence[Staged]) -> None:
        kinds = {f"C{at}": stage_type(column) for at, column in enumerate(self.tables.target.columns)}
        numbers = {"FILE_NO": "NUMBER(38,0)", "LINE_NO": "NUMBER(38,0)"}
        run(create(self.tables.staged, {**numbers, "IS_DELETED": "BOOLEAN", **kinds}, temporary=True))
        if self.spec.duplicates == "reject" or any(unit.rejected for unit in staged):
            run(create(self.tables.rejected, {**numbers, "REASON": "VARCHAR", "ROW_TEXT": "VARCHAR"}, temporary=True))
        run(create(self.tables.files, LEDGER_COLUMNS, temporary=True))
        run(create(self.tables.changed, {"ACTION": "VARCHAR", **kinds}, temporary=True))
        if self.tables.target.order is not None and self.tables.target.history is not None:
            moment = kinds[f"C{self.tables.target.order}"]
            marks = {"AT_TIME": moment, "NEXT_TIME": moment, "IS_DELETED": "BOOLEAN", "FRESH": "BOOLEAN"}
            run(create(self.tables.timeline, {**kinds, **marks}, temporary=True))

    def _copy(self, run: Run, staged: Sequence[Staged]) -> tuple[dict[int, int], dict[int, int]]:
        """Copy the staged rows into the session's tables; return the good and the bad rows by file."""
        good = self._copied(run, self.tables.staged, ROWS, sum(unit.rows for unit in staged))
        bad = self._copied(run, self.tables.rejected, REJECTED, sum(unit.rejected for unit in staged))
        if self.spec.duplicates == "reject" and self.spec.key and good:
            # Where a folder is the whole content of the table, all its files count together.
            for statement in sql.rejecting_duplicates(self.tables, together=self.spec.snapshot == "folder"):
                run(statement)
            good, bad = (_by_file(run, table) for table in (self.tables.staged, self.tables.rejected))
        return good, bad

    def _copied(self, run: Run, table: TableName, name: str, count: int) -> dict[int, int]:
        """Copy one staged folder into its table; return the rows by file, and raise if rows are missing."""
        if not count:
            return {}
        folder = f"@{self.books.stage.sql}/{self.spec.name}/{self.tables.load_id}/{name}/"
        run(f"COPY INTO {table.sql} FROM {literal(folder)} {_FORMAT}")
        rows = _by_file(run, table)
        if sum(rows.values()) != count:
            arrived = sum(rows.values())
            raise LoadError(
                f"{self.spec.name}: {arrived:,} of {count:,} staged rows arrived. Nothing was loaded; run again."
            )
        return rows

    def _list_files(self, run: Run, plan: Sequence[Chosen], rows: dict[int, int], rejected: dict[int, int]) -> None:
        names = [name for name in LEDGER_COLUMNS if name != "LOADED_AT"]
        entries = []
        for number, chosen in enumerate(plan):
            texts = [chosen.file.stamp, chosen.digest, chosen.order_key, chosen.status]
            counts = [chosen.file.size, rows.get(number, 0), rejected.get(number, 0)]
            owner = [str(self.books.table), self.spec.name, self.tables.load_id]
            entries.append([*owner, chosen.file.path, chosen.times, number, *texts, *counts])
        row = f"({', '.join(['%s'] * len(names))})"
        for begin in range(0, len(entries), FILES_PER_STATEMENT):
            batch = entries[begin : begin + FILES_PER_STATEMENT]
            listed = ", ".join([row] * len(batch))
            values = [value for entry in batch for value in entry]
            run(f"INSERT INTO {beside_values(self.tables.files)} ({', '.join(names)}) VALUES {listed}", values)

    def _change(self, run: Run, plan: Sequence[Chosen], rows: dict[int, int], rejected: dict[int, int]) -> Committed:
        """Make all changes of the transaction."""
        ((claimed,),) = run(sql.claim(self.tables))
        if claimed != len(plan):
            raise LoadError(
                f"{self.spec.name}: another load took {len(plan) - claimed} of {len(plan)} files at the same time. "
                "Nothing was loaded twice; run again."
            )
        self._check_newest(run)
        changed, counts = self._write(run) if rows or _replaces(self.spec, plan) else (None, (0, 0, 0))
        bad = sum(rejected.values())
        if bad:
            run(sql.rejects(self.tables))
        done = Committed(self.tables.load_id, sum(rows.values()) + bad, bad, *counts, changed)
        record_load(run, self.tables, self.spec.mode, done, files=len(plan))
        return done

    def _check_newest(self, run: Run) -> None:
        """Raise if another load replaced the whole content meanwhile: the older content must not come last."""
        if self.spec.mode == "truncate" and newest_loaded(run, self.tables, below=self._below) != self._newest:
            raise LoadError(
                f"{self.spec.name}: another load replaced the content of {self.spec.table} meanwhile. Nothing was loaded; run again."
            )

    def _write(self, run: Run) -> tuple[Changed | None, Counts]:
        """Change the table as the mode says; return which keys changed, and rows inserted, updated, deleted."""
        tables = self.tables
        if self.spec.mode == "append":
            ((inserted,),) = run(sql.insert(tables))
            if not tables.keys:
                return Changed("ADD_ROWS") if inserted else None, (inserted, 0, 0)
            run(sql.appended_keys(tables))
            return changed_keys(run, tables, count_actions(run, tables)), (inserted, 0, 0)
        if self.spec.mode == "truncate":
            return self._replace(run)
        if self.spec.mode == "merge":
            run(sql.merged_rows(tables))
            merge, *following = sql.merge(tables)
        else:
            run(sql.timeline(tables))
            run(sql.changed_versions(tables))
            merge, *following = sql.write_versions(tables)
        actions = count_actions(run, tables)
        changed, counts = changed_keys(run, tables, actions), (0, 0, 0)
        # A merge that changes nothing would still create a new version of the table.
        if changed is not None:
            by_key = tuple(actions.get(action, 0) for action in "IUD")
            (planned,) = [by_key] if self.spec.mode == "merge" else run(sql.planned_versions(tables))
            ((inserted, updated, deleted),) = run(merge)
            counts = (inserted, updated, deleted)
            check_undisturbed(self.spec, planned, counts)
        for statement in following:
            run(statement)
        return changed, counts

    def _replace(self, run: Run) -> tuple[Changed | None, Counts]:
        changed: Changed | None = Changed("MIXED_CHANGES")
        ((before,),) = run(f"SELECT COUNT(*) FROM {self.tables.target.table.sql}")
        if self.tables.keys:
            run(sql.replaced_keys(self.tables))
            changed = changed_keys(run, self.tables, count_actions(run, self.tables))
        if changed is None:
            return None, (0, 0, 0)
        ((deleted,),), ((inserted,),) = (run(statement) for statement in sql.replace(self.tables))
        check_undisturbed(self.spec, (0, 0, before), (0, 0, deleted), exactly=True)
        return changed, (inserted, 0, deleted)


def check_rows(spec: LoadSpec, plan: Sequence[Chosen], staged: Sequence[Staged], *, good: int, bad: int) -> None:
    """Raise if too many rows are bad, or if none would be left of a table that must not be empty."""
    total = good + bad
    if bad and bad / total > spec.reject_share:
        samples = [sample for unit in staged for sample in unit.samples][:_SHOWN]
        raise LoadError(
            f"{spec.name}: {bad:,} of {total:,} rows cannot be loaded, more than reject_share = {spec.reject_share:g} allows: "
            f"{'; '.join(samples) or 'keys that are twice in one file'}. Nothing was loaded; `tir load {spec.name} --dry-run` "
            "lists such rows: correct the files, or raise reject_share."
        )
    if _replaces(spec, plan) and not good and not spec.allow_empty:
        raise LoadError(
            f"{spec.name}: the new content has no rows; {spec.table} would be empty. Nothing was loaded; set "
            "`allow_empty: true` if it should be empty."
        )


def _replaces(spec: LoadSpec, plan: Sequence[Chosen]) -> bool:
    return spec.mode == "truncate" and any(chosen.status == "LOADED" for chosen in plan)


def _by_file(run: Run, table: TableName) -> dict[int, int]:
    return {int(row[0]): int(row[1]) for row in run(f"SELECT FILE_NO, COUNT(*) FROM {table.sql} GROUP BY FILE_NO")}


def _passing(failure: Exception) -> bool:
    """Whether the next attempt may succeed. Half an answer comes as the HTTP client's own error, which is an OSError."""
    if isinstance(failure, SnowflakeError):
        return failure.errno in LOST
    return isinstance(failure, (OSError, DisturbedError))


def check_undisturbed(spec: LoadSpec, planned: Sequence[Any], counts: Counts, *, exactly: bool = False) -> None:
    """Raise unless the rows that changed are those that were planned; a table with repeated keys has more rows than keys.

    Each statement sees what others have committed before it, so rows may change between two statements.
    """
    more_rows = not exactly and all(count >= least for count, least in zip(counts, planned, strict=True))
    if tuple(planned) != counts and not more_rows:
        raise DisturbedError(
            f"{spec.name}: somebody else changed {spec.table} during the commit. Nothing was loaded; run again when it is quiet."
        )
