"""Laws 10 and 11: per family, greedy tokens and logits equal transformers', alone and in batches with chunked prefill."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime_models import FAMILIES, Quantized, folder, greedy, model, prompts, quantized, transformers_model
from safetensors.torch import load_file, save_file
from tolerances import LOGITS

from qforge import numerics
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import DataError, ModelError, NotOnRuntimeError, UnsupportedError
from qforge.ops.native_module import context
from qforge.qlinear import QuantizedLinear
from qforge.runtime import LLM, SamplingParams, running
from qforge.runtime.decoder import Decoder
from qforge.runtime.loader import read
from qforge.runtime.native_decoder import NativeDecoder
from qforge.runtime.native_model import NativePart, NativeProduct
from qforge.runtime.places import gpu
from qforge.runtime.shares import Share, of_spec
from qforge.scheme import ACTIVATIONS


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    given, theirs = prompts(20, 60), transformers_model(name)
    wanted = [greedy(theirs, p, 24) for p in given]
    params = SamplingParams(max_tokens=24)
    batch = LLM(model(name), max_step_tokens=13, max_num_seqs=7, num_blocks=40).generate(given, params)
    assert [o.token_ids for o in batch] == wanted
    alone = LLM(model(name))
    assert [alone.generate([p], params)[0].token_ids for p in given[:4]] == wanted[:4]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_windows_equal_those_of_transformers(name: str) -> None:
    window = prompts(1, 2, seed=3)[0] * 100 + prompts(40, 12, seed=4)[0]
    window = (window + [i % 380 + 3 for i in range(200)])[:200]
    pieces = list(LLM(model(name)).score([window]))
    assert [len(p) for p in pieces] == [128, 71]
    with torch.no_grad():
        wanted = transformers_model(name)(torch.tensor([window])).logits[0, :-1]
    assert (torch.cat(pieces) - wanted).abs().max() < LOGITS


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("llama", s) for s in ("int4-g32-sym", "int4-g16-asym", "int8-channel-sym", "nf4-g16")),
        ("qwen3-moe", "int4-g8-sym"),
        ("qwen3-moe-many", "int4-g16-sym"),
        ("mixtral", "int4-g32-sym"),
        *(("phi3-long", s) for s in ("int4-g16-asym", "int8-tensor-sym", "fp8-e4m3-block16", "nf4-g16")),
        ("phi3", "int4-g32-asym"),
        ("glm4", "int4-g32-asym"),
        ("ernie4.5", "int8-channel-sym"),
    ],
)
def test_a_quantized_model_equals_transformers_on_the_same_weights(name: str, scheme: str) -> None:
    ours, theirs = quantized(name, lambda n: scheme)
    given = prompts(20, 40, seed=1)
    outputs = LLM(ours, max_step_tokens=24).generate(given, SamplingParams(max_tokens=16))
    assert [o.token_ids for o in outputs] == [greedy(theirs, p, 16) for p in given]


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g16-asym", "int8-channel-sym"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe-shares", "phi3-long"])
def test_rounded_activations_stay_near_the_same_weights(name: str, scheme: str) -> None:
    ours, theirs = quantized(name, lambda n: scheme)
    window = prompts(1, 60, seed=6)[0] * 3
    with torch.no_grad():
        wanted = theirs(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1)
    divergence = {a: (wanted.exp() * (wanted - torch.cat(list(LLM(ours, activations=a).score([window]))).double().log_softmax(-1))).sum(-1).mean() for a in ACTIVATIONS}
    assert divergence["fp"] < 1e-10
    assert 1e-10 < divergence["int16"] < 1e-6
    assert 1e-5 < divergence["int8"] < 3e-2
    assert 1e-10 < divergence["bf16"] < 1e-3


def test_linears_of_mixed_schemes_run_side_by_side() -> None:
    ours, theirs = quantized("qwen2", lambda n: None if "k_proj" in n else "int8-g32-sym" if "up_proj" in n else "int4-g32-sym")
    llm = LLM(ours)
    given = prompts(5, 40, seed=2)
    assert [o.token_ids for o in llm.generate(given, SamplingParams(max_tokens=16))] == [greedy(theirs, p, 16) for p in given]
    assert llm.kernels() == {"native; native-dense": 3, "native": 9, "native-dense": 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_decoder_computes_the_same(name: str) -> None:
    native, reference = (LLM(model(name), max_step_tokens=13) for _ in range(2))
    reference.runner = Decoder(read(model(name)), num_blocks=reference.num_blocks, block_size=16)
    given = prompts(4, 40, seed=6)
    window = given[0] * 3
    assert (torch.cat(list(native.score([window]))) - torch.cat(list(reference.score([window])))).abs().max() < LOGITS
    params = [SamplingParams(max_tokens=8, temperature=t, top_k=20, seed=3) for t in (0.0, 1.0, 0.0, 0.7)]
    assert [o.token_ids for o in native.generate(given, params)] == [o.token_ids for o in reference.generate(given, params)]


@pytest.mark.parametrize(
    ("scheme", "near"),  # where activations are rounded, a code that falls the other way moves logits
    [("int8-g16-sym+int8-g16", 2e-2), ("fp8-e4m3-channel+fp8-e4m3-token", 6e-2), ("int8-channel-sym+int8-token", 2e-2), ("fp8-e5m2-channel", 1e-5)],
)
def test_products_that_no_native_kernel_runs_whole_are_run_within_the_native_step(scheme: str, near: float) -> None:
    ours, _ = quantized("qwen2", lambda n: None if "k_proj" in n else scheme)
    native, reference = LLM(ours, max_step_tokens=13), LLM(ours)
    reference.runner = Decoder(read(ours), num_blocks=reference.num_blocks, block_size=16)
    window = prompts(1, 2, seed=3)[0] * 40
    a, b = (torch.cat(list(llm.score([window]))) for llm in (native, reference))
    assert (a - b).norm() / b.norm() < near


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-long"])
def test_a_smaller_cache_changes_logits_little(name: str, kind: str) -> None:
    window = prompts(1, 2, seed=3)[0] * 150
    exact, stored = (torch.cat(list(LLM(model(name), kv_cache=k).score([window]))) for k in ("fp32", kind))
    difference = (stored - exact).norm() / exact.norm()
    assert 0 < difference < {"fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2, "fp8": 8e-2}[kind]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_keys_and_values_are_kept_as_the_checkpoint_says_unless_asked(name: str) -> None:
    said = replace(model(name), kv_scales={f"model.layers.{i}.self_attn": (0.03, 0.02) for i in range(3)})
    window = prompts(1, 2, seed=3)[0] * 60
    plain, exact, own, stored = (LLM(m, kv_cache=k) for m, k in ((model(name), None), (said, "fp32"), (model(name), "fp8"), (said, None)))
    assert [llm.kv_cache for llm in (plain, exact, own, stored)] == ["fp32", "fp32", "fp8", "fp8"]
    assert [own.cache_token_bytes - stored.cache_token_bytes, 4 * stored.cache_token_bytes] == [3 * 2 * 8, exact.cache_token_bytes]
    a, b, c, d = (torch.cat(list(llm.score([window]))) for llm in (plain, exact, own, stored))
    assert torch.equal(a, b)
    reference = LLM(said)
    reference.runner = Decoder(read(said), num_blocks=reference.num_blocks, block_size=16, kv_cache="fp8")
    far = (d - a).norm()
    assert (c - d).norm() > 0.1 * far
    assert (torch.cat(list(reference.score([window]))) - d).norm() < 0.1 * far


def test_a_step_that_raises_leaves_nothing_to_be_brought() -> None:
    """Products bring what the next attention will read, by the step's arrays, which are gone once a product elsewhere has raised."""
    llm = LLM(quantized("llama", lambda n: "int8-g32-sym")[0], activations="int8", threads=2, kv_cache="int8")
    whole = llm.runner._model  # type: ignore[attr-defined]
    calls: list[int] = []

    def down(x: int, rows: int, y: int, y_stride: int) -> None:
        calls.append(rows)
        if len(calls) > 1:
            assert sum(map(len, context(2).lines_ahead())) > 0
            raise ZeroDivisionError

    mlp = replace(whole.layers[0].mlps[0], down=NativeProduct("", (NativePart(whole.spec.hidden_size, whole.spec.intermediate_size, elsewhere=down),)))
    layer = replace(whole.layers[0], mlps=(mlp,))
    llm.runner = NativeDecoder(replace(whole, layers=(layer, *whole.layers[1:])), num_blocks=llm.num_blocks, block_size=16, threads=2, kv_cache="int8")
    with pytest.raises(ZeroDivisionError):
        llm.generate(prompts(8, 40), SamplingParams(max_tokens=4, ignore_eos=True))
    assert calls[1] == 8
    assert context(2).lines_ahead() == [[], []]


