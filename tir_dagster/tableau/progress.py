"""How far a transfer has come, told to people: a line every few seconds, and none for what is done at once."""

from __future__ import annotations

import time
from collections.abc import Callable

# (bytes so far, bytes in all)
Progress = Callable[[int, int], None]
EVERY_SECONDS = 5.0


def tell_progress(
    log: Callable[[str], None],
    verb: str,
    *,
    every: float = EVERY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Logs `uploading 120 of 400 MB`, not more often than `every` seconds."""
    last = clock()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= every:
            last = clock()
            log(f"{verb} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    return tell
