"""A model's attention as kernel PCA, by layer and head, over many images: the tables of `robustkpca analyze`.

The model runs in float32 as in an evaluation; queries, keys and values are caught at each attention layer and
analysed in float64 by `robustkpca.kpca.theory`. Only means and sums of squares
are kept of each chunk of images, so the number of images costs no memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pandas as pd
import torch
from timm.layers import Attention
from torch import Tensor, nn

from robustkpca.datasets.samples import Samples
from robustkpca.errors import DataError, SpecError, unknown
from robustkpca.evaluation.loop import Resources
from robustkpca.evaluation.passes import Keep, over_chunks
from robustkpca.kpca import theory
from robustkpca.models.attention import (
    AlphaScaledAttention,
    AsymmetricAttention,
    MultiHeadAttention,
    RPCAttention,
    ScaledAttention,
    SymmetricAttention,
)
from robustkpca.models.classifier import Classifier
from robustkpca.runs.folder import chunk_ranges


@dataclass
class Heads:
    """What a layer attends with, (B, H, N, D) each: h = softmax(q k^T / sqrt(D)) v; for RPC-Attention also PAP's parts.

    `untrained`: in place of the values, a random linear map of the layer's inputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pursuit: theory.Pursuit | None = None
    untrained: Tensor | None = None

    @cached_property
    def spectrum(self) -> theory.Spectrum:
        return theory.spectrum(theory.centred_gram(self.k))


def _of_timm(module: Any, x: Tensor) -> Heads:
    """timm's own attention, with norms of queries and keys where the layer has them."""
    batch, tokens, _ = x.shape
    q, k, v = module.qkv(x).reshape(batch, tokens, 3, module.num_heads, module.head_dim).permute(2, 0, 3, 1, 4).unbind()
    return Heads(module.q_norm(q), module.k_norm(k), v)


def _plain(module: MultiHeadAttention, x: Tensor) -> Heads:
    q, k, v = module.split(x)
    return Heads(k if q is None else q, k, v)


def _scaled(module: ScaledAttention | AlphaScaledAttention, x: Tensor) -> Heads:
    """Scaled Attention is attention to the values (I - S) V."""
    heads = _plain(module, x)
    return Heads(heads.q, heads.k, module.values(heads.k, heads.v))


def _pursued(module: RPCAttention, x: Tensor, *, gradients: bool = True) -> Heads:
    """PAP's output is softmax(K' K'^T / sqrt(D)) V with K' = K - S - Y/mu of the last iteration: those are keys, and
    queries where there are no others.
    """
    q, k, v = module.split(x)
    trace = theory.pursuit_trace(k, v, q=q, iterations=module.iterations, lam=module.lam, gradients=gradients)
    return Heads(trace.keys if q is None else q, trace.keys, v, trace)


# By the very class: a subclass may attend otherwise.
EXTRACTORS: dict[type[nn.Module], Callable[[Any, Tensor], Heads]] = {
    Attention: _of_timm,
    AsymmetricAttention: _plain,
    SymmetricAttention: _plain,
    RPCAttention: _pursued,
    ScaledAttention: _scaled,
    AlphaScaledAttention: _scaled,
}

# What an analysis finds: table -> quantity -> a number for each image and head, (B, H), and each row of the table,
# (B, H, R).
Found = dict[str, dict[str, Tensor]]
TABLES: dict[str, str | None] = {"heads": None, "gamma": "axis", "spectrum": "rank", "pursuit": "iteration"}


def _loss(heads: Heads) -> Found:
    log_norm = theory.log_feature_norm(heads.q, heads.k)
    return {
        "heads": {
            "projection_loss": theory.projection_loss(heads.q, heads.k, heads.v),
            "log_feature_norm": log_norm.logsumexp(-1) - math.log(log_norm.shape[-1]),
        }
    }


