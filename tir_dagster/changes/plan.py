"""The plan: none, incremental or full, and why. Pure: from what is known to what will be done, before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from tir_dagster.changes.difference import Difference
from tir_dagster.errors import GuardError, TirError

Mode = Literal["changes", "slices", "full"]
Decision = Literal["none", "incremental", "full"]


# The warning with SCHEMA_CHANGED where names and types are as before.
DDL_RAN = (
    "DDL ran on a source table since the last refresh: its columns have the names and types of before, but may hold other "
    "values (renamed, or dropped and added again), and it was not shown that they do not."
)
# The warning with SCHEMA_CHANGED where the source is a view.
OTHER_ROWS_BEHIND = (
    "A view shows the rows of the last refresh with other values than the extract: a table behind it was redefined (columns "
    "renamed, or dropped and added again), or a change before that went unnoticed."
)
# The warning with SOURCE_REPLACED where the source is a view.
VIEW_REPLACED = (
    "A view is defined otherwise than at the last refresh, or a table behind it was recreated or swapped, and it was not shown "
    "that the rows of the last refresh are the same."
)
# The warning with RETENTION_EXCEEDED where the source is a view.
VIEW_UNSEEN = (
    "A view no longer shows its rows of the last refresh, and the role may not see what is behind it: a table there may have been "
    "recreated. Let the role see the view's text and its tables to avoid such full refreshes."
)


class Reason(Enum):
    """Why a refresh is a full one: a closed list, always recorded and shown."""

    FIRST_LOAD = "the extract has never been loaded by tir_dagster"
    DEFINITION_CHANGED = "the extract's spec changed"
    SCHEMA_CHANGED = "the source's columns changed"
    SOURCE_REPLACED = "a source table was recreated or swapped, or a view is defined otherwise"
    RETENTION_EXCEEDED = "the source's history no longer reaches back far enough"
    ORTHOGONAL_UNRESOLVED = "a change description could not be resolved to keys"
    NONDETERMINISTIC_VIEW = "the extract's query cannot be refreshed by key"
    COST_THRESHOLD = "so many keys changed that reading everything is cheaper"
    DRIFT_UNREPAIRED = "the extract differs from the source in a way that replacing keys did not repair"
    FOREIGN_PUBLISH = "somebody else published the datasource"
    DATASOURCE_CHANGED = "the spec names another datasource"
    DATASOURCE_GONE = "the datasource was deleted on the server"
    STATE_LOST = "what was known about the extract is gone"
    EXTRACT_EMPTIED = "nothing would remain in the extract"
    NULL_INCREMENT = "a changed row has no increment value"
    REQUESTED = "a full refresh was asked for"


@dataclass(frozen=True)
class SourceState:
    """What an extract version was made from: its definition, and the source's columns, identity and change token."""

    definition: str
    schema: str
    identity: str
    token: str
    # When DDL last ran on each table. None, like the role's: written by a version that did not keep it, so unknown.
    ddl: str | None = None
    role: str | None = None
    # What defines each view, nothing for each table: digests of its text, of what is behind it and of DDL there, ? for what is
    # not known, as text/behind/ddl. None as above: then a view is told by when it was created.
    views: str | None = None

    def completed_by(self, now: SourceState) -> SourceState:
        """Return this state with unknown fields taken from the current one."""
        ddl, role = (now.ddl if self.ddl is None else self.ddl), (now.role if self.role is None else self.role)
        return replace(self, ddl=ddl, role=role)


@dataclass(frozen=True)
class Redefinition:
    """What happened since to the definitions of tables and views, by the warehouse's records: rows may be as before."""

    table_replaced: bool = False
    table_altered: bool = False
    view_replaced: bool = False
    view_altered: bool = False
    # The role may not see everything that decides which rows a view shows.
    view_unknown: bool = False

    @property
    def nothing(self) -> bool:
        """Whether none of it is known to have happened."""
        return not (self.table_replaced or self.table_altered or self.view_replaced or self.view_altered)


