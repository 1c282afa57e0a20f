"""The work of `tir verify`: compare what is published with its source, name the rows that differ, and repair them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import dagster as dg

from tir_dagster.alerts.text import one_line, shortened
from tir_dagster.changes.change_set import place_label
from tir_dagster.cli.audit.rollback import roll_back
from tir_dagster.cli.refresh import LEASE_WAIT_SECONDS, Command
from tir_dagster.errors import EQUALS_SOURCE, SERVER_HOLDS_IT, ExtractError, TirError
from tir_dagster.hyper.differences import RowDifference, RowDifferences, shown_key
from tir_dagster.orchestration.checks import evaluation, finding_result, known_drift
from tir_dagster.orchestration.metadata import confirmations, last_confirmation
from tir_dagster.refresh.context import RefreshContext, leased
from tir_dagster.refresh.state.hold import HeldError
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.verify import ExtractVerification, Finding, Verification, not_verified
from tir_dagster.refresh.why import why_key

# Rows that are named; all are counted.
_MOST_NAMED = 20
# Without --all-slices, so many of the slices that were longest not compared, besides those that the last refresh touched.
_IN_TURN = 3


@dataclass(frozen=True)
class WrongRow:
    """A key whose rows differ, and the refresh that last replaced it, as far as the history reaches."""

    kind: str
    slice: str
    key: dict[str, str | None]
    columns: list[str]
    last_replaced: str | None = None
    extract: list[dict[str, str | None]] | None = None
    source: list[dict[str, str | None]] | None = None


@dataclass
class VerifyOutcome:
    """The result of a verification, as `--json` prints it."""

    extract: str
    version: str
    source_version: str
    # Whether it could be compared, and whether everything compared is equal.
    compared: bool = True
    equal: bool = True
    sentence: str = ""
    slices: dict[str, list[str]] = field(default_factory=dict)
    missing: int = 0
    extra: int = 0
    stale: int = 0
    # Whether all differing rows were counted.
    complete: bool = True
    rows: list[WrongRow] = field(default_factory=list)
    server: str | None = None
    repaired: bool = False
    steps: list[str] = field(default_factory=list)
    # Alerts that could not be sent.
    warnings: list[str] = field(default_factory=list)
    # What differs, in the sentences that people are told.
    told: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    command: Command,
    instance: dg.DagsterInstance,
    *,
    all_slices: bool,
    rows: bool,
    values: bool,
    server: bool,
    progress: Callable[[str], None],
) -> VerifyOutcome:
    """Compare, and record the result as the asset's checks: the next refresh repairs what they say."""
    name = command.spec.name
    confirmed = last_confirmation(instance, command.keys.published_datasource)
    if command.spec.delivery == "trigger":
        raise ExtractError(
            f"{name}: Tableau itself loads this extract (delivery `trigger`), so there is no version here to compare."
        )
    if confirmed is None:
        raise ExtractError(f"{name}: nothing is published yet. Run tir refresh {name}.")
    # Hyper opens a file for one process only, and pruning may remove a version that is being read.
    with leased(command.context, "tir verify", wait_seconds=LEASE_WAIT_SECONDS) as context:
        return _verify(
            context,
            command,
            instance,
            confirmed,
            all_slices=all_slices,
            rows=rows,
            values=values,
            server=server,
            progress=progress,
        )


