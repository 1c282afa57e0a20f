"""The commands that prove and undo what refreshes did: verify, history, why, rollback, release."""
