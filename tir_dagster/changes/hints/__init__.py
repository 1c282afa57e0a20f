"""Hints, pure: change descriptions from outside, read, fitted to a table, turned into SQL. No table is read here."""

from tir_dagster.changes.hints.checks import Resolution as Resolution
from tir_dagster.changes.hints.checks import partial_warning as partial_warning
from tir_dagster.changes.hints.checks import type_warnings as type_warnings
from tir_dagster.changes.hints.fitting import check_hint as check_hint
from tir_dagster.changes.hints.fitting import condition_sql as condition_sql
from tir_dagster.changes.hints.model import MAX_CONDITIONS as MAX_CONDITIONS
from tir_dagster.changes.hints.model import MAX_DEPTH as MAX_DEPTH
from tir_dagster.changes.hints.model import MAX_VALUES as MAX_VALUES
from tir_dagster.changes.hints.model import All as All
from tir_dagster.changes.hints.model import And as And
from tir_dagster.changes.hints.model import Between as Between
from tir_dagster.changes.hints.model import ChangeType as ChangeType
from tir_dagster.changes.hints.model import Equal as Equal
from tir_dagster.changes.hints.model import Hint as Hint
from tir_dagster.changes.hints.model import In as In
from tir_dagster.changes.hints.model import KeyList as KeyList
from tir_dagster.changes.hints.model import Not as Not
from tir_dagster.changes.hints.model import Or as Or
from tir_dagster.changes.hints.model import Scope as Scope
from tir_dagster.changes.hints.model import Unknown as Unknown
from tir_dagster.changes.hints.model import hint_to_json as hint_to_json
from tir_dagster.changes.hints.model import parse_hint as parse_hint
from tir_dagster.changes.hints.model import parse_hints as parse_hints
from tir_dagster.errors import HintError as HintError
