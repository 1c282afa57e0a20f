"""Dagster resources: Snowflake, Spark and Tableau by environment variables, and the folder that keeps the state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from dagster_snowflake import SnowflakeResource

from tir_dagster.changes.changesets import ChangeSetStore
from tir_dagster.errors import TirError
from tir_dagster.extract.versions import VersionStore
from tir_dagster.orchestration.home import tir_home
from tir_dagster.spec import ExtractSpec

_SNOWFLAKE_SECRETS = {
    "password": "SNOWFLAKE_PASSWORD",
    "private_key": "SNOWFLAKE_PRIVATE_KEY",
    "private_key_path": "SNOWFLAKE_PRIVATE_KEY_PATH",
    "private_key_password": "SNOWFLAKE_PRIVATE_KEY_PASSWORD",
}
_SNOWFLAKE_CONTEXT = {
    "warehouse": "SNOWFLAKE_WAREHOUSE",
    "role": "SNOWFLAKE_ROLE",
    "authenticator": "SNOWFLAKE_AUTHENTICATOR",
}


class TableauResource(dg.ConfigurableResource):
    """Tableau Server or Cloud: a site, and a token, a password or a connected app to sign in with."""

    server_url: str | None = None
    site: str | None = None
    token_name: str | None = None
    token_secret: str | None = None
    username: str | None = None
    password: str | None = None
    connected_app_client_id: str | None = None
    connected_app_secret_id: str | None = None
    connected_app_secret_value: str | None = None

    def access(self) -> Any:
        """The plain object that the datasource room works with."""
        from tir_dagster.datasource.access import TableauAccess  # noqa: PLC0415

        given = {name: getattr(self, name) for name in TABLEAU_VARIABLES}
        env = {variable: given[name] for name, variable in TABLEAU_VARIABLES.items() if given[name]}
        return TableauAccess.from_environment(env)


TABLEAU_VARIABLES = {name: f"TABLEAU_{name.upper()}" for name in TableauResource.model_fields}


class StateFolder(dg.ConfigurableResource):
    """Where change sets, extract versions and leases are kept."""

    path: str

    @property
    def folder(self) -> Path:
        return Path(self.path)

    def change_sets(self, extract: str) -> ChangeSetStore:
        return ChangeSetStore(self.folder / "extracts" / extract / "change_sets")

    def versions(self, extract: str) -> VersionStore:
        return VersionStore(self.folder / "extracts" / extract / "versions")


def environment_resources() -> dict[str, Any]:
    """All resources by environment variables; a value that is not set is left out, a secret is never read here."""
    from tir_dagster.orchestration import io_managers  # noqa: PLC0415 - it needs the folder's class from here
    from tir_dagster.orchestration.people import people_resources  # noqa: PLC0415

    state = StateFolder(path=str(tir_home()))
    return {
        "snowflake": _snowflake(),
        "tableau": TableauResource(**_set_variables(TABLEAU_VARIABLES)),
        "pyspark": LazyPySparkResource(spark_config={}),
        "state": state,
        **people_resources(),
        io_managers.CHANGE_SET_IO: io_managers.ChangeSetIOManager(state=state),
        io_managers.HYPER_IO: io_managers.HyperIOManager(state=state),
    }


def _snowflake() -> SnowflakeResource:
    connection: dict[str, Any] = {"network_timeout": 120, "login_timeout": 60}
    for name in ("host", "port", "protocol"):
        if value := os.environ.get(f"SNOWFLAKE_{name.upper()}"):
            connection[name] = int(value) if name == "port" else value
    given = _set_variables(_SNOWFLAKE_SECRETS | _SNOWFLAKE_CONTEXT)
    if not given.keys() & {*_SNOWFLAKE_SECRETS, "authenticator"}:
        # The resource insists on a way to sign in; the variable is asked for when it is used.
        given["password"] = dg.EnvVar("SNOWFLAKE_PASSWORD")
    return SnowflakeResource(
        account=dg.EnvVar("SNOWFLAKE_ACCOUNT"),
        user=dg.EnvVar("SNOWFLAKE_USER"),
        additional_snowflake_connection_args=connection,
        **given,
    )


def _set_variables(names: Mapping[str, str]) -> dict[str, Any]:
    return {name: dg.EnvVar(variable) for name, variable in names.items() if os.environ.get(variable)}


def snowflake_access(resource: SnowflakeResource) -> Any:
    from tir_dagster.source.connection import SnowflakeAccess  # noqa: PLC0415

    return SnowflakeAccess.from_connection_args(dict(resource._connection_args))  # noqa: SLF001


def probing_access(resource: SnowflakeResource, spec: ExtractSpec) -> Any:
    """How the extract's own queries reach Snowflake: its role may be the only one that sees the table."""
    asked = {name: value for name, value in vars(spec.snowflake).items() if value}
    return replace(snowflake_access(resource), **asked)


def spark_session(resource: LazyPySparkResource, home: Path, *, quiet: bool = False) -> Any:
    """The session of dagster-pyspark with the settings that our values depend on."""
    from tir_dagster.source.session import configure, jvm_output, spark_conf, use_this_python  # noqa: PLC0415

    use_this_python()
    settings = spark_conf(home=home, conf=resource.spark_config)
    try:
        with jvm_output(home) if quiet else nullcontext():
            session = LazyPySparkResource(spark_config=settings).spark_session
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise TirError(
            f"Spark did not start: {said}. It needs Java 17 or 21: check `java -version` and JAVA_HOME."
        ) from error
    return configure(session)
