"""Dagster resources of alert channels, by environment variables: Slack through dagster-slack, and ServiceNow."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
from dagster_slack import SlackResource
from slack_sdk import WebClient

from tir_dagster.alerts.retries import ChannelError
from tir_dagster.alerts.sending import Connect, channels_of
from tir_dagster.alerts.servicenow import ServiceNowAccess
from tir_dagster.trust import ssl_context

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SlackAppResource(SlackResource):
    """dagster-slack's resource with an address, so that configuration alone selects Slack or a stand-in."""

    token: str = ""
    api_url: str = WebClient.BASE_URL

    def get_client(self) -> WebClient:
        """Return a client without retries: the spec defines attempts and timeout."""
        if not self.token:
            raise ChannelError("Slack is not configured: set SLACK_BOT_TOKEN")
        client = WebClient(self.token, base_url=self.api_url, retry_handlers=[], logger=_silent(), ssl=ssl_context())
        try:
            host = urlsplit(self.api_url).hostname or ""
        except ValueError:
            # Its text quotes the address.
            raise ChannelError("Slack is not configured: SLACK_API_URL is not a valid address") from None
        # slack_sdk takes the proxy of the environment and does not look at NO_PROXY.
        if host in _LOOPBACK or urllib.request.proxy_bypass(host):
            client.proxy = None
        return client


def _silent() -> logging.Logger:
    """Return a logger without output: the client would log whole pages of HTML; errors are reported elsewhere."""
    logger = logging.getLogger("tir_dagster.slack")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


class ServiceNowResource(dg.ConfigurableResource):
    """A ServiceNow instance: a user (basic), a client with or without a user (OAuth), or a token."""

    url: str = ""
    username: str | None = None
    password: str | None = None
    client_id: str | None = None
    client_secret: str | None = None
    token: str | None = None

    def access(self) -> ServiceNowAccess:
        return ServiceNowAccess(**{name: getattr(self, name) for name in SERVICENOW_VARIABLES})


SERVICENOW_VARIABLES = {name: f"SERVICENOW_{name.upper()}" for name in ServiceNowResource.model_fields}
SLACK_VARIABLES = {"token": "SLACK_BOT_TOKEN", "api_url": "SLACK_API_URL"}


def channel_resources() -> dict[str, Any]:
    """Build the resources from environment variables; an unset value is an error only when it is used."""
    return {
        "slack": SlackAppResource(**_set_variables(SLACK_VARIABLES, dg.EnvVar)),
        "servicenow": ServiceNowResource(**_set_variables(SERVICENOW_VARIABLES, dg.EnvVar)),
    }


def channels_of_environment() -> Connect:
    """Return the channels for a command, where no run resolves resources."""
    slack = SlackAppResource(**_set_variables(SLACK_VARIABLES, os.environ.__getitem__))
    return connect_by(slack, ServiceNowResource(**_set_variables(SERVICENOW_VARIABLES, os.environ.__getitem__)))


def _set_variables(names: dict[str, str], value: Callable[[str], Any]) -> dict[str, Any]:
    return {name: value(variable) for name, variable in names.items() if os.environ.get(variable)}


def connect_by(slack: SlackAppResource, servicenow: ServiceNowResource) -> Connect:
    """Return the function by which the room `alerts` gets its channels, with plain clients of these resources."""
    return partial(channels_of, slack=slack.get_client, servicenow=servicenow.access())
