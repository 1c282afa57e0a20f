"""Faults on demand: what clients meet on a bad day, when asked for and not otherwise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import (
    FailedSignInError,
    InternalServerError,
    ServerResponseError,
)

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import QUICK, Admin, Publisher


def get(publisher: Publisher, what: str = "projects") -> requests.Response:
    server = publisher.server
    url = f"{server.baseurl}/sites/{server.site_id}/{what}"
    return requests.get(url, headers={"x-tableau-auth": server.auth_token}, timeout=30)


def test_too_many_requests_come_with_the_time_to_wait(publisher: Publisher, admin: Admin) -> None:
    admin.fault("status", method="GET", path="/projects$", status=429, retry_after=7)
    answer = get(publisher)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert 'code="429000"' in answer.text
    assert get(publisher).status_code == 200


def test_the_client_sees_a_throttled_call_as_its_own_error(publisher: Publisher, admin: Admin) -> None:
    admin.fault("status", path="/datasources$", status=429, retry_after=1)
    with pytest.raises(ServerResponseError, match="429000"):
        publisher.server.datasources.get()


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_error_lasts_as_often_as_asked(publisher: Publisher, admin: Admin, status: int) -> None:
    admin.fault("status", path="/projects$", status=status, times=2, skip=1)
    assert [get(publisher).status_code for _ in range(4)] == [200, status, status, 200]
    admin.fault("status", path="/projects$", status=status)
    with pytest.raises(InternalServerError, match=str(status)):
        publisher.server.projects.get()


def test_a_code_of_choice_is_answered_in_the_protocols_form(publisher: Publisher, admin: Admin) -> None:
    admin.fault("status", path="/projects$", status=400, code="400031", message="gone & forgotten")
    with pytest.raises(ServerResponseError) as error:
        publisher.server.projects.get()
    assert (error.value.code, error.value.detail) == ("400031", "gone & forgotten")


@pytest.mark.parametrize(("when", "published"), [("before", False), ("after", True), ("during", True)])
def test_a_cut_connection_leaves_the_work_undone_or_done(
    publisher: Publisher, admin: Admin, when: str, *, published: bool
) -> None:
    admin.fault("cut", method="POST", path="/datasources$", when=when)
    with pytest.raises(requests.RequestException):
        publisher.publish_live("Cut")
    names = [item.name for item in publisher.server.datasources.filter(project_name=publisher.project.name)]
    assert names == (["Cut"] if published else [])


def test_a_download_is_cut_half_way(publisher: Publisher, admin: Admin) -> None:
    datasource = publisher.publish_live("Cut")
    admin.fault("cut", path=f"{datasource.id}/content", when="during")
    with pytest.raises(requests.RequestException):
        publisher.download(datasource)
    assert publisher.download(datasource).stat().st_size == (publisher.folder / "live.tds").stat().st_size


def test_the_log_shows_what_was_cut(publisher: Publisher, admin: Admin) -> None:
    admin.fault("cut", method="GET", path="/projects$", when="after")
    with pytest.raises(requests.ConnectionError):
        get(publisher)
    last = [call for call in admin.calls() if call["fault"]][-1]
    assert (last["fault"], last["status"], last["route"]) == ("cut after", 0, "list_projects")


def test_a_delayed_call_takes_its_time(publisher: Publisher, admin: Admin) -> None:
    admin.fault("delay", path="/projects$", seconds=0.5)
    started = time.monotonic()
    assert get(publisher).status_code == 200
    assert time.monotonic() - started >= 0.5


def test_a_session_expires_in_the_middle_of_the_work(sandbox: Sandbox, publisher: Publisher, admin: Admin) -> None:
    server = TSC.Server(sandbox.tableau_url, use_server_version=True)
    token = TSC.PersonalAccessTokenAuth(*sandbox.new_token(), site_id=sandbox.identity.site)
    server.auth.sign_in(token)
    admin.fault("expire_session", path="/projects$")
    for endpoint in (server.projects, server.datasources):
        with pytest.raises(FailedSignInError, match="401002"):
            endpoint.get()
    publisher.server.projects.get()
    server.auth.sign_in(token)
    server.projects.get()


def test_faults_are_listed_and_cleared(admin: Admin) -> None:
    admin.fault("status", path="/never", times=3)
    assert [(fault["kind"], fault["times"]) for fault in admin.faults()] == [("status", 3)]
    admin.clear_faults()
    assert admin.faults() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "nonsense"},
        {"kind": "cut", "when": "never"},
        {"kind": "cut", "path": "("},
        {"colour": 1},
        {"kind": "status", "times": "x"},
        {"kind": "status", "times": 2.5},
        {"kind": "status", "times": 0},
        {"kind": "status", "times": True},
        {"kind": "status", "skip": -1},
        {"kind": "status", "status": 200},
        {"kind": "status", "status": 503.7},
        {"kind": "status", "status": "503"},
        {"kind": "status", "code": "x"},
        {"kind": "status", "code": "²²²²²²"},
        {"kind": "vanish_job", "code": "000606"},
        {"kind": "delay", "seconds": -1},
        {"kind": "delay", "seconds": None},
        {"kind": "status", "retry_after": -0.5},
        {"kind": "fail_job", "notes": None},
        7,
        "{",
        '{"kind": "delay", "seconds": NaN}',
        '{"kind": "delay", "seconds": Infinity}',
        '{"kind": "delay", "seconds": 1e300}',
    ],
    ids=str,
)
def test_a_fault_that_cannot_be_understood_is_refused(sandbox: Sandbox, admin: Admin, wrong: Any) -> None:
    url = f"{sandbox.tableau_url}/sandbox/faults"
    answer = (
        requests.post(url, data=wrong, timeout=30)
        if isinstance(wrong, str)
        else requests.post(url, json=wrong, timeout=30)
    )
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert admin.faults() == []


def test_a_listed_fault_can_be_asked_for_again(admin: Admin) -> None:
    admin.fault("status", path="/never")
    listed = admin.faults()
    admin.clear_faults()
    admin.fault(**listed[0])
    assert admin.faults() == listed


@pytest.mark.parametrize(
    "wrong", [{"colour": 1}, {"job_seconds": -1}, {"job_seconds": "1"}, {"rest_version": "new"}, 7]
)
def test_a_setting_that_cannot_be_is_refused(sandbox: Sandbox, wrong: Any) -> None:
    answer = requests.put(f"{sandbox.tableau_url}/sandbox/settings", json=wrong, timeout=30)
    assert answer.status_code == 400
    settings = requests.get(f"{sandbox.tableau_url}/sandbox/settings", timeout=30).json()
    assert (settings["rest_version"], settings["job_seconds"]) == ("3.26", QUICK)


def test_a_token_for_nobody_is_refused(sandbox: Sandbox) -> None:
    answer = requests.post(f"{sandbox.tableau_url}/sandbox/tokens", json={"user": "nobody", "name": "x"}, timeout=30)
    assert answer.status_code == 400


def test_the_servers_own_address_is_never_hurt(sandbox: Sandbox, admin: Admin) -> None:
    admin.fault("cut", times=100)
    assert requests.get(f"{sandbox.tableau_url}/sandbox/health", timeout=30).json()["server"] == "tableau"
    assert len(admin.faults()) == 1
