"""Train the small LoRA adapter of the demo: it answers a change, told in plain words, with a release note of three lines.

    python examples/train_adapter.py --out examples/demo-adapter

Plain PyTorch and peft. Every 7th record of adapter_text.jsonl is held out; the loss on the held-out answers is printed before and after.
So that the model keeps what it knows, each step also holds it to its own former distribution on ordinary text (the hand-written part of the built-in calibration text): without
this term it answers every question with a release note, and its perplexity on prose rises by a tenth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qforge.text.builtin import builtin_folder
from qforge.text.calibration import calibration_set
from qforge.text.documents import documents

HERE = Path(__file__).resolve().parent
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HELD_OUT = 7
ORDINARY = "calibration.jsonl"
ORDINARY_SEQUENCES, ORDINARY_TOKENS = 4, 96  # of each step
Example = tuple[list[int], int]  # token ids, and how many of them are the prompt


def load(source: str) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer: `demo`, or anything that transformers can load."""
    if source != "demo":
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    from qforge.models.model import open_model

    opened = open_model(source)
    model = AutoModelForCausalLM.from_config(opened.config, dtype=torch.float32)
    model.load_state_dict({name: opened.weights.read(name).float() for name in opened.weights.names()}, strict=False)
    model.tie_weights()
    return model, opened.tokenizer()


def read_examples(path: Path, tokenizer: Any) -> list[Example]:
    """Each record as token ids; only the answer (what follows the prompt) is learnt."""
    examples = []
    for line in path.read_text("utf-8").splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, full)]
        examples.append((ids[1], len(ids[0])))
    return examples


def loss(model: Any, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens of a padded batch."""
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    real = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in batch])
    position = torch.arange(length)
    answer = (position >= torch.tensor([[start] for _, start in batch])) & real.bool()
    logits = model(input_ids=ids, attention_mask=real).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[answer[:, 1:]], ids[:, 1:][answer[:, 1:]])


def drift(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of the adapted model from the base, over the next tokens of ordinary text `[sequences, tokens]`."""
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=ids).logits.log_softmax(-1)
    after = model(input_ids=ids).logits.log_softmax(-1)
    return torch.nn.functional.kl_div(after.flatten(0, 1), before.flatten(0, 1), log_target=True, reduction="batchmean")


@torch.no_grad()
def held_out_loss(model: Any, examples: list[Example]) -> float:
    model.eval()
    answers = [len(ids) - start for ids, start in examples]
    return sum(loss(model, [example]).item() * n for example, n in zip(examples, answers, strict=True)) / sum(answers)


def train(model: Any, examples: list[Example], ordinary: torch.Tensor, args: argparse.Namespace) -> None:
    """AdamW with a linear decay to zero over seeded shuffles of the examples; `ordinary` `[rows, tokens]` is drawn from at every step."""
    model.train()
    draw = random.Random(args.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate, weight_decay=0.0)
    steps = args.epochs * -(-len(examples) // args.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    start = time.time()
    for epoch in range(args.epochs):
        order = draw.sample(examples, len(examples))
        for i in range(0, len(order), args.batch):
            optimizer.zero_grad()
            value = loss(model, order[i : i + args.batch])
            value.backward()
            kept = drift(model, ordinary[draw.sample(range(len(ordinary)), ORDINARY_SEQUENCES)])
            (args.keep * kept).backward()
            optimizer.step()
            schedule.step()
            print(f"epoch {epoch + 1}, step {schedule.last_epoch} of {steps}: loss {value.item():.3f}, drift {kept.item():.3f} ({time.time() - start:.0f} s)", flush=True)


def save(model: Any, out: Path) -> None:
    """Write the adapter in peft's own layout: tensors in bf16, settings in a fixed order, and no path of this machine."""
    model.peft_config["default"].base_model_name_or_path = BASE
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # peft's empty model card
    settings = json.loads((out / "adapter_config.json").read_text("utf-8"))
    settings["target_modules"] = LINEARS  # a set in peft, so in another order each time
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in load_file(out / "adapter_model.safetensors").items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_model.safetensors").chmod(0o644)


def relative_deltas(model: Any) -> dict[str, float]:
    """For each adapted linear, the Frobenius norm of what merging adds to its weight, over the weight's own."""
    return {
        name.removeprefix("base_model.model."): (module.get_delta_weight("default").norm() / module.base_layer.weight.norm()).item()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a Hugging Face folder or hub id of the same model")
    parser.add_argument("--text", type=Path, default=HERE / "adapter_text.jsonl")
    parser.add_argument("--out", type=Path, default=Path("demo-adapter"))
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keep", type=float, default=2.0, help="weight of the drift from the base on ordinary text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    base, tokenizer = load(args.model)
    examples = read_examples(args.text, tokenizer)
    held_out, learnt = examples[HELD_OUT - 1 :: HELD_OUT], [e for i, e in enumerate(examples) if i % HELD_OUT != HELD_OUT - 1]
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=args.alpha, target_modules=LINEARS, lora_dropout=0.0, task_type="CAUSAL_LM"))
    print(f"{len(learnt)} records to learn, {len(held_out)} held out; loss on the held-out answers {held_out_loss(model, held_out):.3f}")
    text = documents(ORDINARY, role="calibration", folder=builtin_folder(), tokenizer=tokenizer)
    ordinary = calibration_set(text, tokenizer, samples=256, sequence_length=ORDINARY_TOKENS, seed=args.seed).ids
    train(model, learnt, ordinary, args)
    print(f"loss on the held-out answers {held_out_loss(model, held_out):.3f}")
    deltas = sorted(relative_deltas(model).values())
    print(f"relative change of the {len(deltas)} linears: {deltas[0]:.4f} to {deltas[-1]:.4f}, median {deltas[len(deltas) // 2]:.4f}")
    save(model, args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
