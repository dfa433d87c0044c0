"""The command line is a contract: the verbs and each verb's flags, frozen. A new flag changes this list on purpose."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from qforge.cli.main import VERBS, cli
from qforge.ops.native_cache import CACHE_TYPES

FLAGS = {
    "quantize": ["--dry-run", "--fresh", "--out", "--recipe", "--set"],
    "export": ["--format", "--out", "--type"],
    "eval": ["--activations", "--against", "--device", "--engine", "--json", "--text", "--window"],
    "compare": ["--gate", "--json", "--out"],
    "generate": ["--activations", "--device", "--json", "--max-tokens", "--prompt", "--prompts", "--seed", "--temperature"],
    "bench": ["--activations", "--device", "--json", "--kv-cache", "--tune"],
    "serve": ["--activations", "--device", "--host", "--kv-cache", "--port"],
    "inspect": ["--check", "--json"],
    "recipe": ["init: --out", "validate: --json", "validate: --set"],
    "doctor": ["--json"],
}
CONTEXT = click.Context(cli, info_name="qforge")


def flags(command: click.Command) -> list[str]:
    if isinstance(command, click.Group):
        return sorted(f"{name}: {flag}" for name, inner in command.commands.items() for flag in flags(inner))
    return sorted(name for p in command.params if isinstance(p, click.Option) for name in p.opts if name.startswith("--"))


def test_the_verbs_are_the_contracts() -> None:
    assert list(VERBS) == list(FLAGS)
    assert len(VERBS) <= 10


@pytest.mark.parametrize("verb", cli.list_commands(CONTEXT))
def test_a_verb_has_exactly_the_flags_of_the_contract(verb: str) -> None:
    command = cli.get_command(CONTEXT, verb)
    assert command is not None
    assert flags(command) == FLAGS[verb]
    assert len(FLAGS[verb]) <= 8


@pytest.mark.parametrize("verb", cli.list_commands(CONTEXT))
def test_every_verb_and_flag_says_what_it_is_for(verb: str) -> None:
    command = cli.get_command(CONTEXT, verb)
    assert command is not None
    for part in [command, *(command.commands.values() if isinstance(command, click.Group) else [])]:
        assert part.help, f"{part.name} has no help"
        for p in part.params:
            assert not isinstance(p, click.Option) or p.help, f"{part.name} {p.name} has no help"


def test_caches_are_those_of_the_runtime() -> None:
    """Named again, because whoever asks for help need not wait for numpy."""
    command = cli.get_command(CONTEXT, "bench")
    assert command is not None
    (choice,) = (p.type for p in command.params if p.name == "kv_cache")
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == list(CACHE_TYPES)


HEAVY = ("torch", "transformers", "numpy", "pydantic", "rich")


@pytest.mark.parametrize("statement", ["import qforge", "from qforge.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"])
def test_help_and_import_are_light(statement: str) -> None:
    code = f"import sys\n{statement}\nprint([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", cli.list_commands(CONTEXT))
def test_help_of_a_verb_does_not_import_torch(verb: str) -> None:
    code = f"import sys\nfrom qforge.cli.main import main\ntry:\n    main([{verb!r}, '--help'])\nexcept SystemExit as e:\n    assert not e.code\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("args", "code", "said"), [(["frobnicate"], 2, "No such command 'frobnicate'"), (["recipe", "validate"], 2, "Missing argument"), (["doctor", "--no"], 2, "No such option")]
)
def test_wrong_usage_is_code_2(args: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "qforge", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
