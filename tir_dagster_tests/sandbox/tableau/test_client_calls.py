"""The calls of Airflow's operator and of tabcmd, as they send them, answered with what they read.

`make clients` runs these clients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import requests

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Publisher

NS = "{http://tableau.com/api}"


class Caller:
    """One signed-in session over plain HTTP."""

    def __init__(self, sandbox: Sandbox, credentials: dict[str, str]) -> None:
        self._http = requests.Session()
        self._api = f"{sandbox.tableau_url}/api"
        info = self._parsed(self._http.get(f"{self._api}/2.4/serverInfo", timeout=30), 200)
        self._api += f"/{info.findtext(f'.//{NS}restApiVersion')}"
        request = ET.Element("tsRequest")
        ET.SubElement(ET.SubElement(request, "credentials", credentials), "site", contentUrl=sandbox.identity.site)
        signed_in = self._parsed(self._http.post(f"{self._api}/auth/signin", ET.tostring(request), timeout=30), 200)
        self._http.headers["x-tableau-auth"] = signed_in.find(f".//{NS}credentials").attrib["token"]
        self.user_id = signed_in.find(f".//{NS}user").attrib["id"]
        self._site = f"{self._api}/sites/{signed_in.find(f'.//{NS}site').attrib['id']}"

    def __call__(self, method: str, path: str, body: str | None = None, *, status: int = 200) -> ET.Element:
        return self._parsed(self._http.request(method, f"{self._site}/{path}", data=body, timeout=30), status)

    def sign_out(self) -> None:
        self._parsed(self._http.post(f"{self._api}/auth/signout", timeout=30), 204)

    @staticmethod
    def _parsed(answer: requests.Response, status: int) -> ET.Element:
        assert answer.status_code == status, answer.text
        return ET.fromstring(answer.content) if answer.content else ET.Element("nothing")

    def pages(self, tag: str) -> Iterator[ET.Element]:
        """The items of every page of a list."""
        seen = number = 0
        while True:
            number += 1
            listed = self("GET", f"{tag}?pageNumber={number}&pageSize=100")
            items = list(listed.iter(f"{NS}{tag.removesuffix('s')}"))
            yield from items
            seen += len(items)
            if seen >= int(listed.find(f"{NS}pagination").attrib["totalAvailable"]):
                return

    def finished(self, job_id: str) -> ET.Element:
        """The job when it has its finish code; until then TSC takes it for -1."""

        def look() -> ET.Element | None:
            job = self("GET", f"jobs/{job_id}").find(f".//{NS}job")
            return job if job.get("finishCode") is not None else None

        return wait_for(look, f"job {job_id} to end")


@pytest.fixture
def by_password(sandbox: Sandbox) -> Iterator[Caller]:
    identity = sandbox.identity
    caller = Caller(sandbox, {"name": identity.tableau_user, "password": identity.tableau_password})
    yield caller
    caller.sign_out()


@pytest.fixture
def by_token(sandbox: Sandbox) -> Iterator[Caller]:
    name, secret = sandbox.new_token()
    caller = Caller(sandbox, {"personalAccessTokenName": name, "personalAccessTokenSecret": secret})
    yield caller
    caller.sign_out()


def test_airflows_operator_looks_through_all_datasources_refreshes_one_and_polls_its_job(
    by_password: Caller, publisher: Publisher, orders: Any
) -> None:
    (found,) = (item for item in by_password.pages("datasources") if item.get("id") == orders.id)
    assert (found.get("name"), found.find(f"{NS}project").get("name")) == ("Orders", publisher.project.name)
    assert found.get("webpageUrl")
    body = "<tsRequest><extractRefresh /></tsRequest>"
    started = by_password("POST", f"datasources/{orders.id}/refresh", body, status=202).find(f".//{NS}job")
    assert by_password.finished(started.get("id")).get("finishCode") == "0"


def test_tabcmd_finds_by_name_and_project_refreshes_with_an_increment_and_deletes(
    by_token: Caller, publisher: Publisher, orders: Any
) -> None:
    assert by_token("GET", f"users/{by_token.user_id}").find(f".//{NS}user").get("name")
    name = publisher.project.name
    (project,) = by_token("GET", f"projects?pageNumber=1&pageSize=100&filter=name:eq:{name}").iter(f"{NS}project")
    assert project.get("id") == publisher.project.id
    (top,) = by_token("GET", "projects?pageNumber=1&pageSize=100&filter=name:eq:Default").iter(f"{NS}project")
    assert top.get("name") == "default"
    wanted = f"filter=name:eq:Orders,projectName:eq:{name}"
    (found,) = by_token("GET", f"datasources?pageNumber=1&pageSize=100&{wanted}").iter(f"{NS}datasource")
    assert (found.get("id"), found.find(f"{NS}project").get("id")) == (orders.id, publisher.project.id)
    body = '<tsRequest><extractRefresh incremental="true" /></tsRequest>'
    started = by_token("POST", f"datasources/{orders.id}/refresh", body, status=202).find(f".//{NS}job")
    assert by_token.finished(started.get("id")).get("finishCode") == "0"
    # It looks for a workbook of the name where it is not told that a datasource is meant.
    assert not list(by_token("GET", f"workbooks?pageNumber=1&pageSize=100&{wanted}").iter(f"{NS}workbook"))
    by_token("DELETE", f"datasources/{orders.id}", status=204)
    by_token("DELETE", f"projects/{project.get('id')}", status=204)
