"""Tableau incremental refresh on Dagster: the public names, nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tir_dagster.alerts.events import Channel as Channel
    from tir_dagster.alerts.events import Event as Event
    from tir_dagster.errors import SpecError as SpecError
    from tir_dagster.errors import TirError as TirError
    from tir_dagster.orchestration.alerts.sensor import build_alert_sensor as build_alert_sensor
    from tir_dagster.orchestration.alerts.sensor import report as report
    from tir_dagster.orchestration.alerts.sensor import report_recovery as report_recovery
    from tir_dagster.orchestration.build import build_defs as build_defs
    from tir_dagster.orchestration.build import build_extract_defs as build_extract_defs
    from tir_dagster.orchestration.component import FileLoadComponent as FileLoadComponent
    from tir_dagster.orchestration.component import TableauExtractComponent as TableauExtractComponent
    from tir_dagster.orchestration.io_managers import ChangeSetIOManager as ChangeSetIOManager
    from tir_dagster.orchestration.io_managers import HyperIOManager as HyperIOManager
    from tir_dagster.orchestration.io_managers import StagedChangeSet as StagedChangeSet
    from tir_dagster.orchestration.io_managers import StateFolder as StateFolder
    from tir_dagster.orchestration.resources import TableauResource as TableauResource
    from tir_dagster.orchestration.resources import environment_resources as environment_resources
    from tir_dagster.orchestration.translation import ExtractTranslator as ExtractTranslator
    from tir_dagster.refresh.state.versions import Version as Version
    from tir_dagster.spec.alerts import Cause as Cause
    from tir_dagster.spec.extract import ExtractSpec as ExtractSpec
    from tir_dagster.spec.reading import load_specs as load_specs

# Loaded when they are first used: Dagster and the connectors take seconds, `import tir_dagster` must not.
_HOMES = {
    "Cause": "spec.alerts",
    "Channel": "alerts.events",
    "ChangeSetIOManager": "orchestration.io_managers",
    "Event": "alerts.events",
    "ExtractSpec": "spec.extract",
    "ExtractTranslator": "orchestration.translation",
    "FileLoadComponent": "orchestration.component",
    "HyperIOManager": "orchestration.io_managers",
    "SpecError": "errors",
    "StagedChangeSet": "orchestration.io_managers",
    "StateFolder": "orchestration.io_managers",
    "TableauExtractComponent": "orchestration.component",
    "TableauResource": "orchestration.resources",
    "TirError": "errors",
    "Version": "refresh.state.versions",
    "build_alert_sensor": "orchestration.alerts.sensor",
    "build_defs": "orchestration.build",
    "build_extract_defs": "orchestration.build",
    "environment_resources": "orchestration.resources",
    "load_specs": "spec.reading",
    "report": "orchestration.alerts.sensor",
    "report_recovery": "orchestration.alerts.sensor",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    # Dagster looks here for components.
    return sorted({*globals(), *_HOMES})
