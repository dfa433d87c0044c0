"""A realistic results.json, made in code: 30 blocks, 350 windows, gates of every outcome, exports checked, skipped and broken."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from qforge.types import (
    Cluster,
    DeltaP,
    Evaluation,
    ExportResult,
    Flips,
    GateResult,
    Greedy,
    Guess,
    Histogram,
    LayerResult,
    PositionBin,
    Results,
    Verification,
    WorstToken,
)

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NASTY = "<script>alert('x')</script> | `rm` & \"quotes\" \x01 *bold*"


def _evaluation(rng: random.Random) -> Evaluation:
    clusters = []
    for _ in range(350):
        nll = rng.gauss(2.9, 0.35)
        clusters.append(Cluster(255, 255 * (nll + rng.gauss(0.08, 0.04)), 255 * nll, 255 * rng.lognormvariate(-2.1, 0.35), rng.randint(180, 215)))
    tokens = 255 * len(clusters)
    candidate, reference = (math.exp(math.fsum(values) / tokens) for values in ([c.nll_candidate for c in clusters], [c.nll_reference or 0.0 for c in clusters]))
    return Evaluation(
        text_sha256="e5" * 32,
        protocol={"description": "non-overlapping windows", "window": 256, "stride": 256, "bos": False, "windows": 350, "cluster": "window"},
        engine="qforge 0.1.0",
        tokens=tokens,
        candidate={"perplexity": candidate, "perplexity_ci95": (19.75, 20.45), "nll": math.log(candidate), "bits_per_byte": 1.0417, "bits_per_byte_ci95": (1.0321, 1.0512)},
        clusters=clusters,
        reference={"perplexity": reference, "perplexity_ci95": (17.9, 18.6), "nll": math.log(reference)},
        perplexity_ratio=candidate / reference,
        perplexity_ratio_ci95=(1.0789, 1.0877),
        kl_mean=math.fsum(c.kl_sum or 0.0 for c in clusters) / tokens,
        kl_mean_ci95=(0.1257, 0.1362),
        kl_median=0.0456,
        kl_median_ci95=(0.0441, 0.0472),
        kl_p90=0.3321,
        kl_p90_ci95=(0.3211, 0.3444),
        kl_p99=1.2345678,
        kl_p99_ci95=(1.1876, 1.2991),
        kl_p999=3.4567,
        kl_p999_ci95=(3.1, 3.9),
        kl_max=9.8765,
        top5_agreement=0.8123,
        top5_agreement_ci95=(0.8101, 0.8145),
        delta_p=DeltaP(-0.0123, 0.0987, {"min": -0.91, "1": -0.3, "50": -0.001, "99": 0.2, "max": 0.8}, (-0.0131, -0.0115), (0.0961, 0.1012)),
        flips=Flips(0.4512, 0.4321, 0.0403, 0.0212, (0.0391, 0.0415), (0.0203, 0.0221)),
        greedy=Greedy(48, "document", [48, 3, 17, 48, 0, 31, 9, 22], 22.25, (11.1234, 33.4567), 0.25),
        kl_by_position=[PositionBin(1 << k, min(2 << k, 256), 350 * (min(2 << k, 256) - (1 << k)), 0.2 - 0.01 * k, 0.004) for k in range(8)],
        kl_histogram=Histogram([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0], [250, 9000, 40000, 35000, 5000]),
        worst_tokens=[
            WorstToken(i, 40 + i, 9.8765 - i / 4, 300 + i, 0.0012, 0.9123, [Guess(1, 0.5, " wrong")], [Guess(300 + i, 0.9123, " right")], " right", f"some context {NASTY} {i}")
            for i in range(20)
        ],
        power={"perplexity_ratio": 0.0123, "kl_mean": 0.002, "top1_agreement": 0.004},
        top1_agreement=0.775421,
        top1_agreement_ci95=(0.7711, 0.7797),
        base={"perplexity": 31.41592, "nll": 3.4473},
        reference_engine="transformers 5.23.0",
    )


def _layers(rng: random.Random) -> list[LayerResult]:
    layers = [
        LayerResult(f"model.layers.{i}.{kind}", "int4-g64-sym", round(rng.uniform(0.08, 0.13), 6), round(rng.uniform(0.02, 0.09), 6), 4.25) for i in range(30) for kind in KINDS
    ]
    layers[7] = LayerResult(layers[7].name, "int8-g64-sym", 0.0061, 0.0009, 8.25, NASTY)
    return [*layers, LayerResult("lm_head", None, note="matches ignore")]


def sample() -> Results:
    rng = random.Random(7)
    return Results(
        qforge_version="0.1.0",
        recipe={"version": 1, "model": {"source": NASTY}, "quantize": {"method": "gptq", "scheme": "int4-g64-sym"}, "gates": {"kl_mean": "<= 0.28"}},
        recipe_sha256="ab" * 32,
        model={"source": "demo", "parameters": 134515008, "dtype": "bfloat16", "family": "llama", "sha256": "cd" * 32},
        artifact={"path": "model", "sha256": "fa" * 32, "size_bytes": 113_000_000, "weights_bytes": 113_010_000,
                  "bits_per_weight": 4.25, "bits_per_parameter": 6.72, "size_ratio": 0.4201,
                  "original_bytes_at_16_bits": 269_030_016},
        calibration={"source": "builtin", "text_sha256": "c4" * 32, "sequences": 128, "tokens": 65536, "overlap": {"identical": False, "shared_documents": 0, "documents": 12}},
        evaluation=_evaluation(rng),
        exports=[
            ExportResult("gguf", "exports/gguf", "9a" * 32, 98_000_000, True,
                         [Verification("llama.cpp", "b6500", 0.00031, 0.9921, 4096, True), Verification("gguf", "0.19.0", weights_equal=True)]),
            ExportResult("gptq", "exports/gptq", "9b" * 32, 113_500_000, False, [Verification("reader", "1", weights_equal=False, note=NASTY)]),
            ExportResult("onnx", skipped_because="onnxruntime is not installed; pip install 'qforge[onnx]'"),
        ],
        gates=[
            GateResult("perplexity_ratio", "<= 1.30", 1.0833, True, "error", (1.0789, 1.0877)),
            GateResult("top1_agreement", ">= 0.80", 0.775421, False, "error", (0.7711, 0.7797)),
            GateResult("size_ratio", "<= 0.40", 0.4201, False, "warn"),
        ],
        layers=_layers(rng),
        adapters=[{"source": "adapter", "weight": 1.0, "method": "rsLoRA", "rank": 8, "tensors": 210, "replaced": [], "relative_delta_mean": 0.0123}],
        work={"computed": 31, "resumed": 4},
        timings={"open": 1.2, "quantize": 187.4, "evaluate": 95.0, "export": 7.25},
        parts={"quantize": {"load": 2.5, "forward": 93.75, "refine": 41.5}},
        peak_rss_bytes=1_234_567_890,
        memory={"model block": 14_000_000, "calibration activations": 151_000_000},
        environment={"qforge": "0.1.0", "torch": "2.13.0", "cpu": "Some CPU", "cores": 2},
        warnings=["window: 2048 tokens asked for, capped at the model's context of 256", NASTY],
    )  # fmt: skip


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """The object of results.json."""
    made: dict[str, Any] = json.loads(sample().to_json())
    return made


@pytest.fixture
def results_path(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(sample().to_json())
    return path
