"""Whether what reads an export cuts and frames text as the artifact does: token ids of awkward strings, end tokens, the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import transformers
from transformers import PreTrainedTokenizerBase

from qforge.engines import foreign, llama_cpp
from qforge.errors import ModelError
from qforge.export.gguf_vocabulary import template_name
from qforge.export.imatrix import FILE as IMATRIX
from qforge.models.assets import VOCABULARIES, load_tokenizer
from qforge.models.model import Model
from qforge.types import Verification

PROBES = ("", " ", "a", "The mill by the river.", "  two spaces, a\ttab\nand 123456 lines\n\n", "naïve straße 日本語 русский 😀", "def f(x):\n    return x + 1", "I'm sure they do")
# Text that llama.cpp cuts in its own way for some tokenizers, whatever a file says: it composes no characters (NFC), and its patterns for gpt-4o and tekken know capitals of ASCII
# only and no combining marks.
APART = ("cafe\u0301 nai\u0308ve \u1112\u1161\u11ab", "हिन्दी ไทย", "ŒUVRE ÉCOLE ΑΘΗΝΑ МОСКВА")
CONVERSATIONS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}, {"role": "user", "content": "Thanks"}],
)
WITHOUT = ("tensorrt", "triton")  # formats in which text is somebody else's business


def verify_text(format_name: str, paths: Sequence[Path], model: Model) -> list[Verification]:
    """Read texts with an export's own tokenizer, by the program that reads it: llama.cpp for GGUF, transformers for the rest.

    Args:
        format_name: of an exporter.
        paths: the files that it wrote.
        model: what was exported.

    Returns:
        One verification, `text_equal` with a note on what differs; none where the program is not installed, or the format holds no tokenizer.
    Raises:
        MissingCapabilityError: the program did not answer in time.
    """
    ours = model.tokenizer()
    if format_name == "gguf":
        return _in_llama_cpp(next(p for p in paths if p.suffix == ".gguf" and p.name != IMATRIX), ours)
    folder = next((p.parent for p in paths if p.name in VOCABULARIES or p.suffix == ".tiktoken"), None)
    if folder is None and format_name in WITHOUT:
        return []
    try:
        problem = "it has no tokenizer" if folder is None else _difference(ours, load_tokenizer(folder, trust_remote_code=model.trust_remote_code))
    except ModelError as e:
        problem = str(e)
    return [Verification("tokenizer in transformers", transformers.__version__, note=problem, text_equal=problem is None)]


def _in_llama_cpp(path: Path, ours: PreTrainedTokenizerBase) -> list[Verification]:
    python = llama_cpp.interpreter()
    if python is None:
        return []
    probes = [*_probes(ours), *APART]
    ids, _ = llama_cpp.tokenized(path, probes)
    common, wanted_ids = len(probes) - len(APART), [ours(p).input_ids for p in probes]
    problem = _other_ids(probes[:common], wanted_ids[:common], ids[:common])
    limit = _other_ids(APART, wanted_ids[common:], ids[common:])
    if problem is None:
        held, wanted = _held_templates(path), {template_name(name): text for name, text in _templates(ours).items()}
        problem = _other_names(wanted, held) or next((f"its {_called(name)} is another one" for name in wanted if held[name] != wanted[name]), None)
    note = problem or (limit and f"but {limit} (llama.cpp's own limits: no composing of characters, capitals of ASCII only in some tokenizers' patterns)")
    return [Verification("tokenizer in llama.cpp", foreign.version_of(python, llama_cpp.PACKAGE), note=note, text_equal=problem is None)]


def _probes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """With special tokens glued to text: they are one token each, or they are not."""
    return [*PROBES, *(f"a{token} b" for token in tokenizer.all_special_tokens[:8])]


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """What differs first, in words; None where nothing does."""
    probes = _probes(ours)
    problem = _other_ids(probes, [ours(p).input_ids for p in probes], [theirs(p).input_ids for p in probes])
    for kind in ("bos", "eos"):
        a, b = (getattr(t, f"{kind}_token_id") for t in (ours, theirs))
        problem = problem or (None if a == b else f"its {kind.upper()} token is {b} instead of {a}")
    wanted, held = _templates(ours), _templates(theirs)
    problem = problem or _other_names(wanted, held)
    if problem:
        return problem
    other = [name for name in wanted if any(_rendered(ours, wanted[name], c) != _rendered(theirs, held[name], c) for c in CONVERSATIONS)]
    return f"its {_called(other[0])} renders a conversation otherwise" if other else None


def _templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Chat templates by name; one alone is the `default`."""
    found = tokenizer.chat_template or {}
    return dict(found) if isinstance(found, dict) else {"default": found}


def _held_templates(path: Path) -> dict[str, str]:
    """Chat templates of a GGUF file, by name."""
    fields = {name.removeprefix("tokenizer.chat_template"): field for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.chat_template")}
    return {name.removeprefix(".") or "default": field.contents() for name, field in fields.items() if name != "s"}


def _called(name: str) -> str:
    return "chat template" if name == "default" else f"chat template '{name}'"


def _other_names(wanted: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    lost = [f"it has no {_called(name)}" for name in wanted if name not in held]
    return next(iter([*lost, *(f"it has a {_called(name)}, and the artifact has none" for name in held if name not in wanted)]), None)


def _other_ids(probes: Sequence[str], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str | None:
    different = [(p, list(a), list(b)) for p, a, b in zip(probes, ours, theirs, strict=True) if list(a) != list(b)]
    if not different:
        return None
    text, a, b = different[0]
    return f"it reads {len(different)} of {len(probes)} texts as other tokens: {text!r} as {_short(b)} instead of {_short(a)}"


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:8]))}, ...]"


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str, conversation: list[dict[str, str]]) -> str:
    """What a template makes of a conversation, a refusal included."""
    try:
        return str(tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False, add_generation_prompt=True))
    except Exception as e:  # whatever a template's own code raises
        return f"{type(e).__name__}: {e}"
