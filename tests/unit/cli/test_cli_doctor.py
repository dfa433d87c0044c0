"""`qforge doctor`: names what is here and what is not, with how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from qforge.cli import machine
from qforge.cli.doctor_command import report
from qforge.cli.main import cli
from qforge.errors import MissingCapabilityError
from qforge.machine_limits import usable_cores


def test_json_says_everything() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"], catch_exceptions=False)
    said = json.loads(result.stdout)
    assert said["ready"] is True
    assert said["cpu"]["cores"] == usable_cores()
    assert 0 < said["memory"]["available_bytes"] <= said["memory"]["total_bytes"]
    assert said["disk"]["free_bytes"] > 0
    versions = {p["name"]: p["version"] for p in said["packages"]}
    assert versions["torch"] == importlib.metadata.version("torch")
    assert all(p["get"] and p["purpose"] for p in said["packages"])
    sets, named = said["native"]["instruction_sets"], said["kernels"]["int4-g128-sym"]
    floats = next(isa for isa in ("avx512-vnni", "avx2", "neon-dotprod", "portable") if isa in sets)
    floats += ", avx2 for many rows" * ("avx512-vnni" in sets and _is_zen4())
    assert named.pop("bf16").startswith("native-bf16 [amx]" if "amx" in sets else f"native-a16 [{sets[0]}] (not native-bf16: it gains only")
    assert {kind: text.partition(" (not")[0] for kind, text in named.items()} == {"fp": f"native [{floats}]", "int16": f"native-a16 [{sets[0]}]", "int8": f"native-a8 [{sets[0]}]"}
    assert "(not native-a8: it rounds activations, for --activations int8)" in named["fp"]
    assert f"native [{floats}] (not native-a8: it multiplies integers" in said["kernels"]["nf4"]["int8"]
    assert said["native"]["present"] == bool(said["native"]["instruction_sets"])


def _is_zen4() -> bool:
    """Family 25 with AVX-512."""
    about = Path("/proc/cpuinfo").read_text()
    return bool(re.search(r"cpu family\s*: 25\n", about) and " avx512f " in about)


def test_the_required_packages_are_those_that_the_package_declares() -> None:
    declared = {r.split(">")[0].split("<")[0].strip().lower() for r in importlib.metadata.requires("qforge") or [] if "extra ==" not in r}
    assert {p.name for p in machine.find_packages() if p.required} == declared


def test_the_optional_packages_are_those_of_the_extras() -> None:
    extras: dict[str, set[str]] = {}
    for requirement in importlib.metadata.requires("qforge") or []:
        for extra in re.findall(r'extra == "([\w-]+)"', requirement):
            extras.setdefault(extra, set()).update(re.findall(r"^[\w.-]+", requirement))
    told = {p.name: p.get for p in machine.find_packages() if not p.required}
    assert set().union(*(packages for extra, packages in extras.items() if extra != "dev")) == set(told) - {"peft"}  # of the tests
    for name, get in told.items():
        named = re.fullmatch(r"pip install 'qforge\[([\w-]+)\]'", get)
        assert get == f"pip install {name}" if named is None else name in extras[named[1]], get


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None if name in ("gguf", "xllamacpp") else "1")
    monkeypatch.setattr(machine, "_native", lambda: {"present": False, "instruction_sets": []})
    said = machine.describe_machine()
    assert said["ready"] is False
    assert [p.split(" (")[0] for p in said["problems"][:1]] == ["gguf is not installed"]
    assert "C++20 compiler" in said["problems"][1]
    page = report(said)
    assert "native module  missing" in page
    assert "pip install 'qforge[llamacpp]'" in page
    assert page.count("problem: ") == 2
    with pytest.raises(MissingCapabilityError, match="gguf is not installed"):
        CliRunner().invoke(cli, ["doctor"], catch_exceptions=False)


def test_the_page_names_processor_memory_and_packages() -> None:
    page = report(machine.describe_machine())
    for word in ("processor", "memory", "disk", "GPU", "native module", "torch", "xllamacpp"):
        assert word in page
