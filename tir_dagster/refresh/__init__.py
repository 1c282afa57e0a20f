"""One refresh from the first look to the confirmation, without Dagster."""
