"""Every environment variable that the product reads, in one table: what for, and which are declared by a spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tir_dagster.spec.extract import ExtractSpec


@dataclass(frozen=True)
class Variable:
    """An environment variable: who reads it, and what for."""

    name: str
    used_for: str
    where: str


def _table(where: str, **used_for: str) -> tuple[Variable, ...]:
    return tuple(Variable(name, text, where) for name, text in used_for.items())


VARIABLES: tuple[Variable, ...] = (
    *_table(
        "every command",
        TIR_SPECS="the spec file; --specs comes first",
        TIR_HOME="folder of state, sandbox and history (default: .tir)",
        DAGSTER_HOME="folder of Dagster's history (default: inside TIR_HOME)",
        TIR_STATE="object store that several workers share, such as s3://bucket/prefix (default: TIR_HOME alone)",
        TIR_DAGSTER_URL="address of Dagster's UI, for links in alerts",
        TIR_PROGRESS="form of the progress on standard error: lines or json; --progress comes first",
        TERM="the terminal; on a dumb one, progress is plain lines",
        HOSTNAME="the machine's name in the record of a rollback",
    ),
    *_table(
        "Snowflake",
        SNOWFLAKE_ACCOUNT="the account",
        SNOWFLAKE_USER="the user; also for datasource credentials that name it",
        SNOWFLAKE_PRIVATE_KEY_PATH="file of the key pair (PKCS #8)",
        SNOWFLAKE_PRIVATE_KEY="the key itself, instead of its file",
        SNOWFLAKE_PRIVATE_KEY_PASSWORD="passphrase of the key",
        SNOWFLAKE_OAUTH_TOKEN="an OAuth token instead of a key pair",
        SNOWFLAKE_PASSWORD="a password instead of a key pair",
        SNOWFLAKE_AUTHENTICATOR="another way of signing in, by the connector's name for it",
        SNOWFLAKE_WAREHOUSE="warehouse of the session, unless a spec names one",
        SNOWFLAKE_ROLE="role of the session, unless a spec names one",
        SNOWFLAKE_DATABASE="database of the session",
        SNOWFLAKE_SCHEMA="schema of the session",
        SNOWFLAKE_QUERY_TAG="tag of our statements (default: tir_dagster)",
        SNOWFLAKE_HOST="another host than the account's",
        SNOWFLAKE_PORT="another port",
        SNOWFLAKE_PROTOCOL="http instead of https, for the sandbox",
    ),
    *_table(
        "Tableau",
        TABLEAU_SERVER_URL="address of the server",
        TABLEAU_SITE="name of the site in its address (default: the default site)",
        TABLEAU_TOKEN_NAME="name of a personal access token",
        TABLEAU_TOKEN_SECRET="its secret",
        TABLEAU_USERNAME="user of a password or of a connected app",
        TABLEAU_PASSWORD="password of that user",
        TABLEAU_CONNECTED_APP_CLIENT_ID="id of a connected app",
        TABLEAU_CONNECTED_APP_SECRET_ID="id of its secret",
        TABLEAU_CONNECTED_APP_SECRET_VALUE="its secret",
        TABLEAU_CONNECTED_APP_SCOPES="further scopes that its token asks for",
        TABLEAU_REFRESHES_PER_HOUR="refresh starts that the site allows (default on Tableau Cloud: 60)",
        TABLEAU_PUBLISHES_PER_HOUR="publishes that the site allows (default on Tableau Cloud: 600)",
        TIR_WEBHOOK_SECRET="secret in the address of webhooks",
    ),
    *_table(
        "alerts",
        SLACK_BOT_TOKEN="token of the app that posts in Slack",
        SLACK_API_URL="another address than Slack's",
        SERVICENOW_URL="address of the instance",
        SERVICENOW_USERNAME="its user",
        SERVICENOW_PASSWORD="password of that user",
        SERVICENOW_CLIENT_ID="OAuth client, instead of a user or beside one",
        SERVICENOW_CLIENT_SECRET="its secret",
        SERVICENOW_TOKEN="a token instead of both",
    ),
    *_table(
        "S3: loads, staging, shared state",
        AWS_ACCESS_KEY_ID="access key; roles and profiles are found by AWS's own means",
        AWS_SECRET_ACCESS_KEY="its secret",
        AWS_SESSION_TOKEN="token of a temporary key",
        AWS_REGION="region of the bucket",
        AWS_DEFAULT_REGION="the same, if AWS_REGION is not set",
        AWS_ENDPOINT_URL_S3="another address than AWS's",
        AWS_ENDPOINT_URL="the same for all services of AWS",
        AWS_CA_BUNDLE="certificate authorities for S3",
    ),
    *_table(
        "network",
        REQUESTS_CA_BUNDLE="certificate authorities of all clients (PEM)",
        CURL_CA_BUNDLE="the same, if REQUESTS_CA_BUNDLE is not set",
        SSL_CERT_FILE="the same, if neither is set; Snowflake's connector does not read it",
        HTTPS_PROXY="proxy to https addresses",
        HTTP_PROXY="proxy to http addresses",
        NO_PROXY="hosts that are reached without a proxy",
    ),
    *_table(
        "Spark",
        JAVA_HOME="folder of Java (default: java on PATH)",
        PATH="where java is looked for",
        SPARK_REMOTE="address of a Spark Connect server for all runs",
        SPARK_CONNECT_AUTHENTICATE_TOKEN="token of that server",
        TIR_SPARK_MASTER="a master instead of a Spark in this process, such as spark://host:7077",
        TIR_STAGING="where executors that share no disk with this machine put rows, such as s3://bucket/prefix",
        SPARK_CONF_DIR="folder of a spark-defaults.conf (default: Spark's own)",
        SPARK_DRIVER_MEMORY="memory of Spark's driver (Spark's default: 1g)",
        TIR_SPARK_ROWS="up to how many rows are read without Spark (default: 10000)",
        PYSPARK_PYTHON="Python of Spark's workers (default: this one)",
        PYSPARK_DRIVER_PYTHON="Python of Spark's driver (default: this one)",
    ),
    *_table(
        "tests and drills",
        TIR_CRASH_AFTER="ends the process after this step of a refresh",
        TIR_SANDBOX_OWNER="process with which a sandbox ends",
    ),
)


@dataclass(frozen=True)
class VariableState:
    """A variable, and whether it is set; never its value."""

    name: str
    is_set: bool
    where: str
    used_for: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def variable_states(env: Mapping[str, str], extracts: Iterable[ExtractSpec]) -> list[VariableState]:
    """Return every variable that the product reads, and those that the declared extracts name for credentials."""
    named = {variable.name: variable for variable in VARIABLES}
    for extract in extracts:
        credentials = extract.datasource.credentials
        for name in filter(None, (credentials.username_env, credentials.password_env) if credentials else ()):
            named.setdefault(name, Variable(name, "credentials of its datasource", f"extract {extract.name}"))
    return [VariableState(one.name, is_set(env, one.name), one.where, one.used_for) for one in named.values()]


def is_set(env: Mapping[str, str], name: str) -> bool:
    """Whether the variable has a value; proxies are also read in small letters."""
    return bool(env.get(name) or (name.endswith("_PROXY") and env.get(name.lower())))


def environment_lines(states: Iterable[VariableState]) -> list[str]:
    """Return the table for people, by the part that reads the variables."""
    lines: list[str] = []
    where = ""
    for state in states:
        if state.where != where:
            where = state.where
            lines += ["", where] if lines else [where]
        lines.append(f"  {'set    ' if state.is_set else 'not set'}  {state.name:<36} {state.used_for}")
    return lines
