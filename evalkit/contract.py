"""What every policy must keep, whatever its method: checks on a tiny random model in float64; knows no single policy.

Each check is a function whose name says what holds. It returns what is wrong, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from .attention import PreTrainedModel
from .cache import EMPTY, LayerCache
from .counters import BYTES, DENSE_BYTES, HELD, READ
from .errors import UsageError
from .model import tiny
from .packing import Document, Packing
from .policies import build
from .policy import Policy
from .session import CellScores, Engine, Session

CLOSE = 1e-9  # log-probabilities that should be equal differ by rounding alone
CHANGED = 1e-6
BUDGETS = ("10%", "12", "30%", "50%")  # the first two that a policy accepts are tried
PROTOCOLS = ("prompt", "stream")
VOCABULARY = 128


@dataclass(frozen=True)
class Finding:
    """Whether one check passed, and what is wrong where it did not."""

    name: str
    passed: bool
    detail: str = ""


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Return `count` different tokens: a token's keys at two positions would tie."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return tuple(order[:count].tolist())


@cache
def documents() -> tuple[Document, ...]:
    """Return prompts of 1 to 70 tokens, two of them alike for a while, with short and long answers."""
    shapes = ((70, (1, 4)), (1, (3,)), (24, (1, 1, 5)), (24, (1,)), (45, (2, 1)))
    drawn = [
        Document(tokens(length, seed), tuple(tokens(count, 100 + 10 * seed + i) for i, count in enumerate(answers)))
        for seed, (length, answers) in enumerate(shapes)
    ]
    drawn[4] = replace(drawn[4], prompt=drawn[0].prompt[:30] + drawn[4].prompt[30:])
    return tuple(drawn)


Answers = list[list[float]]  # log-probabilities, document by document


@dataclass(eq=False)
class Trial:
    """A policy on trial: how to build it at a budget, and the model to run it on."""

    build: Callable[[str], Policy]
    model: PreTrainedModel = field(default_factory=tiny)
    documents: Sequence[Document] = field(default_factory=documents)
    known: dict[tuple[Policy, str], CellScores] = field(default_factory=dict)

    def engine(self, **settings: int) -> Engine:
        """Return a new engine on the model."""
        return Engine(self.model, calibration=lambda: tokens(VOCABULARY, 999), **settings)  # type: ignore[arg-type]

    @cached_property
    def main(self) -> Engine:
        return self.engine()

    @cached_property
    def whole(self) -> Policy:
        """The policy at a full budget."""
        return self.build("100%")

    @cached_property
    def policies(self) -> list[Policy]:
        """The policy at two budgets it accepts, the smaller first."""
        accepted = []
        for budget in BUDGETS:
            with suppress(UsageError):
                accepted.append(self.build(budget))
        if not accepted:
            raise UsageError(f"{type(self.whole).__name__} accepts none of the budgets {', '.join(BUDGETS)}: let it take one of them")
        return accepted[:2]

    @property
    def small(self) -> Policy:
        """The policy at the smallest budget it accepts."""
        return self.policies[0]

    @cached_property
    def protocols(self) -> list[str]:
        """The protocols that the policy does not refuse."""
        return [protocol for protocol in PROTOCOLS if not _refuses(self.whole, protocol)]

    def result(self, policy: Policy, protocol: str) -> CellScores:
        """Score all documents at once; computed once."""
        key = (policy, protocol)
        if key not in self.known:
            self.known[key] = self.main.score(self.documents, [policy], protocol)[0]
        return self.known[key]

    def scores(self, policy: Policy, protocol: str) -> Answers:
        """Return the log-probability of every answer, all documents scored at once."""
        return logprobs(self.result(policy, protocol))

    def cases(self) -> Iterator[tuple[Policy, str]]:
        """The policy at its smallest budget under every protocol it allows."""
        return ((self.small, protocol) for protocol in self.protocols)


def score(engine: Engine, asked: Sequence[Document], policy: Policy, protocol: str) -> Answers:
    """Return the log-probability of every answer."""
    return logprobs(engine.score(asked, [policy], protocol)[0])


def logprobs(result: CellScores) -> Answers:
    """Return the log-probabilities of a cell's answers."""
    return [[one.logprob for one in row] for row in result.scores]


