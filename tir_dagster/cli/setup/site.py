"""A scan of a Tableau site: which extracts take how much of the server's time, and which could be kept by key. Only reads."""

from __future__ import annotations

import difflib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tir_dagster.cli.setup.published import DatasourceSource, look_inside, obstacles, source_of
from tir_dagster.errors import SpecError
from tir_dagster.hyper.package.package import Package
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.calls import Use
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundProject,
    ListedExtract,
    find_project,
    list_extracts,
    list_projects,
    read_datasource,
)
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import EndedRefresh, datasource_of_job, refreshes_since
from tir_dagster.tableau.tasks import RefreshTask, tasks_by_datasource

Tell = Callable[[str], None]
WEEK = timedelta(days=7)
# A site with more refreshes a week than this shows the first ones.
_MOST_JOB_PAGES = 20
# Jobs of datasources that share a name are read one by one, at most so many.
_MOST_JOBS_READ = 200
CLOUD_CALLS = 40_000


def looking_client() -> TableauClient:
    """Return a client of the site that the environment names; the token of a connected app asks for reading only."""
    uses = {Use.SIGN_IN, Use.LOOK, Use.DOWNLOAD, Use.TASKS, Use.JOBS}
    return TableauClient(TableauAccess.from_environment(os.environ).limited_to(uses))


@contextmanager
def optional_client() -> Iterator[TableauClient | None]:
    """Yield that client; None if the environment names no server."""
    if not os.environ.get("TABLEAU_SERVER_URL"):
        yield None
        return
    with looking_client() as client:
        yield client


@dataclass(frozen=True)
class Candidate:
    """An extract on the site; `by_key` is None if nobody looked inside."""

    # The path of its project; a name that others have, too, begins with a slash.
    project: str
    name: str
    id: str
    size_mb: int | None
    # Of the last week; None if this user does not see the list of jobs.
    refreshes: int | None = None
    hours: float | None = None
    tasks: tuple[str, ...] = ()
    rows: int | None = None
    source: DatasourceSource | None = None
    by_key: bool | None = None
    why_not: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.project}/{self.name}"

    @property
    def hours_saved(self) -> float:
        return (self.hours or 0.0) if self.by_key else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "source": self.source.shown if self.source else None, "hours_saved": self.hours_saved}


@dataclass(frozen=True)
class Scan:
    """All extracts of the chosen projects, those first that would save most."""

    where: str
    candidates: tuple[Candidate, ...]
    since: datetime
    sees_jobs: bool
    calls: int = 0
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return {
            "server": self.where,
            "since": self.since.isoformat(timespec="seconds"),
            "rest_calls": self.calls,
            "notes": list(self.notes),
            "extracts": [candidate.as_dict() for candidate in self.candidates],
        }


def scan_site(client: TableauClient, projects: Sequence[str], *, most_inside: int, tell: Tell) -> Scan:
    """List the extracts, add up their refreshes, and look inside those that take most time."""
    counted = _count_calls(client)
    chosen = _chosen(client, projects)
    tell(f"listing the extracts on {client.where}")
    everything = list_extracts(client)
    listed = [item for item in everything if item.project_id in chosen]
    tasks = _tasks(client)
    since = datetime.now(UTC) - WEEK
    tell(f"{len(listed)} extracts; adding up the refreshes of a week")
    jobs = refreshes_since(client, since, most_pages=_MOST_JOB_PAGES)
    by_id, notes = _refreshes_by_id(client, everything, listed, jobs or ())
    project_ids = {item.id: item.project_id for item in listed}
    candidates = [
        _listed(item, chosen[item.project_id], tasks.get(item.id, []), None if jobs is None else by_id.get(item.id, []))
        for item in listed
    ]
    candidates.sort(key=_by_time)
    looked = []
    for number, candidate in enumerate(candidates[:most_inside], start=1):
        tell(f"{number} of {min(len(candidates), most_inside)}: looking inside {candidate.path}")
        looked.append(_inside(client, candidate, chosen[project_ids[candidate.id]]))
    if left := len(candidates) - len(looked):
        notes += [f"{left} extracts with less time were not looked into: --look N looks into more."]
    if jobs is None:
        notes += [
            "This user does not see the list of jobs, so the hours are not known: an administrator's token shows them."
        ]
    ranked = sorted(
        [*looked, *candidates[most_inside:]], key=lambda one: (-one.hours_saved, one.by_key is not True, *_by_time(one))
    )
    return Scan(client.where, tuple(ranked), since, jobs is not None, counted(), tuple(notes))


def _count_calls(client: TableauClient) -> Callable[[], int]:
    """Count the session's calls from now on; the three of signing in are added."""
    calls: list[str] = []

    def hook(server: Any) -> None:
        server.session.hooks["response"].append(lambda response, **_: calls.append(response.request.method))

    client.call(hook, doing="sign in")
    return lambda: len(calls) + 3


def _chosen(client: TableauClient, projects: Sequence[str]) -> dict[str, FoundProject]:
    """Return the projects by id: the named ones with all below them, or all."""
    known = list_projects(client)
    names = Counter(project.name for project in known)
    paths = [find_project(client, path).path for path in projects]
    return {
        project.id: replace(project, path=f"/{project.path}") if _is_ambiguous(project, names) else project
        for project in known
        if not paths or any(project.path == path or project.path.startswith(f"{path}/") for path in paths)
    }


def _is_ambiguous(project: FoundProject, names: Mapping[str, int]) -> bool:
    return "/" not in project.path and names[project.name] > 1


