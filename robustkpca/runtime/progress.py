"""How far work has come, as lines from time to time: where no bar can be drawn. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY = 30.0  # seconds between two lines


class Lines:
    """Calls `say` with a line such as `SymViT  pgd: 37 %, 0:12:04 left`, at most every EVERY seconds.

    The time left is by the mean speed since the first call.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began: tuple[float, float] | None = None  # when, and what was done by then
        self._said = 0.0

    def __call__(self, what: str, done: float, total: float) -> None:
        """`done` of `total`, in any unit."""
        now = self._clock()
        if self._began is None:
            self._began, self._said = (now, done), now
        if now - self._said < EVERY or not 0 < done < total:
            return
        self._said = now
        began, before = self._began
        left = f", {_clock_text((total - done) * (now - began) / (done - before))} left" if done > before else ""
        self._say(f"{what}: {100 * done / total:.0f} %{left}")


def _clock_text(seconds: float) -> str:
    """`1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
