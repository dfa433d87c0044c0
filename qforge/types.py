"""Plain data that several rooms share: what a model is (ModelSpec), what a run reports (Results and its parts), with the limits that its schema states."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(0)]
Some = Annotated[int, Gt(0)]
KvScales = Mapping[str, tuple[float, float]]  # of keys and of values, by the attention module's name


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one kind of layer: base, and scaling as Hugging Face's `rope_parameters` writes it (`default`, `llama3`, `linear`, `yarn`, `longrope`); `none`: no angle.

    Attributes:
        factors: what each frequency is divided by under LongRoPE (arXiv 2402.13753), in sequences up to the original context.
        rotated: how many of a head's dimensions turn, its first ones; 0: all.
        interleaved: whether dimensions 2 i and 2 i + 1 turn together (GLM); else those that are half of the turned ones apart.
    """

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()
    rotated: int = 0
    interleaved: bool = False

    def turned(self, head_dim: int) -> int:
        """How many dimensions of such a head turn."""
        return self.rotated or head_dim

    @property
    def amplitude(self) -> float:
        """What rotated dimensions of queries and keys are multiplied by (YaRN, arXiv 2309.00071, section 3.4; `mscale`, `mscale_all_dim`: DeepSeek's variant; LongRoPE's is a
        parameter)."""
        p = dict(self.parameters)
        if self.kind != "yarn":
            return p["attention_factor"] if self.kind == "longrope" else 1.0

        def grown(by: float) -> float:
            return 1.0 + 0.1 * by * math.log(max(p["factor"], 1.0))

        both = p.get("mscale") and p.get("mscale_all_dim")
        return p.get("attention_factor", grown(p["mscale"]) / grown(p["mscale_all_dim"]) if both else grown(1.0))


NO_ROPE = RopeSpec(1.0, "none")