def _tasks(client: TableauClient) -> dict[str, list[RefreshTask]]:
    try:
        return tasks_by_datasource(client, doing="list the refresh tasks")
    except RefusedError:
        return {}


def _refreshes_by_id(
    client: TableauClient, everything: list[ListedExtract], listed: list[ListedExtract], jobs: Sequence[EndedRefresh]
) -> tuple[dict[str, list[EndedRefresh]], list[str]]:
    """Return the refreshes of each datasource. The list of jobs shows names only, so those of a name that repeats are read."""
    named = Counter(item.name for item in everything)
    ids = {item.name: item.id for item in listed if named[item.name] == 1}
    repeated = {item.name for item in listed if named[item.name] > 1}
    by_id: dict[str, list[EndedRefresh]] = defaultdict(list)
    read, skipped = 0, 0
    for job in jobs:
        if job.title in ids:
            by_id[ids[job.title]].append(job)
        elif job.title in repeated and read < _MOST_JOBS_READ:
            read += 1
            if datasource := datasource_of_job(client, job.job_id, doing=f"read the refreshes of {job.title!r}"):
                by_id[datasource].append(job)
        elif job.title in repeated:
            skipped += 1
    notes = [f"{skipped} refreshes of datasources that share a name were not counted."] if skipped else []
    return by_id, notes


def _listed(
    item: ListedExtract, project: FoundProject, tasks: list[RefreshTask], jobs: list[EndedRefresh] | None
) -> Candidate:
    return Candidate(
        project.path,
        item.name,
        item.id,
        item.size_mb,
        None if jobs is None else len(jobs),
        None if jobs is None else round(sum(job.seconds for job in jobs) / 3600, 4),
        tuple(f"{'incremental' if task.incremental else 'full'} refresh on {task.schedule}" for task in tasks),
    )


def _by_time(candidate: Candidate) -> tuple[float, int, int, str]:
    return -(candidate.hours or 0.0), -(candidate.refreshes or 0), -(candidate.size_mb or 0), candidate.path


def _inside(client: TableauClient, candidate: Candidate, project: FoundProject) -> Candidate:
    """Return the candidate with its source, its rows, and whether it could be kept by key."""
    try:
        datasource = read_datasource(client, candidate.id, project=project, name=candidate.name)
    except RefusedError as error:
        return replace(candidate, by_key=False, why_not=(f"it cannot be read: {error}",))
    if datasource is None:
        return replace(candidate, by_key=False, why_not=("it was deleted meanwhile",))
    package, problem = look_inside(client, datasource)
    if package is None:
        return replace(candidate, by_key=False, why_not=(problem.rstrip("."),))
    why_not = tuple(obstacles(package, datasource.connections))
    source = source_of(package)
    return replace(candidate, source=source, rows=_rows(package), by_key=not why_not, why_not=why_not)


def _rows(package: Package) -> int | None:
    """Return the rows that Tableau's own refreshes say they loaded: the last full one and the increments after it."""
    rows: int | None = None
    for event in package.events:
        if not (event.rows_inserted or "").isdigit():
            return None
        inserted = int(event.rows_inserted or 0)
        rows = inserted if event.kind != "increment" else (rows or 0) + inserted
    return rows


def chosen_candidates(scan: Scan, only: Sequence[str]) -> list[Candidate]:
    """Return the candidates of these names or paths, without names all that can be kept by key; raise SpecError for others."""
    if not only:
        return [candidate for candidate in scan.candidates if candidate.by_key]
    chosen = []
    for name in only:
        matches = [candidate for candidate in scan.candidates if name in (candidate.name, candidate.path)]
        if len(matches) != 1:
            known = [one.path for one in scan.candidates] + [one.name for one in scan.candidates]
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            problem = "Write PROJECT/NAME: there are several." if matches else f"There is no such extract.{hint}"
            raise SpecError(f"--only {name}: {problem}")
        chosen += matches
    return chosen


def scan_lines(scan: Scan) -> list[str]:
    """Return the table for people."""
    lines = [f"{'hours/week':>10} {'refreshes':>9} {'MB':>8} {'rows':>13}  by key  extract"]
    for one in scan.candidates:
        hours = "?" if one.hours is None else f"{one.hours:,.2f}"
        cells = [
            f"{hours:>10}",
            f"{'?' if one.refreshes is None else one.refreshes:>9}",
            f"{'?' if one.size_mb is None else format(one.size_mb, ','):>8}",
            f"{'?' if one.rows is None else format(one.rows, ','):>13}",
            f" {'?' if one.by_key is None else 'yes' if one.by_key else 'no':<6}",
            f" {one.path}{f' of {one.source.shown}' if one.source else ''}",
        ]
        lines.append(" ".join(cells))
        lines += [f"{'':<45}{reason}" for reason in (*one.why_not, *one.tasks)]
    saved, total = sum(one.hours_saved for one in scan.candidates), sum(one.hours or 0 for one in scan.candidates)
    keepable = sum(bool(one.by_key) for one in scan.candidates)
    lines.append(
        f"{len(scan.candidates)} extracts on {scan.where}; {keepable} could be kept by key"
        + (f": {saved:,.2f} of {total:,.2f} hours of refresh since {scan.since:%Y-%m-%d}." if scan.sees_jobs else ".")
    )
    lines += scan.notes
    return [
        *lines,
        f"{scan.calls} REST calls (Tableau Cloud allows a user {CLOUD_CALLS:,} an hour). Nothing was changed.",
    ]
