"""Verification: what was replaced (L1), whole slices in turn (L2), and all that is published, with the spec's assumptions.

Always at the extract's own source version, never "now": a delay is no drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import NO_SLICE_KEY, ROWS, ChangeSet, parts_of, place_label, place_of, slice_label
from tir_dagster.changes.relation import Dimension, Relation, relation_of
from tir_dagster.changes.ties import open_order
from tir_dagster.errors import EQUALS_SOURCE, ExtractError, TirError, VerificationError
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.content import (
    Prints,
    bring_forward,
    content_fingerprints,
    content_sums,
    purged_sums,
    slice_rows,
    source_fingerprints,
    sums_from_json,
)
from tir_dagster.hyper.differences import RowDifferences, find_row_differences
from tir_dagster.hyper.fingerprints import different_slices
from tir_dagster.hyper.hyperfile import odd_keys
from tir_dagster.hyper.replace import ExtractShape, replaced_rows, staged_keys
from tir_dagster.measuring import moved, waiting_for
from tir_dagster.refresh.context import RefreshContext, remove, shape_of
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.server_content import same_rows, version_digests
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import readable_version
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.tableau.client import TableauClient

_MOST_NAMED = 5


def verify_replaced(extract: Path, change_set: ChangeSet, folder: Path, shape: ExtractShape) -> Prints:
    """Raise unless the rows of the replaced keys, read back from the closed file, are the staged ones (L1); return their sums."""
    keys = staged_keys(folder)
    with comparing(extract, shape) as comparison:
        comparison.narrow(keys)
        comparison.add(parts_of(folder / ROWS))
        wrong = comparison.misplaced_keys(keys, most=_MOST_NAMED + 1)
        sums = comparison.sums()
    if wrong:
        many = f"more than {_MOST_NAMED}" if len(wrong) > _MOST_NAMED else str(len(wrong))
        raise _not_as_read(change_set, shape, f", of {many} keys")
    return sums


def verify_loaded(sums: Prints, change_set: ChangeSet, shape: ExtractShape) -> None:
    """Raise unless a file that was loaded anew has as many rows in each slice as were read (L1)."""
    if slice_rows(sums) != {name: count for name, count in change_set.appended.items() if count}:
        raise _not_as_read(change_set, shape, "")


def _not_as_read(change_set: ChangeSet, shape: ExtractShape, what: str) -> VerificationError:
    where = f" in its table {shape.table[1]}" if shape.table else ""
    return VerificationError(
        f"{change_set.extract}: the new extract does not hold{where} the rows that were read{what}. Nothing was published. "
        "Run the refresh again; if that differs too, report it.",
        check=EQUALS_SOURCE,
    )


def compare_slices(
    extract: Path,
    slices: Collection[str | None],
    *,
    shape: ExtractShape,
    table_sql: str,
    query: Callable[[str], list[tuple[Any, ...]]],
) -> Mapping[str | None, Sequence[str]]:
    """Return how whole slices differ from the source, by slice (L2); `table_sql` is the source at the extract's own version.

    Row counts and sums of row digests tell whether a slice differs; only then every feature is asked for, for people.
    """
    different: Collection[str | None] = slices
    differences: Mapping[str | None, Sequence[str]] = {}
    for sums_only in (True, False):
        if not different:
            break
        # In parallel: Hyper and the warehouse work on different machines.
        with ThreadPoolExecutor(max_workers=1) as pool:
            source_query = pool.submit(
                source_fingerprints, query, table_sql, shape, only=different, sums_only=sums_only
            )
            extract_prints = content_fingerprints(extract, shape, only=different, sums_only=sums_only)
            with waiting_for("warehouse"):
                source_prints = source_query.result()
        differences = {**differences, **different_slices(extract_prints, source_prints, shape.columns)}
        different = list(differences)
    return differences


def verify_slices(
    extract: Path,
    name: str,
    slices: Collection[str | None],
    *,
    shape: ExtractShape,
    table_sql: str,
    query: Callable[[str], list[tuple[Any, ...]]],
    table: str = "",
) -> None:
    """Raise if whole slices differ from the source at the same version (L2)."""
    if different := compare_slices(extract, slices, shape=shape, table_sql=table_sql, query=query):
        first, lines = next(iter(different.items()))
        where = f"{table} in " if table else ""
        raise VerificationError(
            f"{name}: the new extract differs from the source in {where}{len(different)} slices, in "
            f"{first or 'rows without a slice'} for example: {'; '.join(lines[:3])}. Nothing was published. The next refresh "
            "replaces these slices, and loads everything if that does not help; if that differs too, report it.",
            check=EQUALS_SOURCE,
            slices={place_label(table, slice_name): differences for slice_name, differences in different.items()},
        )


def slices_in_turn(verified: Mapping[str, str], present: Iterable[str], count: int) -> list[str]:
    """Return the slices that were longest not verified; `verified` tells the source version at which each last was."""
    return sorted(present, key=lambda name: (verified.get(name, ""), name))[:count]


# The stage


@dataclass(frozen=True)
class VerifiedTable:
    """The sums of a table's whole content, the slices that were compared with the source, and rows with odd keys."""

    sums: Prints
    compared: dict[str, str]
    odd_keys: tuple[int, int] | None


