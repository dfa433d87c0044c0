"""Find the fastest tiles for a model's products on this GPU: from the shipped tile step by step to a neighbour that compiles well and is faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from qforge.ops.triton import tiles
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.ops.triton.offline import SHARED_MEMORY, Cost, Variant, compile_for
from qforge.ops.triton.products import DENSE_ROWS, w4_linear, w8_linear
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.timing import COLD_BYTES, microseconds
from qforge.ops.triton.tuned import Product, Tuned
from qforge.ops.triton.variants import LIMIT, w4_variant, w8_variant
from qforge.ops.triton.w4_pack import STEP, W4
from qforge.ops.triton.w8_pack import W8
from qforge.scheme import Number, Per, Scheme
from qforge.types import ModelSpec

ROWS = (1, 4, 16, 32, 64, 128, 192, 256)
_GAIN = 0.98  # of the best time, which a faster tile must stay under: less is noise
_RANGES = {"m": (16, 128), "n": (16, 256), "k": (32, 256), "warps": (1, 8), "parts": (1, 32)}
_MOST_STAGES = 6
Timer = Callable[[Tile], float]


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found.

    Attributes:
        tile: the fastest one; its time in microseconds.
        tried: every tile that was timed, with its time.
        refused: tiles that were not timed, and why.
    """

    tile: Tile
    microseconds: float
    tried: dict[Tile, float]
    refused: dict[Tile, str]


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Tiles that differ in one number, by a factor of two (stages: by one)."""
    for name, (least, most) in _RANGES.items():
        value = getattr(tile, name)
        yield from (replace(tile, **{name: v}) for v in (value // 2, value * 2) if least <= v <= most)
    yield from (replace(tile, stages=s) for s in (tile.stages - 1, tile.stages + 1) if 1 <= s <= _MOST_STAGES)


def search(starts: Iterable[Tile], refusal: Callable[[Tile], str | None], timer: Timer) -> Search:
    """From the fastest start to the fastest of its neighbours, as long as one is faster. A start that is refused is left out, unless all are.

    Args:
        refusal: None, or why a tile is not to be timed.
        timer: microseconds of a tile; may raise RuntimeError for one that the device does not take.
    """
    tried: dict[Tile, float] = {}
    refused: dict[Tile, str] = {}

    def visit(candidates: Iterable[Tile]) -> None:
        for tile in candidates:
            if tile in tried or tile in refused:
                continue
            reason = refusal(tile)
            if reason is None:
                try:
                    tried[tile] = timer(tile)
                except RuntimeError as e:
                    reason = str(e)
            if reason is not None:
                refused[tile] = reason

    visit(starts)
    if not tried:
        raise RuntimeError("no tile runs: " + "; ".join(f"{t}: {why}" for t, why in refused.items()))
    best = min(tried, key=tried.__getitem__)
    while True:
        visit(neighbours(best))
        fastest = min(tried, key=tried.__getitem__)
        if tried[fastest] > _GAIN * tried[best]:
            return Search(best, tried[best], tried, refused)
        best = fastest


def refusal_of(product: Product, rows: int, capability: int) -> Callable[[Tile], str | None]:
    """For a tile: None if it fits so many rows, compiles without spilled registers and fits the shared memory of a block; else why not."""
    shared = SHARED_MEMORY[tiles.device_class(capability)]

    def refusal(tile: Tile) -> str | None:
        if tile.m > max(16, 1 << (rows - 1).bit_length()):
            return f"{tile.m} rows for {rows}"
        if product.kernel != "w4" and any(g % tile.k for g in (product.group, product.input_group) if g):
            return f"steps of {tile.k} inputs cross groups"
        if product.kernel == "w4" and tile.k != STEP:
            return f"weights are packed for steps of {STEP} inputs"
        try:
            cost = _compiled(replace(product, outputs=0, inputs=0), tile, capability)
        except Exception as e:  # the compiler's own kinds of errors, and its assertions
            return f"does not compile: {type(e).__name__}"
        if cost.local:
            return f"{cost.local} bytes or instructions of spilled registers"
        if cost.torn:
            return "its assembly would get other words than neighbours"
        return f"{cost.shared} bytes of shared memory" if cost.shared > shared else None

    return refusal


@functools.cache
def _compiled(product: Product, tile: Tile, capability: int) -> Cost:
    return compile_for(_variant(product, tile), capability)


def _variant(product: Product, tile: Tile) -> Variant:
    if product.kernel == "w4":
        return w4_variant("tuned", tile, "bf16", product.group, product.zeros, tile.parts > 1)
    return w8_variant("tuned", tile, product.kernel.removeprefix("w8-"), product.group, product.input_group)


def starts_of(product: Product, rows: int, capability: int) -> list[Tile]:
    """The shipped tile."""
    of = tiles.device_class(capability)
    if product.kernel == "w4":
        return [tiles.tile_for(tiles.W4_GEMM[of], rows)]
    return [tiles.tile_for((tiles.W8_GROUPED if product.group or product.input_group else tiles.W8_GEMM)[of], rows)]


def products_of(spec: ModelSpec, schemes: Mapping[str, Scheme]) -> list[Product]:
    """The different products of a model's quantized layers as the runtime runs them: q, k, v joined, gate and up joined."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "q_proj": (queries + 2 * keys, spec.hidden_size), "o_proj": (spec.hidden_size, queries), "gate_proj": (2 * spec.intermediate_size, spec.hidden_size),
        "down_proj": (spec.hidden_size, spec.intermediate_size),
    }  # fmt: skip
    shapes |= {"qkv_proj": shapes["q_proj"], "gate_up_proj": shapes["gate_proj"]}
    found = (product_of(shapes[name], scheme) for module, scheme in schemes.items() if (name := module.rpartition(".")[2]) in shapes)
    return list(dict.fromkeys(p for p in found if p is not None))


