"""The REST calls that tir_dagster makes to Tableau Server: why, and what a connected app's token must ask for. `S` is a site's address."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from urllib.parse import urlsplit


class Use(Enum):
    """What a client is needed for: a connected app's token asks for the scopes of its uses and for no others."""

    SIGN_IN = "sign in and out"
    LOOK = "find and read the datasource"
    DOWNLOAD = "download its package"
    UPLOAD = "upload a file"
    PUBLISH = "publish it"
    SETTINGS = "put back what a publish resets"
    CHANGE_DATA = "send a change alone"
    REFRESH = "start the server's refresh"
    JOBS = "wait for jobs, and stop them"
    TASKS = "see the server's own refreshes"
    SCHEDULES = "move a schedule"
    REVISIONS = "fetch older revisions"
    WEBHOOKS = "register, list and remove webhooks"
    RIGHTS = "see what the user may do"
    PROBE = "delete what `tir probe-server` made"


class Budget(Enum):
    """Calls that Tableau Cloud limits by the hour and site."""

    REFRESHES = "refreshes"
    PUBLISHES = "publishes"

    @property
    def shown(self) -> str:
        return "refresh starts" if self is Budget.REFRESHES else "publishes and updates of datasources"

    @property
    def variable(self) -> str:
        """The environment variable that sets the limit."""
        return f"TABLEAU_{self.name}_PER_HOUR"


@dataclass(frozen=True)
class RestCall:
    """One kind of call; `path` follows `/api/{version}/`, or `/api/{version}/sites/{site}/` where it begins with `S/`.

    `scope` is what Tableau's REST reference names for tokens of connected apps; None where it names none: then a
    connected app cannot make the call. Empty: the call takes no scope.
    """

    method: str
    path: str
    why: str
    use: Use
    scope: str | None
    # The first REST version that lets connected apps make the call, where it is not that of the call itself.
    apps_since: tuple[int, int] | None = None
    # What the call counts for on Tableau Cloud.
    budget: Budget | None = None

    @property
    def shown(self) -> str:
        return f"{self.method} {self.path}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        path = f"/sites/{{site}}/{self.path[2:]}" if self.path.startswith("S/") else self.path
        return re.compile("/api/[^/]+" + re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)) + "/?")

    def matches(self, method: str, url: str) -> bool:
        """Whether a request of that method to that address is this call."""
        return method.upper() == self.method and self._pattern.fullmatch(urlsplit(url).path) is not None


_CONTENT = "tableau:content:read"
# Connected apps look at jobs since Tableau Server 2025.1.
APPS_SEE_JOBS = (3, 25)

