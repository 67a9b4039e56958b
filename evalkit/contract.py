"""What every policy must keep, whatever its method: checks on a tiny random model in float64; knows no single policy.

A check is a function whose name says what holds. It returns what is wrong, or nothing; what a policy refuses by declaration it is
excused from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .cache import EMPTY, LayerCache
from .documents import Document
from .policies import build
from .policy import Policy
from .shares import BYTES, DENSE_BYTES, HELD, READ
from .trial import CLOSE, Answers, Trial, conversation, differ, logprobs, one_by_one, score, tokens

CHANGED = 1e-6


@dataclass(frozen=True)
class Finding:
    """Whether one check passed, and what is wrong where it did not."""

    name: str
    passed: bool
    detail: str = ""


class Excused(Exception):
    """Why a check is not for this policy, by what the policy says of itself."""


Check = Callable[[Trial], str]


def a_full_budget_is_the_full_cache(trial: Trial) -> str:
    for protocol in trial.protocols:
        if found := differ(trial.scores(trial.whole, protocol), trial.scores(Policy(), protocol)):
            return f"{protocol}: {found}"
    return ""


def a_small_budget_changes_a_one_token_answer(trial: Trial) -> str:
    excuse_the_full_cache(trial)
    for policy, protocol in trial.cases():
        full, changed = trial.scores(Policy(), protocol), trial.scores(policy, protocol)
        if max(max(gaps) for gaps in first_tokens(trial, full, changed)) < CHANGED:
            return f"{protocol}: at {policy.budget} every one-token answer is scored as by the full cache"
    return ""


def prompts_too_short_to_act_on_are_left_alone(trial: Trial) -> str:
    full = trial.scores(Policy(), "prompt")
    for policy in trial.policies:
        gaps = first_tokens(trial, full, trial.scores(policy, "prompt"))
        for document, worst in zip(trial.documents, map(max, gaps), strict=True):
            if not policy.acts_on(document.basis) and worst > CLOSE:
                return f"at {policy.budget} acts_on({document.basis}) is False and an answer differs by {worst:.1e}"
    return ""


def the_budget_is_kept(trial: Trial) -> str:
    excuse_the_full_cache(trial)
    for policy in trial.policies:
        for protocol in trial.protocols:
            tally = trial.result(policy, protocol).tally
            over = [exceeds(trial, policy, document, sums) for document, sums in zip(trial.documents, tally.T, strict=True)]
            if all(any(each) for each in zip(*over, strict=True)):
                return (
                    f"{protocol}: at {policy.budget} neither the entries held, nor those read, nor the bytes keep to the allowance"
                )
    return ""


def positions_are_distinct_in_order_and_in_the_past(trial: Trial) -> str:
    excuse_simulations(trial)
    for policy in trial.policies:
        for protocol in trial.protocols:
            for session in conversation(trial.main, policy, protocol):
                if found := "".join(map(misplaced, session.caches)):
                    return f"{protocol}: at {policy.budget} after {session.seen} tokens {found}"
    return ""


def a_fork_leaves_the_session_alone(trial: Trial) -> str:
    excuse_simulations(trial)
    for policy, protocol in trial.cases():
        session, asked = trial.main.open(policy, protocol), [tokens(1, 8), tokens(4, 9)]
        session.feed(tokens(20, 7))
        session.generate(2, lambda said: False)
        held, scored = [copied(cache) for cache in session.caches], session.score(asked)
        fork = session.fork()
        fork.generate(3, lambda said: False)
        fork.feed(tokens(8, 10))
        if not all(map(same, held, map(copied, session.caches))):
            return f"{protocol}: what the session holds has changed"
        if session.score(asked) != scored:
            return f"{protocol}: the session's answers have changed"
    return ""


def later_tokens_change_nothing_earlier(trial: Trial) -> str:
    excuse_simulations(trial)
    prompt, answer = tokens(20, 11), tokens(8, 12)
    for policy, protocol in trial.cases():
        early = answer if protocol == "prompt" else (*prompt[1:], *answer)
        line = [Document(prompt[: 20 if protocol == "prompt" else 1], ((*early, *tokens(6, seed)),), 20) for seed in (13, 14)]
        one, other = (trial.predictions(policy, protocol, document)[: len(early)] for document in line)
        apart = (one - other).abs().amax(1) > CLOSE
        if apart.any():
            return (
                f"{protocol}: other tokens after the first {len(early)} change what was predicted after {int(apart.nonzero()[0])}"
            )
    return ""


def answers_at_once_equal_answers_token_by_token(trial: Trial) -> str:
    excuse_simulations(trial)
    return stepped(trial, "prompt")


def stream_equals_one_token_at_a_time(trial: Trial) -> str:
    if "stream" not in trial.protocols:
        raise Excused("it refuses protocol=stream")
    return stepped(trial, "stream")


def packed_equals_alone(trial: Trial) -> str:
    for policy, protocol in trial.cases():
        alone = [score(trial.main, [document], policy, protocol)[0] for document in trial.documents[1:]]
        if found := differ(trial.scores(policy, protocol)[1:], alone):
            return f"{protocol}: {found}"
    return ""


def the_order_of_requests_changes_nothing(trial: Trial) -> str:
    for policy, protocol in trial.cases():
        turned = score(trial.engine(row_tokens=60), trial.documents[:0:-1], policy, protocol)
        if found := differ(trial.scores(policy, protocol)[1:], turned[::-1]):
            return f"{protocol}: {found}"
    return ""


def several_budgets_in_one_pass_equal_each_alone(trial: Trial) -> str:
    policies, some = [*trial.policies, trial.whole], slice(1, 4)
    for protocol in trial.protocols:
        for policy, together in zip(policies, trial.main.score(trial.documents[some], policies, protocol), strict=True):
            if found := differ(logprobs(together), trial.scores(policy, protocol)[some]):
                return f"{protocol}: at {policy.budget} {found}"
    return ""


def prompts_in_chunks_equal_prompts_in_one(trial: Trial) -> str:
    excuse_simulations(trial)
    chunks = score(trial.engine(prefill_chunk=16), trial.documents, trial.small, "prompt")
    return differ(trial.scores(trial.small, "prompt"), chunks)


def the_policy_is_frozen_and_keeps_nothing(trial: Trial) -> str:
    policy, some = trial.build(str(trial.small.budget)), trial.documents[2:3]
    if not type(policy).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "it is not frozen: write @dataclass(frozen=True, kw_only=True)"
    if policy != trial.small or hash(policy) != hash(trial.small):
        return "two policies with the same knobs are not equal"
    before, first = contents(policy), score(trial.main, some, policy, "prompt")
    score(trial.main, trial.documents[:2], policy, "prompt")
    if differ(first, score(trial.main, some, policy, "prompt")):
        return "asked the same again after other documents, it answers differently"
    return "" if contents(policy) == before else "it has changed itself or its class while it ran"


def the_policy_names_its_paper(trial: Trial) -> str:
    policy = trial.whole
    if not policy.paper.startswith("https://"):
        return f"its `paper` is {policy.paper!r}: give the paper's address"
    return "" if "arXiv" in (type(policy).__doc__ or "") else "its docstring names no paper: give the arXiv number"


CHECKS: tuple[Check, ...] = (
    a_full_budget_is_the_full_cache,
    a_small_budget_changes_a_one_token_answer,
    prompts_too_short_to_act_on_are_left_alone,
    the_budget_is_kept,
    positions_are_distinct_in_order_and_in_the_past,
    a_fork_leaves_the_session_alone,
    later_tokens_change_nothing_earlier,
    answers_at_once_equal_answers_token_by_token,
    stream_equals_one_token_at_a_time,
    packed_equals_alone,
    the_order_of_requests_changes_nothing,
    several_budgets_in_one_pass_equal_each_alone,
    prompts_in_chunks_equal_prompts_in_one,
    the_policy_is_frozen_and_keeps_nothing,
    the_policy_names_its_paper,
)


def check(spec: str) -> list[Finding]:
    """Run all checks on the policy called `spec`: a name, with a preset or not, FILE.py or FILE.py:CLASS.

    Raises UsageError when there is no such policy or when it accepts no budget below everything.
    """
    trial = Trial(lambda budget: build(spec, budget))
    return run(trial) if trial.policies else []


def run(trial: Trial, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks on a policy."""
    return [find(one, trial) for one in checks]