def differ(one: Answers, other: Answers) -> str:
    """Return where two runs differ most, if they do."""
    gaps = {
        (number, place): abs(a - b)
        for number, pair in enumerate(zip(one, other, strict=True))
        for place, (a, b) in enumerate(zip(*pair, strict=True))
    }
    worst = max(gaps, key=lambda where: gaps[where])
    if gaps[worst] <= CLOSE:
        return ""
    return f"answer {worst[1]} of document {worst[0]} differs by {gaps[worst]:.1e}"


def _refuses(policy: Policy, protocol: str) -> bool:
    try:
        policy.check(protocol)
    except UsageError:
        return True
    return False


# What must hold


def a_full_budget_is_the_full_cache(trial: Trial) -> str:
    for protocol in trial.protocols:
        if found := differ(trial.scores(trial.whole, protocol), trial.scores(Policy(), protocol)):
            return f"{protocol}: {found}"
    return ""


def a_small_budget_changes_a_one_token_answer(trial: Trial) -> str:
    if trial.small.passive:
        return ""
    for policy, protocol in trial.cases():
        full, changed = trial.scores(Policy(), protocol), trial.scores(policy, protocol)
        gaps = [
            abs(a - b)
            for document, one, other in zip(trial.documents, full, changed, strict=True)
            for answer, a, b in zip(document.answers, one, other, strict=True)
            if len(answer) == 1
        ]
        if max(gaps) < CHANGED:
            return f"{protocol}: at {policy.budget} every one-token answer is scored as by the full cache"
    return ""


def prompts_too_short_to_act_on_are_left_alone(trial: Trial) -> str:
    full = trial.scores(Policy(), "prompt")
    for policy in trial.policies:
        mine = trial.scores(policy, "prompt")
        for number, document in enumerate(trial.documents):
            firsts = [place for place, answer in enumerate(document.answers) if len(answer) == 1]
            gaps = [abs(full[number][place] - mine[number][place]) for place in firsts]
            if not policy.acts_on(document.basis) and max(gaps, default=0.0) > CLOSE:
                return f"at {policy.budget} acts_on({document.basis}) is False and an answer differs by {max(gaps):.1e}"
    return ""


def the_budget_is_kept(trial: Trial) -> str:
    if trial.small.passive:
        return ""
    for policy in trial.policies:
        for protocol in trial.protocols:
            tally = trial.result(policy, protocol).tally
            over = [_over(trial, policy, document, sums) for document, sums in zip(trial.documents, tally.T, strict=True)]
            if all(any(column) for column in zip(*over, strict=True)):
                return f"{protocol}: at {policy.budget} neither the entries held, nor those read, nor the bytes stay within the allowance"
    return ""


def _over(trial: Trial, policy: Policy, document: Document, sums: Tensor) -> tuple[bool, bool, bool]:
    """Whether the entries held, the entries read, the bytes of one document are over the budget, dense layers granted in full."""
    config, basis = trial.model.config, document.basis
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    dense = min(getattr(policy, "dense_layers", 0), layers - 1)
    granted = min(max(policy.budget.allowance(basis), policy.floor), max(basis, 1))
    each = heads * (dense * basis + (layers - dense) * granted)
    queries = [depth + 1 for answer in document.answers for depth in range(len(answer))]  # what each may read of its own answer
    read = len(queries) * each + heads * layers * sum(queries)
    dense_bytes = float(sums[DENSE_BYTES])
    allowed = (each, read, each / max(1, heads * layers * basis) * dense_bytes)
    return tuple(float(sums[what]) > most + 0.5 for what, most in zip((HELD, READ, BYTES), allowed, strict=True))  # type: ignore[return-value]


def positions_are_distinct_in_order_and_in_the_past(trial: Trial) -> str:
    for policy in trial.policies:
        for protocol in trial.protocols:
            for session in conversation(trial.main, policy, protocol):
                for held in session.caches:
                    if found := _misplaced(held):
                        return f"{protocol}: at {policy.budget} after {session.seen} tokens in layer {held.layer.index}, {found}"
    return ""