def _gamma(heads: Heads) -> Found:
    """The eigenvector test, and the same test of untrained values: what alignment comes from shared inputs alone."""
    tokens, axes = heads.v.shape[-2:]
    true = theory.gamma(heads.k, heads.v)
    scale = true.log_scale.exp()[..., None]
    spread = theory.gamma_spread(true.values, true.kept)
    assert heads.untrained is not None
    other = theory.gamma(heads.k, heads.untrained)
    control = theory.gamma_spread(other.values, other.kept)
    missing = (0, max(0, axes - tokens))  # there are only N eigenvalues
    return {
        "heads": {
            "gamma_relative": spread.relative.nanmean(-1),
            "gamma_relative_control": control.relative.nanmean(-1),
            "cosine": true.cosine.nanmean(-1),
            "cosine_control": other.cosine.nanmean(-1),
        },
        "gamma": {
            "gamma_difference_mean": spread.mean * scale,
            "gamma_difference_std": spread.std * scale,
            "gamma_relative": spread.relative,
            "cosine": true.cosine,
            "left_out": 1 - true.kept.double().mean(-2),
            "eigenvalue": nn.functional.pad(heads.spectrum.eigenvalues[..., :axes], missing, value=math.nan),
        },
    }


def _spectrum(heads: Heads) -> Found:
    spectrum = heads.spectrum
    ranks = {"effective_rank": spectrum.effective_rank, "participation_ratio": spectrum.participation_ratio}
    total = spectrum.eigenvalues.sum(-1, keepdim=True)
    shares = torch.where(total > 0, spectrum.eigenvalues / total, 0.0)
    return {"heads": ranks, "spectrum": {"eigenvalue": spectrum.eigenvalues, "share": shares}}


def _pursuit(heads: Heads) -> Found:
    trace = heads.pursuit
    if trace is None:
        return {}
    rows = {name: getattr(trace, name) for name in ("sparse_norm", "sparse_share", "nonzero", "residual", "gradient")}
    one = {"mu": trace.mu, "threshold": trace.threshold}
    return {"pursuit": {n: t[..., None].expand_as(trace.residual) for n, t in one.items()} | rows}


ANALYSES: dict[str, Callable[[Heads], Found]] = {
    "loss": _loss,
    "gamma": _gamma,
    "spectrum": _spectrum,
    "pursuit": _pursuit,
}


class Mean:
    """Running mean and standard error over images (Chan, Golub and LeVeque 1983), float64 on the CPU."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    @staticmethod
    def parts(values: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, sum of squared deviations) over images of `values`, (B, ...)."""
        values = values.detach().to("cpu", torch.float64)
        mean = values.mean(0)
        return mean, (values - mean).square().sum(0)

    def add(self, more: int, mean: Tensor, squares: Tensor) -> None:
        """Take in `more` images, of which `parts` are known."""
        delta, total = mean - self.mean, self.n + more
        self.squares = self.squares + squares + delta.square() * (self.n * more / total)
        self.mean = self.mean + delta * (more / total)
        self.n = total

    @property
    def error(self) -> Tensor:
        """Standard error of the mean; nan for a single image."""
        return (self.squares / (self.n - 1)).sqrt() / math.sqrt(self.n) if self.n > 1 else self.mean * math.nan