def verify_table(
    context: RefreshContext,
    extract: Path,
    change_set: ChangeSet,
    base: Version | None,
    relation: Relation,
    shape: ExtractShape,
    folder: Path,
) -> VerifiedTable:
    """Verify what was replaced in a table (L1), and whole slices in turn (L2); `folder` has its staged files."""
    if change_set.decision == "none" and base is not None:
        # It is as it was.
        sums, odd = sums_from_json(base.manifest["content_sums"]), base.manifest["odd_keys"]
        compared = {name: version for name, version in change_set.verified.items() if name in slice_rows(sums)}
        return VerifiedTable(sums, compared, tuple(odd) if odd else None)
    sums = verify_content(extract, change_set, base, shape, folder)
    compared = verify_turn(context, extract, change_set, base, relation, shape, sums)
    return VerifiedTable(sums, compared, count_odd_keys(extract, change_set, base, shape))


def verify_content(
    extract: Path, change_set: ChangeSet, base: Version | None, shape: ExtractShape, folder: Path
) -> Prints:
    """Verify what was replaced (L1); return the sums of the whole content, brought forward from the base's."""
    if change_set.decision == "full" or base is None:
        sums = content_sums(extract, shape)
        verify_loaded(sums, change_set, shape)
        moved(rows=sum(slice_rows(sums).values()))
        return sums
    appended = verify_replaced(extract, change_set, folder, shape)
    moved(rows=change_set.rows)
    # Versions and change sets of earlier releases have no sums, or have them over other columns.
    kept = base.manifest.get("content_sums") if shape_of(base).loose == shape.loose else None
    before = sums_from_json(kept) if kept is not None else content_sums(base.extract, shape)
    purged = purged_sums(change_set) if (change_set.base, shape_of(base)) == (base.id, shape) else None
    if purged is None:
        purged = content_sums(base.extract, shape, replaced_rows(change_set, folder, shape))
    return bring_forward(before, purged=purged, appended=appended)


def count_odd_keys(
    extract: Path, change_set: ChangeSet, base: Version | None, shape: ExtractShape
) -> tuple[int, int] | None:
    """Return how many rows have a NULL in the row key, and how many keys have several rows; None without a row key.

    Keys are replaced whole: where the base had none of them, all there are came with the change.
    """
    if not shape.key:
        return None
    if base is not None and change_set.odd_keys is not None and base.manifest.get("odd_keys") == [0, 0]:
        return change_set.odd_keys
    return odd_keys(extract, shape.key, shape.columns, names=shape.names or None, table_id=shape.table)


def comparable_version(
    access: SnowflakeAccess, relation: Relation, version: SourceVersion, token: str
) -> SourceVersion | None:
    """Return the version as it can be read once more to compare whole slices; None if that would prove nothing."""
    pinned = readable_version(access, relation.tables, version, token)
    if relation.why_full is not None or relation.excluded_changes or pinned is None:
        # A second reading of such a query or table may rightly differ, and the spec may keep deleted rows.
        return None
    # The same for a query whose order has ties.
    return None if open_order(relation, access, pinned) else pinned


