"""Questions to Tableau Server that only read: versions, what this user may ask, and the shapes of answers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from defusedxml.ElementTree import fromstring

from tir_dagster.probe.doubts import Findings, refusal
from tir_dagster.tableau.access import ConnectedApp
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.failures import TOO_OLD, Fate, RefusedError, understand

T = TypeVar("T")
_LISTS = {
    "site": "/sites/{site}",
    "projects": "S/projects",
    "datasources": "S/datasources",
    "jobs": "S/jobs",
    "tasks": "S/tasks/extractRefreshes",
    "schedules": "/schedules",
    "subscriptions": "S/subscriptions",
    "webhooks": "S/webhooks",
}
# Settings of a site on which refreshes depend; the others are nobody's business.
_SITE = ("runNowEnabled", "revisionHistoryEnabled", "revisionLimit", "extractEncryptionMode", "storageQuota")
_PAGE = "pageSize=100"
_WHOLE_SECONDS = re.compile(r"[\d-]+T[\d:]+Z")
_SAMPLE = 5


def ask(client: TableauClient, action: Callable[[Any], T], *, doing: str, repeat: bool = True) -> T:
    """Run one action; raise RefusedError with the server's code if it says no.

    A connected app without the scope gets the code of a lost session: signing in again would not help.
    """

    def once(server: Any) -> T:
        try:
            return action(server)
        except Exception as error:
            failure = understand(error)
            is_lost = failure is not None and failure.fate is Fate.SESSION_GONE
            if failure is None or not is_lost or not isinstance(client.access.identity, ConnectedApp):
                raise
            raise RefusedError("The connected app lacks the scope.", code=failure.code) from None

    return client.call(once, doing=doing, repeat=repeat)


def read(client: TableauClient, path: str, query: str = "") -> Any:
    """The answer to one GET, as XML; the path is written as in `tableau/calls.py`."""

    def get(server: Any) -> Any:
        full = re.sub("^S/", "/sites/{site}/", path).replace("{site}", str(server.site_id))
        address = f"{server.baseurl}{full}?{query}".rstrip("?")
        return fromstring(server.datasources.get_request(address).content)

    return ask(client, get, doing=f"read {path}")


def elements(root: Any, name: str) -> list[Any]:
    """All elements of that name below the root; none if there is no root."""
    return [] if root is None else [item for item in root.iter() if item.tag.rpartition("}")[2] == name]


def notes(job: Any) -> str:
    """What a job says about itself, in one line."""
    texts = [item.get("text") for item in elements(job, "statusNote")] + [item.text for item in elements(job, "notes")]
    return " ".join(dict.fromkeys(" ".join(text.split()) for text in texts if text and text.strip()))


def probe_reading(client: TableauClient, findings: Findings) -> None:
    """Ask everything that can be asked without a trace on the server."""
    _sign_in(client, findings)
    answers = {name: _listed(client, findings, name, path) for name, path in _LISTS.items()}
    sites = elements(answers["site"], "site")
    settings = {name: site.get(name) for site in sites for name in _SITE if site.get(name) is not None}
    findings.server["site"] = settings
    if run_now := settings.get("runNowEnabled"):
        findings.note("site.run_now", run_now.casefold() != "false")
    _datasources(client, findings, elements(answers["datasources"], "datasource"))
    if jobs := elements(answers["jobs"], "backgroundJob"):
        _jobs(client, findings, jobs)
    types = sorted({task.get("type", "") for task in elements(answers["tasks"], "extractRefresh")})
    if types:
        findings.note("tasks.types", any("increment" in name.casefold() for name in types) or None, ", ".join(types))
    findings.tell("asking for a job and a datasource that are not there")
    code = refusal(partial(read, client, f"S/jobs/{uuid.uuid4()}"))
    is_gone = code == "400031" or (code.startswith("404") and code not in ("404000", TOO_OLD))
    findings.note("answers.no_such_job", is_gone, code)
    code = refusal(partial(read, client, f"S/datasources/{uuid.uuid4()}"))
    findings.note("answers.no_such_datasource", code == "404004", code)


def _sign_in(client: TableauClient, findings: Findings) -> None:
    """Note the versions, and what the answer to a sign-in tells of the session."""
    findings.tell(f"signing in to {client.where}; a token's other sessions end")
    bodies: list[bytes] = []

    def note_body(response: Any, **_: Any) -> None:
        bodies.append(response.content)

    def again(server: Any) -> Any:
        hooks = server.session.hooks["response"]
        hooks.append(note_body)
        try:
            server.auth.sign_in(client.access.credentials())
        finally:
            hooks.remove(note_body)
        return server.server_info.get()

    info = client.call(again, doing="sign in once more")
    findings.server |= {
        "tableau": info.product_version,
        "rest": info.rest_api_version,
        "cloud": client.access.is_cloud,
        "signs_in_with": type(client.access.identity).__name__,
    }
    (credentials,) = elements(fromstring(bodies[-1]), "credentials")
    life = credentials.get("estimatedTimeToExpiration")
    findings.note("session.life", life is not None, life or "")


def _listed(client: TableauClient, findings: Findings, name: str, path: str) -> Any:
    """Read a list, and note whether this user may; None if not."""
    with findings.asking(f"reading {name}", f"calls.{name}"):
        try:
            answer = read(client, path, _PAGE if path.startswith("S/") else "")
        except RefusedError as error:
            findings.note(f"calls.{name}", None if error.code == TOO_OLD else False, error.code)
        else:
            findings.note(f"calls.{name}", True)
            return answer
    return None


def _datasources(client: TableauClient, findings: Findings, items: list[Any]) -> None:
    if not items:
        findings.tell("this user sees no datasource: some questions stay open")
        return
    times = [item.get("updatedAt", "") for item in items]
    form = re.sub(r"\d", "9", times[0])
    findings.note("answers.whole_seconds", all(_WHOLE_SECONDS.fullmatch(time) for time in times), form)
    findings.note("answers.links", all(item.get("webpageUrl") for item in items))
    findings.note("answers.sizes", all(item.get("size") for item in items))
    first = next((item for item in items if item.get("hasExtracts") == "true"), items[0]).get("id")
    _listed(client, findings, "connections", f"S/datasources/{first}/connections")
    answer = _listed(client, findings, "revisions", f"S/datasources/{first}/revisions")
    if revisions := elements(answer, "revision"):
        findings.note("answers.revision_sizes", all(item.get("sizeInBytes") for item in revisions))


def _jobs(client: TableauClient, findings: Findings, jobs: list[Any]) -> None:
    with findings.asking("filtering the list of jobs", "jobs.filtered"):
        done = elements(read(client, "S/jobs", f"filter=status:eq:Success&{_PAGE}"), "backgroundJob")
        none = elements(read(client, "S/jobs", f"filter=title:eq:tir-probe-{uuid.uuid4().hex}"), "backgroundJob")
        findings.note("jobs.filtered", not none and {job.get("status") for job in done} <= {"Success"})
    refreshes = [job for job in jobs if "extract" in job.get("jobType", "").casefold()]
    if types := sorted({job.get("jobType").casefold() for job in refreshes}):
        findings.note("jobs.types", all("increment" in name or "refresh" in name for name in types), ", ".join(types))
    ended = [job.get("id") for job in refreshes if job.get("status") in ("Success", "Failed")][:_SAMPLE]
    with findings.asking("reading finished jobs", "jobs.notes"):
        kept = [bool(notes(read(client, f"S/jobs/{job_id}"))) for job_id in ended]
        findings.note("jobs.notes", any(kept) if kept else None, f"{sum(kept)} of {len(kept)}")
