"""Choosing tokens: greedy unless sampling is asked for, seeded, cut as asked, and nothing else accepted."""

import pytest
import torch

from evalkit.errors import UsageError
from evalkit.sampling import sampler

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def drawn(**given):
    choose = sampler({"do_sample": True, "seed": 3, **given})
    return {choose(LOGITS) for _ in range(300)}


def test_greedy_is_the_default_and_what_no_temperature_means():
    assert sampler({}) is None
    assert sampler({"do_sample": False, "temperature": 0.7}) is None
    assert sampler({"do_sample": True, "temperature": 0.0}) is None


def test_sampling_without_a_temperature_samples_at_one():
    assert drawn() == {0, 1, 2, 3}


def test_the_top_k_are_drawn_from():
    assert drawn(top_k=2) == {0, 1}


def test_the_nucleus_is_of_what_top_k_left():
    """Of 0.4 and 0.3 the first alone makes up 0.55; of all four it would not."""
    assert drawn(top_k=2, top_p=0.55) == {0}
    assert drawn(top_p=0.55) == {0, 1}


def test_the_seed_decides():
    one, same, other = (sampler({"do_sample": True, "seed": seed}) for seed in (1, 1, 2))
    first, again, third = ([choose(LOGITS) for _ in range(30)] for choose in (one, same, other))
    assert first == again != third


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"'tempreature' is not supported.*'temperature'"):
        sampler({"tempreature": 1.0})
