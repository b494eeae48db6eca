"""Loading models and starting a run, as `eval` and `diagnose` do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robustkpca.cli.app import choice, err, interruptible, progress_bar, say
from robustkpca.errors import CheckpointError, SpecError

if TYPE_CHECKING:
    from robustkpca.evaluation.loop import Progress
    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.classifier import Classifier
    from robustkpca.runs.run import Run
    from robustkpca.tasks.base import Unusable

Model = Annotated[
    list[str] | None,
    typer.Option(
        help="Embedded name, FAMILY[-SIZE] (see `models`) with --checkpoint, or timm:NAME. Repeat to compare."
    ),
]
Checkpoint = Annotated[
    list[str] | None, typer.Option(help="Weights of the model in the same place; `embedded` for embedded ones.")
]
Data = Annotated[str, typer.Option(help="Data set (see `datasets`): NAME or NAME:DIR.")]
Weights = Annotated[str, typer.Option(help="raw (what was optimised) or ema, of files that hold both.")]
Iterations = Annotated[
    str | None, typer.Option(help="RPC-Attention: iterations n of PAP; 1,2,4 evaluates each of them.")
]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads, for weights of no known size.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Image side other than the weights'.")]
Classes = Annotated[Path | None, typer.Option(help="Names of the logits, one a line, for weights without names.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, help="Processes that decode images ahead. Default: 0 for embedded data, 1 on the CPU, up to 8 a GPU."
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps decoded images (memory-mapped) for later models, attacks and runs."),
]
CacheLimit = Annotated[
    float, typer.Option(min=0, help="GiB that --cache may hold; what was not used for longest goes first.")
]
Dtype = Annotated[str, typer.Option(help="float32 or bf16, which changes figures.")]
Compile = Annotated[bool, typer.Option("--compile", help="Through torch.compile, which may change the last bits.")]
Checkpointing = Annotated[
    bool,
    typer.Option("--grad-checkpointing", help="Less memory, more time: each block is computed again for its gradient."),
]
BatchSize = Annotated[int, typer.Option(help="Samples a batch; the unit of work that is kept.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="Run folder. Default: one under runs/, named after the request.")
]


def start(
    plan: Plan,
    device: str,
    out_dir: Path | None,
    workers: int | None,
    cache: Path | None = None,
    cache_limit: float = 0,
) -> Run:
    """Announce what is about to be run, and run or continue it. Of several processes only the leading one comes back from here."""
    from robustkpca.datasets.cache import PixelCache
    from robustkpca.evaluation.loop import Resources, carry_out
    from robustkpca.runtime.sharing import place

    if out_dir is None:
        parts = [s.name for s in plan.suites] or [plan.samples.name.partition(":")[0]]
        out_dir = Path("runs") / f"{'-'.join(parts)}-{plan.request.fingerprint[:8]}"
    here = place()
    if here.rank == 0:
        for line in announcement(plan, device):
            err.print(line, markup=False, highlight=False)
        if not here.alone:
            say(f"shared   among {here.world} processes")
    kept = None if cache is None else PixelCache(cache, limit=cache_limit * 2**30, on_notice=say)
    with watched("starting", out_dir) as show:
        run = carry_out(plan, out_dir, Resources(workers, kept, here, show, say))
    if here.rank > 0:
        raise typer.Exit
    return run


@contextlib.contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Torch's deterministic mode inside, where it is wanted."""
    import os

    import torch

    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first CUDA matrix product is made
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def watched(title: str, out_dir: Path) -> Iterator[Callable[[Progress], None]]:
    """A progress bar, moved by what is yielded; an interruption says what is kept in `out_dir`."""
    from robustkpca.runtime.sharing import place

    def kept() -> str:
        chunks = sum(1 for file in out_dir.rglob("*.parquet") if "rows" in file.parts)
        return f"{chunks} chunks are kept in {out_dir}; the same command goes on from there"

    with interruptible(kept), progress_bar(disable=place().rank > 0) as progress:
        bar = progress.add_task(title, total=None)
        yield lambda now: progress.update(
            bar, completed=now.done, total=now.total, description=f"{now.model}  {now.attack}"
        )


