"""`tir adopt` on the sandbox: which extracts a site has, what they cost, whether they can be kept by key; and drafts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.spec.reading import load_declared
from tir_dagster_tests.cli.setup.conftest import Site

WRONG_USAGE = 2


def adopt(site: Site, *arguments: str) -> Any:
    result = site.run("adopt", "--project", site.project.name, "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_extracts_are_ranked_by_the_hours_that_would_be_saved_and_reasons_say_why_not(site: Site):
    site.orders()
    costly = site.publish_extract("costly", table="ORDERS")
    site.publish_extract("idle", table="ORDERS")
    table = f"SETUPS.{site.schema}.ORDERS"
    site.publish_extract("by_query", custom_sql=f"SELECT ID, DAY, AMOUNT FROM {table}")
    unclear = site.publish_extract("by_clock", custom_sql="SELECT ID, DAY, AMOUNT FROM ORDERS")
    site.publish_hyper("made_elsewhere")
    site.publish_live("live")
    for datasource in (unclear, unclear):
        site.refresh(datasource)
    # Times have whole seconds.
    site.admin.set(job_seconds=2.0)
    site.refresh(costly)
    site.admin.forget_calls()
    scan = adopt(site)
    listed = {one["name"]: one for one in scan["extracts"]}
    assert set(listed) == {"costly", "idle", "by_query", "by_clock", "made_elsewhere"}
    assert next(one["name"] for one in scan["extracts"]) == "costly"
    assert {name: one["by_key"] for name, one in listed.items()} == {
        "costly": True,
        "idle": True,
        "by_query": True,
        "by_clock": False,
        "made_elsewhere": False,
    }
    assert "its query cannot be followed" in listed["by_clock"]["why_not"][0]
    assert "does not say where its rows come from" in listed["made_elsewhere"]["why_not"][0]
    assert (listed["costly"]["source"], listed["costly"]["rows"], listed["costly"]["refreshes"]) == (table, 400, 1)
    assert listed["costly"]["hours_saved"] == listed["costly"]["hours"] > 0
    assert (listed["by_clock"]["refreshes"], listed["by_clock"]["hours_saved"]) == (2, 0)
    calls = [call for call in site.admin.calls() if call["agent"].startswith("tir_dagster")]
    assert {(call["method"], call["route"]) for call in calls if call["method"] != "GET"} == {
        ("POST", "sign_in"),
        ("POST", "sign_out"),
    }
    assert abs(scan["rest_calls"] - len(calls)) <= 1, "the calls are counted"


@pytest.mark.long
def test_people_read_a_table_and_how_many_calls_it_took(site: Site):
    site.orders()
    site.publish_extract("orders", table="ORDERS")
    lines = site.run("adopt", "--project", site.project.name).stdout.splitlines()
    assert lines[0].split() == ["hours/week", "refreshes", "MB", "rows", "by", "key", "extract"]
    assert lines[1].endswith(f"yes     {site.project.name}/orders of SETUPS.{site.schema}.ORDERS")
    assert "1 extracts on" in lines[2]
    assert "Nothing was changed." in lines[-1]


@pytest.mark.long
def test_only_so_many_are_looked_into_and_the_others_are_said(site: Site):
    site.orders()
    for name in ("one", "two"):
        site.publish_extract(name, table="ORDERS")
    scan = adopt(site, "--look", "1")
    assert sorted(str(one["by_key"]) for one in scan["extracts"]) == ["None", "True"]
    assert scan["notes"] == ["1 extracts with less time were not looked into: --look N looks into more."]


@pytest.mark.long
def test_a_user_who_sees_no_jobs_is_told_so(site: Site):
    site.orders()
    site.publish_extract("orders", table="ORDERS")
    site.admin.fault("status", status=403, code="403004", path="/jobs$", times=5)
    scan = adopt(site)
    assert scan["extracts"][0]["hours"] is None
    assert "does not see the list of jobs" in scan["notes"][0]


def test_drafts_are_written_for_the_chosen_ones_and_no_file_is_replaced(site: Site):
    site.orders()
    for name in ("one", "two"):
        site.publish_extract(name, table="ORDERS", increment_key="DAY")
    assert adopt(site, "--write", "drafts", "--only", "one")["written"] == ["drafts/one.yaml"]
    (spec,) = load_declared("drafts/one.yaml").extracts
    assert (spec.row_key, spec.changes.detector, spec.datasource.name) == (("ID",), "feed", "one")
    assert not Path("drafts/two.yaml").exists()
    again = site.run("adopt", "--project", site.project.name, "--write", "drafts")
    assert (again.exit_code, "drafts/one.yaml exists" in again.stderr) == (WRONG_USAGE, True)
    assert adopt(site, "--write", "all.yaml")["failed"] == []
    assert [one.name for one in load_declared("all.yaml").extracts] == ["one", "two"]


def test_a_draft_that_cannot_be_made_does_not_stop_the_others(site: Site):
    site.orders()
    site.publish_extract("good", table="ORDERS")
    site.publish_extract("gone", table="NOWHERE")
    result = site.run("adopt", "--project", site.project.name, "--write", "drafts", "--json")
    outcome = json.loads(result.stdout)
    assert (result.exit_code, outcome["written"]) == (1, ["drafts/good.yaml"])
    assert f"SETUPS.{site.schema}.NOWHERE does not exist" in outcome["failed"][0]


def test_a_name_that_is_not_there_is_told_with_similar_names(site: Site):
    site.orders()
    site.publish_extract("orders", table="ORDERS")
    result = site.run("adopt", "--project", site.project.name, "--write", "drafts", "--only", "ordres")
    assert (result.exit_code, "Did you mean orders" in result.stderr) == (WRONG_USAGE, True)
    assert site.run("adopt", "--only", "orders").exit_code == WRONG_USAGE
