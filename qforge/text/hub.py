"""Documents of a dataset on the Hugging Face hub, through the `datasets` package."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from qforge.errors import DataError, MissingCapabilityError
from qforge.text.builtin import Role
from qforge.text.chat import Rendered
from qforge.text.records import ChatRenderer, record_text

HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.-]*))?(:(?P<split>[\w.\[\]%:-]+))?")
SPLITS: dict[Role, tuple[str, ...]] = {"calibration": ("train",), "evaluation": ("test", "validation")}
MOST_CHARACTERS = 8_000_000  # about two million tokens: far more than calibration or a perplexity needs, and it fits in memory


def is_hub_id(source: str) -> bool:
    """Whether `source` reads `owner/name`, `owner/name:config` or `owner/name:config:split`."""
    return HUB_ID.fullmatch(source) is not None


def hub_texts(source: str, role: Role, render: ChatRenderer) -> list[Rendered]:
    """The first `MOST_CHARACTERS` of a dataset's records as texts, streamed. Without a split: `train` for calibration, `test` or `validation` for evaluation.

    Raises:
        MissingCapabilityError: the `datasets` package is not installed, or the dataset cannot be reached from here.
        DataError: a record has no usable field.
    """
    match = HUB_ID.fullmatch(source)
    assert match, "callers ask is_hub_id first"
    splits = (match["split"],) if match["split"] else SPLITS[role]
    rows = _rows(_load_dataset(source), source, match["name"], match["config"] or None, splits)
    texts: list[Rendered] = []
    size = 0
    for number, row in enumerate(rows, start=1):
        rendered = record_text(row, render, f"{source}: row {number}")
        if rendered.text.strip():
            texts.append(rendered)
            size += len(rendered.text)
        if size >= MOST_CHARACTERS:
            break
    return texts


def _load_dataset(source: str) -> Callable[..., Any]:
    try:
        return importlib.import_module("datasets").load_dataset  # type: ignore[no-any-return]
    except ImportError as e:
        raise MissingCapabilityError(f"{source}: no such file here, and reading a hub dataset needs the datasets package: pip install datasets") from e


def _rows(load: Callable[..., Any], source: str, name: str, config: str | None, splits: tuple[str, ...]) -> Any:
    problem: Exception | None = None
    for split in splits:
        try:
            return load(name, config, split=split, streaming=True)
        except ValueError as e:  # datasets' word for an unknown split or configuration
            problem = e
        except Exception as e:  # a hub that is not reached fails in as many ways as there are network libraries
            raise MissingCapabilityError(f"{source}: the dataset cannot be read from the hub ({e}); check the name and the network, or name a .txt or .jsonl file") from e
    raise DataError(f"{source}: {problem}; name a dataset as owner/name:config:split")