def product_of(shape: tuple[int, int], scheme: Scheme) -> Product | None:
    """The product of a weight `[O, I]` of this scheme; None where no tile is to be chosen for it."""
    a, number = scheme.activations, "int8" if scheme.number.is_int else "fp8"
    group = scheme.granularity.columns if scheme.granularity.per in (Per.GROUP, Per.BLOCK) else 0
    if a is None:
        fits = _would_run(TritonW4(), scheme, shape) and scheme.number.is_int and scheme.bits <= 4
        return Product("w4", *shape, group, zeros=not scheme.symmetric) if fits else None
    fits = _would_run(TritonW8(), scheme, shape) and a.number in (Number.INT8, Number.FP8_E4M3)
    return Product(f"w8-{number}", *shape, group, a.granularity.columns if a.granularity.per is Per.GROUP else 0) if fits else None


def _would_run(kernel: TritonW4 | TritonW8, scheme: Scheme, shape: tuple[int, int]) -> bool:
    return kernel.supports(scheme, shape, "cuda") is None


def tune(products: Iterable[Product], capability: int, timer_of: Callable[[Product, int], Timer], said: Callable[[Tuned], None], rows: Iterable[int] = ROWS) -> list[Tuned]:
    """The fastest tile of each product for each number of rows.

    Args:
        timer_of: for a product and a number of rows, what times a tile.
        said: called with each result.
    """
    counts, found = list(rows), []
    for product in products:
        for n in counts if product.kernel != "w4" else [n for n in counts if n < DENSE_ROWS]:
            starts, timer = starts_of(product, n, capability), timer_of(product, n)
            outcome = search(starts, refusal_of(product, n, capability), timer)
            found.append(Tuned(product, n, outcome.tile, outcome.microseconds, outcome.tried.get(starts[0], outcome.microseconds)))
            said(found[-1])
    return found


def gpu_timer(product: Product, rows: int) -> Timer:
    """Times a tile on this GPU: random weights that together exceed its cache, bf16 activations."""
    weights = [random_weight(product) for _ in range(max(2, COLD_BYTES // _bytes(product)))]
    x = torch.randn(rows, product.inputs, device="cuda", dtype=torch.bfloat16)

    def timer(tile: Tile) -> float:
        return microseconds([functools.partial(_multiply, x, w, tile) for w in weights], 7)

    return timer


def _multiply(x: torch.Tensor, w: W4 | W8, tile: Tile) -> torch.Tensor:
    return w4_linear(x, w, tile) if isinstance(w, W4) else w8_linear(x, w, tile=tile)


def _bytes(product: Product) -> int:
    return product.outputs * product.inputs // (2 if product.kernel == "w4" else 1)


def random_weight(product: Product, device: str = "cuda") -> W4 | W8:
    """A weight of which only the time of its product matters."""
    outputs, inputs = product.outputs, product.inputs
    if product.kernel == "w4":
        steps = -(-inputs // STEP)
        words = torch.randint(-(1 << 31), 1 << 31, (steps, outputs, STEP // 8), device=device, dtype=torch.int32)
        group = product.group or steps * STEP
        scales = torch.full((-(-steps * STEP // group), outputs), 2.0**-7, device=device, dtype=torch.float16)
        zeros = torch.full(scales.shape, 8, device=device, dtype=torch.uint8) if product.zeros else None
        return W4(words, scales, zeros, None, None, inputs, group, tiles.new_turns(device), either=True)
    codes = torch.randint(-127, 128, (outputs, inputs), device=device, dtype=torch.int8)
    kind = product.kernel.removeprefix("w8-")
    scales = torch.full((inputs // (product.group or inputs), outputs), 0.01, device=device)
    weight = codes if kind == "int8" else codes.float().to(torch.float8_e4m3fn)
    return W8(weight, scales, None, product.group or inputs, product.input_group, LIMIT[kind], tiles.new_turns(device))