def test_scales_of_other_layers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"no scales of keys and values for model\.layers\.2\.self_attn"):
        LLM(replace(model("llama"), kv_scales={f"model.layers.{i}.self_attn": (1.0, 1.0) for i in (0, 1, 3)}))


@pytest.mark.parametrize("head", ["int8-g32-sym", "int8-channel-sym", "int8-g16-sym"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_head_and_an_embedding_that_share_integers_equal_transformers_on_them(name: str, head: str) -> None:
    ours, theirs = quantized(name, lambda n: "int4-g32-sym", head=head)
    llm = LLM(ours, max_step_tokens=13)
    reference = LLM(ours)
    reference.runner = Decoder(read(ours), num_blocks=reference.num_blocks, block_size=16)
    window = prompts(1, 60, seed=6)[0] * 3
    with torch.no_grad():
        wanted = theirs(torch.tensor([window])).logits[0, :-1]
    for runs in (llm, reference):
        assert (torch.cat(list(runs.score([window]))) - wanted).abs().max() < LOGITS
    given = prompts(8, 40, seed=1)
    assert [o.token_ids for o in llm.generate(given, SamplingParams(max_tokens=16))] == [greedy(theirs, p, 16) for p in given]


@pytest.mark.parametrize("head", ["int8-g32-sym", "int4-g32-sym", "w8a8-int8"])
def test_an_untied_head_of_integers_equals_transformers_on_them(head: str) -> None:
    ours, theirs = quantized("llama-untied-rope3", lambda n: "int4-g32-sym", head=head)
    window = prompts(1, 60, seed=6)[0] * 3
    with torch.no_grad():
        wanted = theirs(torch.tensor([window])).logits[0, :-1]
    difference = (torch.cat(list(LLM(ours).score([window]))) - wanted).abs().max()
    assert difference < (0.05 * wanted.abs().max() if head == "w8a8-int8" else LOGITS)


@pytest.mark.parametrize("scheme", ["int8-channel-sym+int8-tensor-static", "int8-channel-sym+int8-token"])
def test_a_head_whose_inputs_are_rounded_gives_multiplied_logits(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What logits are multiplied by is in the norm before the head: a stored scale of the head's inputs must be, too."""
    whole, linear = quantized("granite", lambda n: None, head=scheme)[0], Quantized.linear
    assert whole.spec is not None
    monkeypatch.setattr(Quantized, "linear", lambda self, name: replace(linear(self, name), input_scale=torch.tensor(0.04) if "static" in scheme else None))
    window = prompts(1, 60, seed=6)[0] * 3
    exact, scaled, unscaled = (torch.cat(list(LLM(m).score([window]))) for m in (model("granite"), whole, replace(whole, spec=replace(whole.spec, logits_scale=1.0))))
    assert (exact - scaled).norm() < 0.03 * exact.norm()
    assert (unscaled * whole.spec.logits_scale - scaled).norm() < 2e-3 * exact.norm()


def test_heads_beyond_what_int8_keys_are_turned_in_are_refused() -> None:
    whole = model("llama")
    assert whole.spec is not None
    with pytest.raises(UnsupportedError, match="heads of up to 512 dimensions, and this model's have 528"):
        LLM(replace(whole, spec=replace(whole.spec, head_dim=528)), kv_cache="int8")


@pytest.mark.parametrize("blocks", [2**40, 2**62])
def test_a_cache_beyond_all_memory_is_named(blocks: int) -> None:
    with pytest.raises(UnsupportedError, match="GiB, more than there is here"):
        LLM(model("llama"), num_blocks=blocks)


@pytest.mark.parametrize("limit", [None, 2**28])
def test_a_context_beyond_half_of_the_memory_leaves_a_cache_that_fits(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's, or of a container's limit. By default; a request for more than it has is refused, and others run."""
    whole = model("llama")
    if limit is not None:
        monkeypatch.setattr(running, "available_memory", lambda: limit)
    assert whole.spec is not None
    llm = LLM(replace(whole, spec=replace(whole.spec, max_positions=2**36)))
    memory = running.available_memory()
    assert 0.99 < llm.num_blocks * 16 * llm.cache_token_bytes / (memory // 2) <= 1
    with pytest.raises(DataError, match="needs 4294967296 cache blocks of 16 tokens, and the pool has"):
        llm.generate(["a"], SamplingParams(max_tokens=2**36))
    assert len(llm.generate(["a"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-shares"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_damaged_router_is_not_passed_over(tmp_path: Path, name: str, value: float) -> None:
    """One expert's logit that is not finite would never be, or always be, the largest: no token is told."""
    shutil.copytree(folder(name), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    router = next(n for n in reversed(tensors) if n.endswith((".mlp.gate.weight", "block_sparse_moe.gate.weight")))
    tensors[router][1, :] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        LLM(tmp_path / "model").generate([[5, 6, 7]], SamplingParams(max_tokens=4))


def test_experts_are_not_for_a_gpu_or_several_processes() -> None:
    with pytest.raises(UnsupportedError, match="mixture of experts, which the runtime computes on the processor only"):
        gpu(model("mixtral"), "cuda")
    spec = model("mixtral").spec
    assert spec is not None
    with pytest.raises(UnsupportedError, match="a mixture of experts is not shared by several processes yet"):
        of_spec(spec, Share(0, 2))


def test_norms_over_all_heads_are_not_for_several_processes() -> None:
    spec = model("olmo2").spec
    assert spec is not None
    with pytest.raises(UnsupportedError, match="normed over all heads at once are not shared by several processes yet"):
        of_spec(spec, Share(0, 2))


def test_a_step_is_said_to_read_the_experts_of_one_token() -> None:
    llm = LLM(model("mixtral"))
    runner = llm.runner
    assert isinstance(runner, NativeDecoder)
    whole, spec = sum(part.nbytes for p in runner._model.products() for part in p.parts), runner.spec
    experts = 4 * 3 * spec.hidden_size * spec.intermediate_size * 3 * spec.experts.count  # fp32, three matrices, three layers
    assert runner.weight_bytes() == whole - experts // 2
    assert runner.weight_bytes() == Decoder(read(model("mixtral")), num_blocks=2, block_size=16).weight_bytes()


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-yarn-whole", "gemma3-yarn", "phi3-long", "phi3-long-whole"])
def test_scales_of_keys_are_those_of_keys_that_yarn_has_multiplied(name: str) -> None:
    """As a checkpoint says them, and transformers' cache rounds: of rotated keys times the factor of YaRN or LongRoPE, which the runtime multiplies scores by instead."""
    window = [i * 37 % 380 + 3 for i in range(120)]
    said = replace(model(name), kv_scales={f"model.layers.{i}.self_attn": (0.011, 0.02) for i in range(3)})
    ours, theirs = (torch.cat(list(scorer.score([window]))) for scorer in (LLM(said), TransformersEngine(said)))
    assert (ours - theirs).norm() < 1e-2 * theirs.norm()  # a code may fall the other way
    exact = torch.cat(list(LLM(model(name)).score([window])))
    assert (ours - exact).norm() > 5 * (ours - theirs).norm()


def test_inputs_in_the_order_of_their_activations_stay_so_where_rows_change_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are not neighbours, zero points, and rows in the decoders' order: 4 bits against the same weights in fp32."""
    plain = Quantized.linear

    def ordered(self: Quantized, name: str) -> QuantizedLinear:
        weight, scheme = self.weights.read(f"{name}.weight"), self.schemes[name]
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name))).argsort()
        index = (order // scheme.granularity.columns).to(torch.int32)
        by_group = weight[:, index.long().argsort(stable=True)]
        return numerics.quantize(weight, scheme, *numerics.minmax_parameters(by_group, scheme), group_index=index)

    monkeypatch.setattr(Quantized, "linear", ordered)
    ours, theirs = quantized("phi3-long", lambda n: "int4-g16-asym")
    window = prompts(1, 60, seed=6)[0] * 3
    with torch.no_grad():
        wanted = theirs(torch.tensor([window])).logits[0, :-1]
    assert (torch.cat(list(LLM(ours).score([window]))) - wanted).abs().max() < LOGITS
    monkeypatch.setattr(Quantized, "linear", plain)
    other, _ = quantized("phi3-long", lambda n: "int4-g16-asym")
    assert (torch.cat(list(LLM(other).score([window]))) - wanted).abs().max() > 100 * LOGITS


def test_sequences_beyond_the_short_factors_are_for_transformers() -> None:
    """At the last position of the short form the logits are transformers'; one more token, and all of transformers' are others."""
    llm, theirs = LLM(model("phi3-long")), transformers_model("phi3-long")
    window = [i * 37 % 380 + 3 for i in range(257)]
    ours = torch.cat(list(llm.score([window[:256]])))
    with torch.no_grad():
        short, long = (theirs(torch.tensor([window[:n]])).logits[0, :255] for n in (256, 257))
    assert (ours - short).abs().max() < LOGITS
    assert (ours - long).abs().max() > 1000 * LOGITS
    with pytest.raises(
        DataError,
        match=r"longer than the model's context of 256; use a smaller window; for longer sequences it has other rotary factors \(longrope\), "
        r"with which transformers runs it \(engine transformers\)",
    ):
        list(llm.score([window]))
    with pytest.raises(NotOnRuntimeError, match=r"255 tokens or fewer; for longer sequences it has other rotary factors \(longrope\)"):
        llm.generate([window[:256]], SamplingParams(max_tokens=1))
    assert "longrope" not in model("llama").spec.beyond  # type: ignore[union-attr]
    assert len(llm.generate([window[:250]], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids) == 6
