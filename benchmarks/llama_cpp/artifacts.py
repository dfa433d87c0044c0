"""Makes what vs_llama_cpp.py compares: 4-bit artifacts with an int8 output head, symmetric (Q4_0 in GGUF) and asymmetric (Q4_1), and their GGUF exports with the same integers.

    python benchmarks/llama_cpp/artifacts.py smollm2 FOLDER        SmolLM2-135M, groups of 64; its head is tied: one table of int8 for both, in both engines
    python benchmarks/llama_cpp/artifacts.py llama-1.1b FOLDER     a random Llama of TinyLlama's shape (1.1 billion parameters, 3 GB on disk), groups of 128; its head is not tied
    python benchmarks/llama_cpp/artifacts.py qwen3-moe FOLDER      4 layers of random weights as Qwen3-30B-A3B has 48: 128 experts, 8 for each token (10 GB on disk)

Rounded to nearest and not evaluated: speed does not depend on which integers there are. Prints the command that compares them; what is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scale import SHAPE, SHARD_BYTES, shapes, weight

from qforge.export.writer import write_safetensors
from qforge.models import skeleton

LAYERS = 22
GROUPS = {"smollm2": 64, "llama-1.1b": 128, "qwen3-moe": 128}
MIXTURE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(GROUPS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    source = "demo" if args.model == "smollm2" else str(random_model(args.folder.resolve() / "source", args.model))
    for kind in ("sym", "asym"):
        quantize(args.folder, source, kind, GROUPS[args.model])
    files = " ".join(f"--gguf {next((args.folder / kind / 'exports/gguf').glob('*.gguf'))}" for kind in ("sym", "asym"))
    print(f"python benchmarks/vs_llama_cpp.py {args.folder}/sym/model {files} --save {args.model}")
    return 0


def quantize(folder: Path, source: str, kind: str, group: int) -> None:
    """One artifact and its GGUF export; the recipe stays beside them."""
    section = {
        "method": "rtn", "scheme": f"int4-g{group}-{kind}", "overrides": [{"match": "lm_head", "scheme": f"int8-g{group}-sym"}], "options": {"scale_search": False},
    }  # fmt: skip
    recipe = folder / f"{kind}.json"
    recipe.write_text(json.dumps({"version": 1, "model": {"source": source}, "quantize": section, "export": [{"format": "gguf"}], "evaluate": None}))
    subprocess.run([sys.executable, "-m", "qforge", "quantize", "--recipe", str(recipe), "--out", str(folder / kind)], check=True, stdout=sys.stderr)
    shutil.rmtree(folder / kind / "work", ignore_errors=True)


def random_model(folder: Path, name: str) -> Path:
    """A model of seeded normal weights and a small byte-level vocabulary, unless it is there."""
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    common = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16"}
    if name == "qwen3-moe":
        config = Qwen3MoeConfig(**MIXTURE, **common, architectures=["Qwen3MoeForCausalLM"])
        tensors = skeleton.build(config).shapes
    else:
        config, tensors = LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, **common, architectures=["LlamaForCausalLM"]), shapes(LAYERS)
    config.save_pretrained(folder)
    write_safetensors(folder, [weight(i, tensor, shape, 0) for i, (tensor, shape) in enumerate(tensors.items())], shard_bytes=SHARD_BYTES)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and few pairs of them: requests are token ids, but GGUF wants a vocabulary that llama.cpp knows."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator([" ".join(["the mill by the river"] * 9)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_max_length=2048)


if __name__ == "__main__":
    raise SystemExit(main())
