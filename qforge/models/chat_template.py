"""Chat templates as Hugging Face describes them: Jinja in a sandbox, with what templates may call."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any


def render(template: str, conversation: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str], *, add_generation_prompt: bool) -> str:
    """The text of a conversation.

    Args:
        template: Jinja.
        conversation: messages with `role` and `content`.
        special_tokens: names that the template may use (`bos_token`, ...).
        add_generation_prompt: whether the beginning of an answer follows.

    Raises:
        Exception: what Jinja or the template raises.
    """
    return str(compiled(template).render(messages=conversation, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **special_tokens))


@functools.lru_cache(maxsize=4)
def compiled(template: str) -> Any:
    """A template in its environment: sandboxed, with `raise_exception`, `strftime_now`, loop controls and JSON that keeps Unicode; what transformers compiles is compiled.

    Raises:
        Exception: it is no Jinja; a `jinja2.TemplateSyntaxError` has the line.
    """
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model said; for a prompt it is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Sequence[str] | None = None, sort_keys: bool = False) -> str:
        pair = None if separators is None else (separators[0], separators[1])
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)

    def now(form: str) -> str:
        import datetime

        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(template)
