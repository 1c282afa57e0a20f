"""Alerts: messages in plain words, the channels Slack and ServiceNow, and the state that keeps one problem in one thread."""
