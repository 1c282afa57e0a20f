"""A spec file in which nothing is wrong."""

from __future__ import annotations

GOOD = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: 2024-12}
    changes: {watermark: UPDATED_AT, look_back: 10 minutes}
    datasource:
      project: sales/europe
      name: Orders
      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
    thresholds: {quiet_period: 1 minute, delete_share: 0.5}
"""
ALERTS = """\
    alerts:
      slack: {channel: "#mychannel", on_success: daily}
      servicenow: {group: mygroup, urgency: low, by_cause: {server_down: {urgency: high}}, fields: {u_name: "{extract}"}}
      timeout: 5 seconds
"""