def announcement(plan: Plan, device: str) -> list[str]:
    """What is about to be run, one line each."""
    from robustkpca.models.classifier import Classifier

    samples = plan.samples
    lines = []
    for label, model in zip(plan.labels, plan.models, strict=True):
        if isinstance(model, Classifier):
            p = model.settings.preprocessing
            notes = "".join(f"; {note}" for note in model.notes)
            size = f"{p.channels}x{p.img_size}x{p.img_size}, crop {p.crop_pct:g} {p.interpolation}"
            lines.append(f"model    {label}: {size}, weights {model.weights}{notes}")
        else:
            lines.append(f"model    {label}: failed: {model.reason}")
    argmax = f", answers {plan.request.data.argmax}" if getattr(samples, "among", ()) else ""
    lines.append(f"data     {samples.name}, n = {len(samples)}{argmax}")
    if samples.ignored:
        shown = ", ".join(samples.ignored[:5]) + (", ..." if len(samples.ignored) > 5 else "")
        lines.append(f"ignored  {len(samples.ignored)} entries that are no samples: {shown}")
    lines += [f"attack   {suite.name}: {suite.describe()}" for suite in plan.suites]
    return [
        *lines,
        f"device   {device}, {plan.request.dtype}, seed {plan.request.seed}, batch size {plan.request.batch_size}",
    ]


def classifiers(
    models: list[str] | None,
    files: list[str] | None,
    *,
    iterations: str | None,
    layers: str | None,
    classes: Path | None,
    weights: str,
    dtype: str = "float32",
    compiled: bool = False,
    checkpointed: bool = False,
    **settings: Any,
) -> list[Classifier | Unusable]:
    """A classifier for each model and number of iterations. Of several, one whose weights do not load is Unusable."""
    from robustkpca.models.checkpoints import EMBEDDED, load_classifier
    from robustkpca.models.classifier import DTYPES
    from robustkpca.models.settings import parse_iterations, parse_layers
    from robustkpca.tasks.base import Unusable

    if not models and not files:
        known = ", ".join(EMBEDDED)
        raise SpecError(f"--model: expected at least one of {known}, another name with --checkpoint, or timm:NAME")
    if models and files and len(models) != len(files):
        raise SpecError(
            f"--checkpoint: expected one for each --model ({len(models)}), got {len(files)}; `embedded` is one"
        )
    names: list[str | None] = [*models] if models else [None] * len(files or [])
    paths = [None if f == "embedded" else f for f in files or []] or [None] * len(names)
    settings["weights"] = choice("--weights", weights, ("raw", "ema"))
    settings["layers"] = None if layers is None else parse_layers(layers)
    settings["classes"] = _read_names(classes) if classes else ()
    choice("--dtype", dtype, tuple(DTYPES))
    way: dict[str, Any] = {"dtype": DTYPES[dtype], "compiled": compiled, "checkpointed": checkpointed}
    changed = compiled or checkpointed or dtype != "float32"
    counts: tuple[int | None, ...] = (None,) if iterations is None else parse_iterations(iterations)
    found: list[Classifier | Unusable] = []
    for name, path in zip(names, paths, strict=True):
        for count in counts:
            try:
                classifier = load_classifier(name, path, iterations=count, **settings)
                found.append(classifier.variant(**way) if changed else classifier)
            except CheckpointError as error:
                if len(names) == 1:
                    raise
                found.append(Unusable(name or Path(path or "").stem, str(path or name), str(error)))
    if all(isinstance(m, Unusable) for m in found):
        raise CheckpointError("; ".join(m.reason for m in found if isinstance(m, Unusable)))
    return found


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--classes {path}: {error}") from None
