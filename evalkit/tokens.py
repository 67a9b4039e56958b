"""What one layer makes of a packed row's tokens, and which of them a job is about; knows no cache and no policy.

Shapes: N tokens in the row, B sequences of a job, H key/value heads, G queries per head, T tokens a sequence, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .kernels import Kernel
from .layer import Layer


class Places:
    """Which of the row's tokens [B, T] a job is about. Those that lie in one piece are looked at where they are, not copied."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.numbers: list[int] = index.flatten().tolist()
        self.start = self.numbers[0] if self.numbers and self.together() else None

    def together(self) -> bool:
        """Whether they lie in one piece, in order."""
        return self.numbers == list(range(self.numbers[0], self.numbers[0] + len(self.numbers)))

    def of(self, tensor: Tensor) -> Tensor:
        """Return their rows of `tensor` [N, ...], as [B, T, ...]."""
        shape = (*self.index.shape, *tensor.shape[1:])
        if self.start is None:
            return tensor.index_select(0, self.index.flatten()).view(shape)
        return tensor.narrow(0, self.start, self.index.numel()).unflatten(0, self.index.shape)

    def set(self, tensor: Tensor, rows: Tensor) -> None:
        """Set their rows of `tensor` [N, ...] to `rows` [B, T, ...]."""
        if self.start is None:
            tensor.index_copy_(0, self.index.flatten(), rows.flatten(0, 1))
        else:
            self.of(tensor).copy_(rows)


@dataclass
class Tokens:
    """What one layer made of the row's tokens, and where their outputs go."""

    layer: Layer
    query: Tensor  # [N, H, G, D]
    keys: Tensor  # [N, H, D]
    values: Tensor  # [N, H, D]
    guess: Tensor | None  # [N, H, G, D] what the layer would have asked of the previous layer's input
    output: Tensor  # [N, H, G, D]
    kernel: Kernel
    asked: frozenset[int] | None = None  # whose outputs matter; None: all

    def queries(self, places: Places) -> Tensor:
        """[B, H, G, T, D] the queries of the tokens at `places` [B, T]."""
        return places.of(self.query).permute(0, 2, 3, 1, 4)

    def guesses(self, places: Places) -> Tensor | None:
        """As `queries`, for the guessed ones."""
        return None if self.guess is None else places.of(self.guess).permute(0, 2, 3, 1, 4)

    def entries(self, places: Places) -> tuple[Tensor, Tensor]:
        """The keys and values [B, H, T, D] of the tokens at `places` [B, T]."""
        return places.of(self.keys).transpose(1, 2), places.of(self.values).transpose(1, 2)

    def matter(self, places: Places) -> bool:
        """Whether the output of any token at `places` is of use: in the last layer it is only where a prediction is read."""
        return self.asked is None or not self.asked.isdisjoint(places.numbers)

    def put(self, places: Places, output: Tensor) -> None:
        """Set the outputs of the tokens at `places` [B, T] to `output` [B, H, G, T, D]."""
        places.set(self.output, output.permute(0, 3, 1, 2, 4))
