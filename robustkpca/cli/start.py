"""What comes before the work of a command: its device, samples and models;
and the work's progress, interruption and announcement."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from robustkpca.cli.show import err, say
from robustkpca.config import composed, read_text
from robustkpca.errors import SpecError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from robustkpca.evaluation.loop import Progress
    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.model import Model, Unusable
    from robustkpca.models.options import ModelOptions
    from robustkpca.runs.run import Run


def pick_device(name: str) -> str:
    """`auto` is CUDA where it works, else the CPU. Of several processes on one machine each takes a GPU of its own, or
    its share of the CPUs."""
    import torch

    from robustkpca.runtime.place import divide_threads, place

    here = place()
    devices = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        divide_threads(here)
        return name
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise SpecError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if int(number or 0) >= devices:
        raise SpecError(f"--device {name}: {devices} CUDA devices are visible here; use --device cpu")
    if number or here.alone:
        return name
    return f"cuda:{here.local_rank % devices}"


def model_options(
    names: list[str] | None,
    checkpoints: list[str] | None,
    *,
    iterations: str | None = None,
    layers: str | None = None,
    classes: Path | None = None,
    **settings: Any,
) -> ModelOptions:
    """The options of a command as ModelOptions; `settings` are those of its fields that need no parsing.

    Raises:
        SpecError: iterations, layers or the file of classes make no sense.
    """
    from robustkpca.models.options import ModelOptions
    from robustkpca.models.settings import parse_iterations, parse_layers

    return ModelOptions(
        names=tuple(names or ()),
        checkpoints=tuple(checkpoints or ()),
        iterations=() if iterations is None else parse_iterations(iterations),
        layers=None if layers is None else parse_layers(layers),
        classes=() if classes is None else _read_names(classes),
        **settings,
    )


def load(options: ModelOptions, device: str) -> list[Model | Unusable]:
    """The models that the options name, at least one. Of several, one whose weights do not load is Unusable."""
    from robustkpca.models.checkpoints import EMBEDDED
    from robustkpca.models.options import load_models

    if not options.names and not options.checkpoints:
        known = ", ".join(EMBEDDED)
        raise SpecError(f"--model: expected at least one of {known}, another name with --checkpoint, or timm:NAME")
    return load_models(options, device)


def split_loaded(loaded: Sequence[Model | Unusable]) -> tuple[list[Classifier], list[Unusable]]:
    """Classifiers, and models that could not be loaded. Raises SpecError for a model of another task."""
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.model import Unusable

    usable = [model for model in loaded if isinstance(model, Classifier)]
    failed = [model for model in loaded if isinstance(model, Unusable)]
    for model in loaded:
        if not isinstance(model, Classifier | Unusable):
            raise SpecError(f"model {model.source}: expected a Classifier, got {type(model).__name__}")
    return usable, failed


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(composed(line.strip()) for line in read_text(path).splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--classes {path}: {error}") from None


def start(
    plan: Plan,
    device: str,
    out_dir: Path | None,
    workers: int | None,
    cache: Path | None = None,
    cache_limit: float = 0,
) -> Run:
    """Announce what is about to be run, and run or continue it.
    Of several processes only the leading one comes back from here."""
    from robustkpca.datasets.cache import PixelCache
    from robustkpca.evaluation.loop import Resources, carry_out
    from robustkpca.runtime.place import place

    if out_dir is None:
        parts = [s.name for s in plan.suites] or [plan.samples.name.partition(":")[0]]
        out_dir = Path("runs") / f"{'-'.join(parts)}-{plan.request.fingerprint[:8]}"
    here = place()
    if here.rank == 0:
        for line in announcement(plan, device):
            say(line)
        if not here.alone:
            say(f"shared   among {here.world} processes")
    pixels = None if cache is None else PixelCache(cache, limit=cache_limit * 2**30, on_notice=say)
    with watched("starting", out_dir) as show:
        run = carry_out(plan, out_dir, Resources(workers, pixels, here, show, say))
    if here.rank > 0:
        raise typer.Exit
    return run


def announcement(plan: Plan, device: str) -> list[str]:
    """What is about to be run, one line each."""
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.model import Unusable

    samples = plan.samples
    lines = []
    for label, model in zip(plan.labels, plan.models, strict=True):
        if isinstance(model, Classifier):
            p = model.settings.preprocessing
            notes = "".join(f"; {note}" for note in model.notes)
            size = f"{p.channels}x{p.img_size}x{p.img_size}, {p.crop_text} {p.interpolation}"
            lines.append(f"model    {label}: {size}, weights {model.weights}{notes}")
        elif isinstance(model, Unusable):
            lines.append(f"model    {label}: failed: {model.reason}")
        else:
            lines.append(f"model    {label}: weights {model.weights}")
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


def progress_bar(*, disable: bool = False) -> Bar:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        disable=disable,
    )


@contextlib.contextmanager
def watched(title: str, out_dir: Path) -> Iterator[Callable[[Progress], None]]:
    """A progress bar, moved by what is yielded; an interruption says what is kept in `out_dir`."""
    from robustkpca.runtime.place import place

    def left() -> str:
        chunks = sum(1 for file in out_dir.rglob("*.parquet") if "rows" in file.parts)
        return f"{chunks} chunks are kept in {out_dir}; the same command goes on from there"

    with interruptible(left), progress_bar(disable=place().rank > 0) as progress:
        bar = progress.add_task(title, total=None)
        yield lambda now: progress.update(
            bar, completed=now.done, total=now.total, description=f"{now.model}  {now.attack}"
        )


@contextlib.contextmanager
def interruptible(left: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process with 130 and 143, and `left` says what is left of its work."""
    received = signal.SIGINT

    def terminate(number: int, frame: object) -> None:  # a scheduler takes the machine back: end as on Ctrl-C
        nonlocal received
        received = signal.Signals(number)
        signal.signal(number, signal.SIG_IGN)  # torchrun and some schedulers say it twice
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    ctrl_c = signal.getsignal(signal.SIGINT)
    if callable(ctrl_c):  # not where it is ignored; the command line's own handler does not wait for modules
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {left()}")
        sys.exit(128 + received)
    finally:
        signal.signal(signal.SIGTERM, before)
        if callable(ctrl_c):
            signal.signal(signal.SIGINT, ctrl_c)


@contextlib.contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Torch's deterministic mode inside, where it is wanted."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first CUDA matrix product is made
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
