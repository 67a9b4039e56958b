"""What policies prepare for a model, learned on a calibration text and kept on disk; knows neither policies nor the text."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import __version__, attention
from .attention import PreTrainedModel
from .counters import Counters
from .errors import UsageError
from .fetch import cache
from .kernels import Kernel
from .memory import Block
from .model import digest
from .policy import Model, Policy
from .row import Row
from .tokens import Tokens

LONGEST = 2048  # tokens of the text that are used
Prepared = Sequence[Mapping[str, Tensor]]  # for each attention layer, tensors by name


class Calibrated(Model, Protocol):
    """A model with a text to calibrate on."""

    model: PreTrainedModel
    calibration: Callable[[], Sequence[int]] | None


@dataclass
class Recording:
    """A job that notes what each layer asks and offers, in host memory."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, tokens: Tokens, counters: Counters) -> None:
        self.layers.append((tokens.query.permute(1, 2, 0, 3)[None].cpu(), tokens.keys.transpose(0, 1)[None].cpu()))


def projections(model: PreTrainedModel, tokens: Sequence[int], kernel: Kernel) -> list[tuple[Tensor, Tensor]]:
    """Return each attention layer's queries [1, H, G, T, D] and keys [1, H, T, D], rotated, on `tokens`; in host memory."""
    places, recording = list(range(len(tokens))), Recording()
    row = Row([Block(torch.tensor([places]), len(places), []), recording], Counters(), kernel)
    attention.run(model, row, list(tokens), places, places[-1:])
    return recording.layers


def text(model: PreTrainedModel, calibration: Callable[[], Sequence[int]] | None) -> list[int]:
    """Return the tokens to calibrate `model` on: those of the text, as many as are used and as the model has positions for."""
    most = min(LONGEST, getattr(model.config, "max_position_embeddings", LONGEST))
    tokens = list(calibration())[:most] if calibration else []
    if not tokens:
        raise UsageError(
            "the policy prepares on a calibration text and the engine has none: give Engine(calibration=...) its tokens"
        )
    return tokens


def prepared(policy: Policy, engine: Calibrated) -> Prepared:
    """Return what `policy` prepares for the engine's model: from disk, or anew where it is not there or cannot be read."""
    file = _file(policy, engine)
    layers = None if file is None else _load(file)
    if layers is None:
        layers = policy.prepare(engine)
        if file is not None:
            with suppress(OSError):  # a cache that cannot be written costs time, not results
                _save(file, layers)
    modules = attention.layers(engine.model)
    return [_placed(layer, module, engine.model.dtype) for layer, module in zip(layers, modules, strict=True)]


def _file(policy: Policy, engine: Calibrated) -> Path | None:
    """Return a path that names all that can change what is prepared; None for a policy whose code is in no file."""
    kind = type(policy)
    try:
        code = hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None
    what = [kind.__qualname__, code, policy.knobs, digest(engine.model), text(engine.model, engine.calibration)]
    key = hashlib.sha256(json.dumps([*what, __version__, torch.__version__], default=str).encode()).hexdigest()
    return cache().parent / "prepared" / f"{key[:32]}.safetensors"


def _save(file: Path, layers: Prepared) -> None:
    """Write under another name first, so that no reader meets half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{index}.{name}": tensor.contiguous() for index, layer in enumerate(layers) for name, tensor in layer.items()}
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        whole = Path(folder) / file.name
        save_file(tensors, whole, {"layers": str(len(layers))})
        os.replace(whole, file)


def _load(file: Path) -> Prepared | None:
    try:
        with safe_open(file, framework="pt") as stored:
            layers: list[dict[str, Tensor]] = [{} for _ in range(int(stored.metadata()["layers"]))]
            for key in stored.keys():  # noqa: SIM118 - the file is no mapping
                index, _, name = key.partition(".")
                layers[int(index)][name] = stored.get_tensor(key)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError):
        return None
    return layers


def _placed(layer: Mapping[str, Tensor], module: torch.nn.Module, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Bring a layer's tensors to the model's precision and to where its weights are (host memory where those come and go)."""
    device = next((weight.device for weight in module.parameters() if weight.device.type != "meta"), None)
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in layer.items()}
