"""KIVI: store old keys and values in 2 or 4 bits and leave the newest in full precision."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

from ..entries import ELEMENT_BYTES
from ..errors import UsageError
from ..policy import Head, Holding, LayerCache, Natural, Policy, Positive, Presets
from ._codes import MOST_BITS, Form, Layout, group_bytes
from ._packed import Packed, Part

LEAST_BITS = 2
RESIDUAL = 128  # the paper's


@dataclass(frozen=True, kw_only=True)
class KIVI(Policy):
    """Code keys by channel and values by token, as steps between the least and the largest number of a group; forget nothing.

    Paper: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750. A prompt or message
    attends in full precision and is coded afterwards. `residual` tokens stay in full precision: keys are coded together once
    that many have come together, values one at a time once there are more. Values are coded in groups of `group` channels, or of
    the largest number below that divides the head size.

    A budget is a share of the full cache's bytes: codes, scales, least numbers and residual. `bits` and `residual` are the largest
    that fit it, bits first, chosen anew whenever a prompt or message is complete. Where fewer bits fit than before, what is coded
    is coded again; more bits return with the next message taken in whole. Prompts of a few groups may cost more than the budget,
    since keys in less than a group stay as they are: then the least possible is held. `kivi:2bit` and `kivi:4bit` fix bits and
    residual as the paper does, and so do the knobs; their budget is 100%. Layers with a sliding window code at most a window of
    keys at once, and none where the window is shorter than a group.
    """

    bits: Literal[2, 4] | None = None  # as the budget allows unless given
    residual: Natural | None = None  # as the budget allows; 128 where bits are given
    group: Positive = 32

    paper: ClassVar[str] = "https://arxiv.org/abs/2402.02750"
    needs: ClassVar[frozenset[str]] = frozenset({"same_length"})
    presets: ClassVar[Presets] = {
        "2bit": {"bits": 2, "residual": RESIDUAL, "group": 32},
        "4bit": {"bits": 4, "residual": RESIDUAL, "group": 32},
    }

    def __post_init__(self) -> None:
        if self.bits is not None and not self.budget.whole:
            raise UsageError(f"budget={self.budget} and bits={self.bits} both say what is held: give one of them")
        if self.bits is None and self.residual is not None:
            raise UsageError(f"residual={self.residual} goes with bits, else the budget chooses it: give bits=2 or bits=4 too")
        if self.bits is not None and self.kept % self.group:
            raise UsageError(f"residual={self.kept} is not allowed: give a multiple of group={self.group}")
        least = Fraction(group_bytes(self.group, LEAST_BITS), self.group * ELEMENT_BYTES)
        if self.budget.share is not None and not self.budget.whole and self.budget.share < least:
            raise UsageError(
                f"budget={self.budget} is below {float(least * 100):g}%, the least that KIVI can hold ({LEAST_BITS} bits, and two "
                f"numbers for each group of {self.group}): give that or more"
            )

    @property
    def lossless(self) -> bool:
        return self.budget.whole and self.bits is None

    @property
    def floor(self) -> int:
        return self.group  # keys of less than a group stay as they are

    @property
    def kept(self) -> int:
        """The newest tokens in full precision, where bits are given."""
        return RESIDUAL if self.residual is None else self.residual

    def acts_on(self, tokens: int) -> bool:
        return super().acts_on(tokens) if self.bits is None else tokens >= max(1, self.kept)

    def write(self, cache: LayerCache) -> LayerCache:
        if self.bits is None and cache.allowance is None:
            return cache
        packed = Packed.of(cache.entries, self.group)
        if packed is cache.entries and not cache.complete:
            return replace(cache, entries=packed.settled(lambda part, _: part.form))
        grants = [0] * packed.count if cache.allowance is None else cache.allowance.tolist()
        return replace(cache, entries=packed.settled(lambda part, place: self.form(cache, part, grants[place])))

    def form(self, cache: LayerCache, part: Part, allowance: int) -> Form:
        """Return the form for sequences stored like `part`, of which the budget grants `allowance` entries in full precision."""
        most = part.form.bits if cache.decoding else MOST_BITS  # token by token, bits would rise and fall with every group of keys
        return self.fitting(part.layout, part.length, allowance, most, cache.layer.window)

    def fitting(self, layout: Layout, length: int, allowance: int, most_bits: int, window: int | None) -> Form:
        """Return the form that is given, or the `largest` of those that the budget allows."""
        if self.bits is not None:
            return Form(self.bits, self.kept, unit(self.kept, self.group, window))
        return largest(layout, length, allowance, most_bits, window)

    def holding(self, head: Head, tokens: int) -> Holding[int]:
        if self.lossless:
            return super().holding(head, tokens)
        layout, window = Layout.of(self.group, head.key_size, head.value_size), head.layer.window
        form = self.fitting(layout, tokens, self.budget.allowance(tokens, window), MOST_BITS, window)
        return held(layout, form, tokens, head.live(tokens))


@lru_cache(maxsize=1 << 16)
def largest(layout: Layout, length: int, allowance: int, most_bits: int, window: int | None) -> Form:
    """Return the form that leaves `length` tokens in no more bytes than `allowance` full ones: most bits, then longest residual.

    Where none is small enough it is the smallest.
    """
    allowed = allowance * (layout.key_size + layout.value_size) * ELEMENT_BYTES
    live = length if window is None else min(length, window)
    longest = -(-max(live, allowance) // layout.group) * layout.group
    bits = [bits for bits in (MOST_BITS, LEAST_BITS) if bits <= most_bits]
    residuals = range(longest, -1, -layout.group)
    forms = (Form(each, residual, unit(residual, layout.group, window)) for each in bits for residual in residuals)
    fitting = (form for form in forms if cost(layout, form, length, live) <= allowed)
    return next(fitting, Form(LEAST_BITS, 0, unit(0, layout.group, window)))


def unit(residual: int, group: int, window: int | None) -> int:
    """Return how many keys are coded at once: a residual, or a group where it is empty; of what a window holds at most."""
    most = max(residual, group)
    return most if window is None else min(most, window // group * group)


def cost(layout: Layout, form: Form, length: int, live: int) -> int:
    """Return the bytes of what is `held`."""
    return held(layout, form, length, live).bytes()


def held(layout: Layout, form: Form, length: int, live: int) -> Holding[int]:
    """Return what a head holds after `length` tokens, of which the newest `live` are left."""
    passed = length - live
    coded = length // form.unit * form.unit if form.unit else 0
    groups = max(0, coded // layout.group - passed // layout.group)
    values = min(form.residual, live)
    return layout.holding(form.bits, length - max(coded, passed), groups, values, live - values)
