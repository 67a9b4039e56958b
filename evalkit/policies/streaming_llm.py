"""StreamingLLM: keep the first tokens, where attention sinks, and the newest ones."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..policy import LayerCache, Natural, Policy, Presets, first, granted, last


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the entries of the first `sinks` tokens and fill the allowance with the newest, at every token.

    Paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453. As in the paper, positions
    are those in the cache, not those in the text: held keys are rotated again, so that entries lie one after another right before
    the query. `streaming_llm:original` (what kvpress and others do; kvpress also acts on the prompt only: `streaming_llm:kvpress`)
    leaves the text's positions. Where the allowance is small the sinks shrink to allowance - 1.
    """

    sinks: Natural = 4
    rerotate: bool = True  # positions by place in the cache (the paper) or in the text
    every_step: bool = True

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    presets: ClassVar[Presets] = {
        "original": {"rerotate": False},
        "kvpress": {"rerotate": False, "every_step": False},
    }

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"rope"} if self.rerotate else ())

    @property
    def static(self) -> bool:
        return not self.every_step

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if not (cache.complete or self.every_step):
            return cache
        allowance = granted(cache)
        sinks = first(cache, (allowance - 1).clamp(max=self.sinks))
        held = sinks[:, 0].sum(-1)  # none of them where a sliding window has passed
        return cache.keep(sinks | last(cache, allowance - held))

    def place(self, cache: LayerCache) -> Tensor | None:
        if not self.rerotate:
            return None
        behind = cache.filled.flip(-1).cumsum(-1).flip(-1)  # entries from this one on: 1 for the newest
        return cache.seen[:, None, None] - behind
