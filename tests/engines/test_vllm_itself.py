"""vLLM beside the full cache: one tokenizer, the same log-likelihoods, texts and refusals, counters of its own, and its chat server."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from urllib.request import urlopen

import pytest
from lm_eval.api.instance import Instance

from evalkit import harness
from evalkit.errors import UsageError
from evalkit.harness import versus
from evalkit.harness.tasks import Tasks
from evalkit.harness.vllm import VllmLM
from evalkit.rooms import room
from tests.saved import save
from tests.test_endpoint import REAL, run
from tests.test_retention_chat import TURNED

LIBRARIES = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning")
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
    pytest.mark.filterwarnings(*LIBRARIES),
]
CLOSE = 1e-3
SPOKEN = "Of a text that is longer than a block of vLLM's cache on CPUs, which has 128 tokens, a byte each here. " * 2
PAIRS = [("The cat sat", " on the mat"), ("The cat sat", " down"), ("A", "b"), ("", "No context"), ("Blanks  ", "x"), (SPOKEN, "y")]
CHILD = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


def requests(*pairs, kind="loglikelihood", task="made"):
    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=(task, number, 1)) for number, pair in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny chat model with heads as wide as vLLM's kernels on CPUs take them."""
    folder = save(tmp_path_factory.mktemp("tiny"), head_dim=32)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TURNED}))
    return folder


@pytest.fixture(scope="module")
def vllm(folder) -> Iterator[VllmLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, which starts sooner
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield VllmLM(str(folder), dtype="float32", max_length=400)


@pytest.fixture(scope="module")
def full(folder):
    return harness.kv_full(str(folder), dtype="float32", device="cpu", max_length=400)


def test_log_likelihoods_are_the_full_caches(vllm, full):
    wanted, found = (lm.loglikelihood(requests(*PAIRS), disable_tqdm=True) for lm in (full, vllm))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=CLOSE)


def test_of_all_tokens_the_same_one_is_greedy(vllm, full):
    prompt = full.tok_encode("Once upon a time")
    asked = [(None, prompt, [token]) for token in range(full.vocab_size)]
    wanted, found = (lm._loglikelihood_tokens(asked, disable_tqdm=True) for lm in (full, vllm))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert sum(greedy for _, greedy in found) == 1


def test_whole_texts_are_cut_into_the_same_windows(vllm, full):
    asked = requests((SPOKEN * 4,), ("Short.",), kind="loglikelihood_rolling")
    wanted, found = (lm.loglikelihood_rolling(asked, disable_tqdm=True) for lm in (full, vllm))
    assert found == pytest.approx(wanted, abs=CLOSE)


def test_texts_end_where_the_full_caches_end(vllm, full):
    stops = (["e"], [" ", "q"], [])
    asked = requests(*[("A dog", {"until": until, "max_gen_toks": 12}) for until in stops], kind="generate_until")
    wanted, found = (lm.generate_until(asked, disable_tqdm=True) for lm in (full, vllm))
    assert found == wanted
    assert found[2]


def test_drawn_texts_differ_by_seed_alone(vllm):
    given = [{"do_sample": True, "temperature": 1.5, "seed": seed, "max_gen_toks": 12, "until": []} for seed in (1, 1, 2)]
    one, again, other = vllm.generate_until(requests(*[("A dog", one) for one in given], kind="generate_until"), disable_tqdm=True)
    assert one == again != other
    with pytest.raises(UsageError, match="'num_beams' is not supported"):
        vllm.generate_until(requests(("A dog", {"num_beams": 2}), kind="generate_until"), disable_tqdm=True)


def test_tasks_have_the_full_caches_results(vllm, full):
    tasks = Tasks([f"mini_{name}" for name in ("piqa", "winogrande", "copa")], [str(room("tasks") / "mini")], limit=4)
    wanted, found = tasks.evaluate(full)["results"], tasks.evaluate(vllm)["results"]
    assert {task: {name: found[task][name] for name in metrics} for task, metrics in wanted.items()} == wanted


def test_generation_reads_cached_prefixes_and_scoring_does_not(vllm):
    asked = (SPOKEN, {"until": [], "max_gen_toks": 5})
    first, second = (vllm.generate_until(requests(asked, kind="generate_until", task=task)) for task in ("first", "second"))
    vllm.loglikelihood(requests((SPOKEN, "z"), task="scored"))
    tasks = vllm.ledger()["tasks"]
    assert first == second
    assert (tasks["second"]["prefix_hits"], tasks["second"]["cached_tokens"], tasks["scored"]["cached_tokens"]) == (128, 128, 0)
    assert "prefix_hits" not in tasks["scored"], "no request looked for any"