def find(check: Check, trial: Trial) -> Finding:
    """Run one check; a policy that fails inside it has not passed."""
    name = check.__name__.replace("_", " ")
    try:
        wrong = check(trial)
    except Excused as reason:
        return Finding(name, True, f"not asked, {reason}")
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return Finding(name, not wrong, wrong)


# What the checks are made of


def excuse_the_full_cache(trial: Trial) -> None:
    if trial.small.passive:
        raise Excused("it is the full cache")


def excuse_simulations(trial: Trial) -> None:
    if "whole_answer" in trial.small.needs:
        raise Excused("it simulates prompt and answer in one pass")


def first_tokens(trial: Trial, one: Answers, other: Answers) -> list[list[float]]:
    """Return how far apart two runs are on each document's one-token answers; 0 where it has none."""
    return [
        [0.0, *(abs(a - b) for answer, a, b in zip(document.answers, *pair, strict=True) if len(answer) == 1)]
        for document, *pair in zip(trial.documents, one, other, strict=True)
    ]


def exceeds(trial: Trial, policy: Policy, document: Document, sums: Tensor) -> tuple[bool, ...]:
    """Return whether the entries held, those read, the bytes of one document, in `sums` [QUANTITIES], are over what the budget grants.

    Layers that the policy declares dense are granted everything, and no layer less than the policy's declared floor.
    """
    config, basis = trial.model.config, document.basis
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    dense = min(getattr(policy, "dense_layers", 0), layers - 1)
    granted = min(max(policy.budget.allowance(basis), policy.floor), max(basis, 1))
    prompt = heads * (dense * basis + (layers - dense) * granted)
    own = [depth + 1 for answer in document.answers for depth in range(len(answer))]  # what each query may read of its answer
    read = len(own) * prompt + heads * layers * sum(own)
    stored = prompt / max(1, heads * layers * basis) * float(sums[DENSE_BYTES])
    return tuple(float(sums[what]) > most + 0.5 for what, most in ((HELD, prompt), (READ, read), (BYTES, stored)))


