"""The plan: what is decided and why, and its guards against a source that looks like a load caught half-way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tir_dagster.changes.difference import Difference
from tir_dagster.changes.plan import Mode, Plan, Reason, Situation, SourceState, check_guards, plan_refresh, settle_plan
from tir_dagster.errors import GuardError, TirError

KNOWN = SourceState(definition="d", schema="s", identity="i", token="t", ddl="then", role="")
QUIET = Situation(extract="orders", mode="changes", policy="auto", now=KNOWN, confirmed=KNOWN)


@pytest.mark.parametrize(
    ("situation", "decision", "reason"),
    [
        (QUIET, "none", None),
        (replace(QUIET, now=replace(KNOWN, token="later")), "incremental", None),
        (replace(QUIET, pending=("a",)), "incremental", None),
        (replace(QUIET, mode="slices", slices=("2025-01",)), "incremental", None),
        (replace(QUIET, mode="full"), "full", Reason.REQUESTED),
        (replace(QUIET, policy="full"), "none", None),
        (replace(QUIET, policy="full", now=replace(KNOWN, token="later")), "full", Reason.REQUESTED),
        (replace(QUIET, confirmed=None), "full", Reason.FIRST_LOAD),
        (replace(QUIET, base_present=False), "full", Reason.STATE_LOST),
        (replace(QUIET, foreign=True), "full", Reason.FOREIGN_PUBLISH),
        (replace(QUIET, confirmed=None, forgotten=True), "full", Reason.STATE_LOST),
        (replace(QUIET, foreign=True, datasource_reason=Reason.DATASOURCE_CHANGED), "full", Reason.DATASOURCE_CHANGED),
        (replace(QUIET, foreign=True, datasource_reason=Reason.DATASOURCE_GONE), "full", Reason.DATASOURCE_GONE),
        (replace(QUIET, now=replace(KNOWN, definition="other")), "full", Reason.DEFINITION_CHANGED),
        (replace(QUIET, now=replace(KNOWN, schema="other")), "full", Reason.SCHEMA_CHANGED),
        (replace(QUIET, now=replace(KNOWN, identity="other")), "full", Reason.SOURCE_REPLACED),
        (replace(QUIET, now=replace(KNOWN, ddl="later")), "full", Reason.SCHEMA_CHANGED),
        (replace(QUIET, now=replace(KNOWN, ddl="later"), same_rows=True), "none", None),
        (replace(QUIET, now=replace(KNOWN, ddl="later", identity="other")), "full", Reason.SOURCE_REPLACED),
        (replace(QUIET, now=replace(KNOWN, role="OTHER")), "full", Reason.DEFINITION_CHANGED),
        # What an earlier version did not keep is unknown, not different.
        (replace(QUIET, confirmed=replace(KNOWN, ddl=None, role=None)), "none", None),
        (replace(QUIET, policy="full", confirmed=replace(KNOWN, ddl=None, role=None)), "none", None),
        (replace(QUIET, pending=("a",), due_reason=Reason.REQUESTED), "full", Reason.REQUESTED),
        (replace(QUIET, due_reason=Reason.DRIFT_UNREPAIRED), "full", Reason.DRIFT_UNREPAIRED),
        (replace(QUIET, policy="full", due_reason=Reason.DRIFT_UNREPAIRED), "full", Reason.REQUESTED),
    ],
)
def test_the_decision_and_its_reason(situation, decision, reason):
    plan = plan_refresh(situation)
    assert (plan.decision, plan.reason) == (decision, reason)


# A view in front of a table: when each was created, when DDL last ran on it, how the view is defined.
VIEWED = replace(KNOWN, identity="v1,t1", ddl="v1,t1", views="text/behind/ddl,")
AGAIN = replace(VIEWED, identity="v2,t1", ddl="v2,t1")


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (AGAIN, None),
        # Something was done to it after it was created: a comment, or a policy.
        (replace(AGAIN, ddl="v3,t1"), Reason.SCHEMA_CHANGED),
        (replace(VIEWED, ddl="v3,t1"), Reason.SCHEMA_CHANGED),
        (replace(AGAIN, views="other/behind/ddl,"), Reason.SOURCE_REPLACED),
        (replace(VIEWED, views="text/other/ddl,"), Reason.SOURCE_REPLACED),
        (replace(VIEWED, views="text/behind/other,"), Reason.SCHEMA_CHANGED),
        # The role may no longer see the tables, then not even the text.
        (replace(AGAIN, views="text/?/?,"), None),
        (replace(VIEWED, views="?/?/?,"), None),
        (replace(AGAIN, views="?/?/?,"), Reason.SOURCE_REPLACED),
    ],
)
def test_a_view_is_told_by_its_definition_where_that_is_known(now, reason):
    situation = replace(QUIET, now=now, confirmed=VIEWED)
    assert plan_refresh(situation).reason is reason
    assert plan_refresh(replace(situation, same_view=True)).decision == "none"
    policy = plan_refresh(replace(situation, policy="full"))
    assert policy.decision == ("none" if reason is None else "full")


def test_what_happens_to_a_table_counts_whatever_a_view_beside_it_shows():
    situation = replace(QUIET, confirmed=VIEWED, same_view=True)
    assert plan_refresh(replace(situation, now=replace(VIEWED, identity="v1,t2"))).reason is Reason.SOURCE_REPLACED
    assert plan_refresh(replace(situation, now=replace(VIEWED, ddl="v1,t2"))).reason is Reason.SCHEMA_CHANGED
    became_a_table = replace(VIEWED, identity="v2,t1", ddl="v2,t1", views=",")
    assert plan_refresh(replace(situation, now=became_a_table)).reason is Reason.SOURCE_REPLACED


def test_a_view_that_an_earlier_version_saw_is_told_by_when_it_was_created():
    earlier = replace(QUIET, confirmed=replace(VIEWED, views=None))
    assert plan_refresh(replace(earlier, now=VIEWED)).decision == "none"
    assert plan_refresh(replace(earlier, now=AGAIN)).reason is Reason.SOURCE_REPLACED


def test_incremental_only_refuses_a_full_refresh_that_nobody_asked_for():
    strict = replace(QUIET, policy="incremental_only")
    with pytest.raises(TirError, match="incremental_only"):
        plan_refresh(replace(strict, foreign=True))
    assert plan_refresh(replace(strict, confirmed=None)).decision == "full", "a first load is always one"
    assert plan_refresh(replace(strict, mode="full")).decision == "full"
    assert plan_refresh(replace(strict, pending=("a",), due_reason=Reason.REQUESTED)).decision == "full"


@pytest.mark.parametrize("mode", ["changes", "full"])
def test_what_nobody_looks_for_is_said_whatever_is_done(mode):
    plan = plan_refresh(replace(QUIET, mode=mode, excluded_changes=("deleted rows are not looked for",)))
    assert plan.notes == ("deleted rows are not looked for",)


def settled(purged: int, appended: int = 0, *, mode: Mode = "changes", allow_empty: bool = False) -> Plan:
    difference = Difference(purged + appended, {"2025-01": purged}, {"2025-01": appended} if appended else {})
    return settle_plan(
        Plan("orders", mode, "incremental"),
        difference,
        rows=100,
        policy="auto",
        delete_share=0.3,
        full_share=0.5,
        pending=False,
        allow_empty=allow_empty,
    )


@pytest.mark.parametrize("mode", ["changes", "slices"])
@pytest.mark.parametrize(("purged", "message"), [(31, "31 of 100 rows would vanish"), (100, "the source is empty")])
def test_a_source_that_lost_too_much_stops_the_refresh_and_the_option_that_allows_it_is_named(mode, purged, message):
    with pytest.raises(GuardError) as caught:
        settled(purged, mode=mode)
    assert message in str(caught.value)
    assert "Nothing was touched" in str(caught.value)
    assert "tir refresh orders --allow-empty" in str(caught.value)


@pytest.mark.parametrize("mode", ["changes", "slices"])
@pytest.mark.parametrize(("purged", "decision"), [(31, "incremental"), (100, "full")])
def test_what_is_allowed_is_done(mode, purged, decision):
    assert settled(purged, mode=mode, allow_empty=True).decision == decision


def test_as_many_deletes_as_the_share_allows_and_rows_that_came_back_stop_nothing():
    assert settled(30).decision == "incremental"
    assert settled(45, 45).decision == "incremental"


def test_the_share_and_its_field_are_in_the_sentence():
    with pytest.raises(GuardError, match=r"more than the 30% that thresholds\.delete_share in the spec allows"):
        check_guards("orders", rows=100, left=50, delete_share=0.3)


def test_an_extract_that_is_already_empty_has_nothing_to_lose():
    check_guards("orders", rows=0, left=0, delete_share=0.0)
