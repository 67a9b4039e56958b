"""Every policy in the folder keeps the contract, and the contract catches policies that do not."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from evalkit import contract, policies
from evalkit.cache import LayerCache
from evalkit.errors import UsageError
from evalkit.policy import Policy, granted, last, top
from evalkit.trial import Trial

PRESETS = [f"{name}:{preset}" for name in policies.shipped() for preset in policies.find(name).presets]
SIZED = ["kivi:2bit", "kivi:4bit"]  # what they hold is in their bits: they take no budget
UNION = ["quest:repo", "quest:per_query_head"]  # a set for each query head, counted by the group's union, may exceed the allowance
SHORT = (
    contract.a_full_budget_is_the_full_cache,
    contract.a_small_budget_changes_a_one_token_answer,
    contract.the_budget_is_kept,
    contract.answers_at_once_equal_answers_token_by_token,
    contract.stream_equals_one_token_at_a_time,
)


pytestmark = pytest.mark.usefixtures("own_cache")


@cache
def trial(name: str) -> Trial:
    return Trial(lambda budget: policies.build(name, budget))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", policies.shipped())
def test_every_shipped_policy_keeps_the_contract(name: str, check: contract.Check) -> None:
    finding = contract.find(check, trial(name))
    assert finding.passed, finding.detail


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in SIZED])
def test_every_preset_keeps_the_contract_in_short(name: str) -> None:
    checks = [check for check in SHORT if name not in UNION or check is not contract.the_budget_is_kept]
    assert [finding for finding in contract.run(trial(name), checks) if not finding.passed] == []


# Policies that break it


@dataclass(frozen=True, kw_only=True)
class Sound(Policy):
    """Keep the newest entries, at every token (no arXiv paper)."""

    paper: ClassVar[str] = "https://example.org/sound"

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache.keep(last(cache, granted(cache)))


@dataclass(frozen=True, kw_only=True)
class Peeks(Sound):
    """Looks at the queries that lie behind its own in memory."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        everything = torch.empty(0, dtype=query.dtype).set_(query.untyped_storage())
        sly = cache.filled & (cache.positions % 2 == int(everything[-8:].sum() > 0))
        return cache.keep(top(sly.double(), granted(cache)[:, None], cache.filled))


@dataclass(frozen=True, kw_only=True)
class Overspends(Sound):
    """Keeps half of the entries, whatever the budget."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache if cache.allowance is None else cache.keep(last(cache, (cache.tokens + 1) // 2))


@dataclass(frozen=True, kw_only=True)
class Remembers(Sound):
    """Keeps more the more often it was asked."""

    asked: ClassVar[list[int]] = []

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        self.asked.append(cache.slots)
        return cache.keep(last(cache, (granted(cache) - len(self.asked) % 3).clamp(min=1)))


@dataclass(frozen=True, kw_only=True)
class Notes(Sound):
    """Writes about itself."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        object.__setattr__(self, "newest", int(cache.seen.max()))
        return super().evict(cache, query)


@dataclass(frozen=True, kw_only=True)
class Scribbles(Sound):
    """Changes values where they lie."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        if cache.allowance is not None:
            cache.entries.dense()[1].mul_(0.9)
        return cache


@dataclass(frozen=True, kw_only=True)
class Idles(Sound):
    """Has an answer and never acts."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache


