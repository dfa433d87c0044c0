"""Launch the products of 4-bit weights that are written in CUDA C++: for a few rows, and for so many that tensor cores are the limit. Made for capability 9.0.

Letters: M rows, N outputs, K inputs, S parts of K.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from qforge.errors import QforgeError
from qforge.ops.cuda import compiler, driver
from qforge.ops.cuda.source import Source
from qforge.ops.triton.present import capability, interpreted, processors
from qforge.ops.triton.w4_pack import STEP, W4, longest_step

Product = Callable[[torch.Tensor, W4], torch.Tensor]

FEW_ROWS = 4  # at most; from here on Triton's kernel is as fast
MANY_ROWS = range(33, 1025)  # beyond, weights are unpacked once for all tiles of rows, and cuBLAS multiplies
_CAPABILITY, _ARCHITECTURE = 90, "sm_90a"
_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_ALIGNED = 8  # numbers of 16 bits that are read together
_SHARED = 226 * 1024  # bytes of shared memory that a block may ask for, with room for its barriers
_FEW_OUTPUTS = 32  # of a warp
_TOLERANCE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # of two products that are each rounded, of the largest result
_log = logging.getLogger(__name__)
_Key = tuple[Source, int, torch.device]  # the kernel, its parts, and where it runs
_agrees: dict[_Key, bool] = {}


@dataclass(frozen=True, slots=True)
class Few:
    """`wn` x `wk` warps a block: 32 outputs each, and every wk-th step of inputs; `blocks` run on a processor together."""

    wn: int
    wk: int
    blocks: int

    @property
    def outputs(self) -> int:
        """Of a block at a time."""
        return _FEW_OUTPUTS * self.wn

    def shared(self, rows: int, steps: int) -> int:
        """Bytes of shared memory: x, and the sums of warps."""
        return rows * (steps * 2 * STEP + 32) + self.wk * 8 * (self.outputs + 4) * 4


@dataclass(frozen=True, slots=True)
class Many:
    """`rows` a tile; `stages` of x in flight; whether a warp of its own brings them; `blocks` run on a processor together; microseconds of a step of one of them, and of all."""

    rows: int
    stages: int
    own: bool
    blocks: int
    alone_us: float
    together_us: float

    @property
    def threads(self) -> int:
        """Of a block: 256 that multiply, and a warp, or four where these have registers to give, that bring x."""
        return 256 if not self.own else 384 if self.rows > 160 else 288

    @property
    def shared(self) -> int:
        """Bytes of shared memory: x, or the sums; 1024 to begin at a multiple of 1024."""
        return max(self.stages * self.rows * STEP * 2, self.rows * 132 * 4) + 1024


# Measured on an H200 (docs/log.md, 2026-11-29), as are the times by which `plan` chooses among those for many rows.
FEW = (Few(4, 4, 1), Few(1, 8, 2), Few(1, 16, 1))  # equally good ones: the first
FEW_OF_SHORT_GROUPS = (Few(2, 4, 1), Few(1, 8, 1))  # four scales of 128 inputs take registers
MANY = (
    Many(48, 7, own=False, blocks=2, alone_us=0.78, together_us=1.12),
    Many(64, 6, own=False, blocks=2, alone_us=0.78, together_us=1.2),
    Many(128, 6, own=False, blocks=1, alone_us=0.93, together_us=0.93),
    Many(192, 4, own=True, blocks=1, alone_us=1.08, together_us=1.08),
    Many(256, 3, own=True, blocks=1, alone_us=1.33, together_us=1.33),
)
MANY_OF_SHORT_GROUPS = tuple(replace(m, blocks=1, together_us=m.alone_us) for m in MANY if m.rows < 256)
_MOST_RUNS = 4
_CLUSTER_US, _MOST_PARTS, _FEWEST_STEPS = 2.0, 4, 4
_CLUSTERED = 0.9  # of the processors that hold clusters of more than two blocks: groups of processors are not multiples of all sizes


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rows are multiplied."""

    tile: Many
    parts: int


