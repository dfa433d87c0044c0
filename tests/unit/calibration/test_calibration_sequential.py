"""Block-by-block replay against the whole model: same statistics, same inputs, same results whether killed or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, Spy, inputs_of, schemes_of, windows
from transformers import AutoModelForCausalLM

from qforge import numerics
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.store import Hidden, Store
from qforge.engines.base import chunks
from qforge.engines.transformers_engine import TransformersEngine
from qforge.methods import Options, find, find_tuner
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma2", "phi3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_engine_equals_the_whole_model(tmp_path: Path, family: str, tied: bool) -> None:
    folder = tiny.make(tmp_path / "m", family, tied=tied)
    ids = windows(3, 200).tolist()
    ids.append(ids[0][:50])
    got = list(TransformersEngine(open_model(str(folder))).score(ids))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = [whole(input_ids=torch.tensor([w])).logits[0] for w in ids]
    expected = [logits[a:b] for logits, w in zip(want, ids, strict=True) for a, b in chunks(len(w))]
    assert [g.shape for g in got] == [e.shape for e in expected]
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("budget", [1 << 30, 30_000])
def test_statistics_are_those_of_two_whole_models(tmp_path: Path, family: str, budget: int) -> None:
    folder = tiny.make(tmp_path / "m", family)
    blocks = BlockModel(open_model(str(folder)))
    schemes, memory, spy = schemes_of(blocks), Memory(), Spy()
    quantize_blocks(Job(blocks, spy, schemes, Options(), Room(tmp_path, budget)), windows(), memory.store(), SILENT)
    quantized, original = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    for name, stats in zip(schemes, spy.seen, strict=True):  # in the order in which the blocks call them
        x, y = inputs_of(quantized, name, windows()), inputs_of(original, name, windows())
        assert stats.tokens == len(x)
        assert stats.hessian is not None
        assert stats.cross is not None
        torch.testing.assert_close(stats.hessian.double(), x.T @ x, rtol=1e-4, atol=1e-4 * float((x.T @ x).abs().max()))
        wanted = (y - x).T @ x
        torch.testing.assert_close(stats.cross.double(), wanted, rtol=1e-2, atol=2e-3 * float(x.abs().max() ** 2 * len(x)) ** 0.5)
        assert (stats.cross == 0).all() == (wanted == 0).all()
        block, _, own = name.partition(".self_attn.") if "self_attn" in name else name.partition(".mlp.")
        tap = {"o_proj": "input_layernorm", "down_proj": "post_attention_layernorm"}.get(own) if family == "llama" else None  # Gemma has norms before its sums
        assert (stats.residual is None) == (tap is None)
        if stats.residual is not None:
            lacking = inputs_of(original, f"{block}.{tap}", windows()) - inputs_of(quantized, f"{block}.{tap}", windows())
            torch.testing.assert_close(stats.residual.double(), lacking.T @ x, rtol=1e-2, atol=2e-3 * float((lacking.T @ x).abs().max()) + 1e-9)
        quantized.get_submodule(name).weight.data = numerics.dequantize(memory.linears()[name])


def test_what_lies_on_disk_changes_no_bit(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m"))))
    found = []
    for folder, budget in ((None, 0), (tmp_path, 1 << 30), (tmp_path, 20_000), (tmp_path, 0)):
        memory, gptq = Memory(), find("gptq")
        assert gptq is not None
        room = Room(folder, budget)
        quantize_blocks(Job(blocks, gptq, schemes_of(blocks), Options(), room), windows(60), memory.store(), SILENT)
        found.append(memory.linears())
        assert room.used == 0
    assert all(q.equals(other[n]) for other in found[1:] for n, q in found[0].items())


@pytest.mark.parametrize("budget", [20_000, 900_000, 1_600_000, 2_400_000, 3_000_000])
def test_what_lies_on_disk_changes_no_bit_of_learned_rounding(tmp_path: Path, budget: int) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", layers=2))))
    quantizer, tuner = find("signround"), find_tuner("signround")
    assert quantizer is not None
    found = []
    for room in (Room(), Room(tmp_path, budget)):
        memory = Memory()
        quantize_blocks(Job(blocks, quantizer, schemes_of(blocks), Options(steps=2), room, tuner=tuner), windows(60), memory.store(), SILENT)
        found.append(memory.linears())
    assert all(q.equals(found[1][n]) for n, q in found[0].items())


@pytest.mark.parametrize("budget", [20_000, 60_000, 200_000, 500_000])
def test_hidden_states_that_numpy_has_seen_can_still_go_to_disk(tmp_path: Path, budget: int) -> None:
    """Writing them to a file takes their memory to numpy, after which PyTorch does not give it back before they are freed."""
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m"))))
    gptq = find("gptq")
    assert gptq is not None
    found = []
    for seen in (False, True):
        memory = Memory()

        def save_hidden(index: int, hidden: Hidden, seen: bool = seen) -> None:
            for held in hidden.values() if seen else ():
                held.load().numpy()

        store = Store(memory.pieces.get, memory._save, lambda index: None, save_hidden, hidden_every=0)
        quantize_blocks(Job(blocks, gptq, schemes_of(blocks), Options(), Room(tmp_path, budget)), windows(60), store, SILENT)
        found.append(memory.linears())
    assert all(q.equals(found[1][n]) for n, q in found[0].items())


def test_linears_that_share_an_input_share_its_statistics(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m"))))
    spy = Spy()
    quantize_blocks(Job(blocks, spy, {n: s for n, s in schemes_of(blocks).items() if ".0." in n}, Options()), windows(), Memory().store(), SILENT)
    first = spy.seen[:7]
    assert len({id(s) for s in first}) == 4  # q k v | o | gate up | down
    assert all(s.tokens == windows().numel() for s in first)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("die_after", [0, 1, 2, 3])
@pytest.mark.parametrize("keep_hidden", [True, False])
def test_resumed_equals_uninterrupted(tmp_path: Path, method: str, die_after: int, keep_hidden: bool) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", tied=False)))
    quantizer = find(method)
    assert quantizer is not None

    def run(memory: Memory) -> None:
        blocks = BlockModel(model)
        quantize_blocks(Job(blocks, quantizer, schemes_of(blocks, head=True), Options()), windows() if quantizer.needs(Options()) else None, memory.store(), SILENT)

    whole, broken = Memory(), Memory(die_after)
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(broken)
    broken.die_after = None
    if not keep_hidden:
        broken.hidden = {}
    before = broken.saves
    run(broken)
    assert broken.saves - before == len(whole.pieces) - die_after  # finished blocks are not computed again
    assert whole.linears().keys() == broken.linears().keys()
    assert "lm_head" in whole.linears()
    assert all(q.equals(broken.linears()[n]) for n, q in whole.linears().items())


def test_output_head_sees_the_final_norm(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m", tied=True)
    blocks = BlockModel(open_model(str(folder)))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = whole(input_ids=windows(), output_hidden_states=True).hidden_states
    engine = TransformersEngine(open_model(str(folder)))
    hidden = engine.hidden(windows().tolist())
    got = torch.cat(list(blocks.head_inputs([h[None] for h in hidden])))
    torch.testing.assert_close(got, states[-1].reshape(-1, states[-1].shape[-1]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(blocks.head_weight(), whole.get_input_embeddings().weight.detach())
