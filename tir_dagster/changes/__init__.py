"""Which keys changed: detectors, hints, plan, change sets. Its core is pure: no Dagster, no I/O."""
