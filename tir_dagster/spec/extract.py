"""The extract spec: what a user declares, as frozen dataclasses that pydantic reads, and what in it cannot work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import Strict

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import SpecError
from tir_dagster.spec.alerts import Alerts
from tir_dagster.spec.declaration import Declaration, Duration, Size, Texts
from tir_dagster.spec.tables import (
    KEY_NEEDED,
    TABLE_FORM,
    Changes,
    ExtractTable,
    Relationship,
    RowSource,
    Slices,
    tables_problems,
)

ASSETS = ("source_table", "changed_keys", "purged_extract", "published_datasource")

_SHORTEST_JOB_SECONDS = 60
_LARGEST_PATCH_MB = 100_000
NAME_FORM = re.compile(r"^[a-z][a-z0-9_]*$")
_CRON_LIMITS = (59, 23, 31, 12, 7)


@dataclass(frozen=True)
class Credentials(Declaration):
    """How the datasource signs in to its source: overwriting it loses what was embedded."""

    method: Literal["key_pair", "password", "oauth"] = "password"
    """`key_pair` and `oauth` are saved in Tableau, in the account settings of the user who publishes, under the user name; a password comes from the environment."""
    username: str | None = None
    """The user name in Snowflake."""
    username_env: str | None = None
    """The environment variable that holds the user name."""
    password_env: str | None = None
    """The environment variable that holds the password."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.method == "password" and not self.password_env:
            yield (
                "password_env",
                "name the environment variable that holds the password, or sign in by `method: key_pair`",
            )
        if self.method != "password" and self.password_env:
            yield (
                "password_env",
                f"leave it out: with `method: {self.method}` the secret is saved in Tableau, in the account settings of the user who publishes",
            )
        if bool(self.username) == bool(self.username_env):
            yield "username", "give either username or username_env"


@dataclass(frozen=True)
class Datasource(Declaration):
    """Where the extract is published. Server and site default to the environment's."""

    name: str
    """The name in Tableau; each extract has a datasource of its own."""
    project: str
    """The path of the project, such as sales/europe."""
    server: str | None = None
    """Another server than TABLEAU_SERVER_URL."""
    site: str | None = None
    """Another site than TABLEAU_SITE."""
    credentials: Credentials | None = None
    create: bool = False
    """Create a datasource of this name though the extract was published to another one before."""
    replace: bool = False
    """Replace a published Hyper file that has other columns than the extract."""
    refresh: Literal["full", "incremental"] = "full"
    """Which of Tableau's own refreshes the delivery `trigger` starts."""
    schedule: str | None = None
    """The delivery `server`: refresh by the server's schedule at this time of day (HH:MM, in the slices' zone), not at once."""
    patch_limit_mb: float = 90.0
    """The delivery `patch`: how many megabytes the server takes in one request."""
    publish_job_mb: float = 1000.0
    """Packages of this many megabytes and more are published by a job of the server, so that no request has to wait for it."""
    # Servers end a refresh after two hours unless they are told otherwise; and it may have to queue before.
    job_timeout: Duration = 4 * 3600.0
    """How long to wait for a job of the server."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if has_credentials(self.server or ""):
            yield (
                "server",
                "leave user and password out of the address, and set TABLEAU_TOKEN_NAME and TABLEAU_TOKEN_SECRET",
            )
        if not 1 <= self.patch_limit_mb <= _LARGEST_PATCH_MB:
            yield "patch_limit_mb", f"give a number of megabytes between 1 and {_LARGEST_PATCH_MB:,}"
        if self.publish_job_mb < 0:
            yield "publish_job_mb", "give a number of megabytes; 0 publishes everything by a job"
        if self.job_timeout < _SHORTEST_JOB_SECONDS:
            yield "job_timeout", "give at least a minute: a job that runs on after its time is not cancelled"
        if self.schedule is not None and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", self.schedule):
            yield "schedule", f"{self.schedule!r} is no time of day; write one such as '06:30', in quotes"


@dataclass(frozen=True)
class Thresholds(Declaration):
    """When to wait, when to stop, and when a full refresh is the better one."""

    quiet_period: Duration = 2.0
    """For how long the source must not have changed before it is read."""
    interval: Duration = 30.0
    """How often the sensors look, at most."""
    delete_share: float = 0.3
    """Stop if more than this share of the rows would be removed."""
    full_share: float = 0.5
    """Load everything if more than this share of the rows changed."""
    rebuild_factor: float = 2.0
    """Rebuild the Hyper file when it is this many times as large as its rows need."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("delete_share", "full_share"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "give a share between 0 and 1"
        if self.interval < 1:
            yield "interval", "give at least 1 second"
        if self.rebuild_factor < 1:
            yield "rebuild_factor", "give a factor of at least 1"


