"""Dagster resources by environment variables: Snowflake, Spark, Tableau, and the state folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import dagster as dg
from pydantic import Field

from tir_dagster.background import no_core_files
from tir_dagster.errors import TirError
from tir_dagster.orchestration import io_managers
from tir_dagster.orchestration.home import STATE_VARIABLE, tir_home
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.snowflake.names import check_mere_name, whole_number
from tir_dagster.spark.connect import connect_session
from tir_dagster.spark.java import require_java
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import load_declared, spark_from_mapping
from tir_dagster.spec.spark import SparkSpec

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
    from dagster_snowflake import SnowflakeResource

_SNOWFLAKE_SECRETS = {
    "password": "SNOWFLAKE_PASSWORD",
    "private_key": "SNOWFLAKE_PRIVATE_KEY",
    "private_key_path": "SNOWFLAKE_PRIVATE_KEY_PATH",
    "private_key_password": "SNOWFLAKE_PRIVATE_KEY_PASSWORD",
    "oauth_token": "SNOWFLAKE_OAUTH_TOKEN",
}
_SNOWFLAKE_CONTEXT = {
    "warehouse": "SNOWFLAKE_WAREHOUSE",
    "role": "SNOWFLAKE_ROLE",
    "authenticator": "SNOWFLAKE_AUTHENTICATOR",
}


class SnowflakeSettings(dg.ConfigurableResource):
    """Snowflake, configured like dagster-snowflake's resource, which a project may use here instead.

    That one imports Snowpark and Snowflake's own API, eight of the ten seconds that definitions took to load. So it is
    imported only when it is used.
    """

    account: str
    user: str
    password: str | None = None
    private_key: str | None = None
    private_key_path: str | None = None
    private_key_password: str | None = None
    oauth_token: str | None = None
    warehouse: str | None = None
    role: str | None = None
    authenticator: str | None = None
    additional_snowflake_connection_args: dict[str, Any] = Field(default_factory=dict)

    @property
    def connection_args(self) -> dict[str, Any]:
        """The arguments of the connector, under its own names."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    @contextmanager
    def get_connection(self) -> Iterator[Any]:
        """Open a connection like dagster-snowflake's resource, for your own assets."""
        from dagster_snowflake import SnowflakeResource

        arguments = {name: value for name, value in self.connection_args.items() if value is not None}
        if token := arguments.pop("oauth_token", None):
            more = {**self.additional_snowflake_connection_args, "token": token}
            arguments |= {"authenticator": "oauth", "additional_snowflake_connection_args": more}
        with SnowflakeResource(**arguments).get_connection() as connection:
            yield connection


class SparkSettings(dg.ConfigurableResource):
    """The configuration of dagster-pyspark's lazy resource; neither it nor Spark is imported before a run needs them."""

    spark_config: dict[str, Any] = Field(default_factory=dict)


# Parameter types of assets, sensors and checks: the classes above, or those of the Dagster libraries. As real types they
# would make Dagster import the libraries whenever definitions load.
if TYPE_CHECKING:
    SnowflakeParam: TypeAlias = SnowflakeSettings | SnowflakeResource
    SparkParam: TypeAlias = SparkSettings | LazyPySparkResource
else:
    SnowflakeParam = SparkParam = dg.ResourceParam[Any]


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
    # Scopes beside those that a refresh asks for by itself.
    connected_app_scopes: str | None = None
    # Calls that the site allows in an hour; 0: any number. Without them, what Tableau Cloud allows.
    refreshes_per_hour: int | None = None
    publishes_per_hour: int | None = None

    def access(self) -> Any:
        """Return the plain object that the room `tableau` uses."""
        from tir_dagster.tableau.access import TableauAccess

        values = {name: getattr(self, name) for name in TABLEAU_VARIABLES}
        env = {variable: values[name] for name, variable in TABLEAU_VARIABLES.items() if values[name] not in (None, "")}
        env = {variable: str(value) for variable, value in env.items()}
        return TableauAccess.from_environment(env)


_NUMBERS = ("refreshes_per_hour", "publishes_per_hour")
TABLEAU_VARIABLES = {name: f"TABLEAU_{name.upper()}" for name in TableauResource.model_fields}


