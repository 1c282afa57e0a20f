"""The messages that people read: events made from reports; pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tir_dagster.alerts.events import Event, Failure, Problem, Recovered, Success
from tir_dagster.alerts.text import joined, moment, one_line, shortened, span
from tir_dagster.spec.alerts import Cause

LONGEST_SENTENCE = 600
_LOOK = "Look at the run, fix the cause, and refresh again."
_NEXT = {
    Cause.SERVER_DOWN: "Check that Tableau Server runs, can be reached from here and takes the token; the sensors try again by themselves.",
    Cause.WAREHOUSE_DOWN: "Check Snowflake's status, the network and the credentials; the sensors try again by themselves.",
    # Each guard's message says what to do if the guard is wrong; --allow-empty helps only for some of them.
    Cause.GUARD: "Look at the source. Only if it is right as it is, do what the message says.",
    Cause.SPEC_UNFIT: "Find out what changed in the source, correct the spec or the source, and refresh again.",
    Cause.SENSOR_BLIND: "Check the table's name, the role's grants and the network; the sensor tries again by itself.",
    Cause.JOB_FAILED: "Look at the job on Tableau Server, fix the cause, and refresh again.",
    Cause.DRIFT: "Re-sync the slices that differ: tir refresh EXTRACT --slices FROM..TO.",
    Cause.LOAD_FAILED: "Look at the run, fix the file or the table, and load again: tir load EXTRACT.",
    Cause.UNVERIFIED: "Look at the run and fix the cause. Until then nobody knows if the extract equals its source.",
    Cause.STALE: "Find out why no refresh succeeded: look at the extract's sensors and its last runs.",
}


def failure_event(key: str, failures: Sequence[Failure], before: Problem | None) -> Event:
    """Return one event for all extracts with the same cause of failure."""
    last = failures[-1]
    extracts = tuple(dict.fromkeys([*(before.affected if before else ()), *(failure.extract for failure in failures)]))
    count = before.count if before else 0
    again = f" again (failure {count + 1} since {_time(before.since)})" if before and count else ""
    return Event(
        kind="repeat" if count else "failure",
        id=last.id,
        key=key,
        extracts=extracts,
        title=shortened(f"{_subject(last, extracts)}: {last.cause.value}{again}", 140),
        text=shortened(one_line(last.sentence), LONGEST_SENTENCE),
        cause=last.cause.name.lower(),
        facts=_filled(
            {
                "Affected": joined(extracts) if len(extracts) > 1 else "",
                "Table" if last.ends_with == "load" else "Datasource": last.datasource if len(extracts) == 1 else "",
                "Step": last.step,
                "Unaffected": shortened(_unaffected(failures, extracts), LONGEST_SENTENCE),
                "Run": last.run_id[:8],
            }
        ),
        links=_filled({"Open the run": last.run_url}),
        next_step=_NEXT.get(last.cause, _LOOK).replace("EXTRACT", last.extract),
        datasource=last.datasource,
        run_id=last.run_id,
    )


def _unaffected(failures: Sequence[Failure], extracts: tuple[str, ...]) -> str:
    """Return what is not affected, for each extract that failed now; for earlier failures it is unknown."""
    if len(extracts) == 1:
        return failures[-1].unaffected
    return "; ".join(f"{failure.extract}: {failure.unaffected}" for failure in failures if failure.unaffected)


def _subject(failure: Failure, extracts: tuple[str, ...]) -> str:
    if failure.cause.is_whole_server:
        return failure.scope or ("Tableau Server" if failure.cause is Cause.SERVER_DOWN else "Snowflake")
    return joined(extracts)


def recovery_event(problem: Problem, by: Success | Recovered, full_seconds: float | None = None) -> Event:
    """Return the event that ends a problem, after a success or a good read."""
    cause = Cause[problem.cause]
    lasted = span(max(0.0, by.at - problem.since))
    works = {
        "refresh": "the refresh works again",
        "sensor": "the sensor reads again",
        "drift": "the extract equals its source again",
        "freshness": "the extract is fresh again",
        "load": "the load works again",
        "verification": "the verification works again",
    }
    ended = "the server answers again" if cause.is_whole_server else works[cause.topic]
    times = "once" if problem.count == 1 else f"{problem.count} times"
    name = (problem.scope or problem.key.split("/")[1]) if cause.is_whole_server else by.extract
    success = by if isinstance(by, Success) else None
    return Event(
        kind="recovery",
        id=f"{by.id}/end",
        key=problem.key,
        extracts=(by.extract,),
        title=shortened(f"{name}: {ended}", 140),
        text=f"It had failed {times} since {_time(problem.since)}, for {lasted}.",
        cause=problem.cause.lower(),
        facts=success_facts(success, full_seconds) if success else {},
        links=_links(success) if success else {},
        datasource=success.datasource if success else "",
        run_id=success.run_id if success else "",
    )


def success_event(success: Success, full_seconds: float | None) -> Event:
    if success.of == "load":
        title = f"{success.extract}: {'loaded' if success.published else 'nothing to load'}"
        text = "The files are in the table." if success.published else "There were no new files."
    elif success.decision == "rollback":
        title = f"{success.extract}: rolled back"
        sentence = success.why.removeprefix(f"{title} ")
        text = sentence[:1].upper() + sentence[1:]
    elif success.published:
        why = f", {success.reason}" if success.reason else ""
        title = f"{success.extract}: refreshed ({success.decision}{why})"
        text = saved_sentence(success, full_seconds)
    else:
        title, text = f"{success.extract}: nothing to do", "The source has not changed since the last refresh."
    return Event(
        kind="success",
        id=success.id,
        key=f"{success.extract}/success/{success.id}",
        extracts=(success.extract,),
        title=shortened(title, 140),
        text=text,
        facts=success_facts(success, full_seconds),
        links=_links(success),
        datasource=success.datasource,
        run_id=success.run_id,
    )


def success_facts(success: Success, full_seconds: float | None) -> dict[str, str]:
    warnings = shortened("; ".join(success.warnings), LONGEST_SENTENCE)
    if success.of == "load":
        took = span(success.seconds) if success.seconds else ""
        return _filled({"Table": success.datasource, **success.facts, "Took": took, "Warnings": warnings})
    by_key = success.published and success.decision != "rollback"
    moved = f"{success.rows_purged:,} rows purged, {success.rows_appended:,} appended" if by_key else ""
    slices = f"{len(success.slices)}: {joined(success.slices)}" if success.slices else ""
    compared = full_seconds is not None and success.decision == "incremental"
    beside = f" (the last full refresh took {span(full_seconds or 0)})" if compared else ""
    return _filled(
        {
            "Datasource": success.datasource,
            "Changed": moved,
            "Slices": slices,
            "Took": f"{span(success.seconds)}{beside}" if success.seconds else "",
            "Data as of": moment(success.as_of) if success.as_of else "",
            "Full because": (success.why or success.reason) if success.decision == "full" else "",
            "Warnings": warnings,
        }
    )


def saved_sentence(success: Success, full_seconds: float | None) -> str:
    """Return a sentence on what the incremental refresh saved against a full one, as far as that is known."""
    if success.decision != "incremental" or success.rows is None:
        return (
            f"The datasource holds {success.rows:,} rows." if success.rows is not None else "The refresh is complete."
        )
    moved = max(success.rows_purged, success.rows_appended)
    share = f"{moved:,} of {success.rows:,} rows moved"
    # Rounded, a few rows of many would look like none.
    saved = min(0.999 if moved else 1.0, max(0.0, 1 - moved / success.rows)) if success.rows else 0.0
    faster = ""
    if full_seconds and success.seconds and full_seconds > success.seconds:
        faster = f" and {span(full_seconds - success.seconds)}"
    return f"{share}: {saved:.1%} of the rows{faster} saved against a full refresh."


def digest_event(successes: Sequence[Success], day: str) -> Event:
    """Return one event for a day's refreshes."""
    by_extract: dict[str, list[Success]] = {}
    for success in successes:
        by_extract.setdefault(success.extract, []).append(success)
    facts = {name: _of_a_day(list(of_extract)) for name, of_extract in list(by_extract.items())[:40]}
    return Event(
        kind="digest",
        id=f"digest/{day}/{successes[-1].id}",
        key=f"digest/{day}/{successes[-1].id}",
        extracts=tuple(by_extract),
        title=f"{len(successes)} refreshes of {len(by_extract)} extracts until {day}",
        text="All of them succeeded; failures are sent when they happen.",
        facts=facts,
    )


def _of_a_day(successes: list[Success]) -> str:
    published = [success for success in successes if success.published]
    if successes[0].of == "load":
        return f"{len(published)} of {len(successes)} loads brought rows"
    full = sum(success.decision == "full" for success in published)
    purged, appended = (
        sum(success.rows_purged for success in published),
        sum(success.rows_appended for success in published),
    )
    fulls = f", {full} of them full" if full else ""
    return f"{len(published)} of {len(successes)} published{fulls}; {purged:,} rows purged, {appended:,} appended"


def _links(success: Success) -> dict[str, str]:
    return _filled({"Open the datasource": success.datasource_url, "Open the run": success.run_url})


def _filled(values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
