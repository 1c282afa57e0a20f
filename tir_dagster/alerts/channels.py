"""The channels of an extract, by the names in its spec; the clients are passed in."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from slack_sdk import WebClient

from tir_dagster.alerts.events import Channel
from tir_dagster.alerts.notify import MakeChannel
from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.servicenow import ServiceNowAccess, ServiceNowChannel, ServiceNowClient
from tir_dagster.alerts.slack import SlackChannel
from tir_dagster.spec.alerts import Alerts, ServiceNowAlerts


def channels_of(
    alerts: Alerts,
    persistence: Persistence,
    *,
    slack: Callable[[], WebClient],
    servicenow: ServiceNowAccess,
) -> Mapping[str, MakeChannel]:
    """Return a function for each channel that creates it: a wrong setting fails only its own channel, when it is used."""
    makers: dict[str, MakeChannel] = {}
    if alerts.slack is not None:
        makers[f"slack:{alerts.slack.channel}"] = partial(_slack, slack, alerts.slack.channel, persistence)
    if alerts.servicenow is not None:
        makers[f"servicenow:{alerts.servicenow.group}"] = partial(
            _servicenow, servicenow, alerts.servicenow, persistence
        )
    return {**makers, **{f"channel:{name}": partial(_own, name) for name in alerts.channels}}


def _slack(client: Callable[[], WebClient], channel: str, persistence: Persistence) -> Channel:
    return SlackChannel(client(), channel, persistence)


def _servicenow(access: ServiceNowAccess, alerts: ServiceNowAlerts, persistence: Persistence) -> Channel:
    if problem := access.problem():
        raise ChannelError(f"ServiceNow is not configured: {problem}")
    return ServiceNowChannel(ServiceNowClient(access), alerts, persistence)


def _own(name: str) -> Channel:
    """Create a channel from the user's own code: a class or a function without arguments, module:name."""
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ChannelError(f"{name} cannot be loaded: {error}") from error
    return cast("Channel", make())
