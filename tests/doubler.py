"""A scorer that doubles numbers, for the tests of who scores; light, as each worker process loads it anew."""

import os
import signal
import time
from dataclasses import dataclass

from evalkit.errors import UsageError


@dataclass
class Doubler:
    """Doubles numbers; does to itself what it is told when it comes to a certain one."""

    fatal: int | None = None
    fault: str = ""
    nap: float = 0.0

    def described(self) -> int:
        return os.getpid()

    def score(self, pack: int) -> int:
        time.sleep(self.nap)
        if pack == self.fatal:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory runs out
            raise UsageError(self.fault)
        return 2 * pack


def refused() -> Doubler:
    """Make none."""
    raise UsageError("no such model")
