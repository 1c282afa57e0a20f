"""The stages of a refresh played one after the other in this process, without Dagster, and ended wherever a test likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.refresh import stages
from tir_dagster.refresh.context import Looked, Published, RefreshContext, Stages
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import Survey
from tir_dagster.spec.extract import ExtractSpec


class Refresher:
    """An extract's context, and what its stages warned of."""

    def __init__(self, spec: ExtractSpec, **others: Any) -> None:
        self.context: RefreshContext = stages.refresh_context(spec, **others)
        self.warnings: list[str] = []
        self.full_reason: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    def begin(self) -> None:
        """Start another refresh: times and warnings begin anew."""
        self.context = replace(self.context, stages=Stages())
        self.warnings, self.full_reason = [], None

    def change(self, **fields: Any) -> None:
        self.context = replace(self.context, **fields)

    def listen(self, log: Callable[[str], None]) -> None:
        """Let this hear each line of the log from here on."""
        self.change(log=log)

    @contextmanager
    def leased(self, purpose: str, *, wait_seconds: float) -> Iterator[None]:
        outside = self.context
        with stages.leased(outside, purpose, wait_seconds=wait_seconds) as holding:
            self.context = holding
            try:
                yield
            finally:
                self.context = outside

    def look(self, confirmed: Confirmation | None, *, repair: bool = True) -> Looked:
        looked = stages.look(self.context, confirmed, repair=repair)
        self.warnings += looked.warnings
        return looked

    def survey(self, looked: Looked) -> Survey:
        return stages.survey(self.context, looked)

    def plan(self, looked: Looked, surveyed: Survey, mode: Mode, **asked: Any) -> Plan:
        return stages.plan(self.context, looked, surveyed, stages.Request(mode, **asked))

    def detect(
        self,
        looked: Looked,
        surveyed: Survey,
        plan: Plan,
        *,
        ident: str,
        resync: Sequence[str | None] = (),
        **asked: Any,
    ) -> tuple[Plan, ChangeSet | None]:
        request = stages.Request(plan.mode, resync=tuple(resync), **asked)
        detected = stages.detect(self.context, looked, surveyed, plan, request, ident=ident)
        return detected.plan, detected.change_set

    def apply(self, looked: Looked, change_set: ChangeSet) -> Version:
        return stages.apply(self.context, looked, change_set).version

    def publish(self, looked: Looked, version: Version) -> Published:
        published = stages.publish(self.context, looked, version)
        self.warnings += published.warnings
        self.full_reason = published.full_reason.name if published.full_reason else None
        return published

    def settle(self, confirmation: Confirmation) -> None:
        stages.settle(self.context, confirmation)
