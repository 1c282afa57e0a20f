"""What a user declares: extracts, loads, alerts; reading them from YAML."""