def environment_resources(*, spark: SparkSpec | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build all resources from environment variables; unset values are left out, and no secret is read here.

    `spark` is the block of that name of a spec file; left out, that of the file that TIR_SPECS names, if any.
    """
    from tir_dagster.orchestration.alerts.resources import channel_resources

    block = (
        load_declared().spark if spark is None else spark if isinstance(spark, SparkSpec) else spark_from_mapping(spark)
    )
    state = StateFolder(path=str(tir_home()), address=os.environ.get(STATE_VARIABLE) or None)
    return {
        "snowflake": _snowflake(),
        "tableau": TableauResource(**_set_variables(TABLEAU_VARIABLES)),
        "pyspark": SparkSettings(spark_config=block.settings() if block else {}),
        "state": state,
        **channel_resources(),
        io_managers.CHANGE_SET_IO: io_managers.ChangeSetIOManager(state=state),
        io_managers.HYPER_IO: io_managers.HyperIOManager(state=state),
    }


def _snowflake() -> SnowflakeSettings:
    connection: dict[str, Any] = {"network_timeout": 120, "login_timeout": 60}
    # Dagster shows these values, so first check that they contain no password.
    if host := os.environ.get("SNOWFLAKE_HOST"):
        check_mere_name("host", host)
        connection["host"] = host
    if port := os.environ.get("SNOWFLAKE_PORT"):
        connection["port"] = whole_number("port", port)
    if protocol := os.environ.get("SNOWFLAKE_PROTOCOL"):
        connection["protocol"] = protocol
    settings = _set_variables(_SNOWFLAKE_SECRETS | _SNOWFLAKE_CONTEXT)
    if not settings.keys() & {*_SNOWFLAKE_SECRETS, "authenticator"}:
        # Dagster reads the variable when the resource is used.
        settings["password"] = dg.EnvVar("SNOWFLAKE_PASSWORD")
    return SnowflakeSettings(
        account=dg.EnvVar("SNOWFLAKE_ACCOUNT"),
        user=dg.EnvVar("SNOWFLAKE_USER"),
        additional_snowflake_connection_args=connection,
        **settings,
    )


def _set_variables(names: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: dg.EnvVar.int(variable) if name in _NUMBERS else dg.EnvVar(variable)
        for name, variable in names.items()
        if os.environ.get(variable)
    }


def snowflake_access(resource: SnowflakeParam) -> Any:
    """Return the plain object that the room `snowflake` uses; from here on the process holds secrets and rows."""
    from tir_dagster.snowflake.connection import SnowflakeAccess

    no_core_files()
    if isinstance(resource, SnowflakeSettings):
        return SnowflakeAccess.from_connection_args(resource.connection_args)
    return SnowflakeAccess.from_connection_args(dict(resource._connection_args))  # noqa: SLF001


def probing_access(resource: SnowflakeParam, spec: ExtractSpec) -> Any:
    """Return access to Snowflake with the extract's own role and warehouse: another role may not see the table."""
    overrides = {name: value for name, value in vars(spec.snowflake).items() if value}
    return replace(snowflake_access(resource), **overrides)


def spark_session(resource: SparkParam, home: Path, *, log: Callable[[str], None]) -> Any:
    """Return a session with the settings that correct values need, on the Spark that variables, resource and machine choose.

    The server of `tir spark up` is used only if the resource has no configuration.
    """
    from tir_dagster.spark.choice import choose_spark

    shared = isinstance(resource, SparkSettings)
    choice = choose_spark(os.environ, resource.spark_config, home, log, shared=shared)
    if choice.remote is None:
        require_java(os.environ)
    log(choice.sentence)
    if choice.remote is not None:
        return connect_session(choice.remote, choice.settings)
    log("it takes from five seconds to a minute; tir spark up keeps one running")
    return _own_session(choice.settings, home)


def clean_staging(resource: SparkParam, *, log: Callable[[str], None]) -> None:
    """Remove rows that crashed runs left in the staging place, also where this run will read too little to use it."""
    from tir_dagster.spark.choice import chosen_staging

    try:
        place = chosen_staging(os.environ, resource.spark_config)
    except TirError as error:
        # An error only for a run that has to stage something.
        log(f"the staging place was not cleaned: {error}")
        return
    if place is not None:
        place.remove_leftovers()


def _own_session(configured: Mapping[str, str], home: Path) -> Any:
    """Start dagster-pyspark's session in this process."""
    from dagster_pyspark import LazyPySparkResource

    from tir_dagster.spark.session import configure, ended_if_interrupted, jvm_output, spark_conf, use_this_python

    settings = spark_conf(home=home, conf=configured)
    use_this_python(settings)
    try:
        # On a terminal, the JVM's output would mix with a command's lines.
        with jvm_output(home), ended_if_interrupted():
            session = LazyPySparkResource(spark_config=settings).spark_session
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        java = "It needs Java 17 or 21: check `java -version` and JAVA_HOME."
        master = settings["spark.master"]
        cluster = "" if master.startswith("local") else f"Check that {master} is reached from here, and its settings. "
        raise TirError(f"Spark did not start: {message}. {cluster}{java}") from error
    return configure(session)
