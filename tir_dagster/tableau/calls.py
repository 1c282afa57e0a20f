"""The REST calls that tir_dagster makes to Tableau Server: what a proxy must let through, and why. `S` is a site's address."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestCall:
    """One kind of call; `path` follows `/api/{version}/`, or `/api/{version}/sites/{site}/` where it begins with `S/`."""

    method: str
    path: str
    why: str

    @property
    def shown(self) -> str:
        return f"{self.method} {self.path}"


CALLS: tuple[RestCall, ...] = (
    RestCall("GET", "/serverInfo", "learn the REST version"),
    RestCall("POST", "/auth/signin", "sign in"),
    RestCall("POST", "/auth/signout", "sign out"),
    RestCall("GET", "/sites/{site}", "may refreshes be started by hand?"),
    RestCall("GET", "S/projects", "find the project by its path"),
    RestCall("GET", "S/datasources", "find the datasource by its name"),
    RestCall("GET", "S/datasources/{datasource}", "read its version, tags and owner"),
    RestCall("PUT", "S/datasources/{datasource}", "put description, certification and owner back"),
    RestCall("PUT", "S/datasources/{datasource}/tags", "put tags back"),
    RestCall("GET", "S/datasources/{datasource}/connections", "which connections need credentials?"),
    RestCall("PUT", "S/datasources/{datasource}/connections/{connection}", "give a connection its credentials back"),
    RestCall("GET", "S/datasources/{datasource}/revisions", "which revision is the current one?"),
    RestCall("GET", "S/datasources/{datasource}/content", "download it"),
    RestCall("GET", "S/datasources/{datasource}/revisions/{revision}/content", "fetch an older revision"),
    RestCall("POST", "S/datasources", "publish it"),
    RestCall("PATCH", "S/datasources/{datasource}/data", "send a change alone"),
    RestCall("POST", "S/fileUploads", "begin an upload in pieces"),
    RestCall("PUT", "S/fileUploads/{upload}", "send a piece"),
    RestCall("POST", "S/datasources/{datasource}/refresh", "start a refresh"),
    RestCall("GET", "S/jobs", "find the refresh that runs already, and changes by others"),
    RestCall("GET", "S/jobs/{job}", "wait for a job"),
    RestCall("PUT", "S/jobs/{job}", "stop a refresh that is not wanted"),
    RestCall("GET", "S/tasks/extractRefreshes", "find Tableau's own refreshes of it"),
    RestCall("GET", "S/subscriptions", "are all subscriptions still there after a publish?"),
    RestCall("POST", "S/tasks/extractRefreshes/{task}/runNow", "start a refresh on servers before REST 3.25"),
    RestCall("GET", "/schedules", "find the datasource's schedule"),
    RestCall("GET", "S/schedules/{schedule}/extracts", "does the schedule have other work?"),
    RestCall("PUT", "/schedules/{schedule}", "move it to the next slot"),
    RestCall("GET", "S/webhooks", "list our webhooks"),
    RestCall("POST", "S/webhooks", "register a webhook"),
    RestCall("DELETE", "S/webhooks/{webhook}", "remove a webhook"),
)
