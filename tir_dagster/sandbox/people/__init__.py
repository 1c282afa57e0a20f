"""The people's side: stand-ins for Slack and ServiceNow that keep what they got, and a page that shows it."""