@dataclass(frozen=True)
class SlicesInTurn:
    """Slices of the confirmed version that were compared with the source at its own version, and how some of them differ."""

    compared: tuple[str, ...]
    different: Mapping[str | None, Sequence[str]]


def compare_in_turn(
    access: SnowflakeAccess,
    relation: Relation,
    confirmed: Confirmation,
    version: Version,
    shape: ExtractShape,
    *,
    count: int,
) -> SlicesInTurn | None:
    """Compare the slices of the confirmed version that were longest not compared (L2); None where that is impossible."""
    chosen = slices_in_turn(version.manifest.get("verified", {}), version.manifest["slice_rows"], count)
    if not chosen:
        return None
    try:
        with access.kept_open():
            read = SourceVersion.parse(confirmed.source_version)
            pinned = comparable_version(access, relation, read, confirmed.known.token)
            if pinned is None:
                return None
            different = compare_slices(
                version.extract,
                [None if name == NO_SLICE_KEY else name for name in chosen],
                shape=shape,
                table_sql=relation.from_clause(pinned),
                query=access.query,
            )
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return None
    return SlicesInTurn(tuple(chosen), different)


def verify_turn(
    context: RefreshContext,
    extract: Path,
    change_set: ChangeSet,
    base: Version | None,
    relation: Relation,
    shape: ExtractShape,
    sums: Prints,
) -> dict[str, str]:
    """Compare whole slices of the new version with the source (L2).

    Return the slices that were compared in this refresh, with the version of both sides. The detection has compared slices
    of the base in turn, where it could. What is left are slices that it found to differ, which were replaced, and all
    touched slices if the spec asks for that.
    """
    rows, settings = slice_rows(sums), context.spec.verify
    compared = {name: version for name, version in change_set.verified.items() if name in rows}
    chosen = set(change_set.drifted)
    if not change_set.verified and not chosen:
        chosen = set(slices_in_turn(last_verified(base, change_set), rows, settings.slices_per_run))
    if settings.each == "slices":
        chosen |= set(rows) if change_set.decision == "full" else {*change_set.purged, *change_set.appended}
    if not chosen:
        return compared
    read = SourceVersion.parse(change_set.source_version)
    pinned = comparable_version(context.snowflake, relation, read, change_set.known.token)
    if pinned is None:
        return compared
    try:
        verify_slices(
            extract,
            context.spec.name,
            [None if name == NO_SLICE_KEY else name for name in chosen],
            shape=shape,
            table_sql=relation.from_clause(pinned),
            query=context.snowflake.query,
            table=context.spec.table,
        )
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        # The change set has waited longer than history is kept.
        return compared
    moved(rows=sum(rows.get(name, 0) for name in chosen))
    return {**compared, **dict.fromkeys(sorted(chosen & rows.keys()), change_set.source_version)}


def last_verified(base: Version | None, change_set: ChangeSet) -> Mapping[str, str]:
    """Return at which source version each slice of the base last equalled the source; a full load knows nothing of it."""
    return base.manifest.get("verified", {}) if base is not None and change_set.decision != "full" else {}


@dataclass(frozen=True)
class Finding:
    """The result of a check: passed, failed, or unknown (`open`), with a sentence."""

    passed: bool
    sentence: str
    open: bool = False
    # What is wrong, by slice.
    slices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)


