"""What Tableau's schema of REST 3.27 allows in the XML of each request that the stand-in serves; the rest is refused.

A real server answers 400000 to an element that its schema does not have. The order of elements is not checked:
tableauserverclient writes others than the schema's, and real servers have taken them for years.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tir_dagster.sandbox.tableau.wire import NAMESPACE, ApiError

_SCHEMA_INSTANCE = "http://www.w3.org/2001/XMLSchema-instance"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"
_LUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
# Kinds of values, by the names that the shapes below give them; `text` is anything.
_KINDS = {
    kind: re.compile(pattern, re.DOTALL)
    for kind, pattern in {
        # tableauserverclient writes Python's `True` when it publishes a certified datasource.
        "boolean": r"true|false|1|0|True|False",
        "count": r"\+?[0-9]+",
        "frequency": r"Hourly|Daily|Weekly|Monthly",
        # 24 is not in the schema; servers write it themselves, and the client sends it back.
        "hours": r"1|2|4|6|8|12|24",
        "luid": _LUID,
        "method": r"POST",
        "minutes": r"15|30",
        "month_day": r"[1-9]|[12]\d|3[01]|LastDay",
        "moment": rf"\d{{4}}-\d\d-\d\dT{_TIME}",
        "order": r"Parallel|Serial",
        "permissions": r"LockedToProject|LockedToProjectWithoutNested|ManagedByOwner",
        # Empty is not in the schema; servers show a connection without a port so, and clients send back what they read.
        "port": r"[0-9]*",
        "schedule_type": r"ActiveDirectorySync|DataAcceleration|Extract|Flow|Subscription",
        "subscribed": r"View|Workbook",
        "text": r".*",
        "time": _TIME,
        "url": r"https?://.+",
        "week_day": r"Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    }.items()
}


@dataclass(frozen=True)
class Shape:
    """What an element may hold: attributes with their kinds of values, children with their shapes, or a text."""

    attributes: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    children: Mapping[str, Shape] = field(default_factory=dict)
    # Children that may occur more than once.
    repeated: frozenset[str] = frozenset()
    text: str | None = None


def _shape(
    attributes: str = "", children: Mapping[str, Shape | list[Shape]] | None = None, *, text: str | None = None
) -> Shape:
    """A shape from words such as `name`, `id:luid` and `label!`, which is required; a child in a list may be repeated."""
    pairs = [word.rstrip("!").partition(":") for word in attributes.split()]
    inner = dict(children or {})
    return Shape(
        {name: kind or "text" for name, _, kind in pairs},
        frozenset(word.rstrip("!").partition(":")[0] for word in attributes.split() if word.endswith("!")),
        {name: shape[0] if isinstance(shape, list) else shape for name, shape in inner.items()},
        frozenset(name for name, shape in inner.items() if isinstance(shape, list)),
        text,
    )


# The schema's types, each by the element that it is mostly used for.

_SITE = _shape("contentUrl id:luid name")

_USER = _shape(
    "authSetting contentAdmin:boolean email externalAuthUserId fullName id:luid identityPoolName name password siteRole"
)

_CONNECTION_CREDENTIALS = _shape("embed name oAuth password")

_PROJECT = _shape(
    "contentPermissions:permissions controllingPermissionsProjectId:luid createdAt:moment description id:luid name"
    " parentProjectId:luid topLevelProject:boolean updatedAt:moment writeable:boolean",
    {"owner": _USER},
)

_TAGS = _shape("", {"tag": [_shape("label!")]})

_DATASOURCE = _shape(
    "certificationNote contentUrl createdAt:moment databaseName description encryptExtracts hasAlert:boolean"
    " hasExtracts:boolean id:luid isCertified:boolean isPublished:boolean name serverName size:count type"
    " updatedAt:moment useRemoteQueryAgent:boolean webpageUrl",
    {
        "connectionCredentials": _CONNECTION_CREDENTIALS,
        "site": _SITE,
        "project": _PROJECT,
        "location": _shape("id:luid name type"),
        "owner": _USER,
        "tags": _TAGS,
        # Not in the schema, and sent by tableauserverclient to real servers for years.
        "askData": _shape("enablement"),
    },
)

_CONNECTION = _shape(
    "authenticationType dbClass embedPassword:boolean filename googleSheetId id:luid instanceUrl oauthConfigId password"
    " queryTaggingEnabled:boolean scope serverAddress serverPort:port type useOAuthManagedKeychain:boolean userName",
    {"datasource": _DATASOURCE, "connectionCredentials": _CONNECTION_CREDENTIALS},
)

_WORKBOOK = _shape(
    "contentUrl createdAt:moment defaultViewId:luid description encryptExtracts id:luid name showTabs:boolean size:count"
    " thumbnailsGroupId:luid thumbnailsUserId:luid updatedAt:moment webpageUrl",
    {
        "connections": _shape("", {"connection": [_CONNECTION]}),
        "connectionCredentials": _CONNECTION_CREDENTIALS,
        "site": _SITE,
        "project": _PROJECT,
        "owner": _USER,
        "tags": _TAGS,
        "views": _shape("", {"view": [_shape("hidden:boolean name")]}),
    },
)

_INTERVAL = _shape("hours:hours minutes:minutes monthDay:month_day weekDay:week_day")

_SCHEDULE = _shape(
    "createdAt:moment endScheduleAt:moment executionOrder:order frequency:frequency id:luid name nextRunAt:moment"
    " priority:count state type:schedule_type updatedAt:moment",
    {"frequencyDetails": _shape("end:time start:time!", {"intervals": _shape("", {"interval": [_INTERVAL]})})},
)

_EXTRACT_REFRESH = _shape(
    "consecutiveFailedCount:count id incremental:boolean priority:count type",
    {"schedule": _SCHEDULE, "datasource": _DATASOURCE, "workbook": _shape("id:luid name")},
)

_SUBSCRIPTION = _shape(
    "attachImage:boolean attachPdf:boolean id:luid message pageOrientation pageSizeOption"
    " refreshExtractTriggered:boolean subject suspended:boolean",
    {
        "content": _shape("customViewId id:luid! name sendIfViewEmpty:boolean type:subscribed!"),
        "schedule": _SCHEDULE,
        "user": _USER,
    },
)

_EVENTS = ("created", "deleted", "refresh-failed", "refresh-started", "refresh-succeeded", "updated")
_WEBHOOK = _shape(
    "createdAt:moment event id:luid isEnabled:boolean name statusChangeReason updatedAt:moment",
    {
        "webhook-source": _shape("", {f"webhook-source-event-datasource-{event}": _shape() for event in _EVENTS}),
        "webhook-destination": _shape("", {"webhook-destination-http": _shape("method:method url:url")}),
        "owner": _USER,
    },
)

# By the name of the operation, which is its handler's; a call that is not listed takes no XML.
REQUESTS: Mapping[str, Shape] = {
    "add_tags": _shape("", {"tags": _TAGS}),
    "add_to_schedule": _shape("", {"task": _shape("", {"extractRefresh": _EXTRACT_REFRESH})}),
    "append_upload": _shape(),
    "cancel_job": _shape(),
    "create_project": _shape("", {"project": _PROJECT}),
    "create_schedule": _shape("", {"schedule": _SCHEDULE}),
    "create_subscription": _shape("", {"subscription": _SUBSCRIPTION}),
    "create_task": _shape("", {"extractRefresh": _EXTRACT_REFRESH, "schedule": _SCHEDULE}),
    "create_webhook": _shape("", {"webhook": _WEBHOOK}),
    "publish": _shape("", {"datasource": _DATASOURCE}),
    "publish_workbook": _shape("", {"workbook": _WORKBOOK}),
    "refresh": _shape("", {"extractRefresh": _shape("incremental:boolean")}),
    "run_task": _shape(),
    "sign_in": _shape(
        "",
        {
            "credentials": _shape(
                # `isUat` is not in the schema; tableauserverclient sends it with every JWT.
                "isUat:boolean jwt name password personalAccessTokenName personalAccessTokenSecret",
                {"site": _SITE, "user": _USER},
            )
        },
    ),
    "sign_out": _shape(),
    "start_upload": _shape(),
    "switch_site": _shape("", {"site": _SITE}),
    "update_connection": _shape("", {"connection": _CONNECTION}),
    "update_connections": _shape(
        "", {"connectionLUIDs": _shape("", {"connectionLUID": [_shape(text="luid")]}), "connection": _CONNECTION}
    ),
    "update_datasource": _shape("", {"datasource": _DATASOURCE}),
    "update_schedule": _shape("", {"schedule": _SCHEDULE}),
    "update_webhook": _shape("", {"webhook": _WEBHOOK}),
}


def check_request(operation: str, root: Any) -> None:
    """Refuse a request whose XML the schema does not allow for this operation, as a real server does."""
    _check(root, REQUESTS.get(operation, Shape()), "tsRequest")


def _check(element: Any, shape: Shape, path: str) -> None:
    _check_attributes(element, shape, path)
    children = [child for child in element if isinstance(child.tag, str)]
    names = [_local(child.tag, "element", path) for child in children]
    for name, times in Counter(names).items():
        if name not in shape.children:
            raise _refused(f"unexpected element '{name}' in {path}. Expected elements are {_listed(shape.children)}")
        if times > 1 and name not in shape.repeated:
            raise _refused(f"unexpected element '{name}' in {path}: it occurs {times} times")
    written = "".join([element.text or "", *(child.tail or "" for child in element)]).strip()
    if shape.text is not None:
        _check_value(written, shape.text, path)
    elif written:
        raise _refused(f"unexpected text in {path}")
    for child, name in zip(children, names, strict=True):
        _check(child, shape.children[name], f"{path}/{name}")


def _check_attributes(element: Any, shape: Shape, path: str) -> None:
    names = set()
    for key, value in element.attrib.items():
        if str(key).startswith(f"{{{_SCHEMA_INSTANCE}}}"):
            continue
        name = _local(key, "attribute", path)
        if name not in shape.attributes:
            raise _refused(
                f"unexpected attribute '{name}' of {path}. Expected attributes are {_listed(shape.attributes)}"
            )
        _check_value(value, shape.attributes[name], f"{path}@{name}")
        names.add(name)
    if missing := shape.required - names:
        raise _refused(f"attribute {_listed(missing)} of {path} is missing")


def _local(name: str, what: str, path: str) -> str:
    """The name without Tableau's namespace; requests may leave that out."""
    namespace, _, local = str(name).rpartition("}")
    if namespace not in ("", f"{{{NAMESPACE}"):
        raise _refused(f"unexpected {what} '{local}' of another namespace in {path}")
    return local


def _check_value(value: str, kind: str, path: str) -> None:
    if not _KINDS[kind].fullmatch(value):
        # Not the value itself: it may be a secret in the wrong place.
        raise _refused(f"the value of {path} is no {kind.replace('_', ' ')}")


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"


def _refused(problem: str) -> ApiError:
    return ApiError(400000, f"Payload is either malformed or incomplete. Deserialization problem: {problem}.")
