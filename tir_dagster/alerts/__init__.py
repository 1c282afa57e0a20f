"""People are told: what happened in plain words, Slack and ServiceNow, and the state that keeps a story in one thread."""