def redefinition(then: SourceState, now: SourceState) -> Redefinition:
    """Compare when tables and views were created and altered, and how views are defined."""
    change = Redefinition()
    for old, new in zip(_sources(then), _sources(now), strict=False):
        known = _UNKNOWN not in (old.text, new.text)
        replaced = old.text != new.text if known else old.created != new.created
        # CREATE OR REPLACE VIEW with the same text changes nothing; what came after it, such as a policy, may.
        altered = old.later_ddl != new.later_ddl if known else old.ddl != new.ddl
        behind = known and _UNKNOWN not in (old.behind, new.behind)
        if behind:
            replaced = replaced or old.behind != new.behind
            altered = altered or old.ddl_behind != new.ddl_behind
        change = Redefinition(
            table_replaced=change.table_replaced or (replaced and not new.is_view),
            table_altered=change.table_altered or (altered and not new.is_view),
            view_replaced=change.view_replaced or (replaced and new.is_view),
            view_altered=change.view_altered or (altered and new.is_view),
            view_unknown=change.view_unknown or (new.is_view and not behind),
        )
    return change


_UNKNOWN = "?"


@dataclass(frozen=True)
class _Source:
    """One table or view of a source state; of a table, text and what is behind it are unknown."""

    created: str
    ddl: str
    is_view: bool
    text: str
    behind: str
    ddl_behind: str

    @property
    def later_ddl(self) -> str:
        return "" if self.ddl == self.created else self.ddl


def _sources(state: SourceState) -> list[_Source]:
    created = state.identity.split(",")
    others = [(text or "").split(",") for text in (state.ddl, state.views)]
    ddl, views = (parts + [""] * (len(created) - len(parts)) for parts in others)
    return [
        _Source(when, defined, bool(view), *(view.split("/") if view else [_UNKNOWN] * 3))
        for when, defined, view in zip(created, ddl, views, strict=False)
    ]


