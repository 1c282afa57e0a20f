"""Decides a first spec from what the servers show; pure. Each field has its reasons, and what cannot be decided says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from statistics import median
from typing import Any

from tir_dagster.cli.setup.published import DatasourceLook, obstacles
from tir_dagster.cli.setup.source import (
    MOVING,
    ColumnFacts,
    SourceLook,
    TableState,
    is_key_type,
    key_rank,
    slice_candidates,
)
from tir_dagster.refresh.deliveries.patch import PATCH_SINCE
from tir_dagster.snowflake.columns import Kind
from tir_dagster.spec.extract import NAME_FORM
from tir_dagster.tableau.datasources import SignInMethod

# Above these a month, then a week, is too much to compare or load at once.
_MONTH_ROWS, _WEEK_ROWS = 5_000_000, 20_000_000
_MOST_DAYS = 1_500
# Slices begin where the rows begin, not at the one order that somebody dated 1900.
_STRAY_SHARE = 0.001
# From these sizes, uploading everything for each change is the expensive part.
_LARGE_MB, _LARGE_ROWS, _VERY_LARGE_MB = 500, 20_000_000, 5_000
_MOST_VALUES = 200
# How long before the look the last change may be, to tell whether a column follows changes.
_RECENT = timedelta(days=7)
_SOON = timedelta(days=1)


@dataclass(frozen=True)
class Part:
    """One field of a spec with its reasons; without a value only a comment."""

    name: str
    value: Any
    reasons: tuple[str, ...] = ()
    # What the user has to decide or check.
    todo: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where the extract is to be published, and what is there; `look` is None if nobody looked."""

    project: str
    name: str
    look: DatasourceLook | None = None


@dataclass(frozen=True)
class Proposal:
    """A whole spec, in the order of its fields."""

    parts: tuple[Part, ...]

    @property
    def mapping(self) -> dict[str, Any]:
        return {part.name: part.value for part in self.parts if part.value is not None}

    @property
    def todos(self) -> tuple[str, ...]:
        return tuple(todo for part in self.parts for todo in part.todo)

    def in_words(self, name: str) -> str:
        """Return the value of a field with its first reason, in one line."""
        part = next((part for part in self.parts if part.name == name), Part(name, None))
        value = part.value if not isinstance(part.value, list) else ", ".join(part.value)
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {inner}" for key, inner in value.items())
        reason = re.split(r"(?<=[.:]) ", part.reasons[0])[0].rstrip(":") if part.reasons else ""
        return f"{value}: {reason}".removesuffix(": ") if value else reason or "none"

    def without(self, name: str, reason: str) -> Proposal:
        """Return the proposal without the value of this field, for the reason."""
        parts = [
            replace(part, value=None, todo=(*part.todo, reason)) if part.name == name else part for part in self.parts
        ]
        return replace(self, parts=tuple(parts))


def propose(name: str, source: SourceLook, place: Place, *, env: Mapping[str, str]) -> Proposal:
    """Decide every field of the spec."""
    first = (
        Part("source", str(source.main.table), _rows(source))
        if source.query is None
        else Part("query", source.query.strip().rstrip(";").rstrip(), _rows(source))
    )
    delivery = _delivery(source, place)
    slices = _slices(source)
    key = _row_key(source, has_slices=slices.value is not None)
    parts = [first, *_columns(source, place), key, slices, _changes(source), delivery]
    if delivery.value == "trigger":
        # Tableau decides what it shows: only the watched tables count.
        watch = [str(state.table) for state in source.tables[1:]]
        parts = [Part("source", str(source.main.table)), *([Part("watch", watch)] if watch else []), delivery]
    return Proposal((Part("name", name), *parts, _datasource(place, delivery.value, env)))


def extract_name(text: str) -> str:
    """Return a name for assets, made of the name of a datasource or a table."""
    name = re.sub(r"[^a-z0-9]+", "_", text.casefold()).strip("_")
    return name if NAME_FORM.match(name) else f"extract_{name}".rstrip("_")


def _rows(source: SourceLook) -> tuple[str, ...]:
    if source.rows is None:
        return ("How many rows it has was not counted.",)
    kind = "view" if source.main.is_view and source.query is None else "query" if source.query is not None else "table"
    counted = "counted" if source.counted else "by the catalogue"
    return (f"The {kind} has {source.rows:,} rows ({counted}).",)


def _columns(source: SourceLook, place: Place) -> Iterator[Part]:
    """Yield `columns` where the table has some that no extract can hold."""
    if source.query is not None or not source.refused or (place.look is not None and place.look.columns is not None):
        return
    yield Part(
        "columns",
        [facts.name for facts in source.columns],
        (
            f"All but {', '.join(source.refused)}: no extract can hold a column of that type. A query can show it as text.",
        ),
    )