@dataclass(frozen=True, kw_only=True)
class ActsLate(Sound):
    """Acts on answers though it says that it leaves them alone."""

    @property
    def static(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class CountsSlots(Sound):
    """Takes slots for positions: among sequences in step, narrower ones have unused slots in front."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        slots = torch.arange(cache.slots).expand_as(cache.positions)
        return cache.keep(top(slots.double(), granted(cache)[:, None], torch.ones_like(cache.filled)) & (slots != 0))


@dataclass(frozen=True, kw_only=True)
class ObservesItsBudget(Sound):
    """Notes something that depends on the budget, though all budgets share one observation."""

    def observe(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache.mark("worth", ((cache.positions * 7) % (granted(cache)[:, None, None] + 3)).double())

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache.keep(top(cache.marks["worth"], granted(cache)[:, None], cache.filled))


@dataclass(frozen=True, kw_only=True)
class Turns(Sound):
    """Holds its entries newest first."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        kept = super().evict(cache, query)
        order = torch.arange(kept.slots - 1, -1, -1).expand_as(kept.positions)
        return replace(kept, entries=kept.entries.take(order), positions=kept.positions.gather(2, order))


@dataclass(frozen=True, kw_only=True)
class ActsUnasked(Sound):
    """Forgets even under a full budget."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache.keep(last(cache, (granted(cache) - 1).clamp(min=1)))


@dataclass(frozen=True, kw_only=True)
class SeesOneBlock(Sound):
    """Takes the last block's queries for the whole prompt's."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        return cache.keep(top(cache.received(query).sum(2), granted(cache)[:, None], cache.filled))


@dataclass(frozen=True, kw_only=True)
class Denies(Sound):
    """Says that it never acts, and does."""

    def acts_on(self, tokens: int) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class CountsSteps(Sound):
    """Keeps less the more tokens are still to come in the same pass."""

    def evict(self, cache: LayerCache, query: Tensor) -> LayerCache:
        together = query.untyped_storage().nbytes() > 4 * query.nbytes
        return cache.keep(last(cache, (granted(cache) - int(together)).clamp(min=1)))


@dataclass(frozen=True, kw_only=True)
class Nameless(Sound):
    """Says nothing of where it is from."""

    paper: ClassVar[str] = ""


BROKEN = [
    (Peeks, contract.later_tokens_change_nothing_earlier),
    (Overspends, contract.the_budget_is_kept),
    (Remembers, contract.the_policy_is_frozen_and_keeps_nothing),
    (Notes, contract.the_policy_is_frozen_and_keeps_nothing),
    (Scribbles, contract.a_fork_leaves_the_session_alone),
    (Scribbles, contract.the_budget_is_kept),
    (Idles, contract.a_small_budget_changes_a_one_token_answer),
    (ActsLate, contract.answers_at_once_equal_answers_token_by_token),
    (CountsSlots, contract.packed_equals_alone),
    (Remembers, contract.the_order_of_requests_changes_nothing),
    (ObservesItsBudget, contract.several_budgets_in_one_pass_equal_each_alone),
    (Turns, contract.positions_are_distinct_in_order_and_in_the_past),
    (ActsUnasked, contract.a_full_budget_is_the_full_cache),
    (SeesOneBlock, contract.prompts_in_chunks_equal_prompts_in_one),
    (Denies, contract.prompts_too_short_to_act_on_are_left_alone),
    (CountsSteps, contract.stream_equals_one_token_at_a_time),
    (Nameless, contract.the_policy_names_its_paper),
]


@pytest.mark.parametrize(("policy", "check"), BROKEN, ids=lambda given: given.__name__)
def test_a_broken_policy_is_caught_by_the_check_that_names_the_fault(policy: type[Policy], check: contract.Check) -> None:
    finding = contract.find(check, Trial(lambda budget: policy(budget=policies.Budget.of(budget))))
    assert not finding.passed
    assert not finding.detail.startswith(("TypeError", "AttributeError", "RuntimeError")), finding.detail


def test_every_check_has_a_policy_that_it_catches() -> None:
    assert set(contract.CHECKS) == {check for _, check in BROKEN}


def test_a_sound_policy_breaks_nothing() -> None:
    found = contract.run(Trial(lambda budget: Sound(budget=policies.Budget.of(budget))))
    assert [finding for finding in found if not finding.passed] == []


# What `evalkit check` runs


def test_check_takes_a_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from evalkit.policy import Policy\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Policy):\n"
        "    def evict(self, cache, query):\n"
        "        raise RuntimeError('not written yet')\n"
    )
    found = {finding.name: finding for finding in contract.check(f"{file}:Mine")}
    assert found["packed equals alone"].detail == "RuntimeError: not written yet"
    assert found["the policy names its paper"].detail == "its `paper` is '': give the paper's address"


def test_a_policy_is_excused_from_what_it_refuses() -> None:
    finding = contract.find(contract.stream_equals_one_token_at_a_time, trial("snapkv"))
    assert (finding.passed, finding.detail) == (True, "not asked, it refuses protocol=stream")


def test_check_refuses_an_unknown_policy() -> None:
    with pytest.raises(UsageError, match="policy=h20 is not known"):
        contract.check("h20")


@pytest.mark.parametrize("name", SIZED)
def test_check_refuses_a_policy_without_a_budget_to_try(name: str) -> None:
    with pytest.raises(UsageError, match="accepts none of the budgets"):
        contract.check(name)
