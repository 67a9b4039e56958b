"""Every policy behind lm-eval's model API; knows no single policy.

lm-eval asks for log-likelihoods of answers after contexts. Here each distinct context is taken in once, the policy acts, and the
answers are scored from what is left. `kv` takes `policy=NAME`, `kv_<name>` is the same for one policy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import attention, settings
from ..counters import Counters, Tally, peak_memory
from ..documents import Document
from ..errors import UsageError, say_errors_in_one_line
from ..ledger import Record, refuse_idle
from ..model import digest
from ..paged import Stored
from ..policies import names
from ..requests import Request, admitted, by_task, check_start, gathered
from ..rooms import room
from ..sampling import sampler
from ..scoring import Score
from ..session import Engine
from ..size import token_bytes

Pair = tuple[tuple[str, str] | None, list[int], list[int]]


class PolicyLM(HFLM):
    """lm-eval's `hf` model with a KV-cache policy: takes every argument of `hf`, evalkit's settings and the policy's knobs.

    `batch_size` above 1 bounds how many documents share a packed row; no result depends on it.
    """

    POLICY: str | None = None

    def __init__(self, pretrained: Any = None, *, policy: str | None = None, batch_size: Any = 1, **given: Any) -> None:
        say_errors_in_one_line()
        name = self.POLICY or policy
        if name is None or (self.POLICY and policy and policy.split(":")[0] != self.POLICY):
            raise UsageError(f"give --model kv with policy=NAME, or --model kv_NAME without: NAME is one of {', '.join(names())}")
        name = policy or name
        preset = given.pop("preset", None)
        self.policy_name = f"{name}:{preset}" if preset else name
        taken = inspect.signature(HFLM.__init__).parameters.keys() - {"self", "kwargs"}
        self.settings, self.policy, passed = settings.part(self.policy_name, given, taken)
        self.load(pretrained, passed)
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            raise UsageError("peft adapters that learn prompts are not supported: use one that changes weights, such as LoRA")
        self.batch_documents = int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else None
        self.engine = Engine(
            self._base(), self.settings.attn, self.settings.row_tokens, self.settings.prefill_chunk, self.batch_documents,
            offload=self.settings.offload,
            calibration=lambda: self.tok_encode((room("tasks") / "calibration.txt").read_text(encoding="utf-8")),
        )  # fmt: skip
        self.explicit_bos = "add_bos_token" in passed
        self.records: dict[str, Record] = {}
        self.stored: dict[str, Stored] = {}  # what prompts take in blocks, by task

    def load(self, pretrained: Any, passed: dict[str, Any]) -> None:
        """Let lm-eval load the model; say in one line why it cannot."""
        where = (
            settings.located(pretrained, passed)
            if pretrained is None or isinstance(pretrained, str)
            else {"pretrained": pretrained}
        )
        passed = {"device": "cuda" if torch.cuda.is_available() else "cpu", **passed, **where, "batch_size": 1}
        if passed.get("backend", "causal") not in ("causal", "default"):
            raise UsageError(f"backend={passed['backend']} is not supported: policies need a decoder-only model")
        try:
            super().__init__(**{**passed, "backend": "causal"})
        except UsageError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"pretrained={where['pretrained']} cannot be loaded ({type(error).__name__}: {reason}): give a model folder, a GGUF file, "
                "a hub name that can be reached, or nothing for the default model"
            ) from error

    def _base(self) -> Any:
        """The transformers model under any adapter."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def token_bytes(self) -> dict[int | None, int]:
        """What a token takes in the layers of each sliding window, and in those without, as `evalkit size` reckons it."""
        return token_bytes(attention.shape(self.engine.model.config))

    # What lm-eval asks

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each request's continuation after its context; results in the requests' order."""
        asked = [self.encoded(i, request) for i, request in enumerate(requests)]
        return self.answered(asked, self.settings.protocol, "scoring", disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        asked = [Request(i, "tokens", tuple(context), tuple(answer), str(i)) for i, (_, context, answer) in enumerate(requests)]
        return self.answered(asked, self.settings.protocol, "scoring", disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, token by token under the budget (protocol=stream), in windows of the model's length."""
        self.policy.check("stream")
        asked: list[Request] = []
        owner = []
        for number, request in enumerate(requests):
            for context, answer in self.windows(request.args[0]):
                asked.append(
                    Request(
                        len(asked),
                        request.task_name or "rolling",
                        tuple(context),
                        tuple(answer),
                        f"doc {request.doc_id}",
                        rolling=True,
                    )
                )
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owner, self.answered(asked, "stream", "rolling", disable_tqdm), strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each request's context under the policy until a stop sequence."""
        asked = [self.to_continue(number, request) for number, request in enumerate(requests)]
        texts = [""] * len(asked)
        with progress(disable_tqdm or self.rank != 0) as bar:
            for task, same in by_task(asked).items():
                record, ready = self.records.setdefault(task, Record()), self.admit(same, self.records[task])
                bar_id = bar.add_task(f"generating {task}", total=len(ready))
                documents, tallies = [], []
                for request in ready:
                    texts[request.number], document, tally = self.continued(request, requests[request.number].args[1], record)
                    documents.append(document)
                    tallies.append(tally)
                    bar.advance(bar_id)
                if documents:
                    record.add(documents, torch.cat(tallies, 1))
                    self.store(task, documents)
                    refuse_idle(self.policy, documents, torch.cat(tallies, 1))
        return texts

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's response cache: it would hand one policy's answers to another."""
        raise UsageError(
            "--use_cache is not possible with kv models (its key is the request alone, whatever the policy): leave it out"
        )

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's own, and the ledger under the key `evalkit`."""
        return {**super().get_model_info(), "evalkit": self.ledger()}

    # How it is answered

    def encoded(self, number: int, request: Instance) -> Request:
        """Tokenise one request as lm-eval does."""
        where = f"{request.task_name} document {request.doc_id}"
        return Request(number, request.task_name or "requests", *self.paired(*request.args), where)

    def paired(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of a context and of its continuation, as lm-eval parts them."""
        if context:
            prompt, answer = self._encode_pair(context, continuation)
        else:
            prompt, answer = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            if answer[:1] == prompt:
                prompt, answer = answer[:1], answer[1:]
        return tuple(prompt), tuple(answer)

    def windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Cut a text into windows of context and continuation, as lm-eval does."""
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [make_disjoint_window(window) for window in windows]

    def answered(self, asked: Sequence[Request], protocol: str, verb: str, quiet: bool) -> list[tuple[float, bool]]:
        """Check all requests, then score them task by task."""
        answers = [(float("-inf"), False)] * len(asked)
        tasks, ready = by_task(asked), {}
        for task, requests in tasks.items():
            record = self.records.setdefault(task, Record())
            ready[task] = self.admit(requests, record)
        with progress(quiet or self.rank != 0) as bar:
            for task, requests in ready.items():
                documents, where = gathered(requests)
                scores = self.scored(task, documents, protocol, bar, verb)
                for request in requests:
                    document, place = where[request.number]
                    answers[request.number] = (scores[document][place].logprob, scores[document][place].greedy)
        return answers

    def scored(self, task: str, documents: list[Document], protocol: str, bar: Progress, verb: str) -> list[list[Score]]:
        """Score one task's documents and enter what it cost."""
        record, self.engine.counters = self.records[task], Counters()
        bar_id = bar.add_task(f"{verb} {task}", total=len(documents))
        with self.engine.counters.phase("total"):
            (cell,) = self.engine.score(documents, [self.policy], protocol, lambda done: bar.advance(bar_id, done))
        record.add(documents, cell.tally)
        self.store(task, documents)
        record.spent(self.engine.counters)
        refuse_idle(self.policy, documents, cell.tally)
        return cell.scores

    def store(self, task: str, documents: Sequence[Document]) -> None:
        """Count what the prompts of documents take in blocks; texts that are scored as a whole have none."""
        if prompts := [document.taken for document in documents if document.length is None]:
            self.stored.setdefault(task, Stored(self.token_bytes)).add(prompts)

    def to_continue(self, number: int, request: Instance) -> Request:
        """Tokenise one context, with room for what may be said."""
        room = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
        sampler(self.generation(request.args[1])[0])  # refused before anything is computed
        where = f"{request.task_name} document {request.doc_id}"
        return Request(number, request.task_name or "requests", tuple(self.tok_encode(request.args[0])), (0,) * room, where)

    def generation(self, given: dict[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """Part generation arguments into those of sampling, the stop sequences and the most tokens to say."""
        rest = normalize_gen_kwargs(given, self.max_gen_toks)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops, limit = handle_stop_sequences(rest.pop("until", None), eos=eos), rest.pop("max_gen_toks")
        return rest, stops, limit

    def continued(self, request: Request, given: dict[str, Any], record: Record) -> tuple[str, Document, torch.Tensor]:
        """Continue one context; return the text, the tokens, and what they cost."""
        rest, stops, limit = self.generation(given)
        self.engine.counters, tally = Counters(), Tally(1, self.engine.device)
        session = self.engine.open(self.policy, self.settings.protocol, tally)
        with self.engine.counters.phase("total"):
            session.feed(request.prompt)
            stopped = lambda said: said[-1] == self.eot_token_id or any(stop in self.tok_decode(said) for stop in stops)  # noqa: E731
            said = session.generate(limit, stopped, sampler(rest))
        record.spent(self.engine.counters)
        text = postprocess_generated_text(self.tok_decode(said), stops, self.think_end_token)
        return text, Document(request.prompt, (tuple(said),)), tally.totals()

    def admit(self, requests: Sequence[Request], record: Record) -> list[Request]:
        """Check requests before anything is computed; return those to be scored."""
        if not requests[0].rolling:
            check_start(requests, self.tokenizer, self.explicit_bos)
        ready = admitted(requests, self.longest, self.settings.overlength, record)
        if record.skipped:
            print(
                f"evalkit: {requests[0].task}: {record.skipped} documents are too long and were skipped; lm-eval still counts them, "
                "as if the first choice had been picked",
                file=sys.stderr,
            )
        return ready

    @property
    def longest(self) -> int:
        """The positions that a request may take: a simulation takes in an answer's last token, too."""
        return int(self.max_length) - ("whole_answer" in self.policy.needs)

    def ledger(self) -> dict[str, Any]:
        """Return what identifies the run, and each task's record."""
        return {
            "protocol": self.settings.protocol,
            "policy": self.policy_name,
            "knobs": self.policy.knobs,
            "budget": str(self.policy.budget),
            "attn": self.settings.attn,
            "model_digest": digest(self._base()),
            "memory": peak_memory(self.engine.device),
            "tasks": {task: record.as_dict() for task, record in self.records.items()},
            "paged": {task: stored.as_dict() for task, stored in self.stored.items()},
            **({"moved": self.engine.host.as_dict()} if self.engine.host.stored else {}),
        }


def progress(quiet: bool) -> Progress:
    """A progress bar over documents with the time left, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def plain_hf(pretrained: str, **given: Any) -> HFLM:
    """Return lm-eval's own `hf` model, to compare with."""
    return HFLM(pretrained, **given)
