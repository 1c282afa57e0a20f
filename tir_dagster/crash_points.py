"""Crash points: named steps after which a test or a drill may kill the process: TIR_CRASH_AFTER=staged."""

from __future__ import annotations

import os
import signal

CRASH_VARIABLE = "TIR_CRASH_AFTER"

# What has happened at each point, in the order in which a load and a refresh come to them.
LOAD_POINTS = {
    "chosen": "the files to load are chosen, nothing is written",
    "staged": "all parts of the files are in the stage",
    "copied": "the rows are in temporary tables",
    "changed": "the table and the list of files are changed, not committed",
    "committed": "the load is committed, its staged files are still there",
    "unstaged": "the staged files are removed",
}
REFRESH_POINTS = {
    "looked": "what a crash left on the server is repaired",
    "planned": "the plan is made",
    "compared": "the keys that differ and their rows are staged, without a name",
    "staged": "the change set is pending",
    "applied": "the keys are replaced in a workspace",
    "checked": "the workspace is verified",
    "verified": "the workspace is a version",
    "intended": "the intent is written",
    "packed": "the package is put together, the settings of people are noted",
    "uploaded": "the parts of a file are on the server, not published",
    "sent": "patch: the server has a job for the change",
    "purged": "server: rows are removed from a copy of the server's file",
    "asked": "server, trigger: the server has a job for its own refresh",
    "refreshed": "server, trigger: that job has ended",
    "reloaded": "server: the version has the package that the server made",
    "landed": "the package is published, the settings of people are not put back",
    "published": "the publish is done, not confirmed",
    "returned": "server: the package of before is published again, after a crash that left rows out",
    "confirmed": "the confirmation is on record",
    "remembered": "what was replaced is in the history",
    "settled": "its change sets are no longer pending",
    "pruned": "old versions are removed",
}
ROLLBACK_POINTS = {
    "held": "the extract is on hold",
    "restored": "the old rows are a new version",
}


def crash_after(point: str) -> None:
    """End the process here if the environment asks for it."""
    if os.environ.get(CRASH_VARIABLE) == point:
        end_process()


def end_process() -> None:
    """Die as by a power cut: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
