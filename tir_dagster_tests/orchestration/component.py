"""The attributes of an extract component, as a defs.yaml has them."""

from __future__ import annotations

ATTRIBUTES = """\
name: orders
source: MYDB.MYSCHEMA.MYTABLE
row_key: ORDER_ID
columns: [ORDER_ID, ORDER_DATE, CUSTOMER, UPDATED_AT]
slices: {column: ORDER_DATE, by: day, start: 2024-12-01, zone: Europe/Berlin}
changes: {watermark: UPDATED_AT, look_back: 10 minutes, deletes: false}
datasource:
  project: myproject
  name: mydatasource
  credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
delivery: republish
policy: incremental_only
thresholds: {quiet_period: 5 seconds, delete_share: 0.1}
snowflake: {warehouse: LOADING, query_tag: "{{ 'tagged' }}"}
"""
