"""The embedded Snowflake, Tableau Server, Slack and ServiceNow: stand-ins that speak the real protocols over HTTP on loopback.

Nothing here is imported by the product; it reaches these servers over HTTP like the real ones, by
configuration alone.
"""
