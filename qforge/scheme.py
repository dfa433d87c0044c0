"""What a quantized linear *is*: number type, granularity, symmetry, scale type, activation scheme. The only place that says it.

A scheme has a text form, `parse(str(scheme)) == scheme`:

    scheme      = weights [ "+" activations ]
    weights     = number "-" granularity [ "-" symmetry ] [ "@" scale ]
    number      = "int2" .. "int8" | "fp8-e4m3" | "fp8-e5m2" | "fp4-e2m1" | "nf4"
    granularity = "tensor" | "channel" | "g" N | "block" N [ "x" M ]        (one scale for: all, an output row, N inputs, an N x M tile)
    symmetry    = "sym" | "asym" | "offset"                                 (integers only: none, integer zero point, real minimum)
    scale       = type [ "/" granularity ":" type ]                         (type of a scale; of the second level, if scales are themselves scaled)
                  a second level of "g" N spans N inputs of a row; over u8 scales, which bitsandbytes keeps in one list, it spans N scales, past row ends
    activations = number "-" ( "tensor" | "token" | "g" N ) [ "-static" ]   (dynamic unless static)

Examples: `int4-g64-sym`, `int4-g128-asym`, `int8-channel-sym+int8-token`, `fp8-e4m3-block128`, `nf4-g64@u8/g256:f32`,
`fp4-e2m1-g16@e4m3/tensor:f32` (NVFP4), `fp4-e2m1-g32@e8m0` (MXFP4), `int4-g32-offset@u6/g256:f16` (the shape of Q4_K).

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from qforge.errors import RecipeError


class Number(StrEnum):
    """The type of one stored code."""

    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8 = "int8"
    FP8_E4M3 = "fp8-e4m3"
    FP8_E5M2 = "fp8-e5m2"
    FP4_E2M1 = "fp4-e2m1"
    NF4 = "nf4"

    @property
    def bits(self) -> int:
        """Bits of one code."""
        match = re.search(r"\d", self.value)
        assert match is not None
        return int(match.group())

    @property
    def is_int(self) -> bool:
        """Whether codes are integers on a uniform grid."""
        return self.value.startswith("int")


class Symmetry(StrEnum):
    """Where the zero of an integer grid lies."""

    SYM = "sym"
    ASYM = "asym"
    OFFSET = "offset"


class ScaleType(StrEnum):
    """The type in which scales are stored. `F16BF16`: values that are exact in fp16 *and* in bf16, so that every format can hold them."""

    F16BF16 = "f16bf16"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    E4M3 = "e4m3"
    E8M0 = "e8m0"
    U6 = "u6"
    U8 = "u8"

    @property
    def bits(self) -> int:
        """Bits of one stored scale."""
        return {"f16bf16": 16, "f16": 16, "bf16": 16, "f32": 32, "u6": 6}.get(self.value, 8)


class Per(StrEnum):
    """What shares one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "g"
    BLOCK = "block"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Granularity:
    """What shares one scale; `rows` x `columns` is the tile for GROUP (rows = 1) and BLOCK, zero otherwise."""

    per: Per
    columns: int = 0
    rows: int = 0

    def __str__(self) -> str:
        if self.per is Per.GROUP:
            return f"g{self.columns}"
        if self.per is Per.BLOCK:
            return f"block{self.columns}" if self.rows == self.columns else f"block{self.rows}x{self.columns}"
        return self.per.value

    def group_size(self, in_features: int) -> int:
        """Inputs that share one scale in a row of `in_features` inputs."""
        return self.columns or in_features


@dataclass(frozen=True, slots=True)
class ScaleFormat:
    """How scales are stored: their type and, for two-level schemes, who shares a second-level scale and its type."""

    type: ScaleType = ScaleType.F16BF16
    super_granularity: Granularity | None = None
    super_type: ScaleType | None = None

    def __str__(self) -> str:
        if self.super_granularity is None:
            return self.type.value
        return f"{self.type.value}/{self.super_granularity}:{self.super_type}"


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How a linear's input is rounded while it runs."""

    number: Number
    granularity: Granularity
    static: bool = False

    def __str__(self) -> str:
        return f"{self.number}-{self.granularity}" + ("-static" if self.static else "")