CALLS: tuple[RestCall, ...] = (
    RestCall("GET", "/serverInfo", "learn the REST version", Use.SIGN_IN, ""),
    RestCall("POST", "/auth/signin", "sign in", Use.SIGN_IN, ""),
    RestCall("POST", "/auth/signout", "sign out", Use.SIGN_IN, ""),
    RestCall("GET", "/sites/{site}", "may refreshes be started by hand?", Use.REFRESH, "tableau:sites:read"),
    RestCall("GET", "S/users/{user}", "`tir doctor`: may the user put owners back?", Use.RIGHTS, "tableau:users:read"),
    RestCall("GET", "S/projects", "find the project by its path", Use.LOOK, _CONTENT),
    RestCall("GET", "S/datasources", "find the datasource by its name", Use.LOOK, _CONTENT),
    RestCall("GET", "S/datasources/{datasource}", "read its version, tags and owner", Use.LOOK, _CONTENT),
    RestCall(
        "PUT",
        "S/datasources/{datasource}",
        "put description, certification and owner back",
        Use.SETTINGS,
        "tableau:datasources:update",
    ),
    RestCall(
        "DELETE",
        "S/datasources/{datasource}",
        "`tir probe-server` deletes what it made",
        Use.PROBE,
        "tableau:datasources:delete",
    ),
    RestCall("PUT", "S/datasources/{datasource}/tags", "put tags back", Use.SETTINGS, "tableau:datasource_tags:update"),
    RestCall(
        "GET", "S/datasources/{datasource}/connections", "which connections need credentials?", Use.LOOK, _CONTENT
    ),
    RestCall(
        "PUT",
        "S/datasources/{datasource}/connections/{connection}",
        "give a connection its credentials back",
        Use.SETTINGS,
        "tableau:datasources:update",
    ),
    RestCall("GET", "S/datasources/{datasource}/revisions", "which revision is the current one?", Use.LOOK, _CONTENT),
    RestCall("GET", "S/datasources/{datasource}/content", "download it", Use.DOWNLOAD, "tableau:datasources:download"),
    RestCall(
        "GET",
        "S/datasources/{datasource}/revisions/{revision}/content",
        "fetch an older revision",
        Use.REVISIONS,
        _CONTENT,
    ),
    RestCall("POST", "S/datasources", "publish it", Use.PUBLISH, "tableau:datasources:create", budget=Budget.PUBLISHES),
    RestCall(
        "PATCH",
        "S/datasources/{datasource}/data",
        "send a change alone",
        Use.CHANGE_DATA,
        "tableau:hyper_data:update",
        budget=Budget.PUBLISHES,
    ),
    RestCall("POST", "S/fileUploads", "begin an upload in pieces", Use.UPLOAD, "tableau:file_uploads:create"),
    RestCall("PUT", "S/fileUploads/{upload}", "send a piece", Use.UPLOAD, "tableau:file_uploads:create"),
    RestCall(
        "POST",
        "S/datasources/{datasource}/refresh",
        "start a refresh",
        Use.REFRESH,
        "tableau:tasks:run",
        budget=Budget.REFRESHES,
    ),
    RestCall(
        "GET",
        "S/jobs",
        "find the refresh that runs already, and changes by others",
        Use.JOBS,
        "tableau:jobs:read",
        APPS_SEE_JOBS,
    ),
    RestCall("GET", "S/jobs/{job}", "wait for a job", Use.JOBS, "tableau:jobs:read", APPS_SEE_JOBS),
    RestCall(
        "PUT", "S/jobs/{job}", "stop a refresh that is not wanted", Use.JOBS, "tableau:jobs:update", APPS_SEE_JOBS
    ),
    RestCall("GET", "S/tasks/extractRefreshes", "find Tableau's own refreshes of it", Use.TASKS, "tableau:tasks:read"),
    # The reference names no scope of subscriptions: they are tasks.
    RestCall(
        "GET",
        "S/subscriptions",
        "are all subscriptions still there after a publish?",
        Use.SETTINGS,
        "tableau:tasks:read",
    ),
    RestCall(
        "POST",
        "S/tasks/extractRefreshes/{task}/runNow",
        "start a refresh on servers before REST 3.25",
        Use.REFRESH,
        "tableau:tasks:run",
        budget=Budget.REFRESHES,
    ),
    RestCall("GET", "/schedules", "find the datasource's schedule", Use.SCHEDULES, "tableau:schedules:read"),
    RestCall("GET", "S/schedules/{schedule}/extracts", "does the schedule have other work?", Use.SCHEDULES, None),
    RestCall("PUT", "/schedules/{schedule}", "move it to the next slot", Use.SCHEDULES, "tableau:schedules:update"),
    RestCall("GET", "S/webhooks", "list our webhooks", Use.WEBHOOKS, "tableau:webhooks:read"),
    RestCall("POST", "S/webhooks", "register a webhook", Use.WEBHOOKS, "tableau:webhooks:create"),
    RestCall("DELETE", "S/webhooks/{webhook}", "remove a webhook", Use.WEBHOOKS, "tableau:webhooks:delete"),
)


def find_call(method: str, url: str) -> RestCall | None:
    """Return the call that a request makes; None if it is not in the list."""
    return next((call for call in CALLS if call.matches(method, url)), None)


def scopes_of(uses: Iterable[Use]) -> tuple[str, ...]:
    """Return the scopes that a connected app's token needs for these uses, sorted."""
    wanted = set(uses)
    return tuple(sorted({call.scope for call in CALLS if call.scope and call.use in wanted}))