# The row key


def _row_key(source: SourceLook, *, has_slices: bool) -> Part:
    aggregated = source.view is not None and source.view.kind == "aggregate"
    if aggregated and source.view is not None:
        return Part(
            "row_key", None, (f"No row_key: the groups of the query are the keys ({', '.join(source.view.group)}).",)
        )
    declared = source.main.primary_key if _has(source, source.main.primary_key) else ()
    if source.unique:
        if source.unique == declared:
            return Part(
                "row_key", list(source.unique), ("The declared primary key; no value of it repeats (counted).",)
            )
        reasons = ["Found by counting: never NULL, and no value repeats."]
        if declared:
            reasons.append(f"The declared primary key ({', '.join(declared)}) has values that repeat.")
        return Part(
            "row_key",
            list(source.unique),
            tuple(reasons),
            ("Check that row_key identifies a row by design, not by chance.",),
        )
    if declared and (not source.counted or not source.rows):
        return Part(
            "row_key",
            list(declared),
            ("The declared primary key. Snowflake does not enforce it, and no value of it was counted.",),
        )
    if has_slices:
        why = "No column, and no likely pair of columns, was found unique" if source.counted else "Nothing was counted"
        return Part(
            "row_key",
            None,
            (f"{why}: without a row_key whole slices are replaced.",),
            ("Name the columns that identify a row as row_key, if there are any: then only changed rows move.",),
        )
    best = _likeliest_key(source)
    if best is None:
        return Part("row_key", None, (), ())
    return Part(
        "row_key",
        [best.name],
        (
            f"The likeliest column; {'its values repeat' if source.counted else 'its values were not counted'}. Rows of one key are replaced together.",
        ),
        ("Name the columns that identify a row as row_key.",),
    )


def _has(source: SourceLook, names: Sequence[str]) -> bool:
    known = {facts.name: facts for facts in source.columns}
    return bool(names) and all(name in known and is_key_type(known[name].column) for name in names)


def _likeliest_key(source: SourceLook) -> ColumnFacts | None:
    keyed = [facts for facts in source.columns if is_key_type(facts.column)]
    return min(keyed, key=lambda facts: (-(facts.distinct or 0), *key_rank(source, facts)), default=None)


# Slices


def _slices(source: SourceLook) -> Part:
    candidates = slice_candidates(source)
    if not candidates:
        return _without_time(source)
    column = candidates[0]
    months = source.months_of(column)
    facts = source.column(column)
    zone = (
        " By days in UTC: set `zone` if your days begin elsewhere."
        if facts and facts.column.kind is Kind.INSTANT
        else ""
    )
    others = f" Other columns to slice by: {', '.join(candidates[1:4])}." if candidates[1:] else ""
    if not months:
        start = f"{datetime.now(UTC).year - 3}-01"
        return Part(
            "slices",
            {"column": column, "by": "month", "start": start},
            (f"Chosen by name and type: the rows were not counted by month.{zone}{others}",),
            (f"Set slices.start to the first month that has rows; {start} is a guess.",),
        )
    by, start, typical = size_of_slices(months, today=(source.now or datetime.now(UTC)).date())
    undated = (source.rows or 0) - sum(rows for _, rows in months)
    return Part(
        "slices",
        {"column": column, "by": by, "start": start},
        (
            (
                f"A date that updates should not move; {len(months)} months have rows, a typical one {typical:,}, so slices by {by}."
                f"{f' {undated:,} rows have no {column}: they belong to every run.' if undated else ''}{zone}{others}"
            ),
        ),
    )


def size_of_slices(months: Sequence[tuple[date, int]], *, today: date) -> tuple[str, str, int]:
    """Return month, week or day, the first slice, and the rows of a typical month: the median since the first slice."""
    total = sum(rows for _, rows in months)
    past = [(day, rows) for day, rows in months if day <= today] or [(today.replace(day=1), 0)]
    before, first = 0, past[0][0]
    for day, rows in past:
        first = day
        before += rows
        if before > total * _STRAY_SHARE:
            break
    typical = int(median(rows for day, rows in past if day >= first))
    if typical <= _MONTH_ROWS:
        return "month", f"{first:%Y-%m}", typical
    if typical <= _WEEK_ROWS or (today - first).days > _MOST_DAYS:
        # A week is named by its Monday.
        return "week", (first - timedelta(days=first.weekday())).isoformat(), typical
    return "day", first.isoformat(), typical


