"""Records InfiniGen: the fetch masks of both accuracy files, skew, partial channels, and the faster code's choices."""

import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from recording.checkout import Source
from recording.stand_ins import ROTATED_ALREADY, causal, hidden, project, settings
from recording.tensors import bits, drawn, given, heads, normal, rounded, settled

REPOSITORY = "snu-comparch/InfiniGen"
MASKS = [
    (800, 24, 4.0, 0.2, 1.0, "counter"),
    (803, 24, 1.0, 0.5, 1.0, "counter"),
    (806, 30, 5.0, 0.4, 1.0, "counter"),
    (809, 24, 0.25, 0.3, 1.0, "counter"),
    (812, 24, 4.0, 0.2, 0.75, "fifo"),
    (815, 24, 4.0, 0.2, 0.75, "lru"),
    (818, 24, 4.0, 0.2, 0.75, "counter"),
]


def fixtures(folder: Path) -> Iterator[tuple[str, Source, list[dict[str, Any]]]]:
    """Every fixture of InfiniGen."""
    for name, file, function, record in FIXTURES:
        source = Source(folder / "InfiniGen", REPOSITORY, file, function)
        yield name, source, record(source)


def masks(source: Source) -> list[dict[str, Any]]:
    """Which keys each row fetches for guessed scores: queries times keys over the root of the head size."""
    return [_mask_case(source, *case) for case in MASKS]


def _mask_case(
    source: Source, seed: int, tokens: int, alpha: float, budget: float, capacity: float, eviction: str
) -> dict[str, Any]:
    inputs = heads(seed, query_heads=4, heads=4, tokens=tokens, size=8, sharp=1.5)
    del inputs["values"]
    parameters = {"alpha": alpha, "budget": budget, "capacity": capacity, "eviction_policy": eviction}
    expected = settled(partial(_run_mask, source, inputs, parameters), "mask")
    name = f"alpha {alpha}, budget {budget} of {tokens}, capacity {capacity} {eviction}"
    return {"name": name, "inputs": inputs, "parameters": parameters, "expected": expected}