@dataclass
class Layer:
    """An attention layer of a model and what was found in it."""

    number: int  # counted from 1
    name: str
    module: nn.Module
    shape: tuple[int, int, int] = (0, 0, 0)  # heads, tokens, head width
    means: dict[tuple[str, str], Mean] = field(default_factory=dict)

    values: dict[str, Tensor] = field(default_factory=dict)  # of the images in hand, by "number/table/quantity"

    def take(self, heads: Heads, analyses: Sequence[str]) -> None:
        """Analyse the images in hand."""
        batch = len(heads.k)
        shape = torch.tensor([heads.k.shape[1], heads.k.shape[2], heads.k.shape[3]])
        self.values = {f"{self.number}/shape": shape.expand(batch, 3)}
        for analysis in analyses:
            for table, quantities in ANALYSES[analysis](heads).items():
                for quantity, values in quantities.items():
                    self.values[f"{self.number}/{table}/{quantity}"] = values

    def add(self, more: int, summary: Mapping[str, Tensor]) -> None:
        """Take in the summary of a chunk of `more` images."""
        for key, mean in summary.items():
            number, *rest = key.split("/")
            if int(number) != self.number or rest[-1] == "squares":
                continue
            if rest == ["shape"]:
                heads, tokens, width = (int(size) for size in mean)
                self.shape = (heads, tokens, width)
                continue
            self.means.setdefault((rest[0], rest[1]), Mean()).add(more, mean, summary[f"{key}/squares"])

    def rows(self, table: str) -> pd.DataFrame:
        """Tidy rows of `table`: layer, head, the table's index, then each quantity with its standard error (`_se`)."""
        by_quantity = {quantity: mean for (home, quantity), mean in self.means.items() if home == table}
        if not by_quantity:
            return pd.DataFrame()
        shape = next(iter(by_quantity.values())).mean.shape
        places = pd.MultiIndex.from_product([range(1, n + 1) for n in shape]).to_frame(index=False)
        columns = {"layer": self.number, "head": places[0]}
        if index := TABLES[table]:
            columns[index] = places[1]
        for quantity, mean in by_quantity.items():
            columns[quantity] = mean.mean.flatten().numpy()
            columns[f"{quantity}_se"] = mean.error.flatten().numpy()
        return pd.DataFrame(columns)


@dataclass(frozen=True)
class Analysis:
    """The tables of one model (see TABLES; those without rows are absent), means over `n` images, and warnings."""

    n: int
    layers: list[tuple[str, str]]  # name and attention class of each layer, in order
    tables: dict[str, pd.DataFrame]
    warnings: list[str]