def test_the_ledger_holds_vllms_counters_and_no_zero_for_what_is_missing(vllm):
    vllm.generate_until(requests(("A cat", {"until": [], "max_gen_toks": 4}), kind="generate_until", task="said"))
    vllm.loglikelihood(requests(("A cat", "y"), task="one token"))
    ledger = vllm.get_model_info()["evalkit"]
    said, scored = ledger["tasks"]["said"], ledger["tasks"]["one token"]
    assert ledger["engine"].startswith("vllm ") and ledger["prefix_caching"] is True
    assert (said["requests"], said["documents"], said["generated_tokens"], said["answer_tokens"]) == (1, 1, 4, 4)
    assert all(said[name]["p50"] > 0 for name in ("ttft", "tpot", "prefill_seconds", "decode_seconds", "latency_seconds"))
    assert said["latency_seconds"]["p50"] >= said["ttft"]["p50"] and said["queue_seconds"]["p50"] >= 0
    assert 0 < said["cache_usage_peak"] <= 1
    assert {"tpot", "decode_seconds", "held", "read", "acted", "bytes"}.isdisjoint(scored)
    assert json.loads(json.dumps(ledger)) == ledger


def test_what_is_too_long_is_refused_before_anything_is_computed(vllm):
    fits, long = ("x" * 400, "y"), ("x" * 401, "y")
    assert vllm.loglikelihood(requests(fits), disable_tqdm=True)[0][0] < 0
    with pytest.raises(UsageError, match="401 \\+ 1 tokens are more than the model's 400 positions"):
        vllm.loglikelihood(requests(fits, long), disable_tqdm=True)


def test_what_vllm_refuses_is_one_line(folder):
    with pytest.raises(UsageError, match=r"cannot be used \(.*\): mend the argument, or give less max_length") as error:
        VllmLM(str(folder), dtype="float32", max_length=10**6)
    assert "\n" not in str(error.value)


def test_side_by_side_all_sides_agree(vllm, full):
    task = Tasks(["mini_copa"], [str(room("tasks") / "mini")], limit=6)
    sides = {name: lambda asked, lm=lm: lm.loglikelihood(asked, disable_tqdm=True) for name, lm in (("kv_full", full), ("v", vllm))}
    rows = versus.compared(task, sides, repeats=2)
    assert [(row.side, row.answers, row.flags, len(row.seconds)) for row in rows] == [("kv_full", 0, 0, 2), ("v", 0, 0, 2)]
    assert rows[0].accuracy == rows[1].accuracy and rows[0].furthest == 0 < rows[1].furthest < CLOSE
    page = versus.page(rows, "made by hand", 6)
    assert "mini_copa | v |" in page.replace("\\", "") and "made by hand" in page and "vllm 0." in page


def test_lm_evals_own_command_runs_it_on_a_real_model(tmp_path):
    words = ["--model_args", "dtype=float32", "--include_path", str(room("tasks") / "mini"), "--tasks", "mini_copa", "--limit", "8"]
    results = []
    for model in ("kv_full", "kv_vllm"):
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            model,
            *words,
            "--log_samples",
            "--output_path",
            str(tmp_path / model),
        ]
        done = subprocess.run(command, env=CHILD, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        (path,) = (tmp_path / model).rglob("samples_*.jsonl")
        results.append([json.loads(line) for line in path.read_text().splitlines()])
    told = [[(float(answer[0][0]), answer[0][1]) for sample in samples for answer in sample["resps"]] for samples in results]
    assert len(told[0]) == 16
    assert [greedy for _, greedy in told[1]] == [greedy for _, greedy in told[0]]
    assert [logprob for logprob, _ in told[1]] == pytest.approx([logprob for logprob, _ in told[0]], abs=CLOSE)


START = 240  # seconds within which a server has to answer


@contextmanager
def served(*command: str, port: int, log: Path) -> Iterator[str]:
    """A server that answers; one that ends before it does, or does not in time, fails the test with the end of what it said."""
    url = f"http://127.0.0.1:{port}/v1"
    with (
        log.open("wb") as said,
        subprocess.Popen(command, env=CHILD, stdout=said, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            deadline = monotonic() + START
            while not answers(f"{url}/models"):
                assert process.poll() is None and monotonic() < deadline, log.read_text(errors="replace")[-3000:]
                sleep(1)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_retention_test_of_its_chat_has_the_answers_of_transformers(folder, tmp_path):
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports.append(taken.getsockname()[1])
    # what `vllm serve` runs; the command itself asks for a distribution called vllm, which vllm-cpu is not
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    vllm += ["--served-model-name", "tiny", "--port", str(ports[0])]
    vllm += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "1G", "--generation-config", "vllm"]
    theirs = [sys.executable, "-m", "tests.serve", str(folder), str(ports[1])]
    found = []
    for port, command in zip(ports, (vllm, theirs), strict=True):
        with served(*command, port=port, log=tmp_path / f"{port}.log") as url:
            queries = run(url, tmp_path / str(port), **{**REAL, "tokenizer": str(folder), "conversations": "1"})
            # vLLM says the bytes of a letter once it has them all
            found.append([{**query, "answer": query["answer"].rstrip("\N{REPLACEMENT CHARACTER}")} for query in queries])
    assert len(found[0]) == 4 and found[0] == found[1]
