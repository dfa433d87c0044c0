"""Continuations of a model that the built-in runtime does not run, by transformers' own generation: one prompt after the other, all weights in fp32."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from qforge.errors import DataError
from qforge.models.assets import end_ids
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.runtime.detokenize import Detokenizer
from qforge.runtime.prompts import Prompt, PromptReader
from qforge.runtime.sequence import FinishReason, Output, SamplingParams

_NO_LIMIT = 1 << 30  # positions of a model whose config tells of none


@torch.no_grad()
def continuations(model: Model, prompts: Sequence[Prompt], params: SamplingParams) -> list[Output]:
    """Continue each prompt, as `LLM.generate` does; seeds give other numbers than there.

    Args:
        model: whichever transformers runs.
        prompts: texts, token ids or messages.
        params: `stop` strings and `min_p` are not for this.

    Raises:
        DataError: a prompt is empty, malformed, or leaves no room in the model's context.
    """
    tokenizer = model.tokenizer()
    ends = end_ids(model.assets, model.config, tokenizer)
    context = int(getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT)
    reader = PromptReader(model.source, lambda: tokenizer, context, int(model.config.vocab_size))
    read = []
    for number, prompt in enumerate(prompts, 1):
        try:
            text, ids = reader.tokenize(prompt)
            if len(ids) >= context:
                raise DataError(f"a prompt of {len(ids)} tokens leaves no room in the model's context of {context}; shorten it to {context - 1} tokens or fewer")
        except DataError as e:
            raise DataError(f"prompt {number} of {len(prompts)}: {e}") from e
        read.append((text, ids))
    drawn = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k} if params.temperature else {"do_sample": False}
    outputs = []
    with BlockModel(model).whole() as module:
        module.generation_config.eos_token_id, module.generation_config.pad_token_id = ends or None, (ends or [0])[0]
        for text, ids in read:
            torch.manual_seed(secrets.randbits(63) if params.seed is None else params.seed)
            given = torch.tensor([ids])
            whole = module.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=min(params.max_tokens or context, context - len(ids)), **drawn)[0].tolist()
            new, detokenizer = whole[len(ids) :], Detokenizer(tokenizer, ids)
            ended = new[-1] in ends
            for token in new[: len(new) - ended]:
                detokenizer.add(token)
            detokenizer.finish()
            outputs.append(Output(text, ids, new, detokenizer.text, FinishReason.STOP if ended else FinishReason.LENGTH))
    return outputs
