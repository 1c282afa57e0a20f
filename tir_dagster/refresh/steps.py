"""What the steps of a refresh hand to each other, and what they write down of a version."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.changes.plan import Known, Reason
from tir_dagster.hyper.replace import Shape
from tir_dagster.refresh.deliveries.republish import ServerLook
from tir_dagster.refresh.detect import Survey
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.tableau.datasources import FoundDatasource

# A test or a drill may end the process right after a step: TIR_CRASH_AFTER=staged
CRASH_VARIABLE = "TIR_CRASH_AFTER"


@dataclass(frozen=True)
class Looked:
    """What is known before anything is read: the server, the last confirmation, and the version it stands for."""

    server: ServerLook
    confirmed: Confirmation | None
    base: Version | None
    foreign: bool = False
    # Why the datasource that the spec names is not the confirmed one.
    elsewhere: Reason | None = None
    late: Confirmation | None = None
    # A change may have arrived on the server in part.
    in_doubt: bool = False
    # As far as it was compared, what is published has the table and the types that our versions have.
    alike: bool = True
    # It was compared, and people have made no document around it that would have to be kept.
    bare: bool = False


@dataclass(frozen=True)
class Prepared:
    """What a detection starts from: what was looked at, the source at a version, and reported hints that are in it."""

    looked: Looked
    surveyed: Survey
    reports: frozenset[int] = frozenset()
    # All reports that the version shows, also those that were looked at before, as far as they may be met again.
    shown_reports: frozenset[int] = frozenset()
    # Slices that an upstream asset of the project's own was materialized for, and whether it may have touched any.
    compare: tuple[str, ...] = ()
    anything: bool = False
    # Slices of the base that are known to differ from the source: they are replaced; or all, if that did not help.
    drifted: tuple[str | None, ...] = ()
    owed: Reason | None = None

    @property
    def hinted(self) -> bool:
        """Whether there is something to look at though the source may not have changed."""
        return bool(self.reports or self.drifted or self.owed)


@dataclass(frozen=True)
class Published:
    """What is on the server now."""

    confirmation: Confirmation
    found: FoundDatasource
    warnings: tuple[str, ...]


@dataclass
class Stages:
    """Seconds by stage of one refresh."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)


def known_of(version: Version) -> Known:
    return Known(**version.manifest["known"])


def shape_to_json(shape: Shape) -> dict[str, Any]:
    return {
        "columns": [[c.name, c.kind.value, c.precision, c.scale, c.nullable] for c in shape.columns],
        "key": list(shape.key),
        "slices": [shape.slices.column, shape.slices.by, shape.slices.zone],
        "names": dict(shape.names),
        "loose": sorted(shape.loose),
    }


def shape_of(version: Version) -> Shape:
    value = version.manifest["shape"]
    columns = tuple(Column(name, Kind(kind), *rest) for name, kind, *rest in value["columns"])
    loose = frozenset(value.get("loose", ()))
    return Shape(columns, tuple(value["key"]), SliceBy(*value["slices"]), value["names"], loose)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def crash_after(step: str) -> None:
    if os.environ.get(CRASH_VARIABLE) == step:
        os.kill(os.getpid(), 9)