@dataclass(frozen=True)
class Checks(Declaration):
    """What is looked at besides each refresh's own verification."""

    row_jump: float | None = None
    """Warn when the rows grow or shrink by more than this share from one refresh to the next."""
    server: bool = False
    """Let a verification download the datasource, too, and compare what the server holds."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.row_jump is not None and self.row_jump <= 0:
            yield "row_jump", "give a share above 0, such as 0.5: half of the rows more or less"


@dataclass(frozen=True)
class Verify(Declaration):
    """What each refresh compares with the source besides what it replaced."""

    slices_per_run: int = 1
    """How many whole slices each refresh compares, the ones compared longest ago first."""
    each: Literal["keys", "slices"] = "keys"
    """`slices`: also compare every touched slice."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.slices_per_run < 0:
            yield "slices_per_run", "give a number of slices, 0 or more"


@dataclass(frozen=True)
class Schedules(Declaration):
    """When everything is verified, and when everything is loaded anew: cron expressions, in the slices' time zone."""

    verify: str | None = None
    """When everything published is compared with the source."""
    full_refresh: str | None = None
    """When everything is loaded anew."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for name, cron in vars(self).items():
            if cron is not None and not _is_cron(cron):
                yield name, f"{cron!r} is no cron expression; write one such as '0 3 * * *': every day at three"


def _is_cron(text: str) -> bool:
    """Whether the five fields look like a cron expression's and no number is beyond its field's greatest."""
    fields = text.split()
    return len(fields) == len(_CRON_LIMITS) and all(
        re.fullmatch(r"[0-9A-Za-z*/,\-]+", cron_field)
        and all(int(number) <= most for number in re.findall(r"\d+", cron_field))
        for cron_field, most in zip(fields, _CRON_LIMITS, strict=True)
    )


_UPSTREAM_TIMED = ("hour", "day", "week", "month")


@dataclass(frozen=True)
class Upstream(Declaration):
    """An asset of the project's own that fills the source: what its partitions are, and in which time zone."""

    partitions: Literal["hour", "day", "week", "month", "value", "none"] = "day"
    """What a partition of the asset is; `value`: of the slices' column."""
    zone: str | None = None
    """The time zone of the partitions; left out, that of the slices."""

    def problems(self) -> Iterator[tuple[str, str]]:
        try:
            ZoneInfo(self.zone or "UTC")
        except (OSError, ValueError, KeyError):
            yield "zone", f"{self.zone!r} is no time zone; use a name such as UTC or Europe/Berlin"

    @property
    def timed(self) -> bool:
        return self.partitions in _UPSTREAM_TIMED


@dataclass(frozen=True)
class Snowflake(Declaration):
    """How the extract's queries run; what is not given comes from the connection."""

    warehouse: str | None = None
    """The virtual warehouse."""
    role: str | None = None
    """A new role means a full refresh."""
    query_tag: str | None = None
    """The tag of the queries in Snowflake's history."""