def w4_product(x: torch.Tensor, w: W4, other: Product) -> torch.Tensor | None:
    """`x [M, K]` fp16 or bf16, contiguous and in the weight's order, -> `[M, N]`; None where these kernels are not for this product, or not faster.

    A kernel is compiled where it runs, by whatever compiler is there: it is used once it has agreed with `other`, on this weight and random numbers.
    """
    rows = len(x)
    if not (0 < rows <= FEW_ROWS or rows in MANY_ROWS) or missing(x.device) or not _fits(x, w):
        return None
    constant = constants(x, w)
    if constant["RUNS"] > _MOST_RUNS:
        return None
    size = (rows, w.out_features, w.steps, processors(x.device), constant["RUNS"])
    if rows > FEW_ROWS:
        if not _scales_fit(x, w):
            return None
        chosen = plan(*size)
        return _checked((many_source(constant, chosen.tile), chosen.parts, x.device), functools.partial(multiply_many, p=chosen), x, w, other)
    shape = few(*size)
    return None if shape is None else _checked((few_source(constant, shape), 1, x.device), functools.partial(multiply_few, shape=shape), x, w, other)


def _checked(key: _Key, multiply: Product, x: torch.Tensor, w: W4, other: Product) -> torch.Tensor | None:
    if key not in _agrees:
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            problem = _difference(multiply, x, w, other)
        except torch.OutOfMemoryError:  # another time
            return None
        except QforgeError as e:
            problem = str(e)
        _settle(key, problem)
    if not _agrees[key]:
        return None
    try:
        return multiply(x, w)
    except QforgeError as e:
        _settle(key, str(e))
        return None


def _settle(key: _Key, problem: str | None) -> None:
    _agrees[key] = problem is None
    if problem is not None:
        _log.warning("the GPU kernel %s is not used, and another in its place: %s", key[0].kernel, problem)


def _difference(multiply: Product, x: torch.Tensor, w: W4, other: Product) -> str | None:
    """None if a kernel gives what the other product gives, and that twice; else what is wrong."""
    tried = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
    y, again, wanted = multiply(tried, w), multiply(tried, w), other(tried, w).float()
    off = float((y.float() - wanted).abs().max() / wanted.abs().max().clamp(min=torch.finfo(x.dtype).tiny))
    if not off <= _TOLERANCE[x.dtype]:
        return f"it is off by {off:.2g} of the largest result"
    return None if torch.equal(y, again) else "it gives other bits the second time"


@functools.cache
def missing(device: torch.device) -> str | None:
    """None, or why these kernels do not run on a device."""
    if interpreted() or device.type != "cuda":
        return "they run on NVIDIA GPUs"
    if capability(device) != _CAPABILITY:
        return f"they are made for compute capability 9.0, this GPU has {capability(device) / 10}"
    return compiler.missing()


