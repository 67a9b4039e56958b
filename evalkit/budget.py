"""How much of a sequence may be kept or read: the one dial of every policy; knows no policy and no tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .errors import UsageError

_ALLOWED = "a share (0.1 or 10%) or a whole number of tokens (256)"


@dataclass(frozen=True)
class Budget:
    """How much of a sequence a policy may keep or read: a share of its tokens, or a number of them."""

    share: Fraction | None = Fraction(1)
    tokens: int | None = None

    @classmethod
    def of(cls, given: object) -> Budget:
        """Read `given`: a Budget, 0.1, "0.1", "10%", 256 or "256". Raises UsageError when it is none of these."""
        if isinstance(given, Budget):
            return given
        text = str(given).strip()
        if text == "1":
            raise UsageError("budget=1 could mean all or one token: write 100% for all, or 2 tokens or more")
        if re.fullmatch(r"\d+", text) and int(text) > 1:
            return cls(None, int(text))
        match = re.fullmatch(r"(\d*\.?\d+(?:e-?\d+)?)(%?)", text, re.IGNORECASE)
        share = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
        if not 0 < share <= 1:
            raise UsageError(f"budget={text} is not allowed: give {_ALLOWED}, above 0 and at most 100%")
        return cls(share)

    @property
    def whole(self) -> bool:
        """Whether the budget asks for everything."""
        return self.share == 1

    def allowance(self, tokens: int, window: int | None = None) -> int:
        """Return the entries granted of `tokens`: max(1, floor(share x tokens)), or the number asked for; of a window at most."""
        most = tokens if window is None else min(tokens, window)
        if self.share is not None:
            return max(1, int(self.share * most))
        assert self.tokens is not None
        return self.tokens if window is None else min(self.tokens, window)

    def __str__(self) -> str:
        # 15 digits: budgets that differ are written differently, since cells are known by what is written.
        return str(self.tokens) if self.share is None else f"{float(self.share * 100):.15g}%"


WHOLE = Budget()  # everything