def _run_mask(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    queries, keys = given(inputs["queries"], dtype), given(inputs["keys"], dtype)
    guess = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
    guess = guess[None] if "llama" in source.file else guess
    choose = next(found for name, found in source.borrow().items() if name.endswith("Attention")).kv_cache_mask
    mask, density = choose(SimpleNamespace(**parameters), guess)
    return {"mask": bits(mask.view(queries.shape[0], *mask.shape[-2:]) == 0), "density": density}


def attention(source: Source) -> list[dict[str, Any]]:
    """A whole attention layer of the Llama file, from hidden states: guess, rotation, skew, channels, mask, output."""
    inputs = {"hidden": normal(830, [24, 256]), "previous": normal(831, [24, 256]), "channels": normal(835, [2, 128])}
    inputs |= {name: normal(seed, [256, 256], 1 / 16) for name, seed in zip("qkv", (832, 833, 834), strict=True)}
    inputs["skew"] = normal(836, [2, 128, 128], 0.0883)
    parameters = {"alpha": 2.0, "budget": 0.25, "capacity": 1.0, "eviction_policy": "counter", "channels_above": 0.5}
    expected = settled(partial(_run_attention, source, inputs, parameters), "mask")
    return [{"name": "two heads of 128", "inputs": inputs, "parameters": parameters, "expected": expected}]


def _run_attention(source: Source, inputs: dict[str, Any], parameters: dict[str, Any], dtype: torch.dtype) -> Any:
    drawn = {name: given(described, dtype) for name, described in inputs.items()}
    layer = source.borrow()["LlamaAttention"](settings(2, 2, 128), layer_idx=2)
    for name in "qkv":
        getattr(layer, f"{name}_proj").weight.data = drawn[name]
    layer.o_proj = torch.nn.Identity()
    layer.previous_hidden_states, layer.skewing_matrix = drawn["previous"][None], drawn["skew"]
    layer.partial_weight_q = (drawn["channels"].flatten() > parameters["channels_above"]).to(dtype)[None].repeat(256, 1)
    for name in ("alpha", "budget", "capacity", "eviction_policy"):
        setattr(layer, name, parameters[name])
    places, mask = torch.arange(24)[None], causal(24, dtype)
    with torch.no_grad():
        output, weights, _ = layer(drawn["hidden"][None], mask, places, output_attentions=True)
    last = rounded(output[0, -1].view(2, 128)[:, :8], 5)
    return {"mask": bits(weights[0] > 0), "density": layer.density, "last_output_first_8": last}


def channels(source: Source) -> list[dict[str, Any]]:
    """The channels a head's guess may use: the union of the largest of skewed queries and of skewed keys."""
    cases = []
    for seed, ratio in ((840, 0.2), (845, 0.3), (850, 0.5)):
        inputs = heads(seed, query_heads=2, heads=2, tokens=24, size=16) | {"skew": normal(seed + 3, [2, 16, 16], 0.25)}
        parameters = {"partial_weight_ratio": ratio}
        expected = settled(partial(_run_channels, source, inputs, parameters), "channels")
        cases.append({"name": f"ratio {ratio}", "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def _run_channels(source: Source, inputs: dict[str, Any], parameters: dict[str, float], dtype: torch.dtype) -> Any:
    (queries, keys, values), skew = drawn(inputs, dtype), given(inputs["skew"], dtype)
    layer = source.borrow(ROTATED_ALREADY)["LlamaAttention"](settings(2, 2, 16))
    project(layer, queries, keys, values)
    layer.q_proj.weight = torch.nn.Parameter(torch.zeros(32, 32))
    layer.skewing_matrix, layer.partial_weight_q = skew, None
    layer.partial_weight_ratio = parameters["partial_weight_ratio"]
    layer(hidden(0, 24, 32, dtype), causal(24, dtype))
    return {"channels": bits(layer.partial_weight_q[0].view(2, 16) > 0)}


def offline_skew(source: Source) -> list[dict[str, Any]]:
    """The skewing matrix of each head, float16, columns up to sign, for given queries and keys of one layer."""
    inputs = heads(860, query_heads=2, heads=2, tokens=32, size=8, sharp=2.0)
    del inputs["values"]
    queries, keys = given(inputs["queries"]), given(inputs["keys"])
    layer = SimpleNamespace(rope_query=queries[None], rope_key=keys[None], head_dim=8, num_heads=2)
    model, library = mock.MagicMock(), mock.MagicMock()
    model.model.layers = [SimpleNamespace(self_attn=layer)]
    library.from_pretrained.return_value.cuda.return_value = model
    library.from_pretrained.return_value.num_hidden_layers = 1
    with tempfile.TemporaryDirectory() as folder:
        _run_script(source, library, folder)
        skew = torch.load(f"{folder}/model.pt")[0]
    expected = {"skew": rounded(skew.float(), 5)}
    return [{"name": "two heads of 8", "inputs": inputs, "parameters": {}, "expected": expected}]


def _run_script(source: Source, library: Any, folder: str) -> None:
    """Runs the repository's script, which asks for a GPU, with its device left where it is."""
    options = mock.MagicMock()
    options.return_value.parse_args.return_value = SimpleNamespace(model="model", output=folder)
    names = dict.fromkeys(("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"), library)
    move = torch.Tensor.to
    with mock.patch.object(torch.Tensor, "to", lambda tensor, goal: tensor if goal == "cuda" else move(tensor, goal)):
        quiet = {"print": lambda *_: None, "open": lambda *_: io.StringIO(), "set_symlink": lambda *_: None}
        source.borrow({**names, **quiet, "process_options": options})["main"]()


def warm_up_skew(source: Source) -> list[dict[str, Any]]:
    """The skew as the faster code computes it: weights that are the identity come out as the matrix turned over."""
    inputs = heads(860, query_heads=2, heads=2, tokens=32, size=8, sharp=2.0)
    del inputs["values"]
    queries, keys = (given(inputs[name]).transpose(0, 1)[None] for name in ("queries", "keys"))
    weights = [torch.eye(16, dtype=torch.float16) for _ in range(2)]
    turned, _ = source.borrow()["skew"](queries, keys, *weights, 2, 8)
    skew = torch.stack([turned[:8, :8].T, turned[8:, 8:].T])
    expected = {"skew": rounded(skew.float(), 5)}
    return [{"name": "two heads of 8", "inputs": inputs, "parameters": {}, "expected": expected}]


def runtime_channels(source: Source) -> list[dict[str, Any]]:
    """The channels the faster code takes from the prompt's queries alone."""
    cases = []
    for seed, ratio in ((870, 0.2), (871, 0.5)):
        inputs, parameters = {"queries": normal(seed, [2, 24, 16])}, {"partial_weight_ratio": ratio}
        queries = given(inputs["queries"]).transpose(0, 1).reshape(1, 24, 32)
        chosen = source.borrow()["partial_weight_index_generation"](queries, 2, 16, ratio)[0]
        expected = {"channels": chosen.sort(dim=-1).values.tolist()}
        cases.append({"name": f"ratio {ratio}", "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def speculation(source: Source) -> list[dict[str, Any]]:
    """The past tokens the faster code fetches at one decoding step, per head."""
    cases = []
    for seed, alpha, most in ((880, 4, 10), (885, 2, 10), (890, 1, 400), (895, 8, 5)):
        inputs = {
            "hidden": normal(seed, [32]),
            "query_weights": normal(seed + 1, [12, 32], 0.25),
            "keys": normal(seed + 2, [4, 30, 3]),
        }
        parameters = {"alpha": alpha, "max_num_kv": most}
        expected = settled(partial(_run_speculation, source, inputs, parameters), "read")
        name = f"alpha {alpha}, at most {most} of 30"
        cases.append({"name": name, "inputs": inputs, "parameters": parameters, "expected": expected})
    return cases


def _run_speculation(source: Source, inputs: dict[str, Any], parameters: dict[str, int], dtype: torch.dtype) -> Any:
    state, weights, keys = (given(inputs[name], dtype) for name in ("hidden", "query_weights", "keys"))
    choose = source.borrow()["speculate_attention"]
    chosen = choose(state[None, None], weights, keys.transpose(0, 1), 4, parameters["alpha"], parameters["max_num_kv"])
    return {"read": chosen[:, 0].T.sort(dim=-1).values.tolist()}


LLAMA = "accuracy/src/modeling_llama_ours.py"
WHOLE_LLAMA = "LlamaRotaryEmbedding, rotate_half, apply_rotary_pos_emb, LlamaAttention"
FASTER = "speedup/infinigen/infinigen"
FIXTURES: list[tuple[str, str, str, Any]] = [
    ("infinigen_llama", LLAMA, "LlamaAttention", masks),
    ("infinigen_opt", "accuracy/src/modeling_opt_ours.py", "OPTAttention", masks),
    ("infinigen_attention", LLAMA, WHOLE_LLAMA, attention),
    ("infinigen_channels", "accuracy/src/modeling_llama_ours_setup.py", "LlamaAttention", channels),
    ("infinigen_skew", "accuracy/setup/gen_llama_skewing_matrix.py", "main", offline_skew),
    ("infinigen_faster_skew", f"{FASTER}/skewing_controller.py", "skew", warm_up_skew),
    (
        "infinigen_faster_channels",
        f"{FASTER}/partial_weight_generation_controller.py",
        "partial_weight_index_generation",
        runtime_channels,
    ),
    ("infinigen_faster_choice", f"{FASTER}/kv_selection_controller.py", "speculate_attention", speculation),
]
