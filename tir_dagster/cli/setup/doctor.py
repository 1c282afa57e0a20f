"""The checks of `tir doctor`: this machine, Snowflake, Tableau, and the others that are configured or declared. Nothing is written."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow import fs
from slack_sdk.errors import SlackApiError

from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.servicenow import ServiceNowChannel
from tir_dagster.changes.relation import read_tables, watched_tables
from tir_dagster.cli.setup.checks import Check, Checks, Result, failure, ok, warning
from tir_dagster.cli.setup.published import look_inside, obstacles
from tir_dagster.cli.setup.source import TableState, table_state
from tir_dagster.errors import DatasourceError, TirError
from tir_dagster.hyper.engine import HyperEngine
from tir_dagster.loading.landing import LandingPlace
from tir_dagster.orchestration.home import tir_home
from tir_dagster.probe.warehouse import other_parameters
from tir_dagster.refresh.context import USES_BY_DELIVERY, snowflake_for, tableau_for
from tir_dagster.refresh.datasource import credentials_for
from tir_dagster.refresh.deliveries.patch import PATCH_SINCE
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.spark.java import require_java
from tir_dagster.spark.remote import Remote
from tir_dagster.spark.server import server_state
from tir_dagster.spec.alerts import ServiceNowAlerts
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import SPECS_VARIABLE, Declared, load_declared
from tir_dagster.tableau.access import ConnectedApp, TableauAccess, TableauPassword
from tir_dagster.tableau.calls import Use
from tir_dagster.tableau.client import TableauClient, Timeouts
from tir_dagster.tableau.datasources import FoundDatasource, find_project, look_for_datasource, none_of_that_name
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import refreshes_since, shows_jobs
from tir_dagster.tableau.tasks import scheduled_refreshes
from tir_dagster.trust import CA_VARIABLES, ssl_context

_OLD_CLOCK, _BROKEN_CLOCK = 30.0, 240.0
_LITTLE_DISK, _NO_DISK = 5e9, 500e6
_NETWORK_SECONDS = 15
# On a busy machine a cold start takes minutes.
_SPARK_SECONDS = 300.0
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
_ADMINISTRATORS = ("administrator", "siteadmin")


@dataclass(frozen=True)
class Installation:
    """What is examined: the environment, what is declared, and what may take longer."""

    env: Mapping[str, str]
    declared: Declared
    with_spark: bool = False

    @property
    def extracts(self) -> tuple[ExtractSpec, ...]:
        return self.declared.extracts

    def wanted(self) -> list[str]:
        """Return the groups that are configured or declared."""
        declared = [*(one.alerts for one in self.declared.extracts), *(one.alerts for one in self.declared.loads)]
        alerts = [one for one in declared if one is not None]
        wanted = ["machine", "snowflake", "tableau"]
        if self.env.get("SLACK_BOT_TOKEN") or any(one.slack for one in alerts):
            wanted.append("slack")
        if self.env.get("SERVICENOW_URL") or any(one.servicenow for one in alerts):
            wanted.append("servicenow")
        return [*wanted, *(["s3"] if self.declared.loads else [])]

    def checks(self, group: str) -> Checks:
        makers = {
            "machine": _machine,
            "snowflake": _snowflake,
            "tableau": _tableau,
            "slack": _slack,
            "servicenow": _servicenow,
            "s3": _s3,
        }
        return partial(makers[group], self)


def read_declared() -> tuple[Declared, Result]:
    """Return what the spec file declares, and whether it can be read; nothing if it cannot."""
    file = os.environ.get(SPECS_VARIABLE)
    if not file:
        return Declared(), warning(
            "no spec file is named, so tables and datasources are not checked",
            "Name one with --specs or TIR_SPECS; tir init writes a first one.",
        )
    try:
        declared = load_declared()
    except TirError as error:
        return Declared(), failure(str(error))
    count = f"{len(declared.extracts)} extracts, {len(declared.loads)} loads"
    return declared, ok(f"{file}: {count}")


# This machine


def _machine(installation: Installation) -> Iterator[Check]:
    yield Check("specs", lambda: read_declared()[1])
    yield Check("python", lambda: ok(f"{platform.python_version()} at {sys.executable}"))
    yield Check("java", partial(_java, installation.env))
    if installation.with_spark:
        yield Check("spark", partial(_spark, installation.env), at_least=_SPARK_SECONDS)
    yield Check("hyper", _hyper)
    yield Check("disk", _disk)
    yield Check("network", partial(_network, installation.env))


def _java(env: Mapping[str, str]) -> Result:
    if remote := env.get("SPARK_REMOTE"):
        return ok(f"not needed: Spark runs at {Remote.parse(remote, env).name}")
    require_java(env)
    return ok("Java 17 or newer; tir doctor --spark also starts Spark")


def _spark(env: Mapping[str, str]) -> Result:
    if env.get("SPARK_REMOTE"):
        return warning(
            "SPARK_REMOTE names a server, which is not asked here", "Run tir refresh with --profile to see it at work."
        )
    state, _ = server_state(tir_home(env))
    if state == "running":
        return ok("the server of tir spark up runs")
    from tir_dagster.spark.session import jvm_output, spark_session

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tir-doctor-") as folder:
        with jvm_output(Path(folder)):
            session = spark_session("tir doctor", home=Path(folder))
        count = session.range(1000).count()
        session.stop()
    return ok(f"starts and counts {count:,} rows in {time.monotonic() - begun:.1f} s")


def _hyper() -> Result:
    engine, begun = HyperEngine(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tir-doctor-") as folder:
        try:
            with engine.connect(Path(folder) / "doctor.hyper", create=True) as connection:
                connection.execute_scalar_query("SELECT 1")
        finally:
            engine.close()
    return ok(f"starts and writes a file in {time.monotonic() - begun:.1f} s")


def _disk() -> Result:
    home = tir_home()
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:,.1f} GB free for {home}"
    if not os.access(folder, os.W_OK):
        return failure(f"{folder} cannot be written", "Set TIR_HOME to a folder of your own.")
    fix = "An extract needs its size three to five times: make room, or set TIR_HOME to a larger disk."
    return failure(detail, fix) if free < _NO_DISK else warning(detail, fix) if free < _LITTLE_DISK else ok(detail)


def _network(env: Mapping[str, str]) -> Result:
    set_proxies = [name for name in _PROXIES if env.get(name) or env.get(name.lower())]
    ssl_context()
    authorities = next((name for name in CA_VARIABLES if env.get(name)), "")
    if authorities == "SSL_CERT_FILE":
        return warning(
            "certificate authorities by SSL_CERT_FILE",
            "Snowflake's connector does not read it: set REQUESTS_CA_BUNDLE.",
        )
    return ok(f"proxy: {', '.join(set_proxies) or 'none'}; certificate authorities: {authorities or 'the usual ones'}")


def clock_result(behind_seconds: float, server: str) -> Result:
    """Judge by how much this machine's clock is behind the server's; negative: before it."""
    detail = f"{abs(behind_seconds):.0f} s {'behind' if behind_seconds > 0 else 'before'} {server}'s"
    fix = "Set this machine's clock (NTP): tokens and key pairs are refused by servers with another time."
    if abs(behind_seconds) >= _BROKEN_CLOCK:
        return failure(detail, fix)
    return warning(detail, fix) if abs(behind_seconds) >= _OLD_CLOCK else ok(f"agrees with {server}'s")


# Snowflake


def _snowflake(installation: Installation) -> Iterator[Check]:
    signed_in: list[SnowflakeAccess] = []

    def sign_in() -> Result:
        access = replace(
            SnowflakeAccess.from_environment(installation.env),
            network_timeout=_NETWORK_SECONDS,
            login_timeout=_NETWORK_SECONDS,
        )
        version, role = access.query("SELECT CURRENT_VERSION() AS V, CURRENT_ROLE() AS R")[0]
        signed_in.append(access)
        by_password = not (access.private_key or access.oauth_token or access.options)
        detail = f"Snowflake {version}, account {access.account}, user {access.user}, role {role}"
        if by_password and access.protocol != "http":
            return warning(
                f"{detail}, by password",
                "Snowflake is switching off passwords as the only factor: use a key pair (SNOWFLAKE_PRIVATE_KEY_PATH).",
            )
        return ok(detail)

    yield Check("sign-in", sign_in)
    if not signed_in:
        return
    access = signed_in[0]
    with access.kept_open():
        yield Check("warehouse", partial(_warehouse, access))
        yield Check("clock", partial(_warehouse_clock, access))
        yield Check("session", partial(_session, access))
    for spec in installation.extracts:
        for table in watched_tables(spec):
            yield Check(f"{spec.name}: {table}", partial(_table, spec, table, snowflake_for(access, spec)))
    for load in installation.declared.loads:
        yield Check(f"{load.name}: {load.table}", partial(_loaded_table, access, TableName.parse(load.table)))


def _warehouse(access: SnowflakeAccess) -> Result:
    name = access.query("SELECT CURRENT_WAREHOUSE() AS W")[0][0]
    # An error here says that there is none to run in.
    access.query("SELECT COUNT(*) AS N FROM (SELECT SEQ4() AS S FROM TABLE(GENERATOR(ROWCOUNT => 1)))")
    return ok(f"statements run in {name}" if name else "statements run without one")


def _warehouse_clock(access: SnowflakeAccess) -> Result:
    before = datetime.now(UTC)
    there: datetime = access.query("SELECT CURRENT_TIMESTAMP()::TIMESTAMP_TZ AS NOW")[0][0]
    here = before + (datetime.now(UTC) - before) / 2
    return clock_result((there - here).total_seconds(), "Snowflake")


def _session(access: SnowflakeAccess) -> Result:
    others = other_parameters(access)
    if others:
        return warning(
            f"the account keeps other values than ours: {', '.join(others)}",
            "Compare them with docs/snowflake.md; rows that queries turn into text may differ.",
        )
    return ok("parameters are as every session of ours needs them")


def _table(spec: ExtractSpec, table: TableName, access: SnowflakeAccess) -> Iterator[Result]:
    with access.kept_open():
        state = table_state(access, table)
        access.query(f"SELECT 1 AS ONE FROM {table.sql} LIMIT 1")
        rows = f"{state.rows:,} rows" if state.rows is not None else "a view"
        yield ok(f"may be read; {rows}, change tracking {'on' if state.tracked else 'off'}")
        if spec.delivery != "trigger":
            yield from _history(spec, state)


def _history(spec: ExtractSpec, state: TableState) -> Iterator[Result]:
    name = str(state.table)
    # Of several tables of an extract, the one that reads it.
    spec = next(part for part in spec.parts.values() if state.table in watched_tables(part))
    is_main = state.table == next(iter(read_tables(spec)), None)
    joined = {str(TableName.parse(table)): changes for table, changes in spec.changes.tables.items()}
    changes = spec.changes if is_main else joined.get(name)
    by = changes.by if changes is not None else "diff"
    if by == "feed" and not state.tracked:
        kind = "VIEW" if state.is_view else "TABLE"
        yield warning(
            "the detector is feed, and change tracking is off: both versions are compared instead",
            f"ALTER {kind} {name} SET CHANGE_TRACKING = TRUE; or choose another detector in the spec.",
        )
    if state.retention_days == 0:
        yield warning(
            "Time Travel is off (0 days), so each refresh compares all rows with the extract",
            f"ALTER TABLE {name} SET DATA_RETENTION_TIME_IN_DAYS = 1",
        )


def _loaded_table(access: SnowflakeAccess, table: TableName) -> Result:
    state = table_state(access, table)
    access.query(f"SELECT 1 AS ONE FROM {table.sql} LIMIT 1")
    if state.is_view:
        return failure("is a view, and loads fill tables", "Name a table in the load's spec.")
    return ok("exists and may be read; whether it may be written shows at the first load")


# Tableau


def _tableau(installation: Installation) -> Iterator[Check]:
    access: list[TableauAccess] = []
    yield Check("configuration", partial(_tableau_configuration, installation, access))
    if not access:
        return
    with _client(access[0]) as client:
        signed_in: list[str] = []
        behind: list[float] = []
        yield Check("sign-in", partial(_tableau_sign_in, client, signed_in, behind))
        if not signed_in:
            return
        if behind:
            yield Check("clock", partial(clock_result, behind[-1], "Tableau"))
        yield Check("jobs", partial(_tableau_jobs, client))
    for spec in installation.extracts:
        uses = USES_BY_DELIVERY[spec.delivery] | {Use.RIGHTS, Use.DOWNLOAD}
        with _client(tableau_for(access[0], spec, uses)) as client:
            yield Check(
                f"{spec.name}: {spec.datasource.project}/{spec.datasource.name}",
                partial(_published, client, spec, installation.env),
            )


def _client(access: TableauAccess) -> TableauClient:
    retry = RetryPolicy(tries=2, backoff=Backoff(first_seconds=0.5), most_asked_seconds=5)
    return TableauClient(access, retry=retry, timeouts=Timeouts(_NETWORK_SECONDS, _NETWORK_SECONDS))


def _tableau_configuration(installation: Installation, found: list[TableauAccess]) -> Iterator[Result]:
    deliveries = (USES_BY_DELIVERY[spec.delivery] for spec in installation.extracts)
    uses = frozenset({Use.LOOK, Use.JOBS}).union(*deliveries)
    access = TableauAccess.from_environment(installation.env).limited_to(uses)
    found.append(access)
    detail = f"{access.where}, {access.identity.shown}"
    if isinstance(access.identity, TableauPassword) and access.is_cloud:
        yield warning(
            f"{detail}, by password", "Tableau Cloud refuses passwords where a second factor is needed: use a token."
        )
        return
    yield ok(detail)


def _tableau_sign_in(client: TableauClient, signed_in: list[str], behind: list[float]) -> Result:
    """Sign in, and note by how many seconds this machine's clock is behind the server's."""

    def note(response: Any, **_: Any) -> None:
        # A Date has whole seconds.
        if text := response.headers.get("Date"):
            behind.append((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds() + 0.5)

    def ask(server: Any) -> Any:
        server.session.hooks["response"].append(note)
        try:
            return server.server_info.get()
        finally:
            server.session.hooks["response"].remove(note)

    info = client.call(ask, doing="ask for the server's version")
    signed_in.append(client.user_id)
    app = client.access.identity
    asks = f"; the token asks for {', '.join(app.scopes)}" if isinstance(app, ConnectedApp) else ""
    return ok(f"Tableau {info.product_version}, REST {info.rest_api_version}{asks}")


def _tableau_jobs(client: TableauClient) -> Result:
    listed = (
        shows_jobs(client) and refreshes_since(client, datetime.now(UTC) - timedelta(hours=1), most_pages=1) is not None
    )
    if listed:
        return ok("the list of jobs may be read")
    return warning(
        "this user does not see the list of jobs, so refreshes by others are noticed only by the datasource's version",
        "Use an administrator's token, or accept it: see docs/deliveries.md.",
    )


def _published(client: TableauClient, spec: ExtractSpec, env: Mapping[str, str]) -> Iterator[Result]:
    project = find_project(client, spec.datasource.project)
    if spec.delivery != "trigger" and project.writeable is False:
        yield failure(
            f"{client.access.identity.shown} may not publish in project {project.path!r}",
            "Give the user the permission to publish there, and a site role that may publish.",
        )
    if spec.delivery == "patch" and client.rest_version < PATCH_SINCE:
        yield failure(
            f"the delivery patch needs REST {_version(PATCH_SINCE)}, the server speaks {_version(client.rest_version)}",
            "Choose the delivery republish.",
        )
    datasource = look_for_datasource(client, project=project, name=spec.datasource.name)
    if datasource is None:
        missing = none_of_that_name(client, project=project, name=spec.datasource.name)
        if spec.delivery in ("server", "trigger"):
            yield failure(
                missing,
                f"The delivery {spec.delivery} needs a datasource with an extract: publish it in Tableau first.",
            )
        else:
            yield ok(f"{missing} The first refresh creates it.")
        return
    yield ok(f"{datasource.shown}: {datasource.size_mb or 0:,} MB, {len(datasource.connections)} connections")
    if spec.delivery == "trigger":
        return
    yield from _lost_by_publish(client, spec, datasource, env)
    yield from _document(client, spec, datasource)
    for task in scheduled_refreshes(client, datasource):
        yield warning(task.needed_warning if spec.delivery == "server" else task.warning)
    if datasource.history is None:
        yield warning(
            "the server shows no revisions to this user, so rows are compared after every publish",
            "Enable revision history on the site, or give the user the permission.",
        )


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _lost_by_publish(
    client: TableauClient, spec: ExtractSpec, datasource: FoundDatasource, env: Mapping[str, str]
) -> Iterator[Result]:
    """Yield what a publish would lose and nobody could put back."""
    try:
        credentials_for(spec, datasource, env, rest_version=client.rest_version)
    except DatasourceError as error:
        yield failure(str(error))
    if datasource.owner_id and datasource.owner_id != client.user_id and is_administrator(client) is not True:
        yield warning(
            f"{datasource.shown} belongs to somebody else, and a publish makes this user its owner",
            "Only an administrator can put the owner back: use an administrator's token, or let the owner's publish.",
        )


def is_administrator(client: TableauClient) -> bool | None:
    """Whether the user is an administrator of the site; None if the server does not tell."""
    user_id = client.user_id
    try:
        user = client.call(lambda server: server.users.get_by_id(user_id), doing="read this user's own role")
    except RefusedError:
        return None
    return any(word in str(user.site_role or "").casefold() for word in _ADMINISTRATORS)


def _document(client: TableauClient, spec: ExtractSpec, datasource: FoundDatasource) -> Iterator[Result]:
    package, problem = look_inside(client, datasource)
    if package is None:
        yield failure(problem)
        return
    if package.is_bare:
        if spec.delivery == "server":
            yield failure(
                "the delivery server needs an extract of a database, and this is a published Hyper file",
                "Choose the delivery patch or republish.",
            )
        return
    if spec.delivery == "patch":
        yield failure(
            "it has a document that people made, and the delivery patch keeps none",
            "Choose the delivery republish, or publish under another name.",
        )
    if unfit := list(obstacles(package, datasource.connections)):
        yield failure(
            f"it cannot be kept by key: {'; '.join(unfit)}",
            "Change the datasource in Tableau, or choose the delivery trigger.",
        )
    if spec.delivery == "server" and not package.incremental:
        yield failure(
            "incremental refresh is not set up",
            "Enable it in Tableau and publish again, or choose the delivery republish.",
        )


# The others


def _slack(installation: Installation) -> Iterator[Check]:
    yield Check("sign-in", partial(_slack_sign_in, installation))


def _slack_sign_in(installation: Installation) -> Iterator[Result]:
    from tir_dagster.orchestration.alerts.resources import SLACK_VARIABLES, SlackAppResource

    settings = {
        name: installation.env[variable] for name, variable in SLACK_VARIABLES.items() if installation.env.get(variable)
    }
    try:
        client = SlackAppResource(**settings).get_client()
        client.timeout = _NETWORK_SECONDS
        answer = client.auth_test()
    except ChannelError as error:
        yield failure(f"{error}", "Set it, or take `slack` out of `alerts` in the spec.")
        return
    except SlackApiError as error:
        yield failure(f"Slack refused: {error.response.get('error')}", "Check SLACK_BOT_TOKEN.")
        return
    scopes = next((value for name, value in answer.headers.items() if name.casefold() == "x-oauth-scopes"), "")
    if scopes and "chat:write" not in scopes:
        yield failure("the app lacks the scope chat:write", "Add it to the app and install it again.")
    channels = sorted({one.alerts.slack.channel for one in installation.extracts if one.alerts and one.alerts.slack})
    named = f"; whether it is in {', '.join(channels)} shows with the first message" if channels else ""
    yield ok(f"workspace {answer.get('team')}, as {answer.get('user')}{named}")


def _servicenow(installation: Installation) -> Iterator[Check]:
    yield Check("sign-in", partial(_servicenow_sign_in, installation))


def _servicenow_sign_in(installation: Installation) -> Result:
    from tir_dagster.orchestration.alerts.resources import SERVICENOW_VARIABLES, ServiceNowResource

    settings = {
        name: installation.env[variable]
        for name, variable in SERVICENOW_VARIABLES.items()
        if installation.env.get(variable)
    }
    access = ServiceNowResource(**settings).access()
    if (problem := access.problem()) is not None:
        return failure("not configured", f"{problem[0].upper()}{problem[1:]}, or take `servicenow` out of `alerts`.")
    channel = ServiceNowChannel(access, ServiceNowAlerts(group="-"), Persistence(1, _NETWORK_SECONDS))
    try:
        channel.check()
    except ChannelError as error:
        return failure(str(error), "Check SERVICENOW_URL, the user and its roles.")
    return ok("incidents may be read; whether they may be created shows with the first one")


def _s3(installation: Installation) -> Iterator[Check]:
    places = {load.files.path: load.name for load in installation.declared.loads}
    for path, name in places.items():
        yield Check(f"{name}: {path}", partial(_place, path, installation.env))


def _place(path: str, env: Mapping[str, str]) -> Result:
    place = LandingPlace.of(path, env)
    info: Any = place.filesystem.get_file_info(place.root)
    if info.type == fs.FileType.NotFound:
        return warning("there is nothing yet", "Check the address in the load's spec; files may land there later.")
    return ok("may be read")
