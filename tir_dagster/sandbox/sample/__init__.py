"""The sample that `tir sandbox seed` and `change` make, through the same clients any user of the servers has."""

from tir_dagster.sandbox.sample.change import Account as Account
from tir_dagster.sandbox.sample.change import Mix as Mix
from tir_dagster.sandbox.sample.change import MonthCount as MonthCount
from tir_dagster.sandbox.sample.change import change_table as change_table
from tir_dagster.sandbox.sample.datasource import DATASOURCE as DATASOURCE
from tir_dagster.sandbox.sample.datasource import PROJECT as PROJECT
from tir_dagster.sandbox.sample.datasource import seed_datasource as seed_datasource
from tir_dagster.sandbox.sample.rows import Month as Month
from tir_dagster.sandbox.sample.rows import parse_month as parse_month
from tir_dagster.sandbox.sample.table import TABLE as TABLE
from tir_dagster.sandbox.sample.table import connect as connect
from tir_dagster.sandbox.sample.table import seed_table as seed_table