def misplaced(held: LayerCache) -> str:
    """Return what is wrong with the positions of a layer, if anything."""
    for row in held.positions.flatten(0, 1).tolist():
        places, seen = [place for place in row if place != EMPTY], int(held.seen.max())
        if any(a >= b for a, b in pairwise(places)) or any(not 0 <= place < seen for place in places):
            return f"layer {held.layer.index} holds the positions {places}. "
    return ""


def copied(held: LayerCache) -> list[Tensor]:
    return [tensor.clone() for tensor in (*held.entries.dense(), held.positions, *held.marks.values(), *held.notes.values())]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def stepped(trial: Trial, protocol: str) -> str:
    """Return how the two shortest documents' last answers differ from a run in which every token is a pass of its own."""
    scores = trial.scores(trial.small, protocol)
    shortest = sorted(zip(trial.documents, scores, strict=True), key=lambda pair: len(pair[0].prompt))
    for document, expected in shortest[:2]:
        gap = abs(one_by_one(trial.main, trial.small, protocol, document, document.answers[-1]) - expected[-1])
        if gap > CLOSE:
            return f"at {trial.small.budget} an answer after {len(document.prompt)} tokens differs by {gap:.1e}"
    return ""


def contents(policy: Policy) -> tuple[str, str]:
    """What a policy and its class hold, but for functions."""
    return repr(vars(policy)), repr({name: value for name, value in vars(type(policy)).items() if not callable(value)})