@dataclass(frozen=True)
class Keep(Declaration):
    """How many of the last verified versions stay on the disk. The confirmed one always does."""

    versions: int = 3
    """How many."""
    size: Size | None = None
    """The size of all of them together; the oldest are removed first."""
    history: int = 30
    """For how many days the rows that refreshes removed and added are kept, for `tir why`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.versions < 1:
            yield "versions", "give a number of at least 1: the confirmed version always stays"
        if self.history < 0:
            yield "history", "give a number of days; 0 keeps no rows longer than the refresh needs them"


@dataclass(frozen=True)
class ExtractSpec(RowSource, Declaration):
    """One extract: its source, its keys and slices, how changes are found, and where it is published."""

    replaceable = (("source", "query"), ("source", "tables"))

    name: str
    """Names the assets: lower-case letters, digits and underscores."""
    source: str
    """One table as it is, DATABASE.SCHEMA.TABLE; or give a `query`, or `tables`."""
    datasource: Datasource
    query: str | None = None
    """A SELECT, instead of `source`."""
    row_key: Texts = ()
    """The columns that identify a row; without them whole slices are replaced."""
    columns: Texts = ()
    """The columns of the extract; left out, the datasource's own, or all."""
    slices: Slices = Slices()
    changes: Changes = Changes()
    delivery: Literal["republish", "server", "patch", "trigger"] = "republish"
    """How the extract reaches Tableau: published whole, as its change alone, by Tableau's own refresh after a purge, or by that alone."""
    watch: Texts = ()
    """Further tables whose change starts the refresh of the delivery `trigger`."""
    policy: Literal["auto", "incremental_only", "full"] = "auto"
    """`incremental_only`: fail rather than load everything."""
    thresholds: Thresholds = Thresholds()
    keep: Keep = Keep()
    snowflake: Snowflake = Snowflake()
    alerts: Alerts | None = None
    freshness: Duration | None = None
    """The datasource is stale when nothing was published for so long."""
    checks: Checks = Checks()
    verify: Verify = Verify()
    schedules: Schedules = Schedules()
    automation: Literal["sensor", "condition"] = "sensor"
    """Who starts refreshes: the sensors, or Dagster's automation conditions."""
    asset_keys: Mapping[str, str] = field(default_factory=dict)
    """Other keys for the assets, parts divided by slashes. A `source_table` named here is an asset of the project."""
    upstream: Mapping[str, Upstream] = field(default_factory=dict)
    """Assets that fill the source, by their keys, parts divided by slashes: their partitions map onto slices."""
    tables: Annotated[tuple[ExtractTable, ...], Strict(False)] = ()
    """Several tables instead of one `source` or `query`, each with its own keys, slices and detector."""
    relationships: Annotated[tuple[Relationship, ...], Strict(False)] = ()
    """How the tables refer to each other."""

    @property
    def table(self) -> str:
        """The name of the table, where this is one of several of an extract; empty for an extract of one."""
        return ""

    @cached_property
    def parts(self) -> Mapping[str, ExtractSpec]:
        """The tables as extracts of their own, the main one first; an extract of one table is its only part, without a name."""
        if not self.tables:
            return {"": self}
        main = next((table for table in self.tables if table.main), self.tables[0])
        # By name: whoever puts them into another order changes nothing.
        others = (table for table in self.tables if table is not main)
        ordered = (main, *sorted(others, key=lambda table: table.name))
        return {table.name: TableSpec.of(self, table) for table in ordered}

    @property
    def main_table(self) -> str:
        """The table that rows come from; of several tables, of the main one."""
        return self.main.main_table if self.tables else super().main_table

    @property
    def main(self) -> ExtractSpec:
        """The extract, or its main table, whose slices are the partitions of the assets."""
        return next(iter(self.parts.values()))

    def problems(self) -> Iterator[tuple[str, str]]:
        if not NAME_FORM.match(self.name):
            yield "name", "use lower-case letters, digits and underscores: it names the assets"
        if self.tables or self.relationships:
            yield from self._tables_problems()
        else:
            yield from self.source_problems()
        if unfit := [table for table in self.watch if not TABLE_FORM.fullmatch(table)]:
            yield "watch", f"{', '.join(unfit)}: give tables as DATABASE.SCHEMA.TABLE"
        if self.watch and self.delivery != "trigger":
            yield "watch", "only the delivery `trigger` watches several tables"
        if self.datasource.schedule and self.delivery != "server":
            yield "datasource.schedule", "only the delivery `server` waits for a schedule"
        if self.delivery == "trigger":
            yield from self._trigger_problems()
        if self.main.slices.by == "value" and self.automation == "condition":
            yield "automation", "conditions need slices by month, week or day, or none; use sensors for slices by value"
        for name, key in self.asset_keys.items():
            if name not in ASSETS:
                yield f"asset_keys.{name}", f"unknown asset; known are {', '.join(ASSETS)}"
            elif not all(key.split("/")):
                yield f"asset_keys.{name}", f"{key!r} has an empty part; write parts divided by single slashes"
        yield from self._upstream_problems()
        if self.lacks_key and not self.tables and self.delivery != "trigger":
            yield "row_key", KEY_NEEDED

    def _tables_problems(self) -> Iterator[tuple[str, str]]:
        if not self.tables:
            yield "relationships", "only an extract of several `tables` has relationships"
            return
        for name in ("source", "query", "row_key", "columns", "slices", "changes"):
            if getattr(self, name) != _EMPTY[name]:
                yield name, "each of the `tables` has its own; give it there"
        if self.delivery == "server":
            yield (
                "delivery",
                "`server` goes on from one last value, and an extract of several tables has none that holds for all; choose `republish` or `patch`",
            )
        yield from tables_problems(self.tables, self.relationships, needs_keys=self.delivery != "trigger")

    def _upstream_problems(self) -> Iterator[tuple[str, str]]:
        for key, upstream in self.upstream.items():
            path = f"upstream.{key}"
            if not all(key.split("/")):
                yield path, f"{key!r} has an empty part; write parts divided by single slashes"
            elif self.delivery == "trigger":
                yield path, "the delivery `trigger` has no slices; name tables to watch in `watch`"
            elif upstream.timed and self.main.slices.by in ("value", "none"):
                yield path, f"partitions by {upstream.partitions} map onto slices by month, week or day; here are none"
            elif upstream.partitions == "value" and self.main.slices.by != "value":
                yield path, "partitions by value map onto slices by value; here are none"

    def _trigger_problems(self) -> Iterator[tuple[str, str]]:
        """Settings that need an extract version on disk, which the delivery `trigger` does not keep."""
        if self.schedules.verify:
            yield "schedules.verify", "the delivery `trigger` keeps no version to verify; leave it out"
        if self.checks != Checks():
            yield "checks", "the delivery `trigger` keeps no version to check; leave them out"


