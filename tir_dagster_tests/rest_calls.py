"""docs/rest-calls.md: REST calls by served by the stand-in, made by the product, fault-tested; and how each is measured.

The stand-in's table says what it serves. What the product makes is said in `tableau/calls.py`; the tests hold that against the
calls that the stand-in saw, which tells the product by its User-Agent. What faults were played at is said here, and held
against the calls of the very refreshes at which they are played.

Write the file anew with `python -m tir_dagster_tests.rest_calls --write`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import requests

from tir_dagster.refresh.context import USES_BY_DELIVERY
from tir_dagster.sandbox.tableau.api.call import Operation
from tir_dagster.sandbox.tableau.app import OPERATIONS
from tir_dagster.sandbox.tableau.scopes import SCOPES
from tir_dagster.tableau.calls import CALLS, Use, scopes_of

FILE = Path(__file__).parents[1] / "docs" / "rest-calls.md"
COMMAND = "python -m tir_dagster_tests.rest_calls --write"
PRODUCT = "tir_dagster"
SITE = "/sites/{site}/"
# By delivery: every call of one refresh, at each of which test_faults.py plays its faults.
_LOOKING = ("server_info", "sign_in", "sign_out", "list_projects", "list_datasources", "get_datasource")
_ABOUT_IT = ("list_connections", "list_revisions")
_PUBLISHING = ("publish", "add_tags", "update_datasource", "list_tasks", "list_subscriptions")
_UPLOADING = ("start_upload", "append_upload")
_REFRESHING = ("list_tasks", "refresh", "get_job")
PLAYED: dict[str, frozenset[str]] = {
    "republish": frozenset({*_LOOKING, *_ABOUT_IT, *_PUBLISHING, *_UPLOADING, "list_jobs"}),
    "patch": frozenset({*_LOOKING, *_ABOUT_IT, *_UPLOADING, "update_data", "get_job", "list_jobs"}),
    "server": frozenset({*_LOOKING, *_ABOUT_IT, *_PUBLISHING, *_REFRESHING, "get_site", "list_jobs", "download"}),
    "trigger": frozenset({*_LOOKING, *_ABOUT_IT, *_REFRESHING}),
}
# At these test_rest_calls.py plays one: no refresh makes them unless it must.
PLAYED_ALONE = frozenset(
    {
        *("cancel_job", "run_task", "list_schedules", "list_extracts", "update_schedule"),
        *("update_connection", "download_revision", "delete_datasource", "get_user"),
        *("list_webhooks", "create_webhook", "delete_webhook"),
    }
)

HEAD = f"""\
# REST calls to Tableau Server

Which calls the sandbox's stand-in serves, which of them tir_dagster makes and for what, and in which refreshes faults are played at them.
Written by `{COMMAND}`; a test fails when it is out of date. `S` stands for `/api/{{version}}/sites/{{site}}`, other
paths follow `/api/{{version}}` unless they begin with `/api`.

| call | since REST | served | made by tir_dagster, to | scope of a connected app | fault-tested in |
|---|---|---|---|---|---|
"""
SCOPES_HEAD = """
## Scopes of a connected app

A connected app (`TABLEAU_CONNECTED_APP_CLIENT_ID`, `…_SECRET_ID`, `…_SECRET_VALUE` and `TABLEAU_USERNAME`) may do what its token asks for. tir_dagster
asks for the scopes of what is to be done, and for no others; with direct trust nothing has to be entered on the server:

| for | scopes |
|---|---|
"""
SCOPES_END = """
- They are the scopes that Tableau's REST reference names for each method, as a public index of it showed them in July 2026. The sandbox enforces
  them; none was verified on a real server. If yours wants another one, put it into `TABLEAU_CONNECTED_APP_SCOPES` (separated by commas
  or spaces): it is asked for, too.
- A server answers a call without its scope as if the session had ended (401002). tir_dagster knows which scopes it asked for: it does not
  sign in again, and the error names the call and the scope. If the server refuses although the scope was asked for, it signs in again once.
