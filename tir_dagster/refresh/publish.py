"""The stage `publish`: bring a version to the server by the extract's delivery; intent before, confirmation after."""

from __future__ import annotations

from dataclasses import replace

from tir_dagster.refresh.context import NEEDED_CALLS, Looked, Published, RefreshContext, explaining_lost_lease
from tir_dagster.refresh.deliveries import Delivery
from tir_dagster.refresh.deliveries.patch import Patch
from tir_dagster.refresh.deliveries.republish import Republish
from tir_dagster.refresh.deliveries.server import Server
from tir_dagster.refresh.state.versions import Version

# `trigger` makes no versions: see deliveries/trigger.py.
_DELIVERIES: dict[str, type[Republish | Patch | Server]] = {"republish": Republish, "patch": Patch, "server": Server}


def delivery_of(context: RefreshContext) -> Delivery:
    """Return the delivery that the spec names."""
    return _DELIVERIES[context.spec.delivery](context)


def publish(context: RefreshContext, looked: Looked, version: Version) -> Published:
    """Bring the version to the server over exactly what was looked at."""
    context.hold.check(context.spec.name)
    with explaining_lost_lease(context), context.calls.reserved(NEEDED_CALLS[context.spec.delivery]):
        published = delivery_of(context).publish(looked, version)
    published = replace(published, warnings=(*published.warnings, *version.manifest.get("warnings", ())))
    # If another process took over, it looks at the server itself: our confirmation would be out of date.
    context.check_lease()
    return published
