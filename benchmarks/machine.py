"""On what a run took place: machine, versions, date."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "tir_dagster", "dagster", "pyspark", "tableauhyperapi", "tableauserverclient", "snowflake-connector-python", "pyarrow",
    "pandas", "pantab",
)  # fmt: skip


def setting() -> dict[str, Any]:
    """The machine, its load when the run began (the mean number of busy processes), the versions, and the date."""
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 1),
    }
    versions = {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    return {"machine": machine, "versions": versions, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or "unknown processor"


def setting_lines(machine: Mapping[str, Any], versions: Mapping[str, str], date: str) -> list[str]:
    """The same as lines of Markdown."""
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    place = (
        f"- {date}; {machine['system']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; load "
        f"{machine['load']:.1f} when the run began"
    )
    return [
        place,
        f"- {listed}",
    ]
