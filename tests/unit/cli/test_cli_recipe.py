"""`qforge recipe`: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from qforge.cli.main import cli, main
from qforge.errors import OutputError, RecipeError
from qforge.recipe import Recipe, json_schema, load_recipe
from qforge.recipe.template import FIRST_RECIPE
from qforge.recipe.yaml_tree import parse_yaml

ROOT = Path(__file__).resolve().parents[3]

GOOD = "version: 1\nmodel: {source: demo}\nquantize: {method: gptq, scheme: int4-g64-sym}\n"


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, ["recipe", *args], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_init_writes_a_recipe_that_validates_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "first.yaml"
    assert str(path) in run("init", "--out", str(path))
    assert run("validate", str(path)) == f"{path} is valid: demo, gptq int4-g64-sym\n"
    with pytest.raises(OutputError, match="exists already"):
        CliRunner().invoke(cli, ["recipe", "init", "--out", str(path)], catch_exceptions=False)


def test_init_prints_with_a_dash(tmp_path: Path) -> None:
    path = tmp_path / "printed.yaml"
    path.write_text(run("init", "--out", "-"))
    assert load_recipe(path).model.source == "demo"


def test_validate_as_json_is_the_whole_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    said = json.loads(run("validate", str(path), "--json", "--set", "calibration.samples=3"))
    assert said["name"] == "r"
    assert said["recipe"]["calibration"]["samples"] == 3
    assert said["sha256"] == load_recipe(path, ["calibration.samples=3"]).sha256
    assert Recipe.model_validate(said["recipe"]).to_dict() == said["recipe"]


def test_a_wrong_recipe_ends_with_code_2_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD + "colour: red\n")
    with pytest.raises(SystemExit) as stopped:
        main(["recipe", "validate", str(path)])
    assert stopped.value.code == 2
    assert f"error: {path}:4: unknown key 'colour'" in capsys.readouterr().err


def test_validate_looks_into_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD + "sweep: {matrix: {quantize.scheme: [int4-g64-sym, int8-channel-sym]}}\n")
    assert run("validate", str(path)) == f"{path} is valid: demo, gptq int4-g64-sym, 2 variants: int4-g64-sym, int8-channel-sym\n"
    assert json.loads(run("validate", str(path), "--json"))["recipe"]["sweep"]
    for wrong, said in (("quantize.scheme: [int4-g64-sym, bogus]", "variant bogus"), ("quantize.mehtod: [rtn]", "unknown key 'mehtod'")):
        path.write_text(GOOD + f"sweep: {{matrix: {{{wrong}}}}}\n")
        for flags in ([], ["--json"]):
            with pytest.raises(RecipeError, match=said):
                CliRunner().invoke(cli, ["recipe", "validate", str(path), *flags], catch_exceptions=False)
        run("validate", str(path), "--set", "sweep=null")


def test_schema_describes_every_field_and_forbids_others() -> None:
    schema = json.loads(run("schema"))
    assert schema == json_schema()
    assert schema["title"] == "qforge recipe"
    assert sorted(schema["required"]) == ["model", "quantize", "version"]
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        assert section["description"]
        for name, field in section["properties"].items():
            assert field.get("description"), f"{section['title']}.{name} has no description"
    assert "int4-g64-sym" in json.dumps(schema["$defs"]["QuantizeSection"]["properties"]["scheme"])


def test_the_schema_takes_what_qforge_takes_and_no_more() -> None:
    """An editor would mark a shipped recipe, or the README's, as wrong."""
    check = jsonschema.Draft202012Validator(json_schema())
    texts = {path.name: path.read_text() for path in sorted((ROOT / "recipes").glob("*.yaml"))} | {"first": FIRST_RECIPE}
    texts |= {f"README {i}": text for i, text in enumerate(re.findall(r"```yaml\n(version: 1\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))}
    assert {"demo.yaml", "sweep.yaml", "README 0"} < set(texts)
    for name, text in texts.items():
        assert [(e.json_path, e.message) for e in check.iter_errors(parse_yaml(text, name).value)] == [], name
    good = parse_yaml(GOOD, "good").value
    assert check.is_valid(good | {"gates": {"kl_mean": {"limit": "<= 0.1", "on": "off"}}})
    for wrong in (0.1, None, ["<= 0.1"], {"on": "warn"}, {"limit": "<= 0.1", "on": "fail"}):
        assert not check.is_valid(good | {"gates": {"kl_mean": wrong}}), wrong
    assert not check.is_valid(good | {"gates": {"kl_maen": "<= 0.1"}})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("verb", [("recipe", "schema"), ("recipe", "init", "--out", "-"), ("recipe", "--help"), ("generate", "/nowhere", "--prompt", "a")])
def test_a_full_stdout_is_bad_output_and_no_failed_gate(verb: tuple[str, ...]) -> None:
    """Nor is it an error of Python's own at the end, which has code 120."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "qforge", *verb], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        silent = subprocess.run([sys.executable, "-m", "qforge", *verb], stdout=full, stderr=full, check=False)
    assert done.returncode == silent.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_left_is_no_error_of_ours() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = subprocess.run([sys.executable, "-m", "qforge", "recipe", "schema"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