def summarise(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is kept of a chunk: of each quantity its mean and sum of squared deviations over images."""
    summary: dict[str, Tensor] = {}
    for key, of_images in values.items():
        if key.endswith("/shape"):
            summary[key] = of_images[0]
        else:
            summary[key], summary[f"{key}/squares"] = Mean.parts(of_images)
    return summary


def analyze(
    classifier: Classifier,
    samples: Samples,
    analyses: Sequence[str] = (),
    *,
    batch_size: int = 20,
    keep: Keep | None = None,
    resources: Resources | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Kernel PCA of every attention layer on `samples`; `analyses` are names of ANALYSES (default: all that apply).

    `keep`: a folder for the results of chunks, from which the same call goes on, and through which several processes
    share the work. `on_progress` is called with images done and images in all. Raises SpecError for a model without the
    attention that an analysis needs.
    """
    layers, ignored = attention_layers(classifier, analyses)
    if broken := [name for name, p in classifier.network.named_parameters() if not p.isfinite().all()]:
        raise DataError(
            f"{classifier.title}: weights are not finite: {', '.join(broken[:3])}{', ...' if len(broken) > 3 else ''}"
        )
    chosen = list(analyses or ANALYSES)
    warnings = [f"{name}: {kind} is not analysed" for name, kind in ignored]

    def compute(images: Tensor) -> dict[str, Tensor]:
        for layer in layers:
            layer.values = {}
        with _caught(layers, len(images), chosen):
            classifier(images)
        return {key: values for layer in layers for key, values in layer.values.items()}

    resources = resources or Resources()
    if on_progress:
        report = on_progress
        resources = replace(resources, on_progress=lambda now: report(int(now.done), int(now.total)))
    with torch.inference_mode(False), torch.no_grad():
        summaries = over_chunks(
            classifier, samples, compute, batch_size=batch_size, summarise=summarise, keep=keep, resources=resources
        )
    for chunk, summary in zip(chunk_ranges(len(samples), batch_size), summaries, strict=True):
        for layer in layers:
            layer.add(len(chunk), summary)
    done = len(samples)
    if unused := [str(layer.number) for layer in layers if not layer.shape[-1]]:
        warnings.append(f"attention of layers {', '.join(unused)}: not run by the model")
    tables = {}
    for table in TABLES:
        rows = [frame for frame in (layer.rows(table) for layer in layers) if len(frame)]
        if rows:
            tables[table] = pd.concat(rows, ignore_index=True)
    return Analysis(
        done,
        [(layer.name, type(layer.module).__name__) for layer in layers],
        tables,
        [*warnings, *_too_wide(layers), *_overflown(tables)],
    )


def attention_layers(classifier: Classifier, analyses: Sequence[str] = ()) -> tuple[list[Layer], list[tuple[str, str]]]:
    """The layers that can be analysed, and (name, class) of other modules that look like attention.

    Raises SpecError where there is none, or none that one of `analyses` needs.
    """
    for name in analyses:
        if name not in ANALYSES:
            raise SpecError(unknown("analysis", name, ANALYSES))
    layers: list[Layer] = []
    others: list[tuple[str, str]] = []
    for name, module in classifier.network.named_modules():
        kind = type(module).__name__
        if type(module) in EXTRACTORS:
            layers.append(Layer(len(layers) + 1, name, module))
        elif "attention" in kind.lower() or "attn" in kind.lower():
            others.append((name, kind))
    if not layers:
        known = ", ".join(sorted(kind.__name__ for kind in EXTRACTORS))
        other = ", ".join(sorted({kind for _, kind in others})) or "none"
        raise SpecError(f"analyze needs one of {known}; attention in {classifier.title}: {other}")
    if "pursuit" in analyses and not any(isinstance(layer.module, RPCAttention) for layer in layers):
        kinds = ", ".join(sorted({type(layer.module).__name__ for layer in layers}))
        raise SpecError(f"pursuit needs RPCAttention, {classifier.title} has {kinds}")
    return layers, others


def _untrained(x: Tensor, v: Tensor) -> Tensor:
    """Values (B, H, N, D) that are Gaussian linear maps of inputs x (B, N, C), the same ones always."""
    _, heads, _, width = v.shape
    weights = torch.randn(heads, x.shape[-1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x[:, None] @ weights.to(x.device)


@contextlib.contextmanager
def _caught(layers: Sequence[Layer], batch: int, analyses: Sequence[str]) -> Iterator[None]:
    """Inside, a pass analyses its first `batch` images (the classifier may fill a batch up) in each of `layers`."""

    def catch(layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if kwargs.get("is_causal") or any(
            a is not None and a is not False for a in (*args[1:], kwargs.get("attn_mask"))
        ):
            raise SpecError(f"{layer.name}: masked attention is not analysed")
        extract = EXTRACTORS[type(module)]
        if extract is _pursued and "pursuit" not in analyses:
            extract = partial(_pursued, gradients=False)
        x = args[0][:batch]
        heads = extract(module, x)
        if not all(part.isfinite().all() for part in (heads.q, heads.k, heads.v)):
            raise DataError(f"{layer.name} (layer {layer.number}): its queries, keys or values are not finite")
        q, k, v = heads.q.double(), heads.k.double(), heads.v.double()
        layer.take(Heads(q, k, v, heads.pursuit, _untrained(x.double(), v)), analyses)

    handles = [layer.module.register_forward_hook(partial(catch, layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _too_wide(layers: Sequence[Layer]) -> list[str]:
    """Layers with more principal axes than tokens."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for layer in layers:
        _, tokens, width = layer.shape
        if width > tokens:
            by_shape.setdefault((width, tokens), []).append(str(layer.number))
    return [
        f"head width {width} is above the number of tokens {tokens} (layers {', '.join(numbers)}): there are at most "
        "as many principal axes as tokens, so the theory does not hold there"
        for (width, tokens), numbers in by_shape.items()
    ]


def _overflown(tables: dict[str, pd.DataFrame]) -> list[str]:
    heads = tables.get("heads", pd.DataFrame())
    if "projection_loss" not in heads:
        return []
    places = [f"{r.layer}.{r.head}" for r in heads[~(heads["projection_loss"].abs() < math.inf)].itertuples()]
    return (
        [f"projection loss beyond float64 in {', '.join(places)} (layer.head): see log_feature_norm"] if places else []
    )