def conversation(engine: Engine, policy: Policy, protocol: str) -> Iterator[Session]:
    """Yield a session after each message: a prompt, a reply taken in token by token, a message, a generated reply."""
    session = engine.open(policy, protocol)
    for count, decoded in ((20, False), (6, True), (12, False)):
        session.feed(tokens(count, 50 + count), decoded=decoded)
        yield session
    session.generate(3, lambda said: False)
    yield session


def _misplaced(held: LayerCache) -> str:
    for row in held.positions.flatten(0, 1).tolist():
        places = [place for place in row if place != EMPTY]
        if any(a >= b for a, b in zip(places, places[1:], strict=False)):
            return f"positions are not distinct and in order: {places}"
        if places and not 0 <= places[0] <= places[-1] < int(held.seen.max()):
            return f"a position is not among the {int(held.seen.max())} tokens seen: {places}"
    return ""


def a_fork_leaves_the_session_alone(trial: Trial) -> str:
    for policy, protocol in trial.cases():
        session = trial.main.open(policy, protocol)
        session.feed(tokens(20, 7))
        session.generate(2, lambda said: False)
        before, asked = [_copied(held) for held in session.caches], [tokens(1, 8), tokens(4, 9)]
        scored = session.score(asked)
        fork = session.fork()
        fork.generate(3, lambda said: False)
        fork.feed(tokens(8, 10))
        same = all(torch.equal(a, b) for held, old in zip(session.caches, before, strict=True) for a, b in zip(_copied(held), old, strict=True))
        if not same:
            return f"{protocol}: what the session holds has changed"
        if session.score(asked) != scored:
            return f"{protocol}: the session's answers have changed"
    return ""


def _copied(held: LayerCache) -> list[Tensor]:
    return [tensor.clone() for tensor in (*held.entries.dense(), held.positions, *held.marks.values(), *held.notes.values())]


def later_tokens_change_nothing_earlier(trial: Trial) -> str:
    start, head = tokens(20, 11), tokens(8, 12)
    for policy, protocol in trial.cases():
        for prompt, early in ((start, head), (start[:1], (*start[1:], *head))):
            runs = [answered(trial, policy, protocol, Document(prompt, ((*early, *tokens(6, seed)),), 20)) for seed in (13, 14)]
            gaps = (runs[0] - runs[1]).abs()[: len(early)].amax(1)
            if gaps.max() > CLOSE:
                return f"{protocol}: other tokens from {len(early)} on change what is predicted after {int(gaps.gt(CLOSE).nonzero()[0])}"
    return ""


def answered(trial: Trial, policy: Policy, protocol: str, document: Document) -> Tensor:
    """Return the logits [T, V] before each of the T tokens of the document's only answer, scored in one pass."""
    engine = _Watched(trial.model, calibration=trial.main.calibration)
    engine.score([document], [policy], protocol)
    return engine.logits[-1]


@dataclass
class _Watched(Engine):
    """An engine that notes the logits of every row."""

    logits: list[Tensor] = field(default_factory=list)

    def run(self, packing: Packing, *given: object) -> Tensor:  # type: ignore[override]
        self.logits.append(super().run(packing, *given))  # type: ignore[arg-type]
        return self.logits[-1]


def answers_at_once_equal_answers_token_by_token(trial: Trial) -> str:
    return stepped(trial, "prompt")


def stream_equals_one_token_at_a_time(trial: Trial) -> str:
    return stepped(trial, "stream") if "stream" in trial.protocols else ""


def stepped(trial: Trial, protocol: str) -> str:
    """Return how a run differs from one in which every token of an answer (of the prompt, too, under stream) is a pass of its own."""
    for number in (1, 2):  # the last answers
        document, expected = trial.documents[number], trial.scores(trial.small, protocol)[number][-1]
        logprob = _one_by_one(trial.main, trial.small, protocol, document, document.answers[-1])
        if abs(logprob - expected) > CLOSE:
            return f"at {trial.small.budget} the last answer of document {number} differs by {abs(logprob - expected):.1e}"
    return ""


