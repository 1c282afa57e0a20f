"""The declared extract or load that a command names. Imports nothing heavy: a wrong name is told at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tir_dagster.errors import SpecError
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

Spec = TypeVar("Spec", ExtractSpec, LoadSpec)
_DRAFT = "extracts.yaml"


def find_declared(specs: Sequence[Spec], name: str, kind: str) -> Spec:
    """Return the extract or load of this name; raise SpecError with the declared names if there is none."""
    by_name = {spec.name: spec for spec in specs}
    if name not in by_name:
        if by_name:
            close = difflib.get_close_matches(name, by_name, n=1) if len(by_name) > 1 else []
            meant = f"Did you mean {close[0]}? " if close else ""
            hint = f"{meant}The spec file declares {', '.join(by_name)}."
        elif file := os.environ.get("TIR_SPECS"):
            hint = f"{file} declares no {kind}s. Add it there, or name another file with --specs or TIR_SPECS."
        else:
            hint = f"Name a spec file with --specs or TIR_SPECS.{_draft_in_this_folder()}"
        raise SpecError(f"There is no {kind} {name!r}. {hint}")
    return by_name[name]


def nothing_declared() -> str:
    """Say how to name a spec file."""
    return f"Nothing is declared: name a spec file with --specs or TIR_SPECS.{_draft_in_this_folder()}"


def _draft_in_this_folder() -> str:
    """Name the file that `tir init` writes, or the folder of a dg project's components, if it is here."""
    if Path(_DRAFT).is_file():
        return f" There is one here: export TIR_SPECS={_DRAFT}"
    folder = next((folder for pattern in ("src/*/defs", "*/defs") for folder in sorted(Path().glob(pattern))), None)
    return f" This is a dg project: export TIR_SPECS={folder}" if folder else ""
