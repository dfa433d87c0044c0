"""Whether an adapter was made for the model that it is merged into: the name that it recorded against those of the model. Shapes cannot tell, a family's models share them."""

from __future__ import annotations

import re
from pathlib import Path

from qforge.files import expanded
from qforge.models.adapter_config import CONFIG_FILE, AdapterConfig

_CACHED = re.compile(r"models--(?:.+--)?(.+)")  # a folder of the hub's cache, where the last part of a path is a commit
_FORM = re.compile(r"(?:[-_.](?:gguf|u?d?i?q\d\w*|b?f16|f32|fp16|fp32|(?:unsloth-)?bnb-4bit))+$", re.IGNORECASE)  # in which the same weights are stored


def other_base(adapter: str, config: AdapterConfig, source: str, folder: Path) -> str | None:
    """A note where an adapter says that it was made for another model than `source`; None where it says nothing, or the same.

    Args:
        adapter: as the user wrote it.
        config: of the adapter.
        source: the model, as the user wrote it.
        folder: what a relative path is relative to.
    """
    names = _names(source, folder)
    if not config.base or _plain(_last(config.base)) in map(_plain, names):
        return None
    return f"the adapter '{_last(adapter)}' was made for '{_shown(config.base)}', by its {CONFIG_FILE}; here it is merged into '{names[0]}'"


def _names(source: str, folder: Path) -> list[str]:
    """As the user wrote it, then where that is."""
    if source == "demo":
        from qforge.models.demo import FILE

        return [source, Path(FILE).stem]
    path = folder / expanded(source)
    resolved = [_last(str(path.resolve()))] if path.exists() else []
    return [name for name in (_last(source), *resolved) if name not in ("", ".", "..")]


def _last(path: str) -> str:
    parts = re.split(r"[/\\]+", path.strip().rstrip("/\\"))
    cached = [found[1] for part in parts if (found := _CACHED.fullmatch(part))]
    return cached[-1] if cached else parts[-1]


def _plain(name: str) -> str:
    return _FORM.sub("", name).lower()


def _shown(base: str) -> str:
    """A hub id whole; of a path the last part, for it may say more than its owner wants a report to tell."""
    return base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else _last(base)
