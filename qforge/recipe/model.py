"""What a recipe says: the fields, their defaults and the words that each allows. Reading a file into it is `load.py`'s work.

Everything is frozen; unknown keys and wrong types are errors. Names that qforge knows but cannot do yet are valid here; the plan refuses them by name.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from qforge.recipe.fields import METHODS, TRANSFORMS, BudgetText, Bytes, Limit, Listed, MethodList, SchemeText, Section, Text
from qforge.recipe.limits import EVALUATED, FIGURES
from qforge.recipe.sweep import SweepSection
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN

__all__ = ["FORMATS", "METHODS", "TRANSFORMS", "Recipe", "json_schema"]

FORMATS = ("gguf", "gptq", "awq", "bitsandbytes", "onnx", "tensorrt", "trtllm", "openvino", "mlx", "ascend", "triton")
IGNORED = ("lm_head",)  # unless a recipe says otherwise
_IMPLIED_SCHEMES = {"fp8": "fp8-dynamic", "nf4": "nf4"}


class ModelSection(Section):
    """Where the base model comes from."""

    source: Text = Field(
        description="A Hugging Face directory or hub id, a .gguf file, or demo (SmolLM2-135M-Instruct, fetched through pip).",
        examples=["demo", "HuggingFaceTB/SmolLM2-135M-Instruct"],
    )
    revision: Text | None = Field(None, description="Branch, tag or commit of a hub model; null takes the default branch.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="Type in which tensors that stay unquantized are stored; auto keeps the model's own.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model. Leave it off unless you have read that code.")


class AdapterSection(Section):
    """One LoRA adapter, merged into the base before anything else."""

    source: Text = Field(description="Folder or hub id of a peft adapter.")
    weight: float = Field(1.0, description="Factor on the adapter's change of the weights.")


class CalibrationSection(Section):
    """The text that calibrated methods, and exports that quantize anew, see. It never overlaps the evaluation text."""

    source: Text = Field("builtin", description="builtin, generated (the model writes its own), a .txt or .jsonl file, or a hub data set.")
    samples: int = Field(128, ge=1, description="Number of sequences.")
    sequence_length: int = Field(512, ge=2, description="Tokens in a sequence; capped at the model's context.")
    generated: int = Field(
        0,
        ge=0,
        description="Further sequences that the model writes itself, each from the first tokens of one of the samples: more text where text is short. Needs the model in memory.",
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of sequences, and of what the model writes.")

    @property
    def tokens(self) -> int:
        """Tokens that are asked for."""
        return (self.samples + self.generated) * self.sequence_length


class OverrideSection(Section):
    """Another scheme for the layers whose name matches."""

    match: Text = Field(description="Pattern of layer names, as in a shell: *.down_proj. One that matches nothing is an error.", examples=["*.down_proj"])
    scheme: SchemeText = Field(description="Scheme of these layers.")


class OptionsSection(Section):
    """How a method works, where its defaults do not fit."""

    damping: float = Field(0.2, gt=0, le=1, description="GPTQ: share of the Hessian's mean diagonal that is added to its diagonal.")
    act_order: bool = Field(True, description="GPTQ: quantize the inputs with the largest activations first. Groups stay where they are, so that it costs nothing at run time.")
    scale_search: bool = Field(True, description="Choose scales by least squared error instead of by the largest weight.")
    error_correction: bool | None = Field(
        None,
        description="GPTQ: aim at the outputs of the unquantized model, so that each layer makes up for the errors of those before it (asymmetric calibration, GPTAQ); "
        "null does where weights alone are rounded, and not where any activations are, too.",
    )
    refine: int = Field(3, ge=0, le=100, description="GPTQ: sweeps of descent over codes and scales after the rounding; 0 for none.")
    fisher: bool = Field(
        False,
        description="GPTQ: weigh outputs by how much the model's predictions depend on them, measured by one pass back through the model; takes longer, and memory for gradients.",
    )
    smoothing: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="SmoothQuant: share of the difficulty that moves from activations into weights (0.5 in the paper); null chooses one for each link by its output error."
    )
    steps: int = Field(200, ge=1, le=10000, description="signround: steps of gradient descent for each decoder block; the time grows with them.")
    tune: int = Field(
        0,
        ge=0,
        le=10000,
        description="After the rounding, steps of gradient descent over all layers' scales together, towards the original's predictions; each takes 2,048 calibration tokens. "
        "The whole model is in memory, with its gradients; 0 for none.",
    )
    group_fallback: Literal["error", "adjust", "ignore"] = Field(
        "error", description="A layer whose width the group size does not divide: refuse the recipe, take the largest group that fits, or leave the layer unquantized."
    )


class QuantizeSection(Section):
    """Method and scheme."""

    method: MethodList = Field(description="none merges, converts and evaluates without quantizing; transforms combine: [awq, gptq].")
    scheme: SchemeText | None = Field(None, description="Number type, granularity and symmetry: int4-g64-sym, int8-channel-sym, fp8-e4m3-block128, or a preset such as w4a16.")
    budget: BudgetText | None = Field(
        None, description="auto: what the choice keeps: bits per weight of the quantized layers (4.5 bits), size of all weights (110 MB), or KL divergence (kl <= 0.05)."
    )
    candidates: Annotated[tuple[SchemeText, ...], Listed] = Field(
        (), description="auto: schemes to choose from; without any, integers of 2 to 8 bits that every requested export holds. The more, the longer the measurement."
    )
    ignore: Annotated[tuple[Text, ...], Listed] = Field(IGNORED, description="Layers that stay unquantized: names or patterns.")
    overrides: Annotated[tuple[OverrideSection, ...], Listed] = Field(
        (),
        description="Other schemes for some layers; the last match wins. What ignore matches stays unquantized all the same, unless an override has the layer's name in full; "
        "lm_head, which is ignored by default, is quantized by any override that matches it.",
    )
    kv_cache: Literal["fp8"] | None = Field(
        None,
        description="fp8: keep keys and values as FP8 E4M3, one scale for all keys of a layer and one for all values, calibrated on the quantized model; null leaves them "
        "to what runs the model.",
    )
    options: OptionsSection = Field(OptionsSection(), description="Fine control of the method.")

    @model_validator(mode="before")
    @classmethod
    def _fill_scheme(cls, data: Any) -> Any:
        """A method that names its number type brings its own scheme."""
        method = data.get("method") if isinstance(data, dict) else None
        if isinstance(method, str) and method in _IMPLIED_SCHEMES and data.get("scheme") is None:
            return {**data, "scheme": _IMPLIED_SCHEMES[method]}
        return data

    @model_validator(mode="after")
    def _auto_has_a_budget(self) -> QuantizeSection:
        auto = self.method[-1] == "auto"
        if auto and self.budget is None:
            raise ValueError('method auto needs a budget: bits per weight (budget: "4.5 bits"), a size ("110 MB"), or a KL divergence to keep ("kl <= 0.05")')
        if auto and self.scheme is not None:
            raise ValueError("method auto chooses schemes itself; list those to choose from as candidates, and fix layers by overrides")
        if not auto and (self.budget is not None or self.candidates):
            raise ValueError("budget and candidates belong to method: auto")
        return self

    @model_validator(mode="after")
    def _needs_scheme(self) -> QuantizeSection:
        if self.scheme is None and self.method[-1] not in ("none", "auto"):
            raise ValueError(f"method {self.method[-1]} needs a scheme, for example scheme: int4-g64-sym")
        return self


class ExportSection(Section):
    """One more format of the same quantized model."""

    format: Literal[FORMATS] = Field(description="Format to write.")  # type: ignore[valid-type]
    type: Text | None = Field(None, description="The format's own type, for gguf q4_0 (integers unchanged) or q4_k_m (quantized anew); null lets the scheme decide.")
    optional: bool = Field(False, description="Go on without this export where the machine lacks what it needs.")


class EvaluateSection(Section):
    """How the quantized model is compared with the original."""

    text: Text = Field("builtin", description="builtin, a .txt or .jsonl file, or a hub data set.")
    window: int = Field(2048, ge=2, description="Tokens in a window; capped at the model's context.")
    against: Literal["original"] = Field("original", description="The reference: the merged, unquantized model.")
    engine: Literal["auto", "runtime", "transformers"] = Field("auto", description="What computes the figures; auto takes our runtime where it lists the model's family.")
    exports: bool = Field(
        False,
        description="Score every export, too, in the engine that runs it (gguf: llama.cpp, onnx: ONNX Runtime, tensorrt: TensorRT, checkpoints: transformers): one pass each.",
    )
    tasks: Annotated[tuple[Text, ...], Listed] = Field(
        (), description="Tasks to score besides the text, by lm-eval: its names, or builtin (needs no hub). They choose among given answers.", examples=[["builtin"]]
    )


class GateSection(Section):
    """A limit on a figure."""

    limit: Limit = Field(description="A comparison with a number, for example <= 1.30.")
    on: Literal["error", "warn", "off"] = Field("error", description="What a miss does: fail the run (exit code 1), only say so, or nothing.")


class RunSection(Section):
    """Where and how the work runs."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field("auto", description="Where weights are quantized: cpu, cuda or cuda:N; auto is the processor.")
    threads: Annotated[int, Field(ge=1)] | None = Field(None, description="CPU threads; null takes all cores.")
    workers: int = Field(1, ge=1, description="Processes that share the calibration text, and the threads (Ray; with RAY_ADDRESS on the machines of that cluster).")
    memory_limit: Bytes | None = Field(None, description="Memory that the run may use, for example 8GiB; null sets no limit.")
    activations: Literal[ACTIVATIONS] = Field("fp", description=ACTIVATIONS_MEAN)  # type: ignore[valid-type]