def _verify(
    context: RefreshContext,
    command: Command,
    instance: dg.DagsterInstance,
    confirmed: Confirmation,
    *,
    all_slices: bool,
    rows: bool,
    values: bool,
    server: bool,
    progress: Callable[[str], None],
) -> VerifyOutcome:
    verification = ExtractVerification(context, confirmed)
    only = None if all_slices else verification.due_slices(_IN_TURN)
    count = "all slices" if only is None else f"{sum(map(len, only.values()))} slices"
    progress(f"comparing {count} of version {confirmed.version} with the source at {confirmed.source_version}")
    finding = _finding(lambda: verification.equals_source(only))
    outcome = VerifyOutcome(command.spec.name, confirmed.version, confirmed.source_version, sentence=finding.sentence)
    outcome.compared, outcome.equal = not finding.open, finding.passed
    outcome.told += [] if finding.passed or finding.open else [finding.sentence]
    outcome.slices = {label: list(lines) for label, lines in finding.slices.items()}
    if only is None and not finding.open:
        _record(instance, command, EQUALS_SOURCE, finding, confirmed.version)
    elif finding.slices:
        # A part that is equal says nothing of the rest, so what is known of that stays.
        _record(instance, command, EQUALS_SOURCE, _with_known(instance, command, confirmed, finding), confirmed.version)
    if rows and finding.slices:
        progress("looking for the rows that differ")
        _name_rows(outcome, verification, context, finding, values=values)
    if server:
        progress("downloading what the server holds")
        held = _finding(lambda: _on_server(outcome, verification, context, confirmed, rows=rows, values=values))
        outcome.server = held.sentence
        outcome.compared, outcome.equal = outcome.compared and not held.open, outcome.equal and held.passed
        outcome.told += [] if held.passed or held.open else [held.sentence]
        if not held.open:
            _record(instance, command, SERVER_HOLDS_IT, held, confirmed.version)
    return outcome


def _with_known(instance: dg.DagsterInstance, command: Command, confirmed: Confirmation, finding: Finding) -> Finding:
    """Return the finding with the slices that an earlier verification of this version found."""
    drift = known_drift(instance, command.keys, confirmed)
    known = drift.labels if drift else ()
    return replace(finding, slices={**{label: ["found earlier"] for label in known}, **finding.slices})


def _on_server(
    outcome: VerifyOutcome,
    verification: ExtractVerification,
    context: RefreshContext,
    confirmed: Confirmation,
    *,
    rows: bool,
    values: bool,
) -> Finding:
    """Compare the server's file with the confirmed version; if it differs, say where it differs from the source."""
    with verification.server_file() as hyper:
        held = verification.held_by_server(hyper)
        if held.passed or hyper is None:
            return held
        served = ExtractVerification(context, confirmed, hyper)
        finding = _finding(served.equals_source)
        outcome.slices |= {label: list(lines) for label, lines in finding.slices.items()}
        if rows and finding.slices:
            _name_rows(outcome, served, context, finding, values=values)
    return held