def _without_time(source: SourceLook) -> Part:
    moving = [facts.name for facts in source.columns if facts.column.kind in (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)]
    group = source.view.group if source.view is not None and source.view.kind == "aggregate" else None
    few = [
        facts
        for facts in source.columns
        if facts.column.kind in (Kind.TEXT, Kind.INTEGER)
        and 2 <= (facts.distinct or 0) <= _MOST_VALUES
        and (group is None or facts.name in group)
    ]
    if not source.unique and not source.main.primary_key and few and group is None:
        best = max(few, key=lambda facts: facts.distinct or 0)
        return Part(
            "slices",
            {"column": best.name, "by": "value"},
            (f"No date to slice by; {best.name} has about {best.distinct} values.",),
            ("Check that slices.column has values that rows keep.",),
        )
    why = f"{', '.join(moving)} would move rows from slice to slice" if moving else "there is no date or timestamp"
    return Part("slices", None, (f"No slices: {why}. Without them a re-sync and a verification read everything.",))


# How changes are found


def _changes(source: SourceLook) -> Part:
    if source.view is not None and source.view.kind in ("whole", "opaque"):
        why = source.view.why_whole or source.view.why_full or ""
        does = "compared as a whole" if source.view.kind == "whole" else "loaded in full at each change"
        return Part("changes", None, (f"The query is {does}. {why}".strip(),))
    main, *joined = source.tables
    changes, reasons, todos = _changes_of(source, main)
    tables = {str(state.table): {"detector": "feed"} for state in joined if state.tracked}
    if tables:
        changes["tables"] = tables
        reasons += [f"Change tracking is on for {', '.join(tables)}, too."]
    if untracked := [str(state.table) for state in joined if not state.tracked]:
        reasons += [f"Of {', '.join(untracked)} both versions are compared: change tracking is off."]
    return Part("changes", changes or None, tuple(reasons), tuple(todos))


def _changes_of(source: SourceLook, main: TableState) -> tuple[dict[str, Any], list[str], list[str]]:
    mark = watermark(source)
    if main.tracked:
        days = main.retention_days
        kept = f"; its past is kept for {days} day{'s' if days != 1 else ''}" if days is not None else ""
        instead = f" Instead: {{watermark: {mark.name}}}." if mark is not None else ""
        reasons = [f"Change tracking is on for {main.table}{kept}: the feed names every changed row.{instead}"]
        return (
            {"detector": "feed"},
            reasons,
            ["Refresh at least daily: an older feed is gone, and then all rows are compared."] if days == 1 else [],
        )
    tracking = f"ALTER {'VIEW' if main.is_view else 'TABLE'} {main.table} SET CHANGE_TRACKING = TRUE would allow the cheaper detector `feed`."
    if mark is not None and source.query is None:
        reasons = [
            (
                f"Change tracking is off; {mark.name} is never NULL, and its greatest value ({_shown(mark.greatest)}) is recent: it"
                f" seems to be raised by every change. {tracking}"
            )
        ]
        return (
            {"watermark": mark.name, "look_back": "10 minutes"},
            reasons,
            [f"Check that every update raises {mark.name}; if not, take `changes` out: then all rows are compared."],
        )
    named = [facts for facts in source.columns if MOVING.search(facts.name) and facts.greatest is not None]
    doubt = (
        f" {named[0].name} (greatest value {_shown(named[0].greatest)}) is no proof of every change." if named else ""
    )
    kept = " Time Travel is off (retention 0 days): set it to 1 or more." if main.retention_days == 0 else ""
    return (
        {},
        [f"No `changes`: both versions are compared in the warehouse (detector diff).{doubt} {tracking}{kept}"],
        [],
    )


def watermark(source: SourceLook) -> ColumnFacts | None:
    """Return the column that behaves like a watermark: named like one, never NULL, recent, and not in the future."""
    now = source.now
    if now is None:
        return None
    for facts in source.columns:
        if facts.column.kind not in (Kind.TIMESTAMP, Kind.INSTANT) or not MOVING.search(facts.name):
            continue
        greatest = facts.greatest
        if facts.filled != source.rows or not isinstance(greatest, datetime):
            continue
        moment = greatest if greatest.tzinfo else greatest.replace(tzinfo=UTC)
        if now - _RECENT <= moment <= now + _SOON:
            return facts
    return None


def _shown(value: date | None) -> str:
    return value.isoformat(sep=" ", timespec="seconds") if isinstance(value, datetime) else str(value)


# How it reaches Tableau


