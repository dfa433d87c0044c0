"""A linear layer as the decoder calls it: weights packed for the kernel that was chosen, several that share an input joined into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from qforge.ops.native import NativeDense, Packed
from qforge.ops.native_module import missing
from qforge.ops.select import choose
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Per

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """An unquantized weight `[O, I]` in the dtype in which the model stores it, and a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


Weight = QuantizedLinear | Dense


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One weight of a Linear.

    Attributes:
        product: `x [T, I] -> [T, O]`, both fp32.
        packed: what a native kernel runs, or None.
        held: bytes of what a GPU's kernel reads, or None.
    """

    product: Product
    out_features: int
    in_features: int
    packed: Packed | None = None
    held: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as its kernel reads it; those of fp32 where none but torch's does."""
        if self.held is not None:
            return self.held
        return 4 * self.out_features * self.in_features if self.packed is None else self.packed.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`x [T, I] -> [T, O]`, both fp32 (on a GPU both 16 bits): the outputs of its parts side by side.

    Attributes:
        kernel: its name, and why not a faster one.
    """

    kernel: str
    parts: tuple[Part, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x `[T, I]`: `[T, O]`."""
        return self.parts[0].product(x) if len(self.parts) == 1 else torch.cat([p.product(x) for p in self.parts], 1)


def linear(weight: Weight, threads: int | None = None, activations: str = "fp") -> Linear:
    """Pack a weight for the fastest kernel that runs it here."""
    if isinstance(weight, QuantizedLinear):
        choice = choose(weight.scheme, (weight.out_features, weight.in_features), threads=threads, activations=activations)
        prepacked = choice.kernel.prepack(weight)
        packed = prepacked if isinstance(prepacked, Packed) else None
        return Linear(choice.explain(), (Part(lambda x: choice.kernel.run(x, prepacked), weight.out_features, weight.in_features, packed),))
    out_features, in_features = weight.weight.shape
    if missing() is None:
        kernel = NativeDense(threads)
        tiles = kernel.prepack(weight.weight, weight.bias)
        return Linear(kernel.name, (Part(lambda x: kernel.run(x, tiles), out_features, in_features, tiles),))
    # torch's matrix product: its bits may depend on the number of rows
    w, b = weight.weight.float(), None if weight.bias is None else weight.bias.float()
    return Linear("torch", (Part(lambda x: torch.nn.functional.linear(x, w, b), out_features, in_features),))


def rows(weight: Weight, index: torch.Tensor) -> Weight:
    """Some rows of a weight, in the order of `index` (int64). Scales of blocks of rows become each row's own."""
    if isinstance(weight, Dense):
        return Dense(weight.weight[index], None if weight.bias is None else weight.bias[index])
    scheme, grain, at = weight.scheme, weight.scheme.granularity, index
    if grain.per is Per.BLOCK:
        scheme, at = replace(scheme, granularity=Granularity(Per.GROUP, grain.columns)), index // grain.rows
    elif grain.per is Per.TENSOR:
        at = torch.zeros(1, dtype=torch.int64)
    return replace(
        weight, scheme=scheme, codes=weight.codes[index], scales=weight.scales[at], zeros=None if weight.zeros is None else weight.zeros[at], super_scales=None,
        bias=None if weight.bias is None else weight.bias[index],
    )  # fmt: skip


def joined(weights: Sequence[Weight], pack: Callable[[Weight], Linear]) -> Linear:
    """Several weights with the same input: their outputs side by side, in one product where their schemes allow it. Bits are those of the single products."""
    whole = _concatenate(weights)
    if whole is not None:
        return pack(whole)
    parts = [pack(w) for w in weights]
    return Linear("; ".join(dict.fromkeys(p.kernel for p in parts)), tuple(part for p in parts for part in p.parts))


def _concatenate(weights: Sequence[Weight]) -> Weight | None:
    first = weights[0]
    if isinstance(first, Dense):
        dense = [w for w in weights if isinstance(w, Dense) and w.weight.dtype == first.weight.dtype]
        if len(dense) < len(weights):
            return None
        return Dense(torch.cat([w.weight for w in dense]), _join_biases([w.bias for w in dense], [len(w.weight) for w in dense]))
    same = [w for w in weights if isinstance(w, QuantizedLinear) and w.scheme == first.scheme and _equal(w.group_index, first.group_index)]
    same = [w for w in same if _equal(w.input_scale, first.input_scale)]
    if len(same) < len(weights) or first.scheme.granularity.per not in (Per.CHANNEL, Per.GROUP):
        return None
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in same if w.zeros is not None])
    bias = _join_biases([w.bias for w in same], [w.out_features for w in same])
    return QuantizedLinear(
        first.scheme, torch.cat([w.codes for w in same]), torch.cat([w.scales for w in same]), zeros, first.group_index, input_scale=first.input_scale, bias=bias
    )


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _join_biases(biases: list[torch.Tensor | None], sizes: list[int]) -> torch.Tensor | None:
    if all(b is None for b in biases):
        return None
    return torch.cat([torch.zeros(n) if b is None else b.float() for b, n in zip(biases, sizes, strict=True)])
