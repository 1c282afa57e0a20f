"""Where a sandbox lives on disk: its folders, its identity (names, ports, secrets) and its server processes' files."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.background import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVERS = ("warehouse", "tableau", "people", "storage")
# Where files land, and what clients call the place that the stand-in is in.
S3_BUCKET, S3_REGION = "landing", "us-east-1"
HEALTH_PATH = "/sandbox/health"

# What an identity has had from the first version on.
_ALWAYS_THERE = {"account", "snowflake_password", "tableau_password", "token_secret"}


class SandboxError(Exception):
    """Something a user of the sandbox can repair; the message says what happened and what to do."""


@dataclass(frozen=True)
class Identity:
    """Names and secrets of one sandbox: made once, the same after every restart."""

    account: str = "sandbox"
    snowflake_user: str = "TIR"
    snowflake_password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)
    site: str = "sandbox"
    tableau_user: str = "tir"
    tableau_password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)
    token_name: str = "tir-token"
    token_secret: str = field(
        default_factory=lambda: f"{secrets.token_urlsafe(16)}:{secrets.token_urlsafe(24)}", repr=False
    )
    reader_user: str = "reader"
    reader_password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)
    reader_token_name: str = "reader-token"
    reader_token_secret: str = field(
        default_factory=lambda: f"{secrets.token_urlsafe(16)}:{secrets.token_urlsafe(24)}", repr=False
    )
    connected_app_client_id: str = field(default_factory=lambda: secrets.token_hex(16))
    connected_app_secret_id: str = field(default_factory=lambda: secrets.token_hex(16))
    connected_app_secret_value: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    slack_token: str = field(default_factory=lambda: f"xoxb-{secrets.token_urlsafe(24)}", repr=False)
    servicenow_user: str = "tir"
    servicenow_password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)
    servicenow_client_id: str = field(default_factory=lambda: secrets.token_hex(16))
    servicenow_client_secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    s3_access_key: str = field(default_factory=lambda: f"SANDBOX{secrets.token_hex(6).upper()}")
    s3_secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(30), repr=False)


@dataclass(frozen=True)
class SandboxHome:
    """One sandbox's folder under TIR_HOME. Two homes are two sandboxes that know nothing of each other."""

    root: Path

    @staticmethod
    def from_environment() -> SandboxHome:
        return SandboxHome((Path(os.environ.get("TIR_HOME") or ".tir").expanduser() / "sandbox").absolute())

    def data(self, server: str) -> Path:
        return self.root / server

    def log(self, server: str) -> Path:
        return self.root / "logs" / f"{server}.log"

    def process_file(self, server: str) -> Path:
        return self.root / "run" / f"{server}.json"

    def identity(self) -> Identity:
        """The sandbox's names and secrets; created on first use, readable by the owner only."""
        path = self.root / "identity.json"
        stored = read_json(path)
        if path.exists() and not is_identity(stored):
            # New secrets in its place would lock out every client that was told the old ones, without a word.
            raise SandboxError(
                f"{path} is damaged: it holds no names and secrets of a sandbox. Put it back from a copy, or delete it"
                " and run tir sandbox up to get new secrets; tables and datasources stay."
            )
        known = {name: value for name, value in stored.items() if name in Identity.__dataclass_fields__}
        identity = replace(Identity(), **known)
        if asdict(identity) != stored:
            write_json(path, asdict(identity))
        return identity

    def port(self, server: str) -> int | None:
        """The port the server last ran on, so that a restart keeps the addresses people noted down."""
        value = read_json(self.root / "ports.json").get(server)
        return value if isinstance(value, int) else None

    def remember_port(self, server: str, port: int) -> None:
        write_json(self.root / "ports.json", {**read_json(self.root / "ports.json"), server: port})


def is_identity(stored: Mapping[str, Any]) -> bool:
    """Whether a file's content is a sandbox's identity; a later version may have added names to it."""
    texts = {name for name, value in stored.items() if isinstance(value, str) and value}
    known = Identity.__dataclass_fields__.keys()
    return texts >= _ALWAYS_THERE and stored.keys() & known <= texts
