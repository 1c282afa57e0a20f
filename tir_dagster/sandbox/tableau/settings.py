"""How this server behaves, changed while it runs: its REST version, the pace of its jobs, the life of sessions."""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from tir_dagster.sandbox.tableau.store import Store

# Times far ahead could no longer be written.
_MOST = {"clock_offset_seconds": 10 * 366 * 86_400.0}
_CHOICES = {"increment_reads": ("after", "from", "again"), "increment_others": ("read", "keep")}


@dataclass(frozen=True)
class Settings:
    """Every default is what a present-day server does, only faster."""

    rest_version: str = "3.26"
    product_version: str = "2025.3.0"
    job_seconds: float = 0.2
    job_keep_seconds: float = 3600.0
    session_idle_minutes: float = 240.0
    upload_session_minutes: float = 60.0
    max_extract_mb: int = 4096
    # Added to the machine's clock: a test of schedules moves the time instead of waiting for it.
    clock_offset_seconds: float = 0.0
    # In which zone schedules say their times.
    time_zone: str = "UTC"
    # A site may forbid to run refreshes by hand; only schedules start them then.
    run_now: bool = True
    # The largest payload of a change to live-to-Hyper data.
    max_payload_mb: int = 100
    # How much a site's published files may take together; 0 is no limit.
    storage_quota_mb: int = 0
    # How many revisions of a datasource are kept; 1 keeps nothing but the current one.
    revisions_kept: int = 25
    # Overwriting a datasource deletes its extract refresh tasks, which a real server keeps.
    overwrite_loses_tasks: bool = False
    # How long a webhook's second attempt waits; the third and fourth wait three and nine times as long.
    webhook_retry_seconds: float = 1.0
    # What Tableau Cloud allows in an hour on one site: refresh starts; publishes and updates. 0 is no limit.
    refreshes_per_hour: int = 0
    publishes_per_hour: int = 0
    # Jobs that change live-to-Hyper data say what they did or why they failed. Servers were seen to say nothing.
    change_notes: bool = False
    # Refreshes and changes of live-to-Hyper data move `updatedAt` and show in a revision's size. Users report servers on which
    # they do not.
    changes_show: bool = True
    # Which rows an increment reads: those `after` the last value; those `from` it on, in place of the ones that have it; or those
    # from it on `again`, beside the ones that have it.
    increment_reads: str = "after"
    # What an increment does with logical tables that have no increment key: it reads them anew, or keeps them as they are.
    increment_others: str = "read"
    # A package may name a last value beyond its data, from which an increment `after` it would miss rows.
    increment_beyond_data: bool = False
    # A server that is asked for an increment, says nothing, and refreshes everything.
    ignore_incremental: bool = False

    @property
    def version(self) -> tuple[int, int]:
        return parse_version(self.rest_version)


def parse_version(text: str) -> tuple[int, int]:
    """`3.26` as numbers; ValueError for anything else."""
    if not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", text):
        raise ValueError(f"not a REST version: {text!r}")
    major, minor = text.split(".")
    return int(major), int(minor)


def _changed(current: Settings, changes: Any) -> Settings:
    if not isinstance(changes, dict):
        raise ValueError("settings are a JSON object")  # noqa: TRY004
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, value in changes.items():
        if name not in defaults:
            raise ValueError(f"unknown setting {name!r}; known are {sorted(defaults)}")
        if isinstance(defaults[name], (str, bool)):
            fits = isinstance(value, type(defaults[name]))
        else:
            fits = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and 0 <= value < _MOST.get(name, math.inf)
            )
        if not fits:
            raise ValueError(f"setting {name} cannot be {value!r}; its default is {defaults[name]!r}")
    settings = replace(current, **changes)
    parse_version(settings.rest_version)
    _check_zone(settings.time_zone)
    for name, choices in _CHOICES.items():
        if getattr(settings, name) not in choices:
            raise ValueError(f"setting {name} is one of {list(choices)}, not {getattr(settings, name)!r}")
    return settings


def _check_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"not a time zone: {name!r}") from error


class SettingsBook:
    """The settings in force, kept over restarts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Set when something has changed; whoever lives by the settings waits for it.
        self.changed = threading.Event()
        # How often the clock was moved back or got another zone: what was planned by it has to be planned anew.
        self.clock_changes = 0
        stored = {row["name"]: json.loads(row["value"]) for row in store.rows("SELECT name, value FROM settings")}
        known = {field.name for field in fields(Settings)}
        self.current = replace(Settings(), **{name: value for name, value in stored.items() if name in known})

    def change(self, changes: Any) -> Settings:
        with self._lock:
            settings = _changed(self.current, changes)
            with self._store.transaction() as db:
                for name, value in asdict(settings).items():
                    db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, json.dumps(value)))
            before, self.current = self.current, settings
            moved_back = settings.clock_offset_seconds < before.clock_offset_seconds
            self.clock_changes += moved_back or settings.time_zone != before.time_zone
            self.changed.set()
            return settings
