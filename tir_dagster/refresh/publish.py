"""The stage `publish`: bring a version to the server by the extract's delivery; intent before, confirmation after."""

from __future__ import annotations

from tir_dagster.measuring import moved
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import (
    Looked,
    Published,
    RefreshContext,
    ServerLook,
    crash_after,
    explaining_lost_lease,
    publishing,
)
from tir_dagster.refresh.datasource import credentials_for
from tir_dagster.refresh.deliveries.by_patch import ByPatch
from tir_dagster.refresh.deliveries.by_server import ByServer
from tir_dagster.refresh.deliveries.republish import deliver
from tir_dagster.refresh.state.versions import SHELL, Version


def publish(context: RefreshContext, looked: Looked, version: Version) -> Published:
    """Bring the version to the server over exactly what was looked at."""
    with explaining_lost_lease(context):
        published = _publish(context, looked, version)
    # Whoever took over looks at what is there: a confirmation from here would be an old one by then.
    context.check_lease()
    return published


def _publish(context: RefreshContext, looked: Looked, version: Version) -> Published:
    by_patch = ByPatch(context)
    if context.spec.delivery == "server":
        return ByServer(context).publish(looked, version)
    if by_patch.fits(looked, version):
        return by_patch.publish(looked, version)
    keyed = by_patch.keyed(version)
    intend(context, looked, version, keyed=keyed)
    crash_after("intended")
    shell = version.folder / SHELL
    with publishing(context) as client, by_patch.whole(version) as hyper:
        sent_bytes = hyper.stat().st_size
        moved(rows=version.manifest["rows"], bytes=sent_bytes)
        delivered = deliver(
            client,
            context.spec,
            looked.server,
            hyper=hyper,
            shell=shell if shell.is_file() else None,
            rows=version.manifest["rows"],
            credentials=credentials_for(context.spec, looked.server.found, context.env),
            home=context.folder,
            log=context.log,
            check=context.check_lease,
            landed=lambda: crash_after("landed"),
        )
        warnings = delivered.warnings
        if delivered.doubtful:
            warnings += by_patch.check_delivered(client, delivered.found, version)
    crash_after("published")
    server = ServerLook(looked.server.project, delivered.found)
    return Published(
        confirmation_of(context, version, server, keyed=keyed), delivered.found, warnings, sent_bytes=sent_bytes
    )
