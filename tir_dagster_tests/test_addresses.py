"""A password inside an address is never shown, whichever variable holds it and whoever quotes it."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tir_dagster.addresses import hide_credentials, host_of, without_credentials
from tir_dagster.alerts.retries import ChannelError
from tir_dagster.alerts.servicenow import ServiceNowAccess
from tir_dagster.alerts.text import scrub
from tir_dagster.errors import SourceError, TirError
from tir_dagster.loading.landing import LandingPlace
from tir_dagster.orchestration.alerts.resources import SlackAppResource
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import Datasource
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.webhooks import receiver_url

PASSWORD = "hunter2secret"
# With characters that should have been escaped, without a scheme, with a wrong one.
ADDRESSES = [
    f"https://me:{PASSWORD}@127.0.0.1:1",
    f"https://{PASSWORD}@127.0.0.1:1",
    f"me:{PASSWORD}@127.0.0.1",
    f"https//me:{PASSWORD}@127.0.0.1",
    f"https://me:{PASSWORD}#1@127.0.0.1:1",
    f"https://me:/{PASSWORD}@127.0.0.1:1",
    f"https://me:1@{PASSWORD}@127.0.0.1:1",
    f"https://[me:{PASSWORD}@127.0.0.1:1",
]
SNOWFLAKE = {"SNOWFLAKE_ACCOUNT": "a", "SNOWFLAKE_USER": "u", "SNOWFLAKE_PASSWORD": "other"}
TABLEAU = {"TABLEAU_TOKEN_NAME": "t", "TABLEAU_TOKEN_SECRET": "other"}
USES: dict[str, Callable[[str], object]] = {
    "SNOWFLAKE_HOST": lambda value: SnowflakeAccess.from_environment({**SNOWFLAKE, "SNOWFLAKE_HOST": value}),
    "SNOWFLAKE_ACCOUNT": lambda value: SnowflakeAccess.from_environment({**SNOWFLAKE, "SNOWFLAKE_ACCOUNT": value}),
    "SNOWFLAKE_PORT": lambda value: SnowflakeAccess.from_environment({**SNOWFLAKE, "SNOWFLAKE_PORT": value}),
    "a Snowflake resource's host": lambda value: SnowflakeAccess(account="a", user="u", password="other", host=value),
    "TABLEAU_SERVER_URL": lambda value: TableauAccess.from_environment({**TABLEAU, "TABLEAU_SERVER_URL": value}),
    "TABLEAU_SERVER_URL alone": lambda value: TableauAccess.from_environment({"TABLEAU_SERVER_URL": value}),
    "TABLEAU_SERVER_URL and half a token": lambda value: TableauAccess.from_environment(
        {"TABLEAU_SERVER_URL": value, "TABLEAU_TOKEN_NAME": "t"}
    ),
    "AWS_ENDPOINT_URL_S3": lambda value: LandingPlace.of("s3://bucket/files", {"AWS_ENDPOINT_URL_S3": value}),
    "AWS_ENDPOINT_URL": lambda value: LandingPlace.of("s3://bucket/files", {"AWS_ENDPOINT_URL": value}),
    "--url of a webhook": lambda value: receiver_url(value, "x" * 32),
}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("variable", USES)
def test_an_address_with_a_password_is_refused_without_showing_it(variable, address):
    with pytest.raises(TirError) as refusal:
        USES[variable](address)
    assert PASSWORD not in str(refusal.value)
    assert PASSWORD not in repr(refusal.value)
    if variable.isupper():
        assert variable in str(refusal.value)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("variable", ["SNOWFLAKE_HOST", "SNOWFLAKE_PORT"])
def test_dagster_is_given_no_value_with_a_password(monkeypatch, variable, address):
    monkeypatch.setenv(variable, address)
    with pytest.raises(SourceError, match=variable) as refusal:
        environment_resources()
    assert PASSWORD not in str(refusal.value)


@pytest.mark.parametrize("address", ADDRESSES)
def test_people_are_shown_the_host_alone(address):
    assert host_of(address).removesuffix(":1") == "127.0.0.1"
    assert PASSWORD not in repr(ServiceNowAccess(address))
    assert [field for field, _ in Datasource("d", "p", server=address).problems()] == ["server"]
    try:
        SlackAppResource(token="t", api_url=address).get_client()
    except ChannelError as error:
        assert PASSWORD not in str(error)  # noqa: PT017 - most addresses are taken, and fail when they are used


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "http_proxy", "SERVICENOW_URL", "SLACK_API_URL", "SPARK_REMOTE"])
def test_errors_and_alerts_show_no_password_that_a_library_quotes(monkeypatch, variable, address):
    monkeypatch.setenv(variable, address)
    for quoted in (address, f"'me:{PASSWORD}' is not a valid host", f'"https://me:/{PASSWORD}%40127.0.0.1%3A1/b"'):
        said = f"Failed to parse: {quoted}. Correct it."
        error = SourceError(said)
        copy = pickle.loads(pickle.dumps(error))
        for shown in (str(error), repr(error), str(copy), scrub(said, {variable: address})):
            assert PASSWORD not in shown
            assert "Correct it." in shown


@pytest.mark.parametrize("address", [one for one in ADDRESSES if "://" in one])
def test_a_password_that_is_in_no_variable_is_hidden_by_the_form_of_its_address(address):
    """As a resource of a project's own, or dagster.yaml, may hold it."""
    shown = hide_credentials(f"Failed to reach '{address}/api'. Correct it.", {})
    assert PASSWORD not in shown
    assert "@127.0.0.1" in shown
    assert shown.endswith("Correct it.")


def test_what_is_no_password_stays():
    shown = "https://tableau.example.com (site 'a@b'), s3://bucket/a@b.csv, user me@example.com, http://127.0.0.1:1/x"
    assert hide_credentials(shown, {"MAIL": "me@example.com"}) == shown
    assert without_credentials("https://me:a/b@c@dagster.example.com/runs/1") == "https://dagster.example.com/runs/1"


def test_a_file_is_read_from_a_folder_whatever_address_s3_has():
    assert LandingPlace.of("file:///data", {"AWS_ENDPOINT_URL_S3": ADDRESSES[0]}).options == ()