def _finding(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except TirError as error:
        return not_verified(error)


def _record(instance: dg.DagsterInstance, command: Command, check: str, finding: Finding, version: str) -> None:
    result = finding_result(check, finding, version)
    instance.report_runless_asset_event(evaluation(result, command.keys.published_datasource))


def _name_rows(
    outcome: VerifyOutcome,
    verification: ExtractVerification,
    context: RefreshContext,
    finding: Finding,
    *,
    values: bool,
) -> None:
    by_table: dict[str, RowDifferences] = verification.differing_rows(finding.slices)
    outcome.missing, outcome.extra, outcome.stale = (
        sum(differences.count(kind) for differences in by_table.values()) for kind in ("missing", "extra", "stale")
    )
    outcome.complete = all(differences.complete for differences in by_table.values())
    outcome.rows = [
        _wrong_row(difference, table, verification.tables[table], context, values=values)
        for table, differences in by_table.items()
        for difference in differences.found[:_MOST_NAMED]
    ][:_MOST_NAMED]


def _wrong_row(
    difference: RowDifference, table: str, verification: Verification, context: RefreshContext, *, values: bool
) -> WrongRow:
    shape = verification.shape
    names = [column.name for column in shape.columns]
    last = next(itertools.islice(why_key(context, shape, difference.key, table=table), 1), None) if shape.key else None
    return WrongRow(
        kind=difference.kind,
        slice=place_label(table, difference.slice),
        key={name: _text(value) for name, value in zip(shape.key, difference.key, strict=False)},
        columns=list(difference.columns),
        last_replaced=None if last is None else last.entry.version,
        extract=[_named(names, row.values) for row in difference.extract] if values else None,
        source=[_named(names, row.values) for row in difference.source] if values else None,
    )


def _named(names: Sequence[str], values: Sequence[Any]) -> dict[str, str | None]:
    return {name: _text(value) for name, value in zip(names, values, strict=True)}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def repair(
    command: Command, instance: dg.DagsterInstance, check: Callable[[], VerifyOutcome], progress: Callable[[str], None]
) -> VerifyOutcome:
    """Replace what differs and compare again; then load everything; then publish the last version that equals its source."""
    steps: list[str] = []
    problem: TirError | None = None
    for mode, step in (("changes", "replaced the slices that differ"), ("full", "loaded everything")):
        progress(f"repairing: {step}")
        try:
            done = command.refresh(mode, (), allow_empty=False)  # type: ignore[arg-type]
        except HeldError:
            raise
        except TirError as error:
            problem = error
            steps.append(f"{step}, which failed ({shortened(one_line(str(error)), 200)})")
            continue
        # A refresh that was asked for the slices loads everything if somebody else published, or for another reason of its own.
        steps.append(f"loaded everything ({done.reason})" if mode == "changes" and done.decision == "full" else step)
        outcome = check()
        if outcome.equal or not outcome.compared:
            # What cannot be compared is not known to be wrong, so nothing older is published over it.
            outcome.repaired, outcome.steps = outcome.equal and outcome.compared, steps
            return outcome
    good = _last_equal(command, instance, progress)
    if good is not None:
        roll_back(command.spec, instance, good, hold="", dry_run=False, progress=progress)
        steps.append(f"published version {good} again, the last one that equals its source")
    elif problem is not None:
        raise problem
    outcome = check()
    outcome.repaired, outcome.steps = outcome.equal and outcome.compared, steps
    return outcome


def _last_equal(command: Command, instance: dg.DagsterInstance, progress: Callable[[str], None]) -> str | None:
    """Return the newest kept version that equals the source at its own source version; None if it is the published one."""
    with leased(command.context, "tir verify", wait_seconds=LEASE_WAIT_SECONDS) as context:
        published, *earlier = confirmations(instance, command.keys.published_datasource)
        for confirmed in (published, *earlier):
            if context.known_version(confirmed.version) is None:
                continue
            progress(f"comparing version {confirmed.version} with the source at {confirmed.source_version}")
            finding = _finding(ExtractVerification(context, confirmed).equals_source)
            # A query that may rightly answer something else passes without a comparison.
            if finding.passed and finding.counted:
                return None if confirmed.version == published.version else confirmed.version
    return None


def lines_of(outcome: VerifyOutcome) -> list[str]:
    """Return the result for people."""
    lines = [f"{outcome.extract}: {outcome.sentence}"]
    # Before the slices: if only the server's file differs, they are the server's.
    lines += [f"server: {outcome.server}"] if outcome.server else []
    lines += [f"  {name}: {'; '.join(differences[:3])}" for name, differences in sorted(outcome.slices.items())]
    if outcome.rows:
        at_least = "" if outcome.complete else "at least "
        lines.append(
            f"rows: {at_least}{outcome.missing:,} missing in the extract, {outcome.extra:,} that the source does not have, "
            f"{outcome.stale:,} with other values"
        )
        lines += [f"  {_row_line(row)}" for row in outcome.rows]
        left = outcome.missing + outcome.extra + outcome.stale - len(outcome.rows)
        lines += [f"  and {left:,} more"] if left > 0 else []
    if outcome.steps:
        ended = "it is equal now" if outcome.repaired else "it still differs"
        lines.append(f"repair: {', then '.join(outcome.steps)}: {ended}")
    return lines


def _row_line(row: WrongRow) -> str:
    key = shown_key(row.key, list(row.key.values())) or "a row"
    what = f" in {', '.join(row.columns)}" if row.columns else ""
    last = f", last replaced by {row.last_replaced}" if row.last_replaced else ""
    line = f"{row.kind}: {key} ({row.slice}){what}{last}"
    for side, rows in (("extract", row.extract), ("source", row.source)):
        for shown in rows or ():
            chosen = row.columns or list(shown)
            line += f"\n    {side}: " + ", ".join(f"{name} = {_shown(shown, name)}" for name in chosen)
    return line


def _shown(row: Mapping[str, str | None], name: str) -> str:
    value = row[name]
    return "NULL" if value is None else value
