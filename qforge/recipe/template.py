"""The first recipe that `qforge recipe init` writes: complete, commented, valid as it stands."""

from __future__ import annotations

FIRST_RECIPE = """\
# A qforge recipe. Run it with:   qforge quantize --recipe FILE
# Only version, model and quantize are required; what else stands here are the defaults. `qforge recipe schema` describes every field.
version: 1

model:
  source: demo              # a Hugging Face directory or hub id, a .gguf file, or demo (SmolLM2-135M-Instruct)
  # revision: main          # branch, tag or commit of a hub model
  # dtype: auto             # type of what stays unquantized: auto, float32, float16, bfloat16

# LoRA adapters, merged in this order before anything else. Paths are relative to this file.
# adapters:
#   - {source: ./my-lora, weight: 1.0}

# The text that gptq (and the other calibrated methods) see. Best: text like what the model will read in use.
calibration:
  source: builtin           # builtin, generated, a .txt or .jsonl file, or a hub data set
  samples: 128
  sequence_length: 512
  seed: 0

quantize:
  method: gptq              # none, rtn (fast, no calibration), gptq (better), auto (chooses each layer's scheme), ...
  scheme: int4-g64-sym      # bits, who shares a scale (g64: 64 inputs), symmetry; or a preset such as w8a16
  # budget: 4.5 bits        # for method: auto, instead of scheme: bits per weight, "110 MB", or "kl <= 0.05"
  ignore: [lm_head]         # names or patterns of layers that stay as they are
  # overrides:              # other schemes for some layers
  #   - {match: "*.down_proj", scheme: int8-g64-sym}
  kv_cache: null            # fp8: keys and values, too, with calibrated scales (vLLM and the built-in runtime keep them so)
  options:
    damping: 0.2
    act_order: true
    scale_search: true
    error_correction: null  # each layer makes up for the errors of those before it, half as slow again; null: where weights alone are rounded
    refine: 3               # sweeps over codes and scales after the rounding
    tune: 0                 # steps over all layers' scales together, towards the original's predictions: try 60
    smoothing: null         # smoothquant: share of the difficulty that moves from activations into weights; null: the best for each
    group_fallback: error   # a width that the group size does not divide: error, adjust or ignore

# Further formats of the same integers; OUT/model (Hugging Face, compressed-tensors layout) is always written.
export:
  - {format: gguf}          # llama.cpp
  # - {format: gptq}        # GPTQ checkpoint

evaluate:                   # `evaluate: null` skips it
  text: builtin             # builtin, a .txt or .jsonl file, or a hub data set; never what calibration saw
  window: 2048
  against: original         # the merged, unquantized model
  engine: auto

# Limits that fail the run (exit code 1). Set them from a run that you are content with.
# gates:
#   perplexity_ratio: "<= 1.10"
#   kl_mean: {limit: "<= 0.10", on: warn}

run:
  device: auto
  threads: null             # null: all cores
  memory_limit: null        # for example 8GiB
"""
