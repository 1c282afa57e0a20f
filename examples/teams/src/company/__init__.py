"""A Dagster project in which several teams declare their extracts."""
