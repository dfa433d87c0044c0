"""Reading recipes: defaults, --set, and every kind of mistake with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from qforge.errors import RecipeError
from qforge.recipe import Recipe, load_recipe
from qforge.recipe.messages import FOREIGN_KEYS
from qforge.recipe.template import FIRST_RECIPE
from qforge.scheme import parse

GOOD = "version: 1\nmodel: {source: demo}\nquantize: {method: gptq, scheme: int4-g64-sym}\n"
RTN = "version: 1\nmodel: {source: demo}\nquantize:\n  method: rtn\n"


def load(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> Recipe:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode())
    return load_recipe(path, overrides)


def refusal(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, overrides)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_three_keys_are_enough_and_the_rest_has_the_documented_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.folder == tmp_path
    assert recipe.name == "mine"
    assert recipe.model.source == "demo"
    assert (recipe.model.revision, recipe.model.dtype, recipe.model.trust_remote_code) == (None, "auto", False)
    assert recipe.quantize.method == ("gptq",)
    assert recipe.quantize.scheme == parse("int4-g64-sym")
    assert recipe.quantize.ignore == ("lm_head",)
    options = recipe.quantize.options
    assert (options.damping, options.act_order, options.scale_search, options.group_fallback) == (0.2, True, True, "error")
    assert (recipe.calibration.source, recipe.calibration.samples, recipe.calibration.sequence_length, recipe.calibration.seed) == ("builtin", 128, 512, 0)
    assert recipe.evaluate is not None
    assert (recipe.evaluate.text, recipe.evaluate.window, recipe.evaluate.against, recipe.evaluate.engine, recipe.evaluate.tasks) == ("builtin", 2048, "original", "auto", ())
    assert (recipe.run.device, recipe.run.threads, recipe.run.workers, recipe.run.memory_limit, recipe.run.activations) == ("auto", None, 1, None, "fp")
    assert recipe.report.formats == ("json", "markdown", "html", "junit")
    assert (recipe.adapters, recipe.export, recipe.gates) == ((), (), {})


def test_everything_written_arrives(tmp_path: Path) -> None:
    text = """\
version: 1
model: {source: ./base, revision: "12", dtype: bfloat16, trust_remote_code: true}
adapters: [{source: ./a}, {source: ./b, weight: 5e-1}]
calibration: {source: own.jsonl, samples: 3, sequence_length: 64, seed: 7}
quantize:
  method: [awq, gptq]
  scheme: w4a16
  ignore: []
  overrides: [{match: "*.down_proj", scheme: int8-g64-sym}]
  options: {damping: 0.1, act_order: false, scale_search: false, group_fallback: adjust}
