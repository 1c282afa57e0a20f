"""The Snowflake warehouse: connection, names, types, versions and slices as SQL; `query` analyses a SELECT."""
