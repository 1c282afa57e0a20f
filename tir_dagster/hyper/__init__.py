"""The extract file: engine, replacement by key, comparison, fingerprints; `package`: the .tdsx around it."""
