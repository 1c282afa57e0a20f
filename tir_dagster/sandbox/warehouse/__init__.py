"""The embedded warehouse: fakesnow's SQL on DuckLake tables, behind Snowflake's own HTTP protocol."""
