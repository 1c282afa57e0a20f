"""Which Spark a run uses: by environment variables, the `pyspark` resource with the block `spark:` in it, or what this machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster.spark.places import LIFETIME, STAGING, STAGING_VARIABLE, StagingPlace, staging_place
from tir_dagster.spark.remote import REMOTE_VARIABLE, Remote
from tir_dagster.spark.server import remote_spark

MASTER_VARIABLE = "TIR_SPARK_MASTER"
_MASTER, _REMOTE = "spark.master", "spark.remote"
BLOCK = "`remote` of the block `spark:` (or spark.remote of the resource `pyspark`)"


@dataclass(frozen=True)
class SparkChoice:
    """A Spark Connect server, or a Spark of this process on `master`; and the settings of its session."""

    remote: Remote | None
    settings: Mapping[str, str]

    @property
    def master(self) -> str:
        return self.settings.get(_MASTER, "local[*]")

    @property
    def sentence(self) -> str:
        """What the log of a run says."""
        if self.remote is not None:
            return f"using Spark at {self.remote.name}"
        return "starting Spark" if self.master.startswith("local") else f"starting Spark on {self.master}"


def choose_spark(
    env: Mapping[str, str],
    configured: Mapping[str, Any],
    home: Path,
    log: Callable[[str], None],
    *,
    shared: bool = True,
) -> SparkChoice:
    """Choose by SPARK_REMOTE, then TIR_SPARK_MASTER, then what is configured, then this home's own server, if it may be shared.

    The first one counts. Where rows are staged is TIR_STAGING, or what is configured, whichever Spark it is.
    """
    settings = _with_staging(env, configured)
    # Raises now, before a statement runs, if the address cannot be one.
    staging_place(settings, env)
    named, master = settings.pop(_REMOTE, None), env.get(MASTER_VARIABLE)
    if env.get(REMOTE_VARIABLE):
        # What is configured is for another Spark.
        staging = {name: settings[name] for name in (STAGING, LIFETIME) if name in settings}
        return SparkChoice(remote_spark(env, home, log), staging)
    if master:
        return SparkChoice(None, {**settings, _MASTER: master})
    if named:
        return SparkChoice(Remote.parse(named, env, BLOCK), settings)
    is_bare = not set(settings) - {STAGING, LIFETIME}
    return SparkChoice(remote_spark(env, home, log) if shared and is_bare else None, settings)


def chosen_staging(env: Mapping[str, str], configured: Mapping[str, Any]) -> StagingPlace | None:
    """Return where rows would be staged, whichever Spark stages them."""
    return staging_place(_with_staging(env, configured), env)


def _with_staging(env: Mapping[str, str], configured: Mapping[str, Any]) -> dict[str, str]:
    settings = {name: str(value) for name, value in configured.items()}
    if address := env.get(STAGING_VARIABLE):
        settings[STAGING] = address
    return settings
