"""Model cards: what is known is said, nothing else, and equal facts give equal bytes."""

from __future__ import annotations

from qforge.export.card import write_card
from qforge.types import Cluster, Evaluation

PROVENANCE = {
    "qforge_version": "0.1.0",
    "model": {"source": "SmolLM2-135M", "parameters": 800},
    "adapters": [{"source": "my-lora"}],
    "quantize": {"method": ["gptq"], "scheme": "int4-g64-sym"},
    "calibration": {"tokens": 65536},
    "bits_per_weight": 5.125,
    "layers": [
        {"name": "a", "scheme": "int4-g64-sym", "relative_error": 0.125},
        {"name": "b", "scheme": "int4-g64-sym", "relative_error": 0.25},
        {"name": "lm_head", "scheme": None, "relative_error": None},
    ],
}


def written(tmp_path, *args):
    write_card(tmp_path, *args)
    return (tmp_path / "README.md").read_text()


def test_a_card_holds_recipe_and_measured_quality(tmp_path):
    evaluation = Evaluation("ab" * 32, {}, "qforge", 5100, {"perplexity": 4.5}, [Cluster(5100, 1.0)], {"perplexity": 4.25}, kl_mean=0.03125, top1_agreement=0.9375)
    (tmp_path / "model.safetensors").write_bytes(bytes(675))
    text = written(tmp_path, "gptq", PROVENANCE, evaluation)
    for part in ("library_name: transformers", "- gptq", "# SmolLM2-135M, quantized", "`my-lora`", "scheme: int4-g64-sym", "65,536 tokens",
                 "5.125 bits per weight in the quantized layers, scales counted, 6.750 bits per parameter of the whole model.",
                 "2 int4-g64-sym, 1 as it was",
                 "| perplexity | 4.500 |",
                 "| perplexity of the unquantized model | 4.250 |", "0.0312", "0.9375",
                 "0.1875 on average; largest in `b` (0.2500), `a` (0.1250)"):  # fmt: skip
        assert part in text, part
    assert text == written(tmp_path, "gptq", PROVENANCE, evaluation)


def test_a_card_of_a_model_that_is_not_quantized_says_so(tmp_path):
    text = written(tmp_path, "plain", {**PROVENANCE, "quantize": {"method": "none"}, "bits_per_weight": 16.0, "layers": []})
    assert "No layer is quantized." in text
    assert "bits per" not in text


def test_a_card_of_a_foreign_checkpoint_claims_nothing(tmp_path):
    text = written(tmp_path, "awq", {"qforge_version": "0.1.0", "model": {"source": "theirs"}})
    assert "# theirs, quantized" in text
    assert "Quality" not in text
    assert "Recipe" not in text
