"""Verification of everything that is published (L2), and of the spec's assumptions. No Dagster in here.

Always at the extract's own source version, never "now": a delay is no drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.changes.relation import Dimension, Relation, relation_of
from tir_dagster.changes.ties import open_order
from tir_dagster.errors import TirError
from tir_dagster.hyper.content import content_digests, content_fingerprints, source_fingerprints
from tir_dagster.hyper.fingerprints import different_slices
from tir_dagster.hyper.hyperfile import odd_keys
from tir_dagster.hyper.payload import row_digest
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.refresh.context import RefreshContext, remove, shape_of
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import readable_version
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.tableau.client import TableauClient


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
    """The published version of one extract, with everything it is compared with."""

    def __init__(self, context: RefreshContext, confirmed: Confirmation) -> None:
        self._context = context
        self._confirmed = confirmed
        self._name = context.spec.name
        self._version: Version = context.versions.get(confirmed.version)
        self._shape: ExtractShape = shape_of(self._version)

    def equals_source(self) -> Finding:
        """Compare every slice of the local version with the source at the version's own moment."""
        relation = self._relation()
        if relation.why_full is not None:
            return Finding(True, f"Asked again, the query may rightly answer something else. {relation.why_full}")
        if relation.excluded_changes:
            return Finding(True, f"Not compared with the source: {' '.join(relation.excluded_changes)}")
        if (version := self._readable(relation)) is None:
            return Finding(False, f"Not verified: {self._unreadable(relation)}", open=True)
        if tied := open_order(relation, self._context.snowflake, version):
            return Finding(True, f"Asked again, the query may rightly answer something else: {tied}.")
        extract_prints = content_fingerprints(self._version.extract, self._shape)
        source_prints = source_fingerprints(self._context.snowflake.query, relation.from_clause(version), self._shape)
        different = {
            slice_label(name or NO_SLICE_KEY): lines
            for name, lines in different_slices(extract_prints, source_prints).items()
        }
        rows = sum(fingerprint["rows"] for fingerprint in extract_prints.values())
        counted = {"tir/slices_compared": len({*extract_prints, *source_prints}), "dagster/row_count": rows}
        if not different:
            return Finding(
                True, f"All {len(extract_prints)} slices equal the source at {self._moment}.", counted=counted
            )
        count = "1 slice differs" if len(different) == 1 else f"{len(different)} slices differ"
        sentence = f"{count} from the source at {self._moment}. {self._repair(sorted(different))}"
        return Finding(False, sentence, slices=different, counted=counted)

    @property
    def _moment(self) -> str:
        return self._confirmed.source_version

    def _repair(self, names: Sequence[str]) -> str:
        dated = [name for name in names if name != slice_label(NO_SLICE_KEY)]
        if self._shape.slices.by == "none" or not dated:
            return f"The next refresh replaces them; at once: tir refresh {self._name}."
        span = ",".join(dated) if self._shape.slices.by == "value" else f"{dated[0]}..{dated[-1]}"
        return f"The next refresh replaces them; at once: tir refresh {self._name} --slices {span}."

    def server_holds_it(self) -> Finding:
        """Download what the server holds, and compare it with what was confirmed."""
        context = self._context
        folder = context.work / "verify"
        try:
            with TableauClient(context.tableau) as client:
                datasource = look_at_server(client, context.spec).datasource
                if datasource is None:
                    return Finding(False, f"The datasource {context.spec.datasource.name!r} is gone. Refresh again.")
                _, hyper = fetch_shell(client, datasource, folder)
            same = self._holds(hyper)
        finally:
            remove(folder)
        if same:
            return Finding(True, "The server holds what was confirmed.")
        sentence = "The server holds other rows than were confirmed. The next refresh loads everything; at once:"
        return Finding(False, f"{sentence} tir refresh {self._name}.")

    def _holds(self, hyper: Path) -> bool:
        if self._confirmed.fingerprint not in content_digests(content_fingerprints(hyper, self._shape), self._shape):
            return False
        # Rows of patches were not read back, so they are compared exactly; Tableau itself may write equal values differently.
        exact = self._context.spec.delivery == "patch"
        return not exact or row_digest(hyper, self._shape) == row_digest(self._version.extract, self._shape)

    def unique_row_key(self, *, known: bool = False) -> Finding:
        """Whether every row of the extract has a key of its own; `known`: as the refresh counted them."""
        counts = self._version.manifest.get("odd_keys") if known else None
        nulls, repeated = counts or odd_keys(
            self._version.extract, self._shape.key, self._shape.columns, names=self._shape.names or None
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
