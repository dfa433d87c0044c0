"""Tiny seeded models with a real (byte-level BPE) tokenizer, as Hugging Face directories. No network, a few hundred kilobytes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "The small mill stands by the river, and the miller grinds wheat for the village every day of the week.",
    "A model is a function; a quantized model is a smaller function that is nearly the same.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "When the storm came, they closed the windows, lit the lamp, and told each other stories until morning.",
]

GRANITE: dict[str, object] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.3,
    "logits_scaling": 5.0,
    "rms_norm_eps": 0.05,
}  # an epsilon that counts


def longrope(rotated: int = 12, head_dim: int = 16) -> dict[str, object]:
    """Phi 3's settings: of so many dimensions of a head, with factors that differ everywhere and an amplitude above 1."""
    factors = {"short_factor": [1.0 + 0.3 * i for i in range(rotated // 2)], "long_factor": [2.0 + 1.7 * i for i in range(rotated // 2)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": rotated / head_dim, **factors}
    return {"original_max_position_embeddings": 256, "max_position_embeddings": 4096, "rope_parameters": rope}


def tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """Byte-level BPE, with <|endoftext|> (0) as end, `<|im_start|>` and `<|im_end|>`."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_max_length=256)
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def make(folder: Path, family: str = "llama", *, seed: int = 0, layers: int = 3, hidden: int = 64, intermediate: int = 128, heads: int = 4, kv_heads: int = 2, tied: bool = True,
         dtype: torch.dtype = torch.float32, norms: bool = False, **config: object) -> Path:  # fmt: skip
    """Write a seeded random model of a family (any causal-LM `model_type` of transformers) to `folder` and return it. Weights are scaled up so that logits are not flat.
    `norms`: those of norms are random, too, not all 1 (or 0)."""
    fast = tokenizer()
    width = {} if isinstance(getattr(CONFIG_MAPPING[family], "head_dim", None), property) else {"head_dim": hidden // heads}  # of some it is computed
    settings = AutoConfig.for_model(
        family, vocab_size=len(fast), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, pad_token_id=None, **{"max_position_embeddings": 256, **width, **config},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.25 if "embed" in name else 1.4 / p.shape[-1] ** 0.5)
            elif "bias" in name:
                p.normal_(0, 0.1)
            elif norms:
                p.add_(torch.empty_like(p).uniform_(-0.4, 0.4))
    model.to(dtype).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
