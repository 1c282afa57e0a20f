"""The stages of a refresh in their order: look, survey, plan, detect, apply (which verifies), publish, settle.

Each takes the context and values, and returns a frozen result. Importing them brings Hyper and the clients of both servers.
"""

from tir_dagster.refresh.apply import apply
from tir_dagster.refresh.confirm import settle
from tir_dagster.refresh.context import leased, refresh_context
from tir_dagster.refresh.detect import detect
from tir_dagster.refresh.look import look
from tir_dagster.refresh.plan import Request, plan
from tir_dagster.refresh.publish import publish
from tir_dagster.refresh.survey import survey

__all__ = ["Request", "apply", "detect", "leased", "look", "plan", "publish", "refresh_context", "settle", "survey"]
