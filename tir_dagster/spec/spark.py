"""The block `spark:` of a spec file: which Spark runs the tasks, and where executors on other machines stage rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tir_dagster.addresses import has_credentials, staging_problem
from tir_dagster.spec.declaration import Declaration, Duration

_MASTER = re.compile(r"local(-cluster)?(\[.*\])?|spark://.+|k8s://.+|yarn")
# What Spark itself hides in its own page, and tokens in addresses.
_SECRET = re.compile(r"secret|password|token|access[._-]?key|credential", re.IGNORECASE)
# Their values are the names of Kubernetes secrets, whatever their own name says.
_REFERENCE = re.compile(r"spark\.kubernetes\.(driver|executor)\.(secretKeyRef|secrets)\..+")
_DAY = 86_400.0


@dataclass(frozen=True)
class SparkSpec(Declaration):
    """The Spark of all extracts and loads of the file; environment variables come first."""

    master: str | None = None
    """A cluster: spark://host:7077, yarn or k8s://https://host:443. Left out: this machine."""
    remote: str | None = None
    """A Spark Connect server, sc://host:15002. Its token is in the variable SPARK_CONNECT_AUTHENTICATE_TOKEN."""
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Settings of Spark, such as `spark.executor.memory: 4g`; with `remote`, those of a session. No secrets."""
    staging: str | None = None
    """Where executors on other machines write rows, for this one to fetch: s3://bucket/prefix, another object store, or a folder that all
    of them reach."""
    staging_lifetime: Duration = _DAY
    """What a crash leaves in `staging` is removed by the first refresh after this time. A run takes less time than this."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.master is not None and self.remote is not None:
            yield "remote", "give `master` or `remote`, not both"
        if self.master is not None and not _MASTER.fullmatch(self.master):
            yield "master", "write spark://host:7077, yarn, k8s://https://host:443 or local[*]"
        if self.remote is not None and not self.remote.startswith("sc://"):
            yield "remote", "write the address of a Spark Connect server, such as sc://spark.example.com:15002"
        elif self.remote is not None and (has_credentials(self.remote) or _SECRET.search(self.remote)):
            yield "remote", "leave the token out; set it in the variable SPARK_CONNECT_AUTHENTICATE_TOKEN"
        for name in self.config:
            if not name.startswith("spark."):
                yield f"config.{name}", "names of Spark's settings begin with `spark.`"
            elif name in ("spark.master", "spark.remote"):
                yield f"config.{name}", f"give it as `{name.removeprefix('spark.')}`, beside `config`"
            elif _SECRET.search(name) and not _REFERENCE.fullmatch(name):
                yield (
                    f"config.{name}",
                    "secrets do not belong into this file; set it in the spark-defaults.conf of SPARK_CONF_DIR",
                )
        if self.staging is not None and (problem := staging_problem(self.staging)):
            yield "staging", problem
        if self.staging_lifetime < 600:
            yield "staging_lifetime", "give at least 10 minutes: the rows of runs at work are there, too"

    def settings(self) -> dict[str, str]:
        """Return the block as settings of a Spark session; those that begin with spark.tir are this package's own."""
        own = {"spark.master": self.master, "spark.remote": self.remote, "spark.tir.staging": self.staging}
        if self.staging is not None:
            own["spark.tir.staging.lifetime"] = f"{self.staging_lifetime:g}"
        texts = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.config.items()
        }
        return {**texts, **{name: value for name, value in own.items() if value is not None}}