def _delivery(source: SourceLook, place: Place) -> Part:
    look = place.look
    if look is None:
        return Part(
            "delivery", "republish", ("The default: exact, and nobody sees missing rows. Nobody looked at Tableau.",)
        )
    if look.datasource is None:
        return _new(source, look)
    assert look.package is not None, "a datasource without an extract is refused before"
    if not look.is_bare and (problems := list(obstacles(look.package, look.datasource.connections))):
        return Part(
            "delivery",
            "trigger",
            (
                f"Tableau itself refreshes the datasource when the source changed: it cannot be kept by key as it is. {'; '.join(problems)}.",
            ),
            ("To keep it by key, publish under another name, or change the datasource in Tableau.",),
        )
    size = look.datasource.size_mb or 0
    shown = f"{size:,} MB" if size else "under 1 MB"
    if look.is_bare:
        large = size >= _LARGE_MB and look.shows_jobs and look.rest_version >= PATCH_SINCE
        why = "only changes are sent" if large else f"everything is published: {shown} are sent quickly"
        instead = "" if large else " Instead: patch sends only changes."
        return Part(
            "delivery",
            "patch" if large else "republish",
            (f"The datasource is a published Hyper file of {shown}: {why}.{instead}",),
            (
                (
                    "If that file has other columns than the extract, tir plan refuses to replace it: then name another datasource, or set"
                    " datasource.replace: true if nobody needs it."
                ),
            ),
        )
    if look.package.incremental and size >= _VERY_LARGE_MB and look.shows_jobs:
        return Part(
            "delivery",
            "server",
            (
                f"The extract has {size:,} MB and incremental refresh is set up ({look.package.increment_key}): Tableau reads new rows itself.",
            ),
            ("If old rows change often, republish is better: server loads everything since the oldest change again.",),
        )
    instead = (
        f" Incremental refresh is set up ({look.package.increment_key}): server would let Tableau load."
        if look.package.incremental
        else ""
    )
    return Part(
        "delivery",
        "republish",
        (
            f"The datasource was made in Tableau ({shown}): its document is kept, its rows are replaced by key.{instead}",
        ),
    )


def _new(source: SourceLook, look: DatasourceLook) -> Part:
    spoken = ".".join(map(str, look.rest_version))
    is_large = (source.rows or 0) >= _LARGE_ROWS
    may_patch = look.rest_version >= PATCH_SINCE and look.shows_jobs
    if is_large and may_patch:
        return Part(
            "delivery",
            "patch",
            (
                f"A new datasource of many rows, and the server changes data in place (REST {spoken}): only changes are sent.",
            ),
        )
    why = (
        "it is small enough to publish whole"
        if not is_large
        else f"the server (REST {spoken}) cannot change data in place for this sign-in"
    )
    return Part("delivery", "republish", (f"A new datasource, created by the first refresh; {why}.",))


# Where it is published


def _datasource(place: Place, delivery: str, env: Mapping[str, str]) -> Part:
    value: dict[str, Any] = {"project": place.project, "name": place.name}
    look = place.look
    if look is None:
        todo = (
            "Nobody looked at Tableau: check project and name, and whether credentials are embedded (docs/deliveries.md).",
        )
        return Part("datasource", value, (), todo)
    if look.datasource is None:
        return Part(
            "datasource",
            value,
            ("There is no such datasource yet: the first refresh creates it. It needs no credentials.",),
        )
    reasons = [task.warning if delivery in ("republish", "patch") else task.needed_warning for task in look.tasks]
    if delivery == "trigger":
        return Part("datasource", value, ())
    embedded = [connection for connection in look.datasource.connections if connection.embed_password]
    if not embedded:
        return Part("datasource", value, ("No credentials are embedded, so none are named.", *reasons))
    method, username = embedded[0].method, embedded[0].username
    credentials, why, todos = _credentials(method, username, env)
    return Part("datasource", {**value, "credentials": credentials}, (why, *reasons), todos)


def _credentials(
    method: SignInMethod, username: str, env: Mapping[str, str]
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    same = bool(username) and env.get("SNOWFLAKE_USER", "").upper() == username.upper()
    user = {"username_env": "SNOWFLAKE_USER"} if same or not username else {"username": username}
    if method == "password":
        variable = "SNOWFLAKE_PASSWORD" if same or not username else "TABLEAU_SNOWFLAKE_PASSWORD"
        todo = (
            ""
            if env.get(variable)
            else f"Set {variable} to the password of {username}: a publish loses it, and Tableau never gives it back."
        )
        why = f"Its connection signs in by password, as {username or 'nobody named'}. Better: a key pair, see docs/deliveries.md."
        return {**user, "password_env": variable}, why, (todo,) if todo else ()
    saved = "key pair" if method == "key_pair" else "OAuth credential"
    todo = (
        f"Check that the {saved} of {username} is saved in Tableau, in the account settings of the user who publishes."
    )
    return {"method": method, **user}, f"Its connection signs in by {saved}, as {username}.", (todo,)