- Connected apps see jobs from REST 3.25 (Tableau Server 2025.1) on. On older servers `patch`, `server` and `trigger` are refused before anything is
  touched; `republish` works.
- For `GET S/schedules/{schedule}/extracts` the reference names no scope: to move a schedule (`datasource: {schedule: …}`), sign in with a token or a
  password.
- Tableau's own page lists more: [Access Scopes for Connected Apps](https://help.tableau.com/current/online/en-us/connected_apps_scopes.htm).
"""
# What commands do beside the deliveries.
USES_BY_COMMAND = {
    "tir revisions": frozenset({Use.LOOK, Use.DOWNLOAD, Use.REVISIONS}),
    "tir webhooks": frozenset({Use.WEBHOOKS}),
    "tir adopt": frozenset({Use.LOOK, Use.DOWNLOAD, Use.TASKS, Use.JOBS}),
    "tir doctor": frozenset({Use.LOOK, Use.DOWNLOAD, Use.TASKS, Use.JOBS, Use.RIGHTS}),
}


def served() -> dict[str, Operation]:
    """By the name that the stand-in's log gives them; of two spellings of one call the client's."""
    found: dict[str, Operation] = {}
    for one in OPERATIONS:
        found.setdefault(one.name, one)
    return found


def address(one: Operation) -> str:
    """The call as the product writes it."""
    path = one.path.removeprefix("/api/{version}").replace(":path}", "}")
    return f"{one.method} {path.replace(SITE, 'S/', 1)}"


def made() -> set[str]:
    """The names of the calls that the product says it makes."""
    names = {address(one): name for name, one in served().items()}
    return {names.get(call.shown, f"not served: {call.shown}") for call in CALLS}


def check_played(delivery: str, routes: Iterable[str]) -> None:
    """Hold a refresh's calls against what is said of it here; variants of a delivery are not always played."""
    if " " in delivery:
        return
    seen, said = set(routes), PLAYED.get(delivery, frozenset())
    assert seen == said, (
        f"PLAYED[{delivery!r}] in tir_dagster_tests/rest_calls.py is out of date: it lacks {sorted(seen - said)} and has"
        f" {sorted(said - seen)} too many. Fix it, then run `{COMMAND}`."
    )


def check_product(url: str) -> None:
    """Hold everything that the product asked this server against what it says it makes."""
    try:
        routes = requests.get(f"{url}/sandbox/routes", timeout=30).json()["routes"]
    except requests.ConnectionError:
        return  # a test stopped it
    unknown = set(routes.get(PRODUCT, ())) - made()
    assert not unknown, (
        f"tir_dagster makes calls that tir_dagster/tableau/calls.py does not list: {sorted(unknown)}. Add them, then"
        f" run `{COMMAND}`."
    )


def text() -> str:
    why = {call.shown: call.why for call in CALLS}
    rows = "".join(_row(name, one, why.get(address(one), "")) for name, one in served().items())
    return HEAD + rows + SCOPES_HEAD + "".join(_scope_rows()) + SCOPES_END


def _scope_rows() -> Iterable[str]:
    for name, uses in {**USES_BY_DELIVERY, **USES_BY_COMMAND}.items():
        yield f"| `{name}` | {', '.join(f'`{scope}`' for scope in scopes_of(uses))} |\n"


def _row(name: str, one: Operation, why: str) -> str:
    places = [f"`{delivery}`" for delivery, routes in PLAYED.items() if name in routes]
    places += ["by itself"] if name in PLAYED_ALONE else []
    since = ".".join(map(str, one.since))
    scope = SCOPES[name]
    scope = "none in the reference" if scope is None else f"`{scope}`" if scope else ""
    return f"| `{address(one)}` | {since} | yes | {why} | {scope} | {', '.join(places)} |\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"Usage: {COMMAND}")
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE} is written.")
