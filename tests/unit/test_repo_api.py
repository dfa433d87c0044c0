"""The public Python API: complete, sorted, importable, and imported late."""

from __future__ import annotations

import importlib

import pytest

import qforge


def test_the_list_is_sorted_and_complete() -> None:
    assert qforge.__all__ == sorted(qforge.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert set(qforge.__all__) == set(qforge._HOME)
    assert dir(qforge) == sorted([*qforge.__all__, "__version__"])


@pytest.mark.parametrize("name", qforge.__all__)
def test_every_name_can_be_imported_and_is_documented(name: str) -> None:
    value = getattr(qforge, name)
    assert value is getattr(importlib.import_module(qforge._HOME[name]), name)
    assert value.__doc__


def test_rooms_do_not_hide_functions_of_the_same_name() -> None:
    for name in ("evaluate", "export"):
        room = importlib.import_module(f"qforge.{name}")
        setattr(qforge, name, room)  # as the import system does
        assert callable(getattr(qforge, name))
        assert getattr(qforge, name) is not room


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qforge.nothing  # noqa: B018