export: [{format: gguf, type: q4_0}, {format: gguf, type: q8_0}, {format: tensorrt, optional: true}]
evaluate: {text: t.txt, window: 128, engine: transformers, tasks: [a]}
gates: {kl_mean: <= 0.28, size_ratio: {limit: "<= 0.45", on: off}}
run: {device: "cuda:1", threads: 2, workers: 3, memory_limit: 8GiB, activations: int8}
report: {formats: [json]}
"""
    recipe = load(tmp_path, text)
    assert [a.weight for a in recipe.adapters] == [1.0, 0.5]
    assert recipe.quantize.method == ("awq", "gptq")
    assert recipe.quantize.scheme == parse("int4-g128-sym")
    assert recipe.quantize.overrides[0].scheme == parse("int8-g64-sym")
    assert [(e.format, e.type, e.optional) for e in recipe.export] == [("gguf", "q4_0", False), ("gguf", "q8_0", False), ("tensorrt", None, True)]
    assert {name: (g.limit, g.on) for name, g in recipe.gates.items()} == {"kl_mean": ("<= 0.28", "error"), "size_ratio": ("<= 0.45", "off")}
    assert recipe.run.memory_limit == 8 << 30
    assert recipe.evaluate is not None
    assert recipe.evaluate.tasks == ("a",)


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2 TiB", 2 << 40), ("4096", 4096), ("800kB", 800_000)])
def test_memory_limits_are_sizes(tmp_path: Path, text: str, size: int) -> None:
    assert load(tmp_path, GOOD + f"run: {{memory_limit: {text}}}\n").run.memory_limit == size


def test_auto_has_a_budget_and_no_scheme(tmp_path: Path) -> None:
    auto = "version: 1\nmodel: {source: demo}\nquantize: {method: auto, budget: 4.5 bits, candidates: [int4-g32-sym, w8a16]}\n"
    recipe = load(tmp_path, auto)
    assert recipe.quantize.scheme is None
    assert recipe.quantize.candidates == (parse("int4-g32-sym"), parse("int8-channel-sym"))
    assert load(tmp_path, json.dumps(recipe.to_dict())) == recipe
    for change, says in (
        ("quantize.budget=null", 'method auto needs a budget: .*"4.5 bits"'),
        ("quantize.budget=4.5", "budget"),
        ("quantize.budget=soon", "'soon' is no budget; write bits per weight"),
        ("quantize.scheme=int4-g32-sym", "method auto chooses schemes itself"),
        ("quantize={method: rtn, scheme: w8a16, budget: 4 bits}", "belong to method: auto"),
        ("quantize={method: rtn, scheme: w8a16, candidates: [w8a16]}", "belong to method: auto"),
        ("quantize.candidates=[int4]", "'int4' is not a scheme"),
    ):
        assert re.search(says, refusal(tmp_path, auto, (change,))), change


def test_methods_that_name_their_numbers_bring_a_scheme(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, ("quantize.method=nf4", "quantize.scheme=null")).quantize.scheme == parse("nf4")
    assert load(tmp_path, GOOD, ("quantize={method: fp8}",)).quantize.scheme == parse("fp8-dynamic")
    assert load(tmp_path, GOOD, ("quantize={method: none}",)).quantize.scheme is None


def test_anchors_are_allowed_and_do_not_share_state(tmp_path: Path) -> None:
    text = RTN + "  scheme: &s int4-g64-sym\n  overrides: [&o {match: a, scheme: *s}, *o]\n"
    recipe = load(tmp_path, text, ("quantize.overrides.1.match=b",))
    assert [o.match for o in recipe.quantize.overrides] == ["a", "b"]


def test_set_changes_adds_and_appends(tmp_path: Path) -> None:
    overrides = ("model.source=other", "gates.kl_mean=<= 0.3", "adapters.0={source: x}", "adapters.0.weight=2", "run.threads=3", "evaluate=null", "gates={}")
    recipe = load(tmp_path, GOOD, overrides)
    assert (recipe.model.source, recipe.adapters[0].weight, recipe.run.threads, recipe.evaluate, recipe.gates) == ("other", 2.0, 3, None, {})


def test_an_override_may_replace_what_the_file_has_wrong(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "run: {threads: many}\n", ("run.threads=2",)).run.threads == 2


def test_hash_is_of_the_meaning_not_of_the_text(tmp_path: Path) -> None:
    base = load(tmp_path, GOOD)
    assert load(tmp_path, "# a comment\n" + GOOD + "calibration: {samples: 128}\n").sha256 == base.sha256
    assert load(tmp_path, GOOD, ("quantize.scheme=int4-g32-sym",)).sha256 != base.sha256
    assert re.fullmatch(r"[0-9a-f]{64}", base.sha256)


def test_the_first_recipe_is_valid_and_says_the_defaults(tmp_path: Path) -> None:
    written = load(tmp_path, FIRST_RECIPE)
    assert written.to_dict() == load(tmp_path, GOOD + "export: [{format: gguf}]\n").to_dict()


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    with pytest.raises(ValueError, match="frozen"):
        recipe.quantize.options.damping = 0.5  # type: ignore[misc]


MISTAKES = {
    "unknown key": (GOOD + "colour: red\n", "mine.yaml:4: unknown key 'colour' in a recipe; allowed: version, model,"),
    "near miss": (GOOD + "calibraton: {}\n", "mine.yaml:4: unknown key 'calibraton' in a recipe (did you mean calibration?)"),
    "key of another section": (GOOD + "samples: 3\n", "mine.yaml:4: unknown key 'samples' in a recipe (samples belongs at calibration.samples)"),
    "wrong type": (RTN + "  scheme: 7\n", "mine.yaml:5: quantize.scheme: given 7; a scheme is a text such as int4-g64-sym"),
    "impossible scheme": (RTN + "  scheme: int5-g31-maybe\n", "mine.yaml:5: quantize.scheme: given 'int5-g31-maybe'; 'int5-g31-maybe' is not a scheme"),
    "scheme of an override": (RTN + "  scheme: w4a16\n  overrides:\n    - match: a\n      scheme: int4\n", "mine.yaml:8: quantize.overrides[0].scheme: given 'int4'"),
    "no scheme": (RTN, "mine.yaml:3: quantize: method rtn needs a scheme, for example scheme: int4-g64-sym"),
    "unknown method": (GOOD.replace("gptq", "magic"), "mine.yaml:3: quantize.method: given 'magic'; unknown method 'magic'; known methods: none, rtn, gptq, awq"),
    "method order": (GOOD.replace("gptq", "[gptq, awq]"), "'gptq' cannot come before another method"),
    "method twice": (GOOD.replace("gptq", "[awq, awq]"), "names each method once"),
    "method of a wrong type": (GOOD.replace("gptq", "[]"), "a method is one of none, rtn"),
    "unknown version": (GOOD.replace("version: 1", "version: 99"), "mine.yaml:1: version: given 99; this qforge reads recipes of version 1"),
    "version in quotes": (GOOD.replace("version: 1", "version: '1'"), "mine.yaml:1: version: given '1'; allowed: a whole number"),
    "version is true": (GOOD.replace("version: 1", "version: true"), "mine.yaml:1: version: given true; allowed: a whole number"),
    "missing": ("version: 1\nquantize: {method: none}\n", "mine.yaml:1: model is required: model: {source: demo}"),
    "missing inside": (GOOD + "adapters:\n  - weight: 1\n", "mine.yaml:5: adapters[0].source is required"),
    "number for a text": (GOOD.replace("demo", "7"), 'mine.yaml:2: model.source: given 7; allowed: a text (put it in quotes if you mean it: "7")'),
    "empty text": (GOOD.replace("demo", "''"), "mine.yaml:2: model.source: given ''; allowed: a text that is not empty"),
    "text for a mapping": (GOOD.replace("{source: demo}", "demo"), "mine.yaml:2: model: given 'demo'; allowed: a mapping, {key: value}"),
    "mapping for a list": (GOOD + "adapters: {source: x}\n", 'mine.yaml:4: adapters: given {"source": "x"}; allowed: a list'),
    "nothing for a list": (GOOD + "adapters:\n", "mine.yaml:4: adapters: given nothing; allowed: a list"),
    "fraction": (GOOD + "evaluate: {window: 0.5}\n", "mine.yaml:4: evaluate.window: given 0.5; allowed: a whole number"),
    "yes is no boolean": (RTN + "  scheme: w8a16\n  options: {act_order: yes}\n", "mine.yaml:6: quantize.options.act_order: given 'yes'; allowed: true or false"),
    "out of range": (GOOD + "calibration: {samples: 0}\n", "mine.yaml:4: calibration.samples: given 0; allowed: greater than or equal to 1"),
    "not finite": (GOOD + "adapters: [{source: a, weight: .inf}]\n", "mine.yaml:4: adapters[0].weight: given Infinity; allowed: a finite number"),
    "unknown word": (GOOD + "evaluate: {engine: runtme}\n", "mine.yaml:4: evaluate.engine: given 'runtme'; allowed: 'auto', 'runtime' or 'transformers' (did you mean runtime?)"),
    "unknown format": (GOOD + "export:\n  - {format: gguf}\n  - {format: gugf}\n", "mine.yaml:6: export[1].format: given 'gugf'"),
    "export twice": (GOOD + "export: [{format: gguf}, {format: gguf}]\n", "the same format and type is listed twice"),
    "gate that is no condition": (GOOD + "gates: {perplexity_ratio: about one}\n", "mine.yaml:4: gates.perplexity_ratio.limit: given 'about one'"),
    "gate that is a number": (GOOD + "gates: {kl_mean: 0.2}\n", "mine.yaml:4: gates.kl_mean: given 0.2; allowed: a comparison, '<= 0.2' or '>= 0.2', or one with"),
    "gate that is nothing": (GOOD + "gates: {kl_mean: null}\n", "mine.yaml:4: gates.kl_mean: given nothing; allowed: a comparison, '<= 0.1' or"),
    "gate on an unknown figure": (GOOD + "gates:\n  kl_maen: <= 1\n", "mine.yaml:5: unknown key 'kl_maen' in gates (did you mean kl_mean?)"),
    "gate without an evaluation": (GOOD + "evaluate: null\ngates: {kl_mean: <= 1}\n", "mine.yaml:5: gates: nothing measures kl_mean because of evaluate: null"),
    "gate with a wrong word": (GOOD + "gates: {kl_mean: {limit: <= 1, on: fatal}}\n", "mine.yaml:4: gates.kl_mean.on: given 'fatal'; allowed: 'error', 'warn' or 'off'"),
    "memory": (GOOD + "run: {memory_limit: 8GiBs}\n", "mine.yaml:4: run.memory_limit: given '8GiBs'; a memory limit is a size such as 8GiB"),
    "device": (GOOD + "run: {device: gpu}\n", "mine.yaml:4: run.device: given 'gpu'"),
    "not YAML": ("version: 1\n  model: [\n", "mine.yaml:2: this is not valid YAML: mapping values are not allowed here"),
    "key twice": (GOOD + "model: {source: x}\n", "mine.yaml:4: 'model' is given twice (first in line 2); keep one"),
    "tag": (GOOD.replace("demo", "!!python/name:os.system x"), "mine.yaml:2: YAML tags ('!!python/name:os.system') are not allowed"),
    "merge key": ("version: 1\nmodel: &m {source: demo}\nquantize:\n  <<: *m\n", "mine.yaml:4: merge keys (<<) are not part of YAML 1.2"),
    "anchor in itself": ("version: &a [*a]\n", "mine.yaml:1: this is not a recipe: it is nested too deeply, or an anchor repeats itself"),
    "anchors that explode": ("".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)), "an anchor repeats itself"),
    "deep": ("[" * 9000, "nested too deeply"),
    "a list": ("- 1\n", "mine.yaml: this is not a recipe: expected keys such as version, model and quantize"),
    "empty": ("", "mine.yaml: this is not a recipe"),
    "a key that is a list": ("? [a]\n: 1\n", "mine.yaml:1: a key must be a word"),
    "control characters": ("version: \x00\n", "mine.yaml: this is not valid YAML"),
    "two documents": (GOOD + "---\n" + GOOD, "this is not valid YAML: but found another document"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    message = refusal(tmp_path, text)
    assert expected in message
    assert len(message.splitlines()) <= 7


@pytest.mark.parametrize("key", sorted(FOREIGN_KEYS))
@pytest.mark.parametrize("place", ["  {}: 1\n", "  options: {{{}: 1}}\n"])
def test_other_tools_names_lead_to_ours(tmp_path: Path, key: str, place: str) -> None:
    message = refusal(tmp_path, RTN + "  scheme: w8a16\n" + place.format(key))
    assert f"{key} is another tool's name; in qforge it is {FOREIGN_KEYS[key]}" in message
    assert message.startswith("mine.yaml:6: quantize.")


def test_the_fields_that_other_names_lead_to_exist() -> None:
    for ours in FOREIGN_KEYS.values():
        section = Recipe.model_json_schema()
        for word in re.split(r"[ :]", ours)[0].split(".") if not ours.startswith("no field") else []:
            properties = section["properties"] if "properties" in section else Recipe.model_json_schema()["$defs"][section["$ref"].split("/")[-1]]["properties"]
            assert word in properties
            section = properties[word]


def test_every_problem_is_listed_in_the_order_of_the_file_up_to_a_limit(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD + "".join(f"key{i}: 1\n" for i in range(10)))
    lines = message.splitlines()
    assert [line.split(":")[1] for line in lines[:-1]] == [str(n) for n in range(4, 10)]
    assert lines[-1] == "and 4 more"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("quantize.scheme", "--set quantize.scheme: expected key.path=value"),
        ("=1", "--set =1: expected key.path=value"),
        ("a..b=1", "--set a..b=1: expected key.path=value"),
        ("model.source.x=1", "--set model.source.x=1: model.source is a single value, it has no 'x'"),
        ("adapters.x=1", "--set adapters.x=1: adapters is a list; its items are 0 to 0, and 1 adds one"),
        ("adapters.2.weight=1", "adapters is a list; its items are 0 to 0, and 1 adds one"),
        ("quantize.scheme=7", "--set quantize.scheme=7: quantize.scheme: given 7; a scheme is a text"),
        ("quantize.foo=1", "--set quantize.foo=1: unknown key 'foo' in quantize"),
        ("run={threads: [}", "--set run={threads: [}:1: this is not valid YAML"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in refusal(tmp_path, GOOD + "adapters: [{source: a}]\n", (override,))


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*: No such file"):
        load_recipe(tmp_path / "nope.yaml")
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        load_recipe(tmp_path)
    for data, reason in ((b"\xff\xfe\x00", "not a text file"), (b"#" * (1 << 20) + b"\n", "larger than 1 MiB")):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(RecipeError, match=reason):
            load_recipe(tmp_path / "x")


def test_yaml_scalars_follow_the_core_schema(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD.replace("demo", "no"), ("calibration.seed=0x10", "quantize.options.damping=1e-3", "model.revision=12:30"))
    assert (recipe.model.source, recipe.calibration.seed, recipe.quantize.options.damping, recipe.model.revision) == ("no", 16, 1e-3, "12:30")


def test_json_is_yaml_too(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert load(tmp_path, json.dumps(recipe.to_dict(), indent=1)) == recipe
    assert load(tmp_path, yaml.safe_dump(recipe.to_dict())).sha256 == recipe.sha256
