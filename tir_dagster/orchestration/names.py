"""The names that an extract's Dagster objects have: asset keys, jobs, and the op config that runs are started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dagster as dg

from tir_dagster.spec import ExtractSpec

# The run whose command tells people itself; a re-execution copies the tag, but has another id.
TOLD_BY_COMMAND = "tir/told_by_command"


@dataclass(frozen=True)
class ExtractKeys:
    """The asset keys of one extract."""

    source_table: dg.AssetKey
    changed_keys: dg.AssetKey
    purged_extract: dg.AssetKey
    published_datasource: dg.AssetKey


def extract_keys(spec: ExtractSpec) -> ExtractKeys:
    names = ("source_table", "changed_keys", "purged_extract", "published_datasource")
    return ExtractKeys(*(dg.AssetKey([spec.name, name]) for name in names))


def detect_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_detect"


def refresh_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_refresh"


def detection_config(keys: ExtractKeys, **config: Any) -> dict[str, Any]:
    return {"ops": {keys.changed_keys.to_python_identifier(): {"config": config}}}


def application_config(keys: ExtractKeys, change_set: str) -> dict[str, Any]:
    return {"ops": {keys.purged_extract.to_python_identifier(): {"config": {"change_set": change_set}}}}
