"""Which methods read which option: what is asked for and would do nothing is found here, to be refused rather than passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qforge.methods import coupled, refine
from qforge.scheme import Scheme

_SECOND_ORDER = ("gptq", "signround", "auto")
# act_order and scale_search are on by default, and off with every method that does not do them: turned off, they say what is so
_READ_BY: dict[str, tuple[str, ...]] = {
    "damping": _SECOND_ORDER,
    "error_correction": _SECOND_ORDER,
    "refine": _SECOND_ORDER,
    "fisher": _SECOND_ORDER,
    "smoothing": ("smoothquant",),
    "steps": ("signround",),
}
_OFF: dict[str, Any] = {"error_correction": False, "refine": 0, "fisher": False}  # what asks for nothing
_SCHEMES: dict[str, tuple[Callable[[Scheme], bool], str]] = {
    "refine": (refine.applies, "numbers with one scale for each output channel or group"),
    "fisher": (coupled.applies, "integers with one scale for each output channel or group"),
}


def unread(chain: Sequence[str], schemes: Sequence[Scheme], asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """A sentence for each option that is set to something else than its default and that nothing reads.

    Args:
        chain: the methods, in their order.
        schemes: of the linears that are quantized.
        asked: every option's value, by name.
        defaults: likewise.
    """
    found = []
    for name, readers in _READ_BY.items():
        value = asked[name]
        if value == defaults[name] or (name in _OFF and value == _OFF[name]):
            continue
        off = f"{name}: {str(_OFF[name]).lower()}" if name in _OFF else f"no {name}"
        applies, kinds = _SCHEMES.get(name, (lambda scheme: True, ""))
        if not set(readers) & set(chain):
            methods = f"method {readers[0]}" if len(readers) == 1 else f"methods {', '.join(readers[:-1])} and {readers[-1]}"
            found.append(f"quantize.options.{name} is for {methods}, not {chain[-1]}; use {off}, or method: {readers[0]}")
        elif not any(map(applies, schemes)):
            found.append(f"quantize.options.{name} is for {kinds}, not {schemes[0] if schemes else 'none'}; use {off}")
        elif name == "fisher" and not asked["refine"]:
            found.append("quantize.options.fisher weighs outputs in the sweeps of refine, and refine: 0 makes none; use fisher: false, or refine: 3")
    return found