@dataclass(frozen=True)
class Situation:
    """All that the decision depends on, before any row is read."""

    extract: str
    mode: Mode
    policy: Literal["auto", "incremental_only", "full"]
    now: SourceState
    confirmed: SourceState | None
    base_present: bool = True
    foreign: bool = False
    # Why the datasource that the spec names is not the confirmed one; None: it is.
    datasource_reason: Reason | None = None
    # Nothing is confirmed, though a version was: the record is gone.
    forgotten: bool = False
    pending: tuple[str, ...] = ()
    # Why a full refresh is still due: it was started and did not finish, or drift stayed.
    due_reason: Reason | None = None
    slices: tuple[str, ...] = ()
    # There are hints: they are followed, whatever the tokens say.
    hinted: bool = False
    # Why the query cannot be refreshed by key.
    opaque: str | None = None
    # The query may show other rows though no table changed.
    restless: bool = False
    # DDL ran on a table since the last refresh, but the old rows have the same values in the current columns.
    same_rows: bool = False
    # A view shows the old rows with other values.
    redefined: bool = False
    # A view was replaced or altered, or DDL ran behind it, but it shows the rows of the last refresh as the extract does.
    same_view: bool = False
    # The role may not see what is behind a view, which no longer shows its rows of the last refresh: they may be a new table's.
    unseen: bool = False
    # Changes that are not looked for, because the spec excludes them.
    excluded_changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the refresh will do, for people to read; kept as metadata of the run."""

    extract: str
    mode: Mode
    decision: Decision
    reason: Reason | None = None
    slices: tuple[str | None, ...] = ()
    keys: int | None = None
    # Rows removed from the extract and rows added, where known.
    purged: int | None = None
    appended: int | None = None
    warnings: tuple[str, ...] = ()
    # Changes that a refresh by key does not look for: expected, so no warning.
    notes: tuple[str, ...] = ()
    # The table that it is about, and the plan of each table, the main one first; both empty for an extract of one table.
    table: str = ""
    parts: Mapping[str, Plan] = field(default_factory=dict)

    def of(self, table: str) -> Plan:
        """Return the plan of this table; an extract of one table is its only part, without a name."""
        return self.parts[table] if self.parts else self

    def sentence(self) -> str:
        if self.decision == "none":
            return f"{self.extract}: nothing to do, the source has not changed."
        if self.decision == "full":
            return f"{self.extract}: full refresh, because {self.reason.value if self.reason else 'it was asked for'}."
        if self.parts:
            changing = [name for name, part in self.parts.items() if part.decision != "none"]
            tables = "; ".join(f"{name}{self.parts[name].counted}" for name in changing)
            still = [name for name in self.parts if name not in changing]
            return f"{self.extract}: incremental refresh: {tables}{f' ({_listed(still)} as before)' if still else ''}."
        return f"{self.extract}: incremental refresh{self.counted}."

    @property
    def counted(self) -> str:
        """What moves, as the end of a sentence."""
        keys = "" if self.keys is None else f" of {self.keys:,} keys" if not self.table else f" {self.keys:,} keys"
        where = f" in {len(self.slices)} slices" if self.slices else ""
        moved = "" if self.purged is None else f": {self.purged:,} rows removed, {self.appended:,} added"
        return f"{keys}{where}{moved}"


def plan_refresh(situation: Situation) -> Plan:
    """Decide from tokens and definitions alone; `incremental` still means: look which keys differ."""
    plan = Plan(situation.extract, situation.mode, "none", notes=situation.excluded_changes)
    reason = _full_reason(situation)
    if reason is None:
        unchanged = situation.confirmed is not None and situation.confirmed.token == situation.now.token
        if situation.mode == "changes" and unchanged and not situation.pending and not situation.hinted:
            return plan
        return replace(plan, decision="incremental", slices=situation.slices)
    warnings = (situation.opaque,) if situation.opaque and reason is Reason.NONDETERMINISTIC_VIEW else ()
    if reason is Reason.SCHEMA_CHANGED and situation.confirmed and situation.now.schema == situation.confirmed.schema:
        warnings = (OTHER_ROWS_BEHIND if situation.redefined else DDL_RAN,)
    if reason is Reason.SOURCE_REPLACED and situation.confirmed:
        table_replaced = redefinition(situation.confirmed.completed_by(situation.now), situation.now).table_replaced
        warnings = () if table_replaced else (VIEW_REPLACED,)
    if reason is Reason.RETENTION_EXCEEDED:
        warnings = (VIEW_UNSEEN,)
    return load_all(replace(plan, warnings=warnings), reason, situation.policy)


def settle_plan(
    plan: Plan,
    difference: Difference,
    *,
    rows: int,
    policy: Literal["auto", "incremental_only", "full"],
    delete_share: float,
    full_share: float,
    pending: bool,
    allow_empty: bool = False,
) -> Plan:
    """Return the final plan once the differing keys are known: none, incremental or full; raise GuardError if it looks wrong.

    `rows` is how many the extract has.
    """
    purged, appended = sum(difference.purged.values()), sum(difference.appended.values())
    if not allow_empty:
        check_guards(
            plan.extract, rows=rows, left=rows - purged + appended, delete_share=delete_share, table=plan.table
        )
    settled = replace(plan, keys=difference.keys, slices=difference.slices, purged=purged, appended=appended)
    if difference.keys == 0 and not pending:
        return replace(settled, decision="none")
    if rows and max(purged, appended) > full_share * rows:
        # Under incremental_only a large change is still right, only slow.
        return settled if policy == "incremental_only" else load_all(settled, Reason.COST_THRESHOLD, policy)
    return settled


def merge_plans(whole: Plan, parts: Mapping[str, Plan], policy: str) -> Plan:
    """Return the plan of an extract of several tables: everything is loaded anew if that has to be for one of them."""
    merged = replace(
        whole,
        parts=parts,
        warnings=_each_once(whole.warnings, *(part.warnings for part in parts.values())),
        notes=_each_once(whole.notes, *(part.notes for part in parts.values())),
    )
    full = next((part.reason for part in parts.values() if part.decision == "full"), None)
    if full is not None:
        return load_all(merged, full, policy)
    if all(part.decision == "none" for part in parts.values()):
        return replace(merged, decision="none")
    main = next(iter(parts.values()))
    counted = [part for part in parts.values() if part.keys is not None]
    if counted:
        merged = replace(
            merged,
            keys=sum(part.keys or 0 for part in counted),
            purged=sum(part.purged or 0 for part in counted),
            appended=sum(part.appended or 0 for part in counted),
        )
    return replace(merged, decision="incremental", slices=main.slices)


def settle_tables(
    plan: Plan,
    differences: Mapping[str, Difference],
    *,
    rows: Mapping[str, int],
    policy: Literal["auto", "incremental_only", "full"],
    delete_share: Mapping[str, float],
    full_share: float,
    pending: Collection[str],
    allow_empty: bool = False,
) -> Plan:
    """The same for an extract of several tables: each has its guard, and so many changes that all is loaded are those of all.

    A small table of which most rows changed is no reason to load a large one.
    """
    parts = {
        name: settle_plan(
            part,
            differences[name],
            rows=rows[name],
            policy="incremental_only",
            delete_share=delete_share[name],
            full_share=full_share,
            pending=name in pending,
            allow_empty=allow_empty,
        )
        if name in differences
        else part
        for name, part in plan.parts.items()
    }
    settled = merge_plans(plan, parts, policy)
    moved = max(settled.purged or 0, settled.appended or 0)
    if settled.decision == "incremental" and moved > full_share * sum(rows.values()) > 0:
        return settled if policy == "incremental_only" else load_all(settled, Reason.COST_THRESHOLD, policy)
    return settled


def _each_once(*texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for some in texts for text in some))


def _listed(names: Collection[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def check_guards(extract: str, *, rows: int, left: int, delete_share: float, table: str = "") -> None:
    """Raise GuardError if the source looks as if its load had not finished; nothing was changed yet."""
    empty = f"the source of {table} is empty, its table has" if table else "the source is empty, the extract has"
    if rows and left == 0:
        raise GuardError(
            f"{extract}: {empty} {rows:,} rows. Nothing was touched. Wait for the source's load "
            f"to finish; if it is meant to be empty, run: tir refresh {extract} --allow-empty."
        )
    if rows and rows - left > delete_share * rows:
        raise GuardError(
            f"{extract}: {rows - left:,} of {rows:,} rows{f' of {table}' if table else ''} would vanish, more than the {delete_share:.0%} that "
            "thresholds.delete_share in the spec allows. Nothing was touched. Check the source; if it is right, run once: "
            f"tir refresh {extract} --allow-empty."
        )


def _full_reason(situation: Situation) -> Reason | None:
    now = situation.now
    confirmed = situation.confirmed.completed_by(now) if situation.confirmed else None
    if situation.mode == "full" or situation.policy == "full":
        # A policy of full still does nothing when nothing changed.
        unchanged_extract = (
            confirmed is not None
            and replace(confirmed, identity=now.identity, ddl=now.ddl, views=now.views) == now
            and redefinition(confirmed, now).nothing
            and situation.base_present
            and not (situation.foreign or situation.datasource_reason)
        )
        idle = situation.mode == "changes" and unchanged_extract and not situation.pending and not situation.due_reason
        return None if idle else Reason.REQUESTED
    if confirmed is None:
        return Reason.STATE_LOST if situation.forgotten else Reason.FIRST_LOAD
    if situation.datasource_reason is not None:
        return situation.datasource_reason
    if not situation.base_present:
        return Reason.STATE_LOST
    if situation.foreign:
        return Reason.FOREIGN_PUBLISH
    if (now.definition, now.role) != (confirmed.definition, confirmed.role):
        return Reason.DEFINITION_CHANGED
    if now.schema != confirmed.schema:
        return Reason.SCHEMA_CHANGED
    change = redefinition(confirmed, now)
    if change.table_replaced or (change.view_replaced and not situation.same_view):
        return Reason.SOURCE_REPLACED
    altered = (change.table_altered and not situation.same_rows) or (change.view_altered and not situation.same_view)
    if situation.redefined or altered:
        return Reason.SCHEMA_CHANGED
    if situation.unseen:
        return Reason.RETENTION_EXCEEDED
    unchanged = now.token == confirmed.token and not situation.restless
    idle = situation.mode == "changes" and unchanged and not situation.pending
    return Reason.NONDETERMINISTIC_VIEW if situation.opaque and not idle else situation.due_reason


def load_all(plan: Plan, reason: Reason, policy: str) -> Plan:
    """Return the plan of a full refresh for this reason; raise if the policy forbids it."""
    if policy == "incremental_only" and reason not in (Reason.FIRST_LOAD, Reason.REQUESTED):
        raise TirError(
            f"{plan.extract}: a full refresh is needed, because {reason.value} ({reason.name}), and the policy is "
            "incremental_only. Nothing was touched. Run tir refresh --full, or set policy: auto."
        )
    parts = {name: load_all(part, reason, "auto") for name, part in plan.parts.items()}
    return replace(plan, decision="full", reason=reason, slices=(), keys=None, purged=None, appended=None, parts=parts)
