"""Tableau incremental refresh on Dagster: the public names, nothing else."""