class ReportSection(Section):
    """Which reports are written."""

    formats: Annotated[tuple[Literal["json", "markdown", "html", "junit"], ...], Listed] = Field(
        ("json", "markdown", "html", "junit"), description="results.json is always written; these name the reports made from it."
    )


def _gate(value: Any) -> Any:
    if not isinstance(value, str | dict | GateSection):
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.1
        raise ValueError(f"allowed: a comparison, '<= {number}' or '>= {number}', or one with a word for a miss, {{limit: '<= {number}', on: warn}}")
    return {"limit": value} if isinstance(value, str) else value


_GATE_SCHEMA_DOC = "Limits by figure: a comparison such as '<= 1.30', or {limit: '<= 1.30', on: warn}. Without gates nothing fails."


class Recipe(Section):
    """One run: a base model, its adapters, how to quantize, what to export, and what counts as good."""

    model_config = ConfigDict(title="qforge recipe")
    version: int = Field(description="Version of the recipe format: 1.", json_schema_extra={"const": 1})
    model: ModelSection = Field(description="The base model.")
    adapters: Annotated[tuple[AdapterSection, ...], Listed] = Field((), description="LoRA adapters, merged in order.")
    calibration: CalibrationSection = Field(CalibrationSection(), description="Text that calibrated methods see.")
    quantize: QuantizeSection = Field(description="How the weights are quantized.")
    export: Annotated[tuple[ExportSection, ...], Listed] = Field((), description="Further formats of the same model; model/ is always written.")
    evaluate: EvaluateSection | None = Field(EvaluateSection(), description="Comparison with the original; null skips it.")
    gates: dict[Literal[FIGURES], Annotated[GateSection, BeforeValidator(_gate, json_schema_input_type=Limit | GateSection)]] = Field({}, description=_GATE_SCHEMA_DOC)  # type: ignore[valid-type]
    run: RunSection = Field(RunSection(), description="Device, threads and memory.")
    report: ReportSection = Field(ReportSection(), description="Reports to write.")
    sweep: SweepSection | None = Field(None, description="Variants of this recipe to run together and compare.")
    _folder: Path = PrivateAttr(default_factory=Path)
    _name: str = PrivateAttr("recipe")
    _variant: bool = PrivateAttr(False)

    @field_validator("version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if version != 1:
            raise ValueError("this qforge reads recipes of version 1")
        return version

    @field_validator("export")
    @classmethod
    def _exports_differ(cls, exports: tuple[ExportSection, ...]) -> tuple[ExportSection, ...]:
        seen = [(e.format, e.type) for e in exports]
        if len(set(seen)) != len(seen):
            raise ValueError("the same format and type is listed twice; keep one")
        return exports

    @field_validator("gates")
    @classmethod
    def _gates_have_figures(cls, gates: dict[str, GateSection], info: ValidationInfo) -> dict[str, GateSection]:
        lost = [name for name in gates if name in EVALUATED and info.data.get("evaluate", ...) is None]
        if lost:
            raise ValueError(f"nothing measures {', '.join(lost)} because of evaluate: null; remove these gates, or evaluate")
        return gates

    @field_validator("sweep")
    @classmethod
    def _sweep_is_measured(cls, sweep: SweepSection | None, info: ValidationInfo) -> SweepSection | None:
        if sweep is not None and info.data.get("evaluate", ...) is None:
            raise ValueError("nothing compares the variants because of evaluate: null; evaluate, or remove the sweep")
        return sweep

    @property
    def folder(self) -> Path:
        """The recipe file's folder; paths in the recipe are relative to it."""
        return self._folder

    @property
    def name(self) -> str:
        """The recipe file's name without its ending."""
        return self._name

    @property
    def variant(self) -> bool:
        """Whether it is one of a sweep, which its options may be meant for as a whole."""
        return self._variant

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the recipe with all its defaults, as canonical JSON (sorted keys, no spaces)."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The recipe with all its defaults as plain JSON values; loading them again gives an equal recipe."""
        return self.model_dump(mode="json")

    def at(self, folder: Path, name: str, *, variant: bool = False) -> Recipe:
        """The same recipe, known as `name`, with its paths relative to `folder`; one of a sweep from here on where it is a `variant`."""
        placed = self.model_copy()
        placed._folder, placed._name, placed._variant = folder, name, variant or self._variant
        return placed


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors and CI."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema(mode="validation")}
