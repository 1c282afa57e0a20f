"""Names of Dagster objects of extracts and loads: asset keys, jobs, pools, and the op config of runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import dagster as dg

from tir_dagster.spec.extract import ASSETS, ExtractSpec
from tir_dagster.spec.load import LoadSpec

# The id of a run whose command sends alerts itself; a re-execution copies the tag, but has another id. Dagster hides tags of this beginning.
TOLD_BY_COMMAND = ".dagster/tir_told_by_command"
# Whom Dagster's pages name under "Launched by".
LAUNCHED_BY = "user"


@dataclass(frozen=True)
class ExtractKeys:
    """The asset keys of one extract."""

    source_table: dg.AssetKey
    changed_keys: dg.AssetKey
    purged_extract: dg.AssetKey
    published_datasource: dg.AssetKey


def extract_keys(spec: ExtractSpec) -> ExtractKeys:
    """Return the asset keys of the spec; by default the extract's name and the asset's."""
    return ExtractKeys(
        *(
            dg.AssetKey(spec.asset_keys[name].split("/") if name in spec.asset_keys else [spec.name, name])
            for name in ASSETS
        )
    )


@dataclass(frozen=True)
class LoadKeys:
    """The asset keys of one load."""

    landed_files: dg.AssetKey
    source_table: dg.AssetKey


def load_keys(spec: LoadSpec) -> LoadKeys:
    return LoadKeys(dg.AssetKey([spec.name, "landed_files"]), dg.AssetKey([spec.name, "source_table"]))


def load_job_name(spec: LoadSpec) -> str:
    return f"{spec.name}_load"


def pool_name(spec: ExtractSpec) -> str:
    """Return the pool of the datasource; Dagster allows only letters, digits and a few signs."""
    place = f"{spec.datasource.project}/{spec.datasource.name}"
    return "tableau_" + re.sub(r"[^A-Za-z0-9_]+", "_", place).strip("_").lower()


def detect_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_detect"


def refresh_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_refresh"


def refresh_now_job_name(spec: ExtractSpec) -> str:
    """Return the job that people launch: it asks for nothing. What Tableau refreshes itself has no other one."""
    return refresh_job_name(spec) if spec.delivery == "trigger" else f"{spec.name}_refresh_now"


def source_sensor_names(spec: ExtractSpec) -> tuple[str, ...]:
    """Return the sensors that make refreshes go by themselves."""
    source = f"{spec.name}_source"
    return (
        (source,) if spec.delivery == "trigger" or spec.automation == "condition" else (source, f"{spec.name}_refresh")
    )


def verify_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_verify"


def rollback_job_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_rollback"


def full_config(spec: ExtractSpec, keys: ExtractKeys) -> dict[str, Any]:
    """Return the run config of a full refresh."""
    if spec.delivery == "trigger":
        return {"ops": {keys.published_datasource.to_python_identifier(): {"config": {"mode": "full"}}}}
    return {"ops": {keys.purged_extract.to_python_identifier(): {"config": {"full": True}}}}


def detection_config(keys: ExtractKeys, **config: Any) -> dict[str, Any]:
    return {"ops": {keys.changed_keys.to_python_identifier(): {"config": config}}}


def application_config(keys: ExtractKeys, change_set: str) -> dict[str, Any]:
    return {"ops": {keys.purged_extract.to_python_identifier(): {"config": {"change_set": change_set}}}}