class Verification:
    """A table of the published version, or its only one, with everything it is compared with."""

    def __init__(
        self, context: RefreshContext, confirmed: Confirmation, version: Version, extract: Path | None = None
    ) -> None:
        self._context = context
        self._confirmed = confirmed
        self._name = context.spec.name
        self._version = version
        self._shape: ExtractShape = shape_of(version)
        # Another file that should hold the version's rows, such as the server's.
        self._extract = extract or version.extract

    @property
    def shape(self) -> ExtractShape:
        return self._shape

    def due_slices(self, count: int) -> list[str | None]:
        """Return the slices that the last refresh touched, and as many of those that were longest not compared."""
        manifest, entries = self._version.manifest, self._context.history.entries()
        entry = next((entry for entry in entries if entry.version == self._version.id), None)
        change_set = entry.of(self._context.spec.table).change_set if entry else None
        touched = [
            name
            for name in (change_set.touched if change_set else ())
            if (name or NO_SLICE_KEY) in manifest["slice_rows"]
        ]
        in_turn = slices_in_turn(manifest.get("verified", {}), manifest["slice_rows"], count)
        return list(dict.fromkeys([*touched, *(None if name == NO_SLICE_KEY else name for name in in_turn)]))

    def differing_rows(self, slices: Collection[str | None]) -> RowDifferences:
        """Return the keys and rows of these slices that differ (L3); only after `equals_source` could compare them."""
        relation = self._relation()
        version = self._readable(relation)
        assert version is not None, "the slices were compared at this version"
        return find_row_differences(
            self._extract,
            slices,
            shape=self._shape,
            table_sql=relation.from_clause(version),
            query=self._context.snowflake.query,
        )

    def equals_source(self, only: Collection[str | None] | None = None) -> Finding:
        """Compare every slice of the local version, or some, with the source at the version's own moment."""
        relation = self._relation()
        if relation.why_full is not None:
            return Finding(True, f"Asked again, the query may rightly answer something else. {relation.why_full}")
        if relation.excluded_changes:
            return Finding(True, f"Not compared with the source: {' '.join(relation.excluded_changes)}")
        if (version := self._readable(relation)) is None:
            return Finding(False, f"Not verified: {self._unreadable(relation)}", open=True)
        if tied := open_order(relation, self._context.snowflake, version):
            return Finding(True, f"Asked again, the query may rightly answer something else: {tied}.")
        extract_prints = content_fingerprints(self._extract, self._shape, only=only)
        source_prints = source_fingerprints(
            self._context.snowflake.query, relation.from_clause(version), self._shape, only=only
        )
        different = {
            slice_label(name or NO_SLICE_KEY): lines
            for name, lines in different_slices(extract_prints, source_prints, self._shape.columns).items()
        }
        rows = sum(fingerprint["rows"] for fingerprint in extract_prints.values())
        counted = {"tir/slices_compared": len({*extract_prints, *source_prints}), "dagster/row_count": rows}
        if not different:
            slices = len(self._version.manifest["slice_rows"])
            equal = (
                f"All {len(extract_prints)} slices equal"
                if only is None or len(only) == slices
                else f"{len(only)} of {slices} slices were compared: all of them equal"
            )
            return Finding(True, f"{equal} the source at {self._moment}.", counted=counted)
        count = "1 slice differs" if len(different) == 1 else f"{len(different)} slices differ"
        sentence = f"{count} from the source at {self._moment}. {self._repair(sorted(different))}"
        return Finding(False, sentence, slices=different, counted=counted)

    @property
    def _moment(self) -> str:
        return self._confirmed.source_version

    def _repair(self, names: Sequence[str]) -> str:
        dated = [name for name in names if name != slice_label(NO_SLICE_KEY)]
        if self._shape.slices.by == "none" or not dated or self._context.spec.table:
            return f"The next refresh replaces them; at once: tir refresh {self._name}."
        span = ",".join(dated) if self._shape.slices.by == "value" else f"{dated[0]}..{dated[-1]}"
        return f"The next refresh replaces them; at once: tir refresh {self._name} --slices {span}."

    def unique_row_key(self, *, known: bool = False) -> Finding:
        """Whether every row of the extract has a key of its own; `known`: as the refresh counted them."""
        counts = self._version.manifest.get("odd_keys") if known else None
        nulls, repeated = counts or odd_keys(
            *(self._version.extract, self._shape.key, self._shape.columns),
            names=self._shape.names or None,
            table_id=self._shape.table,
        )
        counted = {"tir/null_keys": nulls, "tir/repeated_keys": repeated}
        names = ", ".join(self._shape.key)
        if not nulls and not repeated:
            return Finding(True, f"Every row has its own {names}.", counted=counted)
        sentence = f"{repeated:,} values of {names} are there more than once, {nulls:,} rows have a NULL in it."
        return Finding(False, f"{sentence} Check the source, or name another row_key in the spec.", counted=counted)

    def mandatory_joins(self) -> Finding:
        """Whether inner joins hide rows whose partner is missing."""
        relation = self._relation()
        if (version := self._readable(relation)) is None:
            return Finding(False, f"Not verified: {self._unreadable(relation)}", open=True)
        hidden = {
            str(dimension.table): self._unmatched(relation, dimension, version)
            for dimension in relation.dimensions
            if dimension.join == "inner"
        }
        wrong = {table: count for table, count in hidden.items() if count}
        if not wrong:
            return Finding(True, f"{len(hidden)} mandatory joins: every row finds its partner.")
        sentence = "; ".join(
            f"{count:,} rows refer to keys that {table} does not have" for table, count in wrong.items()
        )
        return Finding(False, f"{sentence}: the query hides them. Load the partners, or make the join a LEFT JOIN.")

    def _readable(self, relation: Relation) -> SourceVersion | None:
        """Return the confirmed version if its tables can still be read as they were."""
        version = SourceVersion.parse(self._confirmed.source_version)
        return readable_version(self._context.snowflake, relation.tables, version, self._confirmed.known.token)

    def _unreadable(self, relation: Relation) -> str:
        tables = ", ".join(map(str, relation.tables))
        return (
            f"{tables} changed since {self._moment}, and without Time Travel (DATA_RETENTION_TIME_IN_DAYS is 0) nobody can read "
            f"what was there then. Verify right after a refresh, or give the table a retention of a day."
        )

    def _unmatched(self, relation: Relation, dimension: Dimension, version: SourceVersion) -> int:
        assert relation.view is not None, "only a query joins"
        pinned = version.sql
        parent = next(joined.table for joined in relation.view.tables if joined.alias == dimension.parent)
        pairs = list(_pairs(dimension))
        has_key = " AND ".join(f"P.{column} IS NOT NULL" for column, _ in pairs)
        same = " AND ".join(f"D.{key} = P.{column}" for column, key in pairs)
        sql = (
            f"SELECT COUNT(*) FROM {parent.sql} {pinned} AS P WHERE {has_key} AND NOT EXISTS "
            f"(SELECT 1 FROM {dimension.table.sql} {pinned} AS D WHERE {same})"
        )
        return int(self._context.snowflake.query(sql)[0][0])

    def _relation(self) -> Relation:
        names = [column.name for column in self._shape.columns]
        return relation_of(self._context.spec, self._context.snowflake, columns=names)