@dataclass(frozen=True, slots=True)
class Scheme:
    """One quantized linear's description. Build it with `parse`; compare and hash it freely."""

    number: Number
    granularity: Granularity
    symmetry: Symmetry = Symmetry.SYM
    scale: ScaleFormat = ScaleFormat()
    activations: ActivationScheme | None = None

    def __str__(self) -> str:
        text = f"{self.number}-{self.granularity}"
        if self.number.is_int:
            text += f"-{self.symmetry}"
        if self.scale != ScaleFormat():
            text += f"@{self.scale}"
        if self.activations is not None:
            text += f"+{self.activations}"
        return text

    @property
    def bits(self) -> int:
        """Bits of one code, scales not counted."""
        return self.number.bits

    @property
    def symmetric(self) -> bool:
        """Whether there is neither a zero point nor an offset."""
        return self.symmetry is Symmetry.SYM

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code: signed when symmetric, unsigned otherwise; (0, 2**bits - 1) for floats and code books."""
        if self.number.is_int and self.symmetric:
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape `[rows, columns]` of the scale tensor of a weight `[out_features, in_features]`."""
        g = self.granularity
        if g.per is Per.TENSOR:
            return 1, 1
        rows = -(-out_features // g.rows) if g.per is Per.BLOCK else out_features
        return rows, -(-in_features // g.group_size(in_features))

    def storage_bits(self, out_features: int, in_features: int) -> int:
        """Bits of codes, scales and zero points (or offsets) of a weight `[out_features, in_features]`, container overhead not counted."""
        rows, columns = self.scale_shape(out_features, in_features)
        bits = out_features * in_features * self.bits + rows * columns * self.scale.type.bits
        if self.symmetry is Symmetry.ASYM:
            bits += rows * columns * self.bits
        elif self.symmetry is Symmetry.OFFSET:
            bits += rows * columns * self.scale.type.bits
        if self.scale.super_type is not None:
            bits += self._super_scales(rows, columns, in_features) * self.scale.super_type.bits * (2 if self.symmetry is Symmetry.OFFSET else 1)
        return bits

    def _super_scales(self, rows: int, columns: int, in_features: int) -> int:
        g = self.scale.super_granularity
        assert g is not None
        if g.per is not Per.GROUP:
            return 1 if g.per is Per.TENSOR else rows
        if self.scale.type is ScaleType.U8:
            return -(-rows * columns // g.columns) + 1  # and the mean that was subtracted
        return rows * -(-in_features // g.columns)

    def with_group_size(self, group_size: int) -> Scheme:
        """The same scheme with another group size."""
        return replace(self, granularity=Granularity(Per.GROUP, group_size, 1))

    def problem_with(self, out_features: int, in_features: int) -> str | None:
        """Why a weight `[out_features, in_features]` cannot have this scheme, with the sizes that fit; None if it can."""
        g = self.granularity
        if g.per is Per.GROUP and in_features % g.columns:
            fitting = [n for n in (16, 32, 48, 64, 96, 128, 192, 256) if in_features % n == 0] or [n for n in range(8, 257) if in_features % n == 0]
            return f"group size {g.columns} does not divide its input width {in_features} (these do: {', '.join(map(str, fitting)) or 'none up to 256'}; or per channel)"
        upper, inputs = self.scale.super_granularity, self.activations
        if upper is not None and upper.per is Per.GROUP and self.scale.type is not ScaleType.U8 and in_features % upper.columns:
            return f"second-level scales of {upper.columns} inputs do not divide its input width {in_features}"
        if inputs is not None and inputs.granularity.per is Per.GROUP and in_features % inputs.granularity.columns:
            return f"activations in groups of {inputs.granularity.columns} do not divide its input width {in_features} (write +{inputs.number}-token)"
        return None


# How the runtime may take the inputs of products with quantized weights: as they are, or rounded on the fly; bf16 rounds what the weights stand for, too.
ACTIVATIONS = ("fp", "int16", "bf16", "int8")
ACTIVATIONS_MEAN = (
    "fp: only weights are quantized (accurate); int16 and int8 also round activations on the fly (faster); "
    "bf16 rounds both sides, as other engines do: ten times nearer than int8, fastest for many rows on a CPU with AMX, elsewhere the same as int16."
)

PRESETS = {
    "w4a16": "int4-g128-sym",
    "w4a16-asym": "int4-g128-asym",
    "w8a16": "int8-channel-sym",
    "w8a8-int8": "int8-channel-sym+int8-token",
    "fp8-dynamic": "fp8-e4m3-channel+fp8-e4m3-token",
    "fp8-block": "fp8-e4m3-block128+fp8-e4m3-g128",
    "nf4": "nf4-g64@u8/g256:f32",
    "nvfp4": "fp4-e2m1-g16@e4m3/tensor:f32",
    "mxfp4": "fp4-e2m1-g32@e8m0",
}

_NUMBER = "|".join(sorted((n.value for n in Number), key=len, reverse=True))
_GRANULARITY = r"tensor|channel|token|g[1-9]\d*|block[1-9]\d*(?:x[1-9]\d*)?"
_SCALE = "|".join(s.value for s in ScaleType)
_WEIGHTS = re.compile(rf"({_NUMBER})-({_GRANULARITY})(?:-(sym|asym|offset))?(?:@({_SCALE})(?:/({_GRANULARITY}):({_SCALE}))?)?")
_ACTIVATIONS = re.compile(rf"({_NUMBER})-({_GRANULARITY})(-static)?")
_HELP = "write it as number-granularity-symmetry, for example int4-g64-sym, int4-g128-asym, int8-channel-sym, fp8-e4m3-block128, or a preset: "


def _granularity(text: str) -> Granularity:
    if text.startswith("block"):
        rows, _, columns = text.removeprefix("block").partition("x")
        return Granularity(Per.BLOCK, int(columns or rows), int(rows))
    if text[0] == "g":
        return Granularity(Per.GROUP, int(text[1:]), 1)
    return Granularity(Per(text))


def parse(text: str) -> Scheme:
    """Read the text form or the name of a preset.

    Raises:
        RecipeError: the text is not a scheme; the message says what one looks like.
    """
    given = text
    text = PRESETS.get(text, text)
    weights_text, plus, activations_text = text.partition("+")
    match = _WEIGHTS.fullmatch(weights_text)
    if match is None:
        raise RecipeError(f"'{given}' is not a scheme: {_HELP}{', '.join(PRESETS)}")
    number, granularity = Number(match[1]), _granularity(match[2])
    if granularity.per is Per.TOKEN:
        raise RecipeError(f"'{given}' is not a scheme: weights have no tokens; use tensor, channel, g<N> or block<N>")
    if number.is_int != (match[3] is not None):
        raise RecipeError(f"'{given}' is not a scheme: " + ("an integer needs -sym, -asym or -offset" if number.is_int else f"{number} takes no -{match[3]}"))
    scale = ScaleFormat()
    if match[4] is not None:
        scale = ScaleFormat(ScaleType(match[4]), _granularity(match[5]) if match[5] else None, ScaleType(match[6]) if match[6] else None)
    activations = None
    if plus:
        found = _ACTIVATIONS.fullmatch(activations_text)
        if found is None or found[2].startswith(("channel", "block")):
            raise RecipeError(f"'{given}' is not a scheme: after + comes how activations are rounded, for example int8-token or fp8-e4m3-tensor-static")
        activations = ActivationScheme(Number(found[1]), _granularity(found[2]), found[3] is not None)
    return Scheme(number, granularity, Symmetry(match[3]) if match[3] else Symmetry.SYM, scale, activations)
