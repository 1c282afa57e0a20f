"""One folder for each team."""
