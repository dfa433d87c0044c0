"""Integers as GPTQModel's, AutoGPTQ's and AutoAWQ's own packing code writes them (make_packing.py): read as what went in, and written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qforge.layouts.autoawq import AutoAwq
from qforge.layouts.autogptq import AutoGptq
from qforge.scheme import parse

GOLDEN = load_file(Path(__file__).with_name("packing.safetensors"))
VERSIONS = {"gptqmodel": 2, "auto_gptq": 1}  # GPTQModel packs as version 2 and subtracts one where it saves version 1
GPTQ = sorted({tuple(n.split(".")[:2]) for n in GOLDEN if not n.startswith("auto_awq.")})
AWQ = sorted({n.split(".")[1] for n in GOLDEN if n.startswith("auto_awq.")})


def parts(maker: str, case: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(f"{maker}.{case}."): t for n, t in GOLDEN.items() if n.startswith(f"{maker}.{case}.")}


def check(layout: AutoGptq | AutoAwq, stored: dict[str, torch.Tensor], case: str) -> None:
    codes, zeros = stored.pop("codes"), stored.pop("zeros")
    bits, symmetric = int(case[0]), case.endswith("-sym")
    q = layout.unpack(stored, parse(f"int{bits}-g32-{'sym' if symmetric else 'asym'}@f16"))
    middle = 2 ** (bits - 1)
    assert torch.equal(q.codes.int() + (middle if symmetric else 0), codes.int())
    assert (zeros == middle).all() if q.zeros is None else torch.equal(q.zeros, zeros)
    assert (q.group_index is not None) == case.endswith("-order")
    again = layout.pack(q)
    assert set(again) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(again[name], tensor.to(again[name].dtype)), name


@pytest.mark.parametrize(("maker", "case"), GPTQ)
def test_gptq(maker, case):
    check(AutoGptq(VERSIONS[maker]), parts(maker, case), case)


@pytest.mark.parametrize("case", AWQ)
def test_awq(case):
    check(AutoAwq(), parts("auto_awq", case), case)
