"""The full cache: keep everything, read everything. What vLLM's PagedAttention computes, and what all else is measured against."""

from dataclasses import dataclass
from typing import ClassVar

from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every entry and read all of them.

    Paper: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180
    (paging moves entries about; it changes no result).
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.06180"
