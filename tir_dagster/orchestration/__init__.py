"""Dagster: assets, partitions, IO managers, sensors, checks, jobs, resources, component. The only room that knows Dagster."""