# Of an extract of several tables, what each of them says for itself.
_EMPTY: dict[str, object] = {
    "source": "",
    "query": None,
    "row_key": (),
    "columns": (),
    "slices": Slices(),
    "changes": Changes(),
}


@dataclass(frozen=True)
class TableSpec(ExtractSpec):
    """One of several tables as an extract of its own: it shares all settings that are not the table's."""

    table_name: str = ""

    @staticmethod
    def of(spec: ExtractSpec, table: ExtractTable) -> TableSpec:
        own = {name: getattr(table, name) for name in _EMPTY}
        shared = {field.name: getattr(spec, field.name) for field in fields(ExtractSpec)}
        if table.delete_share is not None:
            shared["thresholds"] = replace(spec.thresholds, delete_share=table.delete_share)
        return TableSpec(**{**shared, **own, "tables": ()}, table_name=table.name)

    @property
    def table(self) -> str:
        return self.table_name


def check_columns(spec: ExtractSpec, source_columns: Sequence[str]) -> None:
    """Refuse a spec that names a column the source does not have, or works with one that `columns` leaves out."""
    problems = [
        f"{field} names {name}, which {spec.main_table} does not have{_suggestion(name, source_columns)}"
        for field, names in {
            "columns": spec.columns,
            **_working_columns(spec),
            "changes.watermark": _watermark(spec),
        }.items()
        for name in names
        if not {name, name.upper()} & set(source_columns)
    ]
    if problems:
        raise SpecError(
            f"{spec.name}: {'; '.join(problems)}. The source has {', '.join(source_columns)}: correct the spec."
        )
    columns = {name if name in source_columns else name.upper() for name in spec.columns or source_columns}
    hidden = [
        f"{field} {name}"
        for field, names in _working_columns(spec).items()
        for name in names
        if not {name, name.upper()} & columns
    ]
    if hidden:
        raise SpecError(
            f"{spec.name}: `columns` leaves out what a refresh works with: {', '.join(hidden)}. Add it to `columns` in the spec."
        )


def needed_columns(spec: ExtractSpec) -> tuple[str, ...]:
    """All columns that the extract must have; the watermark is only queried and may be left out."""
    return tuple(dict.fromkeys(name for names in (*_working_columns(spec).values(), spec.columns) for name in names))


def _working_columns(spec: ExtractSpec) -> dict[str, tuple[str, ...]]:
    """The columns of the extract that a refresh works with, by the field that names them."""
    return {"row_key": spec.row_key, "slices.column": (spec.slices.column,) if spec.slices.column else ()}


def _watermark(spec: ExtractSpec) -> tuple[str, ...]:
    return (spec.changes.watermark,) if spec.changes.watermark else ()


def _suggestion(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name.upper(), names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""