LayerNorms = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: LayerNorms = ("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts of a mixture, in layers that have them.

    Attributes:
        intermediate_size: of each.
        active: how many each token is sent to, those with the largest of the router's logits.
        normalized: whether the weights of these sum to 1; else they are their shares of the softmax over all experts.
        layers: per layer, whether it has experts in place of one MLP.
    """

    count: int
    intermediate_size: int
    active: int
    normalized: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model as data: everything that the runtime's one decoder must know of a family.

    Attributes:
        family: Hugging Face `model_type` (`llama`, `qwen2`, ...).
        hidden_act: `silu` or `gelu_pytorch_tanh`.
        layer_windows: per layer, the sliding window in tokens or 0 for full attention.
        max_positions: of a sequence; under LongRoPE of one that is rotated by its short factors, the form that the runtime computes.
        layer_ropes: per layer, its rotary embedding.
        attention_scale: multiplier of q.k as the family has it (head_dim ** -0.5 unless the family says otherwise).
        qk_norm: whether queries and keys are normed; `whole_qk_norm`: over all their heads at once, else each head by itself.
        norms: names below a layer of the norms of what attention reads, of what it adds, of what the MLP reads and of what that adds; None where the family has none.
        norm_offset: 1.0 where the norm multiplies by (1 + weight) (Gemma), else 0.0.
        embedding_scale: multiplier of token embeddings (sqrt(hidden) for Gemma), else 1.0.
        residual_scale: multiplier, above 0, of what a layer adds to the residual stream (Granite), else 1.0.
        logits_scale: multiplier of logits (Granite), else 1.0.
        attention_bias, output_bias, mlp_bias: of q, k and v, of the attention's output, and in the MLP; the runtime adds those that are stored.
        experts: None: no layer has any.
        kv_scales: per layer, of its keys and its values where a checkpoint says that they are kept as FP8 E4M3; else empty.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    hidden_act: str
    tied_head: bool
    layer_windows: tuple[int, ...]
    layer_ropes: tuple[RopeSpec, ...]
    attention_scale: float
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    norms: LayerNorms = PRE_NORMS
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    experts: ExpertsSpec | None = None
    kv_scales: tuple[tuple[float, float], ...] = ()

    @property
    def post_norms(self) -> bool:
        """Whether what a branch adds is normed."""
        return self.norms[1] is not None

    @property
    def beyond(self) -> str:
        """What is to be said of longer sequences than `max_positions`, where the model itself has a form for them."""
        long = any(r.kind == "longrope" for r in self.layer_ropes)
        return "; for longer sequences it has other rotary factors (longrope), with which transformers runs it" if long else ""

    def score_scale(self, layer: int) -> float:
        """Multiplier of q.k in a layer, where these are rotated and nothing else; dimensions that do not turn are then divided by the amplitude (`RopeTable`)."""
        return self.attention_scale * self.layer_ropes[layer].amplitude ** 2


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sums over one document or window, the unit of resampling. `agree`: positions where both models rank the same token first."""

    tokens: Some
    nll_candidate: float
    nll_reference: float | None = None
    kl_sum: NotNegative | None = None
    agree: Count | None = None


@dataclass(frozen=True, slots=True)
class DeltaP:
    """Change of the true token's probability, candidate minus reference, as llama-perplexity reports it. `percentiles`: `min`, `0.1`, `1`, ... `99.9`, `max`."""

    mean: float
    rms: float
    percentiles: dict[str, float]
    mean_ci95: tuple[float, float] | None = None
    rms_ci95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Flips:
    """Shares of positions by whose first choice was the text's token: `right_reference`, `right_candidate`; `lost`: only the reference's; `gained`: only the candidate's."""

    right_reference: float
    right_candidate: float
    lost: float
    gained: float
    lost_ci95: tuple[float, float] | None = None
    gained_ci95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy continuations: how many tokens of each (`kept`, in the order of the text) are also the original's first choices before one is not; `limit` tokens were written.

    `mean` of them, with an interval that resamples `cluster`s; `whole`: the share of continuations that never departed.
    """

    limit: int
    cluster: str
    kept: list[int]
    mean: float
    mean_ci95: tuple[float, float] | None
    whole: float


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Mean KL divergence of the tokens that have `start` to `stop - 1` tokens before them in their window; `error`: standard error over clusters, None for a single one."""

    start: int
    stop: int
    tokens: int
    kl_mean: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many tokens have a KL divergence between `edges[i]` and `edges[i + 1]` nats; the first bin also holds what is smaller, the last what is larger."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that a model thought likely, and its probability."""

    token: int
    probability: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A position where the models differ most: the text's token after `position` tokens of a window, both probabilities of it, what each model expected, and the text before it."""

    window: int
    position: int
    kl: float
    token: int
    probability: float
    probability_reference: float
    expected: list[Guess]
    expected_reference: list[Guess]
    text: str | None = None
    context: str | None = None


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One metric of a task for both models; its `difference` (candidate - reference) with an interval, paired question by question, and how many answers flipped.

    `lost`: questions that only the reference answered rightly; `gained`: only the candidate; `right`: 1 for each question, in order, that the candidate answered rightly, else 0.
    None for a metric that is not right or wrong; so is the difference where single questions have no figure.
    """

    reference: float
    candidate: float
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    lost: Count | None = None
    gained: Count | None = None
    right: str | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task's metrics by name, how many questions it has, and the protocol: lm-eval's version, the task's, examples shown, BOS, chat template, engines."""

    questions: Count
    metrics: dict[str, TaskMetric]
    protocol: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model (candidate) on one text, beside another (reference) if there is one. Perplexity protocol: `protocol`, in words and numbers.

    `candidate`, `reference` and `base` hold `perplexity`, `nll` (nats per token) and, where the text's bytes are known, `bits_per_byte`, the first and last with `_ci95`.
    Every `_ci95` is a 95 % interval that resamples clusters; None with one (quantiles: below eight). `power`: per figure, the smallest difference between two candidates that this
    text would show in four of five comparisons.
    """

    text_sha256: str
    protocol: dict[str, Any]
    engine: str
    tokens: Some
    candidate: dict[str, Any]
    clusters: list[Cluster]
    reference: dict[str, Any] | None = None
    perplexity_ratio: NotNegative | None = None
    perplexity_ratio_ci95: tuple[float, float] | None = None
    kl_mean: NotNegative | None = None
    kl_mean_ci95: tuple[float, float] | None = None
    kl_median: NotNegative | None = None
    kl_median_ci95: tuple[float, float] | None = None
    kl_p90: NotNegative | None = None
    kl_p90_ci95: tuple[float, float] | None = None
    kl_p99: NotNegative | None = None
    kl_p99_ci95: tuple[float, float] | None = None
    kl_p999: NotNegative | None = None
    kl_p999_ci95: tuple[float, float] | None = None
    kl_max: NotNegative | None = None
    top1_agreement: Share | None = None
    top1_agreement_ci95: tuple[float, float] | None = None
    top5_agreement: Share | None = None
    top5_agreement_ci95: tuple[float, float] | None = None
    delta_p: DeltaP | None = None
    flips: Flips | None = None
    greedy: Greedy | None = None
    kl_by_position: list[PositionBin] = field(default_factory=list)
    kl_histogram: Histogram | None = None
    worst_tokens: list[WorstToken] = field(default_factory=list)
    power: dict[str, float] = field(default_factory=dict)
    base: dict[str, Any] | None = None
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    reference_engine: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """One reading of an export, compared with the artifact or our runtime. `executed`: an engine that is not ours ran it; otherwise its weights were only read and compared.

    `text_equal`: whether text becomes the same tokens, end tokens and chat template included; None where that was not what was read.
    `rounded`: what was rounded as it was written, in words: the export holds what it is to hold, and is not lossless.
    `kl_bound`: what `kl_mean` may be at most, where the engine computes in fp32 what our runtime does; None where it rounds as it runs.
    """

    engine: str
    version: str
    kl_mean: NotNegative | None = None
    top1_agreement: Share | None = None
    positions: Count | None = None
    weights_equal: bool | None = None
    note: str | None = None
    executed: bool = False
    text_equal: bool | None = None
    kl_bound: NotNegative | None = None
    rounded: str | None = None

    @property
    def near(self) -> bool:
        """Whether distributions are as near as they have to be."""
        return self.kl_bound is None or self.kl_mean is None or self.kl_mean <= self.kl_bound

    @property
    def passed(self) -> bool:
        """Whether nothing was found to differ that has to be equal, and distributions are near."""
        return self.weights_equal is not False and self.text_equal is not False and self.near


@dataclass(frozen=True, slots=True)
class ExportFigures:
    """An exported file in the engine that runs it, on the run's evaluation text, beside the original: figures and intervals as in `Evaluation`."""

    engine: str
    tokens: Some
    perplexity: NotNegative
    perplexity_ci95: tuple[float, float] | None
    perplexity_ratio: NotNegative | None
    perplexity_ratio_ci95: tuple[float, float] | None
    kl_mean: NotNegative | None
    kl_mean_ci95: tuple[float, float] | None
    top1_agreement: Share | None
    top1_agreement_ci95: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """One export. `lossless`: equal codes, scales and fp32 dequantization. `skipped_because`: why it, or a verifier of it, was left out. `measured`: by `evaluate.exports`."""

    format: str
    path: str | None = None
    sha256: str | None = None
    size_bytes: Count | None = None
    lossless: bool | None = None
    verified_by: list[Verification] = field(default_factory=list)
    skipped_because: str | None = None
    measured: ExportFigures | None = None


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate: the figure's name, the limit as the recipe wrote it, the value, the verdict. `on`: error, warn or off."""

    name: str
    limit: str
    value: float
    passed: bool
    on: str = "error"
    interval: tuple[float, float] | None = None

    @property
    def failed(self) -> bool:
        """Whether the limit is broken, and that matters."""
        return not self.passed and self.on == "error"


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One linear: its scheme (`None`: left as it was), the relative error of its weight (Frobenius) and, with calibration, of its output; the `tokens` of calibration.

    `input_peak`: the largest input on the calibration text in units of the root mean square of all (4 to 5 for a normal distribution; outlier channels give tens and hundreds).
    """

    name: str
    scheme: str | None
    relative_error: NotNegative | None = None
    output_error: NotNegative | None = None
    bits_per_weight: NotNegative | None = None
    note: str | None = None
    tokens: int | None = None
    input_peak: float | None = None


@dataclass(frozen=True, slots=True)
class BlameResult:
    """What came back when a part of the model was restored to full precision: `kl_mean` of the rest, and the share of the whole divergence that went (`returned`).

    `name`: a decoder block, a linear, `everything outside of the blocks`, or `the engine (NAME VERSION)`: then what is restored is transformers' code over the same files, and
    the share is that of the engine's own divergence. `part_of`: the block that a linear was singled out of.
    """

    name: str
    kl_mean: float
    returned: float
    part_of: str | None = None


@dataclass(frozen=True, slots=True)
class Blame:
    """Where a divergence comes from, largest share first, measured on `tokens` positions. `words`: what that comes to. `groups`: of the first linear's inputs, each alone."""

    tokens: int
    kl_mean: float
    parts: list[BlameResult]
    words: str
    groups: list[BlameResult] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Results:
    """What a run leaves in results.json; the report reads only this. Field names are a contract. `parts`: seconds of what a stage of `timings` consists of, by stage."""

    qforge_version: str
    recipe: dict[str, Any]
    recipe_sha256: str
    model: dict[str, Any]
    artifact: dict[str, Any]
    calibration: dict[str, Any] | None
    evaluation: Evaluation | None
    exports: list[ExportResult]
    gates: list[GateResult]
    layers: list[LayerResult]
    adapters: list[dict[str, Any]]
    work: dict[str, int]
    timings: dict[str, float]
    peak_rss_bytes: Count
    memory: dict[str, int]
    environment: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    auto: dict[str, Any] | None = None
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    blame: Blame | None = None
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether no gate that is an error failed, and every verification of an export passed."""
        return not any(g.failed for g in self.gates) and all(v.passed for e in self.exports for v in e.verified_by)

    def to_json(self) -> str:
        """The text of results.json."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"