def few(rows: int, outputs: int, steps: int, count: int, runs: int) -> Few | None:
    """The shape of blocks that leaves the fewest of `count` processors idle; None where x does not fit into their shared memory. `runs`: scales of 128 inputs."""
    possible = [f for f in (FEW_OF_SHORT_GROUPS if runs > 2 else FEW) if outputs >= f.outputs and f.shared(rows, steps) * f.blocks <= _SHARED]
    return max(possible, key=lambda f: _busy(-(-outputs // f.outputs), count, f.blocks), default=None)


def _busy(tiles: int, count: int, blocks: int) -> float:
    """Which part of the time `count` processors work on tiles that take equally long."""
    places = count if tiles <= count else blocks * count
    return tiles / (-(-tiles // places) * places)


@functools.lru_cache(maxsize=4096)
def plan(rows: int, outputs: int, steps: int, count: int, runs: int) -> Plan:
    """The tile and the number of parts that should take the least time on `count` processors. `runs`: scales of 128 inputs."""
    tiles = MANY_OF_SHORT_GROUPS if runs > 2 else MANY
    plans = [Plan(tile, parts) for tile in tiles for parts in range(1, _MOST_PARTS + 1) if parts == 1 or steps >= parts * _FEWEST_STEPS]
    return min(plans, key=lambda p: _microseconds(p, rows, outputs, steps, count))


def _microseconds(p: Plan, rows: int, outputs: int, steps: int, count: int) -> float:
    blocks = -(-outputs // 128) * -(-rows // p.tile.rows) * p.parts
    places = p.tile.blocks * int(count * (_CLUSTERED if p.parts > 2 else 1))
    step = p.tile.alone_us if blocks <= count else p.tile.together_us
    return -(-blocks // places) * -(-steps // p.parts) * step + p.tile.rows / 100 + (p.parts > 1) * _CLUSTER_US


def _fits(x: torch.Tensor, w: W4) -> bool:
    """Whether what is read together lies together."""
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (x, w.words, w.bias)) and w.in_features % _ALIGNED == 0 and w.out_features % _ALIGNED == 0
    return aligned and w.out_features >= _FEW_OUTPUTS and x.dtype in (torch.float16, torch.bfloat16)


def _scales_fit(x: torch.Tensor, w: W4) -> bool:
    """Whether the type of x holds scales exactly: they are multiplied in it."""
    return w.scales.dtype == x.dtype or w.either


def constants(x: torch.Tensor, w: W4) -> dict[str, int]:
    """What the product of these two is compiled for, whatever the shape of its blocks."""
    group = 0 if len(w.scales) == 1 else w.group
    runs = STEP // min(STEP, longest_step(group)) if group else 1
    return {"KIND": _KINDS[x.dtype], "SCALE": _KINDS[w.scales.dtype], "ZEROS": int(w.zeros is not None), "GROUP": group, "RUNS": runs}


def few_source(constants: dict[str, int], shape: Few) -> Source:
    """The kernel for a few rows."""
    return Source.of("w4_few", constants | {"WN": shape.wn, "WK": shape.wk, "BLOCKS": shape.blocks})


def many_source(constants: dict[str, int], tile: Many) -> Source:
    """The kernel for many rows."""
    return Source.of("w4_many", constants | {"ROWS": tile.rows, "STAGES": tile.stages, "OWN": int(tile.own), "THREADS": tile.threads, "BLOCKS": tile.blocks})


def multiply_few(x: torch.Tensor, w: W4, shape: Few) -> torch.Tensor:
    """`[M, N]` by the kernel for a few rows, whatever becomes of it."""
    rows, shared = len(x), shape.shared(len(x), w.steps)
    function = _function(few_source(constants(x, w), shape), _SHARED, x.device)
    y = torch.empty((rows, w.out_features), dtype=x.dtype, device=x.device)
    grid = (min(-(-w.out_features // shape.outputs), shape.blocks * processors(x.device)), 1, 1)
    driver.launch(function, x.device, grid, 32 * shape.wn * shape.wk, shared, x, w.words, w.scales, w.zeros, w.bias, y, rows, w.out_features, w.in_features, w.steps)
    return y


def multiply_many(x: torch.Tensor, w: W4, p: Plan) -> torch.Tensor:
    """`[M, N]` by the kernel for many rows, whatever becomes of it."""
    tile, rows = p.tile, len(x)
    function = _function(many_source(constants(x, w), tile), tile.shared, x.device)
    y = torch.empty((rows, w.out_features), dtype=x.dtype, device=x.device)
    part_steps = -(-w.steps // p.parts)
    parts = -(-w.steps // part_steps)
    grid = (-(-w.out_features // 128), -(-rows // tile.rows), parts)
    x_map = driver.tensor_map(x, tile.rows, STEP // 2)
    driver.launch(function, x.device, grid, tile.threads, tile.shared, x_map, w.words, w.scales, w.zeros, w.bias, y, rows, w.out_features, w.steps, part_steps, cluster=parts)
    return y


@functools.cache
def _function(source: Source, shared: int, device: torch.device) -> driver.Function:
    with torch.cuda.device(device):
        return driver.load(compiler.compiled(source, _ARCHITECTURE), source.kernel, shared)
