"""How outputs weigh against each other, against autograd over transformers' whole model in fp64; what GPTQ makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from qforge.calibration import fisher
from qforge.calibration.gradients import CHUNK
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.store import Piece, Store
from qforge.calibration.transforms import Folds
from qforge.methods import Options, find
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.scheme import parse

SHAPE = (6, 64)


def windows() -> torch.Tensor:
    return torch.randint(3, 300, SHAPE, generator=torch.Generator().manual_seed(1))


def gathered(folder: Path) -> dict[str, torch.Tensor]:
    blocks = BlockModel(open_model(str(folder)))
    found: dict[str, torch.Tensor] = {}
    names = [n for i in range(blocks.num_blocks) for n in blocks.linears(i)]
    fisher.gather(blocks, names, windows(), Room(folder, 1 << 16), lambda index, outputs: found.update({n: t.float() for n, t in outputs.items()}), SILENT)
    assert found.keys() == set(names)
    return found


def by_autograd(folder: Path) -> dict[str, torch.Tensor]:
    """Sums of g g^T with the same draws, over the mean of their diagonals."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
    logits = model(input_ids=windows()).logits
    log_p = logits.log_softmax(-1).flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    random = torch.cat([torch.rand(len(part), 1, generator=generator) for part in log_p.split(CHUNK)])
    drawn = torch.searchsorted(log_p.detach().exp().cumsum(-1), random.double())
    gradients = torch.autograd.grad(log_p.gather(1, drawn).sum(), list(outputs.values()))
    sums = [g.flatten(0, 1).T @ g.flatten(0, 1) for g in gradients]
    return {name: total / total.diagonal().mean() for name, total in zip(outputs, sums, strict=True)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_equals_autograd_over_the_whole_model(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path, family)
    wanted = by_autograd(tmp_path)
    for name, found in gathered(tmp_path).items():
        assert float((found - wanted[name]).norm() / wanted[name].norm()) < 2e-3, name  # half precision, of inputs and of what is found


def test_divided_outputs_count_as_many_times_more() -> None:
    folds = Folds(sources={"v": torch.tensor([2.0, 1.0])})
    assert torch.equal(folds.weighed("v", torch.tensor([[1.0, 3.0], [3.0, 5.0]])), torch.tensor([[4.0, 6.0], [6.0, 5.0]]))
    assert torch.equal(folds.weighed("o", torch.eye(2)), torch.eye(2))


def test_gptq_uses_it_and_says_what_it_needs(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    blocks, quantizer = BlockModel(open_model(str(tmp_path))), find("gptq")
    assert quantizer is not None
    assert "outputs" in quantizer.needs(Options(fisher=True))
    assert "outputs" not in quantizer.needs(Options(fisher=True, refine=0)) | quantizer.needs(Options())
    name = next(iter(blocks.linears(0)))
    outputs: dict[int, dict[str, torch.Tensor]] = {}
    fisher.gather(blocks, list(blocks.linears(0)), windows(), Room(), lambda index, found: outputs.update({index: found}), SILENT)

    class Given:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

        def load(self) -> torch.Tensor:
            return self.tensor

    def codes(weighed: bool) -> torch.Tensor:
        pieces: dict[int, Piece] = {}
        job = Job(
            blocks, quantizer, {name: parse("int3-g32-sym")}, Options(fisher=weighed), outputs=lambda i: {n: Given(t) for n, t in outputs.get(i, {}).items()} if weighed else {}
        )
        quantize_blocks(job, windows(), Store(pieces.get, pieces.__setitem__, lambda i: None, lambda i, h: None), SILENT)
        return pieces[0].linears[name].codes

    assert (codes(True) != codes(False)).float().mean() > 0.02