class ExtractVerification:
    """The published version of one extract: each of its tables, and what the server holds of them."""

    def __init__(self, context: RefreshContext, confirmed: Confirmation, extract: Path | None = None) -> None:
        self._context = context
        self._confirmed = confirmed
        self._name = context.spec.name
        self._version: Version = context.versions.get(confirmed.version)
        if set(self._version.tables) != set(context.spec.parts):
            raise ExtractError(
                f"{self._name}: the spec declares other tables than version {self._version.id} has. Run tir refresh {self._name}."
            )
        self.tables = {
            table: Verification(context.of(table), confirmed.of(table), self._version.of(table), extract)
            for table in context.spec.parts
        }

    @property
    def version(self) -> Version:
        return self._version

    def due_slices(self, count: int) -> dict[str, list[str | None]]:
        """Return the slices of each table that the last refresh touched, and as many of those that were longest not compared."""
        return {table: part.due_slices(count) for table, part in self.tables.items()}

    def equals_source(self, only: Mapping[str, Collection[str | None]] | None = None) -> Finding:
        """Compare every slice of the local version, or some, with the source at the version's own moment."""
        return self._together(lambda table, part: part.equals_source(None if only is None else only[table]))

    def differing_rows(self, labels: Iterable[str]) -> dict[str, RowDifferences]:
        """Return the keys and rows that differ in the slices of these labels, by table."""
        places: dict[str, list[str | None]] = {}
        for label in labels:
            table, name = place_of(label, self.tables)
            places.setdefault(table, []).append(name)
        return {table: self.tables[table].differing_rows(slices) for table, slices in places.items()}

    def unique_row_key(self, *, known: bool = False) -> Finding:
        """Whether every row has a key of its own; `known`: as the refresh counted them."""
        return self._together(lambda _, part: part.unique_row_key(known=known) if part.shape.key else None)

    def mandatory_joins(self) -> Finding:
        """Whether inner joins of queries hide rows whose partner is missing."""
        parts = self._context.spec.parts
        return self._together(lambda table, part: part.mandatory_joins() if parts[table].query is not None else None)

    def _together(self, check: Callable[[str, Verification], Finding | None]) -> Finding:
        """Return the findings of all tables as one."""
        findings = {table: finding for table, part in self.tables.items() if (finding := check(table, part))}
        if list(findings) == [""]:
            return findings[""]
        counted: Counter[str] = Counter()
        for finding in findings.values():
            counted.update(finding.counted)
        failed = [finding for finding in findings.values() if not finding.passed]
        return Finding(
            not failed,
            " ".join(f"{table}: {finding.sentence}" for table, finding in findings.items()),
            # What differs counts, whatever else could not be compared.
            open=bool(failed) and all(finding.open for finding in failed),
            slices={
                place_label(table, place_of(label, ())[1]): lines
                for table, finding in findings.items()
                for label, lines in finding.slices.items()
            },
            counted=dict(counted),
        )

    def server_holds_it(self) -> Finding:
        """Download what the server holds, and compare it with what was confirmed."""
        with self.server_file() as hyper:
            return self.held_by_server(hyper)

    @contextmanager
    def server_file(self) -> Iterator[Path | None]:
        """Give the Hyper file that the server holds; None if the datasource is gone."""
        context = self._context
        folder = context.work / "verify"
        try:
            hyper = None
            with TableauClient(context.tableau) as client:
                datasource = look_at_server(client, context.spec).datasource
                if datasource is not None:
                    _, hyper = fetch_shell(client, datasource, folder, several=bool(context.spec.tables))
            yield hyper
        finally:
            remove(folder)

    def held_by_server(self, hyper: Path | None) -> Finding:
        """Compare the server's file with what was confirmed."""
        if hyper is None:
            return Finding(False, f"The datasource {self._context.spec.datasource.name!r} is gone. Refresh again.")
        if self._holds(hyper):
            return Finding(True, "The server holds what was confirmed.")
        sentence = "The server holds other rows than were confirmed. The next refresh loads everything; at once:"
        return Finding(False, f"{sentence} tir refresh {self._name}.")

    def _holds(self, hyper: Path) -> bool:
        if self._confirmed.fingerprint not in version_digests(hyper, self._version):
            return False
        # Rows of patches were not read back, so they are compared exactly; Tableau itself may write equal values differently.
        exact = self._context.spec.delivery == "patch"
        return not exact or same_rows(hyper, self._version)


def _pairs(dimension: Dimension) -> Iterator[tuple[str, str]]:
    for pair in dimension.on:
        yield quote(pair.column), quote(pair.key)


def row_jump(before: int | None, after: int, share: float) -> Finding:
    """Whether the rows grew or shrank by more than the share that the spec allows."""
    counted = {"tir/rows_before": before or 0, "tir/rows_after": after}
    if not before:
        return Finding(True, f"{after:,} rows; there were none before.", counted=counted)
    moved = (after - before) / before
    sentence = f"{before:,} rows before, {after:,} now ({moved:+.1%}); checks.row_jump allows {share:.1%}."
    return Finding(abs(moved) <= share, sentence, counted=counted)


def not_verified(error: TirError) -> Finding:
    """Return the finding of a check that could not run: drift is neither known nor excluded."""
    return Finding(False, f"Not verified: {error}", open=True)