def _one_by_one(engine: Engine, policy: Policy, protocol: str, document: Document, answer: Sequence[int]) -> float:
    session = engine.open(policy, protocol)
    stream = protocol == "stream"
    if not stream:
        session.feed(document.prompt)
    logprob = 0.0
    line = (*(document.prompt if stream else document.prompt[-1:]), *answer)
    for token, following in zip(line, line[1:], strict=False):
        granted = None if session.state.caches else [document.basis]
        logits = session.step([token], granted, 0 if stream else 1)
        session.seen += 1
        logprob += float(logits[-1].log_softmax(-1)[following]) if session.seen >= len(document.prompt) else 0.0
    return logprob


def packed_equals_alone(trial: Trial) -> str:
    for policy, protocol in trial.cases():
        alone = [score(trial.main, [document], policy, protocol)[0] for document in trial.documents]
        if found := differ(trial.scores(policy, protocol), alone):
            return f"{protocol}: {found}"
    return ""


def the_order_of_requests_changes_nothing(trial: Trial) -> str:
    for policy, protocol in trial.cases():
        turned = score(trial.engine(row_tokens=150), trial.documents[::-1], policy, protocol)
        if found := differ(trial.scores(policy, protocol), turned[::-1]):
            return f"{protocol}: {found}"
    return ""


def several_budgets_in_one_pass_equal_each_alone(trial: Trial) -> str:
    policies = [*trial.policies, trial.whole]
    for protocol in trial.protocols:
        for policy, together in zip(policies, trial.main.score(trial.documents, policies, protocol), strict=True):
            if found := differ(logprobs(together), trial.scores(policy, protocol)):
                return f"{protocol}: at {policy.budget} {found}"
    return ""


def prompts_in_blocks_equal_prompts_in_one(trial: Trial) -> str:
    policy = trial.small
    size = max(16, getattr(policy, "window", 0))
    return differ(trial.scores(policy, "prompt"), score(trial.engine(block_tokens=size), trial.documents, policy, "prompt"))


def the_policy_is_frozen_and_keeps_nothing(trial: Trial) -> str:
    policy = trial.build(str(trial.small.budget))
    kind = type(policy)
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return f"{kind.__name__} is not a frozen dataclass: write @dataclass(frozen=True, kw_only=True)"
    if policy != trial.small or hash(policy) != hash(trial.small):
        return "two policies with the same knobs are not equal"
    before = _kept(policy)
    first = score(trial.main, trial.documents[2:3], policy, "prompt")
    score(trial.main, trial.documents[:2], policy, "prompt")
    if differ(first, score(trial.main, trial.documents[2:3], policy, "prompt")):
        return "asked the same again after other documents, it answers differently"
    return "" if _kept(policy) == before else "it has changed itself or its class while it ran"


def _kept(policy: Policy) -> tuple[str, str]:
    return repr(vars(policy)), repr({name: value for name, value in vars(type(policy)).items() if not callable(value)})


def the_policy_names_its_paper(trial: Trial) -> str:
    policy = trial.whole
    if not policy.paper.startswith("https://"):
        return f"{type(policy).__name__}.paper is {policy.paper!r}: give the paper's address"
    return "" if "arXiv" in (type(policy).__doc__ or "") else f"the docstring of {type(policy).__name__} names no paper: give its arXiv number"


Check = Callable[[Trial], str]
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
    prompts_in_blocks_equal_prompts_in_one,
    the_policy_is_frozen_and_keeps_nothing,
    the_policy_names_its_paper,
)


def find(check: Check, trial: Trial) -> Finding:
    """Run one check; a policy that fails inside it has not passed."""
    name = check.__name__.replace("_", " ")
    try:
        wrong = check(trial)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return Finding(name, not wrong, wrong)


def run(trial: Trial, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks on a policy."""
    return [find(one, trial) for one in checks]


def check(spec: str) -> list[Finding]:
    """Run all checks on the policy called `spec`: a name, with a preset or not, FILE.py or FILE.py:CLASS."""
    build(spec)  # an unknown name is the user's error, no finding
    return run(Trial(lambda budget: build(spec, budget)))
