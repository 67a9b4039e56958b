"""Policies behind lm-eval: the same numbers as its own `hf` with a full cache, honest ones without, and clear refusals."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from evalkit import harness
from evalkit.errors import UsageError
from evalkit.harness.tasks import Tasks
from evalkit.harness.worker import Asking, Pack, Worker
from evalkit.policies import build
from evalkit.rooms import room
from tests.saved import save

MINI = str(room("tasks") / "mini")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hf(folder) -> HFLM:
    return HFLM(str(folder), dtype="float64", device="cpu", batch_size=1)


def kv(folder, name="kv_full", **given):
    return getattr(harness, name)(str(folder), dtype="float64", device="cpu", **given)


def requests(*pairs, kind="loglikelihood", task="made"):
    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=(task, number, 1)) for number, pair in enumerate(pairs)
    ]


PAIRS = [
    ("The cat sat", " on the mat"),
    ("The cat sat", " down"),
    ("The cat slept", " on the mat"),
    ("A", "b"),
    ("", "No context at all"),
    ("Trailing blanks  ", "x"),
    ("The cat sat", " on the mat"),
]


class TestFull:
    @pytest.mark.parametrize("batch_size", [1, 3, "auto"])
    def test_it_equals_hf(self, folder, hf, batch_size):
        wanted = hf.loglikelihood(requests(*PAIRS), disable_tqdm=True)
        found = kv(folder, batch_size=batch_size).loglikelihood(requests(*PAIRS), disable_tqdm=True)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-9)

    def test_whole_texts_equal_hf(self, folder):
        text = requests(("A text of some length, longer than the window. " * 3,), ("Short.",), kind="loglikelihood_rolling")
        hf = HFLM(str(folder), dtype="float64", device="cpu", max_length=40)
        found = kv(folder, max_length=40).loglikelihood_rolling(text, disable_tqdm=True)
        assert found == pytest.approx(hf.loglikelihood_rolling(text, disable_tqdm=True), abs=1e-8)

    def test_generated_text_equals_hf(self, folder, hf):
        asked = requests(*[(text, {"until": ["e"], "max_gen_toks": 12}) for text in ("Once upon", "A dog")], kind="generate_until")
        assert kv(folder).generate_until(asked, disable_tqdm=True) == hf.generate_until(asked, disable_tqdm=True)

    def test_tasks_equal_hf(self, folder, hf):
        tasks = Tasks([f"mini_{name}" for name in ("piqa", "winogrande", "boolq")], [MINI], limit=4)
        wanted, found = tasks.evaluate(hf), tasks.evaluate(kv(folder))
        for task, metrics in wanted["results"].items():
            assert {name: found["results"][task][name] for name in metrics} == metrics


class TestPolicies:
    def test_h2o_changes_one_token_answers(self, folder):
        pairs = requests(*[(f"Is number {number} even?", answer) for number in range(5) for answer in ("y", "n")])
        full = kv(folder).loglikelihood(pairs, disable_tqdm=True)
        h2o = kv(folder, "kv_h2o", budget=0.1).loglikelihood(pairs, disable_tqdm=True)
        assert all(abs(a - b) > 1e-6 for (a, _), (b, _) in zip(full, h2o, strict=True))

    def test_h2o_at_a_full_budget_is_full(self, folder):
        full, h2o = (kv(folder, name).loglikelihood(requests(*PAIRS), disable_tqdm=True) for name in ("kv_full", "kv_h2o"))
        assert [a for a, _ in h2o] == pytest.approx([a for a, _ in full], abs=1e-10)

    def test_whole_texts_meet_the_policy(self, folder):
        text = requests(("A text of some length. " * 4,), kind="loglikelihood_rolling")
        full, h2o = kv(folder).loglikelihood_rolling(text), kv(folder, "kv_h2o", budget=0.2).loglikelihood_rolling(text)
        assert abs(full[0] - h2o[0]) > 1e-3

    def test_whole_texts_are_refused_by_policies_of_prompts(self, folder):
        with pytest.raises(UsageError, match="protocol=stream"):
            kv(folder, "kv_snapkv", budget=0.5).loglikelihood_rolling(requests(("Text.",), kind="loglikelihood_rolling"))

    def test_the_ledger_says_what_was_held_and_read(self, folder):
        lm = kv(folder, "kv_h2o", budget=0.1)
        lm.loglikelihood(requests(("x" * 101, "y")), disable_tqdm=True)
        ledger = lm.get_model_info()["evalkit"]
        record = ledger["tasks"]["made"]
        assert (ledger["policy"], ledger["budget"], ledger["protocol"]) == ("h2o", "10%", "prompt")
        assert record["held"] == 0.1
        assert record["read"] == pytest.approx(11 / 101)
        assert (record["acted"], record["prompt_tokens"], record["answer_tokens"]) == (1.0, 101, 1)
        assert 0.1 < record["held_bytes"] < 0.11
        assert json.loads(json.dumps(ledger)) == ledger

    def test_a_policy_from_a_file_works(self, folder, tmp_path):
        (tmp_path / "mine.py").write_text(MINE)
        lm = kv(folder, "kv", policy=f"{tmp_path}/mine.py:Newest", budget=0.5)
        lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
        assert lm.ledger()["tasks"]["made"]["held"] <= 0.5

    def test_a_policy_that_never_acts_is_an_error(self, folder, tmp_path):
        (tmp_path / "lazy.py").write_text(MINE.replace("return cache.keep(last(cache, granted(cache)))", "return cache"))
        with pytest.raises(UsageError, match="did nothing on"):
            kv(folder, "kv", policy=f"{tmp_path}/lazy.py", budget=0.5).loglikelihood(requests(*PAIRS), disable_tqdm=True)

    def test_generated_texts_are_in_the_ledger(self, folder):
        lm = kv(folder, "kv_h2o", budget=0.2)
        lm.generate_until(requests(("x" * 51, {"until": [], "max_gen_toks": 4}), kind="generate_until"), disable_tqdm=True)
        record = lm.ledger()["tasks"]["made"]
        assert (record["held"], record["acted"], record["prompt_tokens"]) == (0.2, 1.0, 51)
        assert record["computed_tokens"] >= 54

    def test_a_policy_that_never_acts_is_an_error_in_generation_too(self, folder, tmp_path):
        (tmp_path / "idle.py").write_text(MINE.replace("return cache.keep(last(cache, granted(cache)))", "return cache"))
        with pytest.raises(UsageError, match="did nothing on"):
            kv(folder, "kv", policy=f"{tmp_path}/idle.py", budget=0.5).generate_until(
                requests(("x" * 51, {"until": [], "max_gen_toks": 2}), kind="generate_until"), disable_tqdm=True
            )

    @pytest.mark.parametrize("task", ["mini_copa", "mini_winogrande"])
    def test_many_cells_in_one_pass_equal_each_alone(self, folder, task):
        tasks = Tasks([task], [MINI], limit=5)
        cells = [Asking("full", "100%"), *(Asking(name, budget) for name in ("h2o", "tova", "random") for budget in ("10%", "50%"))]
        worker = Worker(str(folder), {"dtype": "float64", "device": "cpu"}, {})
        encoded = worker.encoded(tasks.asked().items()[task])
        together = worker.score(Pack(task, encoded.documents, cells, "prompt", encoded.prefix))
        for cell, found in zip(cells, together.cells, strict=True):
            alone = tasks.evaluate(kv(folder, "kv", policy=cell.policy, budget=cell.budget))
            logprobs = [[round(logprob, 9) for logprob in own] for own in found.logprobs]
            assert logprobs == [[logprob for logprob, _ in own] for own in resps(alone)[task]], cell

    def test_sampling_is_seeded(self, folder):
        how = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 16}
        ask = lambda seed: requests(("Once", {**how, "seed": seed}), kind="generate_until")  # noqa: E731
        lm = kv(folder, "kv_h2o", budget=0.5)
        assert lm.generate_until(ask(1)) == lm.generate_until(ask(1))
        assert lm.generate_until(ask(1)) != lm.generate_until(ask(2))


MINE = '''
from dataclasses import dataclass
from evalkit.policy import Policy, granted, last


@dataclass(frozen=True, kw_only=True)
class Newest(Policy):
    """Keep the newest entries."""

    def evict(self, cache, query):
        return cache.keep(last(cache, granted(cache)))
'''


def resps(results):
    rounded = lambda sample: [(round(float(a), 9), b) for ((a, b),) in sample["resps"]]  # noqa: E731
    return {task: [rounded(sample) for sample in found] for task, found in results["samples"].items()}


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "line"),
        [
            ({"budgett": 0.1}, "unknown argument 'budgett'.*did you mean 'budget'"),
            ({"budget": 0}, "budget=0 is not allowed"),
            ({"budget": -1}, "budget=-1 is not allowed"),
            ({"budget": "nan"}, "budget=nan is not allowed"),
            ({"budget": 1.5}, "budget=1.5 is not allowed"),
            ({"budget": 1}, "budget=1 could mean"),
            ({"protocol": "streem"}, "protocol=streem is not allowed"),
            ({"attn": "flash"}, "attn=flash needs a CUDA device"),
            ({"preset": "papr"}, "did you mean 'paper'"),
            ({"every_step": "perhaps"}, "every_step='perhaps' is not allowed"),
            ({"truncation": True}, "truncation=True is not honoured: give overlength=truncate"),
            ({"mixed_precision_dtype": "float16"}, "mixed_precision_dtype=float16 is not honoured: give dtype"),
            ({"backend": "seq2seq"}, "backend=seq2seq is not supported"),
            ({"pretrained": "./nowhere"}, "pretrained=./nowhere does not exist"),
        ],
    )
    def test_bad_arguments_are_one_line(self, folder, given, line):
        with pytest.raises(UsageError, match=line) as error:
            harness.kv_h2o(**{"pretrained": str(folder), "device": "cpu", **given})
        assert "\n" not in str(error.value)

    def test_an_unknown_policy_is_refused_with_the_nearest(self, folder):
        with pytest.raises(UsageError, match=r"policy=h20 is not known.*'h2o'"):
            kv(folder, "kv", policy="h20")

    def test_a_policy_that_refuses_the_protocol_says_so(self, folder):
        with pytest.raises(UsageError, match="use protocol=prompt"):
            kv(folder, "kv_snapkv", protocol="stream", budget=0.5)

    def test_a_budget_over_every_prompt_is_refused(self, folder):
        with pytest.raises(UsageError, match="budget=5000 is over every prompt"):
            kv(folder, "kv_h2o", budget=5000).loglikelihood(requests(*PAIRS), disable_tqdm=True)

    def test_a_corrupt_model_file_is_one_line(self, folder, tmp_path):
        broken = save(tmp_path / "broken")
        (broken / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00nonsense")
        with pytest.raises(UsageError, match="cannot be loaded") as error:
            kv(broken)
        assert "\n" not in str(error.value)

    def test_an_empty_continuation_names_its_document(self, folder):
        with pytest.raises(UsageError, match="made document 1: no tokens in the continuation"):
            kv(folder).loglikelihood(requests(("Fine", " text"), ("Empty", "")), disable_tqdm=True)

    def test_two_bos_tokens_are_refused(self, folder):
        with pytest.raises(UsageError, match="begins with two BOS tokens"):
            kv(folder).loglikelihood(requests(("<s><s>twice", " x")), disable_tqdm=True)

    def test_lm_evals_response_cache_is_refused(self, folder, tmp_path):
        with pytest.raises(UsageError, match="--use_cache is not possible"):
            lm_eval.simple_evaluate(kv(folder, "kv_h2o", budget=0.5), tasks=["copa"], use_cache=str(tmp_path / "cache"))


class TestOverlength:
    LONG = (("x" * 50, " answer"), ("short", " answer"))

    def test_it_is_an_error_by_default(self, folder):
        with pytest.raises(UsageError, match="made document 0: 50 \\+ 7 tokens are more than the model's 40 positions"):
            kv(folder, max_length=40).loglikelihood(requests(*self.LONG), disable_tqdm=True)

    def test_truncating_keeps_the_end_as_hf_does_and_is_counted(self, folder):
        lm = kv(folder, max_length=40, overlength="truncate")
        hf = HFLM(str(folder), dtype="float64", device="cpu", max_length=40)
        found, wanted = (model.loglikelihood(requests(*self.LONG), disable_tqdm=True) for model in (lm, hf))
        assert [a for a, _ in found] == pytest.approx([a for a, _ in wanted], abs=1e-9)
        assert lm.ledger()["tasks"]["made"]["truncated"] == 1

    def test_skipping_is_counted_and_never_looks_like_a_score(self, folder):
        lm = kv(folder, max_length=40, overlength="skip")
        first, second = lm.loglikelihood(requests(*self.LONG), disable_tqdm=True)
        assert first == (float("-inf"), False)
        assert second[0] > float("-inf")
        assert lm.ledger()["tasks"]["made"]["skipped"] == 1


class TestTheCommand:
    def run(self, *arguments):
        command = [sys.executable, "-m", "lm_eval", *arguments, "--include_path", MINI, "--device", "cpu"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
        )

    def test_lm_eval_runs_a_policy_and_saves_the_ledger(self, folder, tmp_path):
        model_args = f"pretrained={folder},dtype=float64,budget=0.1"
        where = ("--tasks", "mini_copa", "--limit", "3", "--output_path", str(tmp_path))
        done = self.run("--model", "kv_h2o", "--model_args", model_args, *where)
        assert done.returncode == 0, done.stderr
        (results,) = tmp_path.rglob("results_*.json")
        ledger = json.loads(results.read_text())["config"]["evalkit"]
        assert ledger["tasks"]["mini_copa"]["documents"] == 3
        assert ledger["tasks"]["mini_copa"]["held"] <= 0.1

    def test_a_typo_ends_with_one_line(self, folder):
        done = self.run("--model", "kv_h2o", "--model_args", f"pretrained={folder},budgett=0.1", "--tasks", "mini_copa")
        assert done.returncode != 0
        assert "evalkit: error: unknown argument 'budgett' (did you mean 'budget'?)" in done.stderr
        assert "Traceback" not in done.stderr


class TestRealTasks:
    """On real data with the default model, where both are at hand."""

    def test_full_equals_hf_and_h2o_keeps_its_budget(self, data, tmp_path):
        from evalkit.data import use
        from evalkit.fetch import model_folder

        use(data, tmp_path)
        tasks = Tasks(["piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq"], [str(tmp_path)], limit=5)
        smol = str(model_folder("smollm2-135m-instruct"))
        hf, full = HFLM(smol, dtype="float32", device="cpu", batch_size=4), harness.kv_full(smol, dtype="float32", device="cpu")
        wanted, found = tasks.evaluate(hf), tasks.evaluate(full)
        for task in wanted["results"]:
            pairs = zip(flat(wanted, task), flat(found, task), strict=True)
            assert all(abs(a - b) < 1e-3 and c == d for (a, c), (b, d) in pairs), task
        full.policy, full.records = build("h2o", 0.1), {}
        h2o = tasks.evaluate(full)
        assert flat(h2o, "boolq") != flat(found, "boolq")
        held = full.ledger()["tasks"]["boolq"]["held"]
        assert held is not None
        assert held <= 0.1


def flat(results, task):
    return [(float(a), b) for sample in results["samples"][task] for ((a, b),) in sample["resps"]]
