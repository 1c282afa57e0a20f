"""Whether a publish landed, decided from two looks at the datasource."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, Revision, ServerVersion, server_version
from tir_dagster.tableau.outcome import PublishOutcome, outcome_by_revisions

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = datetime(2026, 1, 1, 13, tzinfo=UTC)


def revisions(*publishers: str | None) -> tuple[Revision, ...]:
    return tuple(Revision(number, who, NOON, 100) for number, who in enumerate(publishers, start=1))


BEFORE = FoundDatasource(
    id="1",
    name="Orders",
    project=FoundProject("p", "Sales", "Sales"),
    owner_id="us",
    tags=frozenset(),
    description="",
    certified=False,
    certification_note="",
    updated_at=NOON,
    has_extracts=True,
    size_mb=1,
    connections=(),
    webpage_url="",
    history=revisions("us"),
)


def after(*publishers: str | None) -> FoundDatasource:
    return replace(BEFORE, updated_at=LATER, history=revisions(*publishers))


@pytest.mark.parametrize(
    ("before", "now", "sends", "verdict"),
    [
        (None, None, 1, PublishOutcome.NOT_LANDED),
        (BEFORE, BEFORE, 1, PublishOutcome.NOT_LANDED),
        (BEFORE, after("us", "us"), 1, PublishOutcome.LANDED),
        (BEFORE, after("us", "us", "us"), 2, PublishOutcome.LANDED),
        (None, after("us"), 1, PublishOutcome.LANDED),
        (BEFORE, after("us", "them"), 1, PublishOutcome.FOREIGN),
        (BEFORE, after("us", "them", "us"), 1, PublishOutcome.FOREIGN),
        (BEFORE, after("us", "us", "us"), 1, PublishOutcome.FOREIGN),
        (BEFORE, after("us", "us"), 0, PublishOutcome.FOREIGN),
        (BEFORE, None, 1, PublishOutcome.FOREIGN),
        (BEFORE, replace(after("us", "us"), id="2"), 1, PublishOutcome.FOREIGN),
        (None, after("them"), 1, PublishOutcome.FOREIGN),
        (BEFORE, after("us"), 1, PublishOutcome.UNKNOWN),
        (BEFORE, after("us", None), 1, PublishOutcome.UNKNOWN),
        (BEFORE, after("us", None, None), 1, PublishOutcome.FOREIGN),
        (BEFORE, replace(BEFORE, updated_at=LATER, history=None), 1, PublishOutcome.UNKNOWN),
    ],
)
def test_the_revisions_since_tell_whose_content_the_server_holds(
    before: FoundDatasource | None, now: FoundDatasource | None, sends: int, verdict: PublishOutcome
) -> None:
    assert outcome_by_revisions(before, now, user_id="us", sends=sends) is verdict


@pytest.mark.parametrize(
    "version",
    [
        server_version(BEFORE),
        server_version(replace(BEFORE, history=None)),
        ServerVersion("1", None, None, None),
    ],
)
def test_a_version_can_be_written_down_and_read_again(version: ServerVersion) -> None:
    assert ServerVersion.parse(str(version)) == version


def test_each_part_of_a_version_counts() -> None:
    size_changed = replace(BEFORE, history=(replace(revisions("us")[0], size_bytes=101),))
    versions = {
        server_version(found)
        for found in (BEFORE, size_changed, after("us"), after("us", "us"), replace(BEFORE, id="2"))
    }
    assert len(versions) == 5
