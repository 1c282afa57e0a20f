"""Scopes of connected apps: what the token of one must have asked for, by call, as Tableau's REST reference names it."""

from __future__ import annotations

from collections.abc import Collection

# The call takes no scope: everybody may make it, or everybody who is signed in.
OPEN = ""
_CONTENT = "tableau:content:read"
# By the name of the handler. None: the reference names no scope, so a connected app cannot make the call.
SCOPES: dict[str, str | None] = {
    "server_info": OPEN,
    "sign_in": OPEN,
    "sign_out": OPEN,
    "switch_site": "tableau:sites:switch",
    "list_sites": "tableau:sites:read",
    "get_site": "tableau:sites:read",
    "list_users": "tableau:users:read",
    "get_user": "tableau:users:read",
    "list_projects": _CONTENT,
    "create_project": "tableau:projects:create",
    "list_datasources": _CONTENT,
    "get_datasource": _CONTENT,
    "update_datasource": "tableau:datasources:update",
    "delete_datasource": "tableau:datasources:delete",
    "add_tags": "tableau:datasource_tags:update",
    "delete_tag": "tableau:datasource_tags:delete",
    "list_revisions": _CONTENT,
    "download": "tableau:datasources:download",
    "download_revision": _CONTENT,
    "delete_revision": "tableau:datasources:delete",
    "list_connections": _CONTENT,
    "update_connection": "tableau:datasources:update",
    "update_connections": "tableau:datasources:update",
    "start_upload": "tableau:file_uploads:create",
    "append_upload": "tableau:file_uploads:create",
    "publish": "tableau:datasources:create",
    "update_data": "tableau:hyper_data:update",
    "update_connection_data": "tableau:hyper_data:update",
    "refresh": "tableau:tasks:run",
    "get_job": "tableau:jobs:read",
    "list_jobs": "tableau:jobs:read",
    "cancel_job": "tableau:jobs:update",
    "list_schedules": "tableau:schedules:read",
    "get_schedule": "tableau:schedules:read",
    "create_schedule": "tableau:schedules:create",
    "update_schedule": "tableau:schedules:update",
    "add_to_schedule": "tableau:schedules:update",
    "list_extracts": None,
    "list_tasks": "tableau:tasks:read",
    "create_task": "tableau:tasks:create",
    "get_task": "tableau:tasks:read",
    "delete_task": "tableau:tasks:delete",
    "run_task": "tableau:tasks:run",
    "create_webhook": "tableau:webhooks:create",
    "list_webhooks": "tableau:webhooks:read",
    "get_webhook": "tableau:webhooks:read",
    "update_webhook": "tableau:webhooks:update",
    "delete_webhook": "tableau:webhooks:delete",
    "test_webhook": "tableau:webhooks:test",
    "list_subscriptions": "tableau:tasks:read",
    "create_subscription": "tableau:tasks:create",
    "delete_subscription": "tableau:tasks:delete",
    "delete_project": "tableau:projects:delete",
    "list_workbooks": _CONTENT,
    "publish_workbook": "tableau:workbooks:create",
    "get_workbook": _CONTENT,
    "delete_workbook": "tableau:workbooks:delete",
    "list_views_of_workbook": _CONTENT,
    "list_views": _CONTENT,
    "get_view": _CONTENT,
    "query_metadata": _CONTENT,
}
# Servers before Tableau 2025.1 show jobs to no connected app.
_JOBS_SINCE = (3, 25)


def is_granted(call: str, asked: Collection[str] | None, version: tuple[int, int]) -> bool:
    """Whether a session that asked for these scopes may make the call; None asked for none: it is not a connected app's."""
    scope = SCOPES[call]
    if asked is None or scope == OPEN:
        return True
    if scope is None or (scope.startswith("tableau:jobs:") and version < _JOBS_SINCE):
        return False
    return any(scope == name or (name.endswith(":*") and scope.startswith(name[:-1])) for name in asked)
