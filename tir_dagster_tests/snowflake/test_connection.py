from __future__ import annotations

import base64
import pickle
import socket

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from dagster_snowflake import SnowflakeResource

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.connection import SnowflakeAccess


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _pem(key: rsa.RSAPrivateKey, password: bytes | None = None) -> str:
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden).decode()


def _server(sandbox) -> dict:
    return {
        "host": sandbox.env["SNOWFLAKE_HOST"],
        "port": int(sandbox.env["SNOWFLAKE_PORT"]),
        "protocol": sandbox.env["SNOWFLAKE_PROTOCOL"],
    }


def test_the_environment_is_enough(sandbox):
    assert SnowflakeAccess.from_environment(sandbox.env).query("SELECT 1, %s", ("it's",)) == [(1, "it's")]


@pytest.mark.parametrize("missing", ["SNOWFLAKE_ACCOUNT", "SNOWFLAKE_USER", "SNOWFLAKE_PASSWORD"])
def test_a_missing_variable_is_named(sandbox, missing):
    with pytest.raises(SourceError, match=missing):
        SnowflakeAccess.from_environment({name: value for name, value in sandbox.env.items() if name != missing})


def test_no_secret_is_shown_and_all_travel(sandbox, key):
    access = SnowflakeAccess.from_connection_args(
        {
            "account": "a",
            "user": "u",
            "password": "pass-word",
            "private_key": _pem(key),
            "proxy_password": "proxy-word",
        }
    )

    assert "word" not in repr(access)
    assert "word" not in access.scrub("pass-word proxy-word https://host/x?signature=password")
    assert pickle.loads(pickle.dumps(access)) == access


def test_a_dagster_resource_gives_the_access(sandbox):
    resource = SnowflakeResource(
        account=sandbox.env["SNOWFLAKE_ACCOUNT"],
        user=sandbox.env["SNOWFLAKE_USER"],
        password=sandbox.env["SNOWFLAKE_PASSWORD"],
        schema="PUBLIC",
        network_timeout=33,
        additional_snowflake_connection_args=_server(sandbox),
    )

    for args in (resource._connection_args, resource._resolved_config_dict):
        access = SnowflakeAccess.from_connection_args(args)
        assert (access.schema, access.network_timeout, access.options) == ("PUBLIC", 33, ())
        assert access.query("SELECT 1") == [(1,)]


def test_a_key_pair_signs_in_however_it_is_given(sandbox, run, key, tmp_path):
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    run(f"ALTER USER {sandbox.env['SNOWFLAKE_USER']} SET RSA_PUBLIC_KEY = '{base64.b64encode(public).decode()}'")
    (tmp_path / "key.p8").write_text(_pem(key, b"secret"))
    common = {"account": sandbox.env["SNOWFLAKE_ACCOUNT"], "user": sandbox.env["SNOWFLAKE_USER"], **_server(sandbox)}

    for credentials in (
        {"private_key": _pem(key)},
        {"private_key": base64.b64encode(_pem(key).encode()).decode()},
        {"private_key_path": str(tmp_path / "key.p8"), "private_key_password": "secret"},
        {"private_key": SnowflakeAccess.from_connection_args({**common, "private_key": _pem(key)}).private_key},
    ):
        access = SnowflakeAccess.from_connection_args({**common, **credentials})
        assert access.query("SELECT 1") == [(1,)], sorted(credentials)


def test_a_broken_key_is_refused_without_showing_it(tmp_path):
    with pytest.raises(SourceError, match="cannot be read") as caught:
        SnowflakeAccess.from_connection_args({"account": "a", "user": "u", "private_key": "c2VjcmV0"})
    assert "c2VjcmV0" not in str(caught.value)
    with pytest.raises(SourceError, match=r"absent\.p8"):
        SnowflakeAccess.from_connection_args(
            {"account": "a", "user": "u", "private_key_path": str(tmp_path / "absent.p8")}
        )


def test_an_oauth_token_signs_in(sandbox):
    common = {"account": sandbox.env["SNOWFLAKE_ACCOUNT"], "user": sandbox.env["SNOWFLAKE_USER"], **_server(sandbox)}
    args = {**common, "authenticator": "oauth", "token": sandbox.env["SNOWFLAKE_PASSWORD"]}

    assert SnowflakeAccess.from_connection_args(args).query("SELECT 1") == [(1,)]


def test_a_wrong_password_says_so(sandbox):
    env = {**sandbox.env, "SNOWFLAKE_PASSWORD": "not-the-one"}

    with pytest.raises(SourceError, match=r"Incorrect username or password.*Check user and credential") as caught:
        SnowflakeAccess.from_environment(env).query("SELECT 1")
    assert "not-the-one" not in str(caught.value)


def test_an_unreachable_host_is_named_soon(sandbox):
    access = SnowflakeAccess.from_connection_args(
        {"account": "a", "user": "u", "password": "secret", **_server(sandbox), "port": 1, "login_timeout": 2}
    )

    with pytest.raises(SourceError, match=r":1: .*Check host, network"):
        access.query("SELECT 1")


def test_nobody_but_snowflake_is_asked_unless_wished_for(sandbox, monkeypatch):
    access, addresses = SnowflakeAccess.from_environment(sandbox.env), []
    connect = socket.socket.connect

    def noted(self, address):
        addresses.append(address)
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    assert access.query("SELECT 1") == [(1,)]
    assert {(host, int(port)) for host, port, *_ in addresses} == {(access.host, access.port)}
    wished = SnowflakeAccess.from_connection_args(
        {"account": "a", "user": "u", "password": "p", "platform_detection_timeout_seconds": 0.5}
    )
    assert wished.connection_args()["platform_detection_timeout_seconds"] == 0.5


@pytest.mark.parametrize(
    ("sql", "hint"),
    [
        ("SELECT * FROM SRC.PUBLIC.ABSENT", "ABSENT.*Check the table's name"),
        ("SELECT ABSENT FROM {table}", "ABSENT.*column is missing"),
        ("SELECT * FROM {table} AT(TIMESTAMP => '2001-01-01T00:00:00+00:00'::TIMESTAMP_TZ)", "outside Time Travel"),
        ("SELECT * FROM {table} CHANGES(INFORMATION => DEFAULT) AT(OFFSET => 0)", "CHANGE_TRACKING = TRUE"),
    ],
)
def test_what_snowflake_refuses_ends_with_what_to_do(access, make_table, sql, hint):
    table = make_table("ID INT")

    with pytest.raises(SourceError, match=hint):
        access.query(sql.format(table=table.sql))


def test_statements_run_in_utc_and_carry_the_query_tag(sandbox, warehouse):
    access = SnowflakeAccess.from_environment({**sandbox.env, "SNOWFLAKE_QUERY_TAG": "tir-run-7"})

    assert access.query("SELECT CURRENT_TIMESTAMP()")[0][0].utcoffset().total_seconds() == 0
    assert warehouse.queries()[-1]["query_tag"] == "tir-run-7"
    assert access.connection_args()["arrow_number_to_decimal"], "else NUMBER(12,2) arrives as a float"
