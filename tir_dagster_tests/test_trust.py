"""Certificates are checked by every client, your own authority is one variable, and proxies are used as the environment says."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tir_dagster.alerts.events import Event
from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.servicenow import ServiceNowChannel
from tir_dagster.alerts.slack import SlackChannel
from tir_dagster.errors import TirError
from tir_dagster.loading.landing import LandingPlace
from tir_dagster.orchestration.alerts.resources import ServiceNowResource, SlackAppResource
from tir_dagster.retries import RetryPolicy
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.alerts import ServiceNowAlerts
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import list_projects
from tir_dagster.trust import proxy_for
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.tunnel import self_signed, tunnelled

EVENT = Event("failure", "run-1", "trust", ("orders",), "A title", "A text")
ONCE = Persistence(attempts=1, seconds=10.0)


def tableau(sandbox: Sandbox, url: str) -> None:
    access = replace(TableauAccess.from_environment(sandbox.env), server_url=url)
    with TableauClient(access, retry=RetryPolicy(tries=1)) as client:
        assert list_projects(client)


def servicenow(sandbox: Sandbox, url: str) -> None:
    identity = sandbox.identity
    access = ServiceNowResource(
        url=url, username=identity.servicenow_user, password=identity.servicenow_password
    ).access()
    assert ServiceNowChannel(access, ServiceNowAlerts(group="mygroup"), ONCE).told(EVENT)


def slack(sandbox: Sandbox, url: str) -> None:
    client = SlackAppResource(token=sandbox.identity.slack_token, api_url=f"{url}/slack/api/").get_client()
    assert SlackChannel(client, "#mychannel", ONCE).told(EVENT)


def snowflake(sandbox: Sandbox, url: str) -> None:
    access = SnowflakeAccess.from_environment(sandbox.env)
    port = int(url.rpartition(":")[2])
    assert replace(access, protocol="https", port=port, login_timeout=5).query("SELECT 1") == [(1,)]


def s3(sandbox: Sandbox, url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**sandbox.env, "AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url}.items():
            patch.setenv(name, value)
        place = LandingPlace.of("s3://landing")
        # The client that lists objects, and the one that reads them.
        place.listed()
        with place.explaining_errors("s3://landing"):
            assert place.filesystem.get_file_info("landing").is_file is False


CLIENTS: dict[str, tuple[Callable[[Sandbox, str], None], Callable[[Sandbox], str], str]] = {
    "Tableau": (tableau, lambda sandbox: sandbox.tableau_url, "certificate .* set REQUESTS_CA_BUNDLE"),
    "ServiceNow": (
        servicenow,
        lambda sandbox: sandbox.people_url,
        "its certificate is not trusted; .* REQUESTS_CA_BUNDLE",
    ),
    "Slack": (slack, lambda sandbox: sandbox.people_url, "certificate"),
    "Snowflake": (
        snowflake,
        lambda sandbox: f"http://127.0.0.1:{sandbox.env['SNOWFLAKE_PORT']}",
        "its certificate is not trusted, .* REQUESTS_CA_BUNDLE",
    ),
    "S3": (s3, lambda sandbox: sandbox.env["AWS_ENDPOINT_URL_S3"], "the certificate of S3 is not trusted"),
}


@pytest.fixture(autouse=True)
def no_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_is_trusted_only_if_the_environment_names_its_authority(
    client: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, address, told = CLIENTS[client]
    certificate = self_signed(tmp_path)
    with tunnelled(address(sandbox), certificate) as tunnel:
        with pytest.raises((TirError, ChannelError), match=told):
            use(sandbox, tunnel.url)
        assert not tunnel.carried, "nothing was sent to a server that could not show who it is"
        # Snowflake's connector does not look at the second one.
        for variable in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")[: 1 if client == "Snowflake" else 2]:
            with monkeypatch.context() as patch:
                patch.setenv(variable, str(certificate))
                use(sandbox, tunnel.url)
        assert tunnel.carried


def test_an_authority_that_is_not_there_is_told_with_its_variable(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    for use, address, _ in (CLIENTS["Tableau"], CLIENTS["ServiceNow"], CLIENTS["Slack"], CLIENTS["S3"]):
        with pytest.raises(TirError, match=r"SSL_CERT_FILE is /nowhere/ca\.pem, and there is no such file"):
            use(sandbox, address(sandbox))


def test_no_certificates_in_the_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ca.pem").write_text("nothing", encoding="utf-8")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with pytest.raises(TirError, match=r"ca\.pem holds no certificates"):
        SlackAppResource(token="xoxb-1").get_client()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A proxy that writes down where it was asked to connect to, and refuses."""
    asked: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "direct.example.com")
        yield asked
        server.shutdown()


@pytest.mark.parametrize(
    ("use", "host"),
    [(tableau, "tableau.example.com:443"), (servicenow, "desk.example.com:443"), (slack, "slack.example.com:443")],
)
def test_calls_go_through_the_proxy(use, host: str, sandbox: Sandbox, proxy: list[str]):
    with pytest.raises((TirError, ChannelError)):
        use(sandbox, f"https://{host.removesuffix(':443')}")
    assert set(proxy) == {host}


def test_files_are_read_through_the_proxy(proxy: list[str]):
    network = dict(LandingPlace.of("s3://bucket", {"AWS_REGION": "eu-west-1"}).network)
    assert network == {"proxy_options": proxy_for("https", "s3.eu-west-1.amazonaws.com")}
    assert network["proxy_options"]
    assert not LandingPlace.of("s3://bucket", {"AWS_ENDPOINT_URL": "https://direct.example.com"}).network
    assert not LandingPlace.of("file:///folder", {}).network
