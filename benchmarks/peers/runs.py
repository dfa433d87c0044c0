"""What is asked to run: `TOOL:METHOD` of a peer, `ours:METHODS[@SCHEME][/option=value...]` of qforge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

OURS = "ours"
PEERS = ("llmcompressor", "gptqmodel", "autoround", "simple")
ASYMMETRIC = ("hqq",)
NF4_BLOCK = 64
CHOSEN = "by layer"  # the scheme of a run that has a budget in its place


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        tool: `ours` or a peer.
        method: as the tool calls it; ours joins several with `+`.
        scheme: ours: a scheme's text form; a peer's: bits, group, symmetry.
        bits: of a code.
        group: weights that share a scale.
        options: ours: `quantize.options` of the recipe, its `budget` (bits per weight) and `candidates` (joined by `+`), `generated` of its calibration, `memory_limit` of its run.
    """

    tool: str
    method: str
    scheme: str
    bits: int
    group: int
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """As tables print it, without the scheme."""
        return " ".join([f"{self.tool}:{self.method}", *(f"{key}={value}" for key, value in self.options)])

    @property
    def folder(self) -> str:
        """A folder name of its own."""
        return re.sub(r"[^\w.=+-]+", "-", f"{self.tool}-{self.method}-{self.scheme}" + "".join(f"-{key}={value}" for key, value in self.options))

    @property
    def stored_bits(self) -> float:
        """Bits per weight of a peer's own format: codes, a 16-bit scale a group, and a 16-bit zero where it is asymmetric (NF4: a 32-bit scale for each block of 64)."""
        if self.method == "nf4":
            return self.bits + 32 / NF4_BLOCK
        return self.bits + (32 if self.method in ASYMMETRIC else 16) / self.group


def parse(text: str, bits: int, group: int) -> Run:
    """A run from its text; ValueError says what is allowed."""
    head, *settings = text.split("/")
    named, _, scheme = head.partition("@")
    tool, _, method = named.partition(":")
    if tool not in (OURS, *PEERS) or not method:
        raise ValueError(f"'{text}': a run is TOOL:METHOD with a tool of {', '.join((OURS, *PEERS))}, for example ours:gptq or llmcompressor:gptq_static")
    if tool != OURS and (scheme or settings):
        raise ValueError(f"'{text}': only ours takes a scheme and options; --bits and --group hold for all")
    options = tuple((key, yaml.safe_load(value)) for key, _, value in (s.partition("=") for s in settings))
    if tool == OURS:
        return Run(tool, method, scheme or (CHOSEN if method == "auto" else f"int{bits}-g{group}-sym"), bits, group, options)
    return Run(tool, method, _peers_scheme(method, bits, group), bits, group)


def _peers_scheme(method: str, bits: int, group: int) -> str:
    if method == "nf4":
        return f"nf4-g{NF4_BLOCK}"
    return f"int{bits}-g{group}-{'asym' if method in ASYMMETRIC else 'sym'}"
