"""What is, what was and what would be: `tir status`, `tir report` and `tir plan`."""
