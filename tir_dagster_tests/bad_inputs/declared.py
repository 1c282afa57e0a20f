"""What users write: spec files, commands, the environment, queries and hints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tir_dagster.changes.hints import check_hint, parse_hint, parse_hints
from tir_dagster.loading.landing import LandingPlace
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import analyse
from tir_dagster.spark.java import require_java
from tir_dagster.spark.places import StagingPlace
from tir_dagster.spark.server import remote_spark
from tir_dagster.spec.extract import check_columns
from tir_dagster.spec.reading import load_specs, parse_declared, parse_specs
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.webhooks import receiver_url, webhook_secret
from tir_dagster.trust import ca_file
from tir_dagster_tests.bad_inputs.case import Case, Scene
from tir_dagster_tests.spec.sample import ALERTS, GOOD

# Spec files: what is written, instead of what.

END = "0.5}"
IN_EXTRACTS = [
    ("name: orders", "name: Orders!"),
    ("row_key:", "row_keys:"),
    ("by: month", "by: year"),
    ("by: month", "by: value"),
    ("start: 2024-12", "start: December"),
    ("start: 2024-12", "start: 2024-13"),
    ("start: 2024-12", "start: 2999-01"),
    ("start: 2024-12", "start: 2024-12, zone: Mars/North"),
    ("10 minutes", "soon"),
    ("delete_share: 0.5", "delete_share: 50"),
    ("      name: Orders\n", ""),
    ("source: MYDB.MYSCHEMA.MYTABLE", "source: MYTABLE"),
    ("MYDB.MYSCHEMA.MYTABLE", "MYDB.MY SCHEMA.MYTABLE"),
    ("MYDB.MYSCHEMA.MYTABLE", "'A.\"B'"),
    ("password_env: SNOWFLAKE_PASSWORD", "password: secret"),
    ("row_key: ORDER_ID", "row_key: A\n    row_key: B"),
    ("row_key: ORDER_ID", "row_key: 5"),
    (END, "0.5}\n    delivery: mail"),
    (END, "0.5}\n    keep: {size: much}"),
    (END, "0.5}\n    keep: {size: 20}"),
    (END, "0.5}\n    keep: {versions: 0}"),
    (END, "0.5}\n    keep: {versions: 2.5}"),
    (END, "0.5}\n    keep: {versions: true}"),
    ("name: Orders", "name: Orders\n      job_timeout: 5 seconds"),
]
IN_ALERTS = [
    ("#mychannel", "# my channel"),
    ("on_success: daily", "daily_at: noon"),
    ("daily", "sometimes"),
    ("group: mygroup, ", ""),
    ("server_down", "weather"),
    ("{extract}", "{secret}"),
    ("u_name", "state"),
    ("5 seconds", "5 minutes"),
    ("timeout: 5 seconds", "attempts: 1.5"),
    ("timeout: 5 seconds", "channels: [Mail]"),
]
IN_LOADS = [
    "mode: merge",
    "mode: scd2, key: ID",
    "mode: append, delete_flag: OP",
    "mode: swap",
    "mode: append, reject_share: 2",
    "mode: append, schedule: hourly",
    "mode: append, kee: ID",
]
LOAD = "loads:\n  - {{name: a, table: A.B.C, files: {{path: 's3://b/p', format: csv}}, {}}}\n"
SHAPES = [
    ("an empty file", ""),
    ("a list instead of fields", "- a"),
    ("`extracts: 5`", "extracts: 5"),
    ("`extracts: [5]`", "extracts: [5]"),
    ("a bracket that is not closed", "a: {b"),
    ("a tab where YAML wants spaces", "extracts:\n\t- x"),
    ("a NUL character in the file", "\x00"),
    ("an anchor that contains itself", "extracts: &a [*a]"),
    ("an extract with neither a row key nor slices", "extracts: [{name: a, source: A.B.C, datasource: {name: n, project: p}}]"),
    ("two extracts of one name", GOOD + GOOD.split("\n", 1)[1]),
    ("two extracts of one datasource", GOOD + GOOD.split("\n", 1)[1].replace("name: orders", "name: orders_again", 1)),
    ("alerts that reach nobody", GOOD + "    alerts: {timeout: 5 seconds}\n"),
]  # fmt: skip


def swapped(text: str, old: str, new: str) -> Callable[[Scene], Any]:
    assert old in text
    return lambda _: parse_specs(text.replace(old, new), "tir.yaml")


def written(old: str, new: str) -> str:
    """The edit in words: what stands there now."""
    if not new:
        return f"without `{old.strip()}`"
    if new.startswith(old):
        return f"`{new.removeprefix(old).strip(' ,' + chr(10))}`"
    return f"`{' / '.join(line.strip() for line in new.splitlines())}` instead of `{old.strip()}`"


def spec_cases() -> list[Case]:
    area = "Spec files"
    cases = [Case(area, written(old, new), swapped(GOOD, old, new)) for old, new in IN_EXTRACTS]
    cases += [
        Case(area, f"in `alerts`: {written(old, new)}", swapped(GOOD + ALERTS, old, new)) for old, new in IN_ALERTS
    ]
    cases += [
        Case(area, f"a load with `{fields}`", lambda _, fields=fields: parse_declared(LOAD.format(fields), "tir.yaml"))
        for fields in IN_LOADS
    ]
    cases += [Case(area, done, lambda _, text=text: parse_specs(text, "tir.yaml")) for done, text in SHAPES]
    return [
        *cases,
        Case(
            area,
            "a file that is not UTF-8",
            lambda scene: load_specs(scene.file("latin.yaml", b"extracts: \xff\xfe")),
        ),
        Case(area, "a file that is not there", lambda scene: load_specs(scene.folder / "none.yaml")),
        Case(
            area,
            "two loads into one table, each with its own list of files",
            lambda _: parse_declared(
                "loads:\n"
                "  - {name: a, table: A.B.C, mode: append, files: {path: 's3://b/p', format: csv}}\n"
                "  - {name: b, table: A.B.C, mode: append, files: {path: 's3://b/p', format: csv}, bookkeeping: A.LISTS}\n",
                "tir.yaml",
            ),
        ),
        Case(
            area,
            "`row_key` and `changes.watermark` name columns that the source does not have",
            lambda _: check_columns(parse_specs(GOOD, "tir.yaml")[0], ["ORDERID", "ORDER_DATE"]),
        ),
        Case(
            area,
            "`columns` leaves out the column of the slices",
            lambda _: check_columns(
                parse_specs(GOOD.replace("row_key:", "columns: [ORDER_ID, UPDATED_AT]\n    row_key:"), "tir.yaml")[0],
                ["ORDER_ID", "ORDER_DATE", "UPDATED_AT"],
            ),
        ),
    ]


# Commands

COMMANDS: list[tuple[str, ...]] = [
    ("refresh", "order"),
    ("refresh", "orders", "--slices", "2025-03", "--full"),
    ("refresh", "orders", "--slices", ""),
    ("refresh", "orders", "--slices", "2025-03 to 2025-05"),
    ("refresh", "orders", "--slices", "1999-01"),
    ("refresh", "orders", "--hint", "@none.json"),
    ("refresh",),
    ("refresh", "orders", "--everything"),
    ("load", "orders"),
    ("verify", "orders", "--values"),
    ("why", "orders"),
    ("revisions", "orders", "--fetch", "3"),
    ("revisions", "orders", "--fetch", "first", "--to", "file.tdsx"),
    ("rollback", "orders"),
    ("history", "orders", "--limit", "0"),
]


def command_cases() -> list[Case]:
    area = "Commands"

    def typed(command: tuple[str, ...]) -> str:
        return f"`tir {' '.join(word if word and ' ' not in word else repr(word) for word in command)}`"

    cases = [Case(area, typed(command), lambda scene, command=command: scene.tir(*command)) for command in COMMANDS]
    return [
        *cases,
        Case(
            area,
            "`tir refresh orders` without a spec file",
            lambda scene: scene.tir("refresh", "orders", TIR_SPECS=None),
        ),
        Case(
            area,
            "`tir refresh orders --slices 2025-03` of an extract without slices",
            lambda scene: scene.tir(
                *("refresh", "orders", "--slices", "2025-03"),
                spec=GOOD.replace("    slices: {column: ORDER_DATE, by: month, start: 2024-12}\n", ""),
            ),
        ),
        Case(
            area,
            "`tir refresh orders --slices 2025-02..2025-01`",
            lambda scene: scene.tir("refresh", "orders", "--slices", "2025-02..2025-01", spec=GOOD),
        ),
    ]


# The environment

ACCOUNT = {"SNOWFLAKE_ACCOUNT": "acme", "SNOWFLAKE_USER": "ada"}
SERVER = {"TABLEAU_SERVER_URL": "https://tableau.example.com", "TABLEAU_SITE": "sales"}
TOKEN = {"TABLEAU_TOKEN_NAME": "nightly", "TABLEAU_TOKEN_SECRET": "secret"}


def environment_cases() -> list[Case]:
    area = "Environment variables"

    def snowflake(done: str, **env: str) -> Case:
        return Case(area, done, lambda _: SnowflakeAccess.from_environment(env))

    def tableau(done: str, **env: str) -> Case:
        return Case(area, done, lambda _: TableauAccess.from_environment(env))

    return [
        snowflake("no Snowflake variables at all"),
        snowflake("no credential for Snowflake", **ACCOUNT),
        snowflake("`SNOWFLAKE_PORT=https`", **ACCOUNT, SNOWFLAKE_PASSWORD="p", SNOWFLAKE_PORT="https"),
        snowflake(
            "`SNOWFLAKE_HOST` with a user and a password in it",
            **ACCOUNT,
            SNOWFLAKE_PASSWORD="p",
            SNOWFLAKE_HOST="https://ada:hunter2@acme.snowflakecomputing.com",
        ),
        snowflake("`SNOWFLAKE_PRIVATE_KEY` that is no key", **ACCOUNT, SNOWFLAKE_PRIVATE_KEY="c2VjcmV0"),
        snowflake(
            "`SNOWFLAKE_PRIVATE_KEY_PATH` of a file that is not there",
            **ACCOUNT,
            SNOWFLAKE_PRIVATE_KEY_PATH="/keys/absent.p8",
        ),
        tableau("no `TABLEAU_SERVER_URL`", **TOKEN),
        tableau("no credential for Tableau", **SERVER),
        tableau("half a token", **SERVER, TABLEAU_TOKEN_NAME="nightly"),
        tableau("half a connected app", **SERVER, TABLEAU_CONNECTED_APP_CLIENT_ID="client"),
        tableau("`TABLEAU_SERVER_URL` without https://", **TOKEN, TABLEAU_SERVER_URL="tableau.example.com"),
        tableau("a password in `TABLEAU_SERVER_URL`", **TOKEN, TABLEAU_SERVER_URL="https://ada:hunter2@tableau"),
        Case(
            area,
            "a password in `AWS_ENDPOINT_URL_S3`",
            lambda _: LandingPlace.of("s3://bucket", {"AWS_ENDPOINT_URL_S3": "https://ada:hunter2@s3"}),
        ),
        Case(
            area,
            "`REQUESTS_CA_BUNDLE` of a file that is not there",
            lambda _: ca_file({"REQUESTS_CA_BUNDLE": "/etc/ssl/ours.pem"}),
        ),
        Case(
            area,
            "`SPARK_REMOTE` that is no address",
            lambda scene: remote_spark({"SPARK_REMOTE": "spark.example.com"}, scene.folder, print),
        ),
        Case(area, "`TIR_STAGING` that is no place", lambda _: StagingPlace.of("https://example.com/staging", {})),
        Case(area, "`JAVA_HOME` without Java", lambda scene: require_java({"JAVA_HOME": str(scene.folder)})),
        Case(area, "no Java at all", lambda scene: require_java({"PATH": str(scene.folder)})),
        Case(area, "`TIR_WEBHOOK_SECRET` that is too short", lambda _: webhook_secret({"TIR_WEBHOOK_SECRET": "abc"})),
        Case(
            area,
            "`tir webhooks register --url http://hooks.example.com`",
            lambda _: receiver_url("http://hooks.example.com", "x" * 32),
        ),
        Case(
            area,
            "a `DAGSTER_HOME` whose dagster.yaml is nonsense",
            lambda scene: scene.tir(
                *("plan", "orders"),
                DAGSTER_HOME=str(scene.file("dagster/dagster.yaml", "storage: {nonsense: 1}").parent),
            ),
        ),
    ]


# Queries

TABLES = {
    TableName("DB", "S", "SALES"): ["ID", "DAY", "PRODUCT", "QTY"],
    TableName("DB", "S", "PRODUCTS"): ["PRODUCT", "COLOR"],
}
JOINED = "FROM DB.S.SALES s JOIN DB.S.PRODUCTS p ON p.PRODUCT = s.PRODUCT"
QUERIES = [
    "",
    "SELECT 'open FROM DB.S.SALES",
    "SELECT ID ID2 ID3 FROM DB.S.SALES",
    "DELETE FROM DB.S.SALES",
    "SELECT ID FROM DB.S.SALES; SELECT 1 AS X",
    "SELECT 1 AS ONE",
    "SELECT ID FROM DB.S.OTHER",
    "SELECT ID, QYT FROM DB.S.SALES",
    "SELECT ID FROM SALES",
    f"SELECT PRODUCT {JOINED}",
    f"SELECT s.*, p.* {JOINED}",
    "SELECT ID, QTY + 1 FROM DB.S.SALES",
    "SELECT ID, QTY, COUNT(*) AS N FROM DB.S.SALES GROUP BY ID",
    "SELECT ID, COUNT(*) AS N FROM DB.S.SALES WHERE SUM(QTY) > 1 GROUP BY ID",
    "SELECT ID FROM DB.S.SALES AT(OFFSET => -60) s",
    "SELECT ID, COUNT(*) FILTER (WHERE QTY > 1) AS N FROM DB.S.SALES GROUP BY ID",
]


def query_cases() -> list[Case]:
    return [
        Case("Queries", f"`{query}`" if query else "an empty query", lambda _, query=query: analyse(query, TABLES))
        for query in QUERIES
    ]


# Hints

COLUMNS = {
    column.name: column
    for column in (
        Column("ORDER_ID", Kind.INTEGER, 38),
        Column("PRICE", Kind.DECIMAL, 20, 8),
        Column("PAID", Kind.BOOLEAN),
        Column("PRODUCT", Kind.TEXT),
        Column("ORDER_DATE", Kind.DATE),
        Column("SEEN_AT", Kind.INSTANT),
    )
}
HINTS: list[Any] = [
    "{",
    [],
    {"type": "ADD_ROWS"},
    {"table": "SALES", "type": "ADD_ROWS"},
    {"table": "A.B.C"},
    {"table": "A.B.C", "type": "ADDED_ROWS"},
    {"table": "A.B.C", "type": "ADD_ROWS", "scop": "all"},
]
SCOPES: list[Any] = [
    "everything",
    {"equals": {"PRODUCT": "P1"}},
    {"equal": {"PRODUCT": ["P1", "P2"]}},
    {"in": {"PRODUCT": []}},
    {"between": {"ORDER_DATE": ["2025-03-31", "2025-03-01"]}},
    {"equal": {"PRODUKT": "P1"}},
    {"equal": {"ORDER_ID": "17"}},
    {"equal": {"PAID": 1}},
    {"equal": {"ORDER_DATE": "01.03.2025"}},
    {"equal": {"SEEN_AT": "2025-03-01T00:00:00"}},
    {"keys": [{"ORDER_ID": 1}, {"PRODUCT": "P1"}]},
]


def hint_cases() -> list[Case]:
    def scoped(scope: Any) -> None:
        check_hint(parse_hint({"table": "MYDB.S.SALES", "type": "MIXED_CHANGES", "scope": scope}, "--hint"), COLUMNS)

    def shown(value: Any) -> str:
        return f"`{value if isinstance(value, str) else json.dumps(value)}`"

    whole = [
        Case(
            "Hints",
            f"the hint {shown(hint)}",
            # A list is a list of hints.
            lambda _, hint=hint: parse_hint(hint, "--hint") if isinstance(hint, list) else parse_hints(hint, "--hint"),
        )
        for hint in HINTS
    ]
    return [
        *whole,
        *(Case("Hints", f"the scope {shown(scope)}", lambda _, scope=scope: scoped(scope)) for scope in SCOPES),
    ]


CASES = [*spec_cases(), *command_cases(), *environment_cases(), *query_cases(), *hint_cases()]
