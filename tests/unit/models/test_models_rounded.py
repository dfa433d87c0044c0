"""A model rounded as it is read: its predictions are those of transformers with the rounded weights, and near the model's own; what is quantized already stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from qforge import numerics
from qforge.models.model import open_model
from qforge.models.rounded import rounded
from qforge.runtime import LLM
from qforge.scheme import parse


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("qwen2", {"tied": False}), ("gemma3_text", {})])
def test_logits_are_those_of_the_rounded_weights(tmp_path: Path, family: str, settings: dict[str, bool]) -> None:
    tiny.make(tmp_path, family, **settings)
    model, ids = open_model(str(tmp_path)), [int(i) for i in torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0))]
    ours = rounded(model, parse("int8-channel-sym"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(ours.schemes) == 7 * model.config.num_hidden_layers + 1
    with torch.no_grad():
        for name in ours.schemes:
            theirs.get_submodule(name).weight.copy_(numerics.dequantize(ours.linear(name)))
        wanted, own = (m(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for m in (theirs, plain))
    found = torch.cat(list(LLM(ours).score([ids]))).log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert 0 < (own.exp() * (own - found)).sum(-1).mean() < 0.02


def test_a_quantized_model_stays(tmp_path: Path) -> None:
    tiny.make(tmp_path, "llama")
    once = rounded(open_model(str(tmp_path)), parse("int8-channel-sym"))
    assert rounded(once, parse("int4-g32-sym")) is once
