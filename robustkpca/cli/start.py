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
from robustkpca.errors import CheckpointError, SpecError
from robustkpca.files import no_file

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from robustkpca.cli.options import ModelFlags
    from robustkpca.datasets.registry import Source
    from robustkpca.evaluation.loop import Progress
    from robustkpca.evaluation.plan import Plan
    from robustkpca.models.classifier import Classifier
    from robustkpca.models.loading import Load
    from robustkpca.models.model import Model, Unusable
    from robustkpca.models.options import ModelOptions
    from robustkpca.runs.run import Run


def pick_device(name: str) -> str:
    """`auto` is CUDA where it works, else the CPU. Of several processes on one machine each takes a GPU of its own, or
    its share of the CPUs.

    Raises:
        SpecError: a name that makes no sense (before torch is imported), or a device that is not there.
    """
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or (number and not number.isdigit())):
        raise SpecError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    import torch

    from robustkpca.runtime.place import divide_threads, place

    here = place()
    devices = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        divide_threads(here)
        return name
    if int(number or 0) >= devices:
        raise SpecError(f"--device {name}: {devices} CUDA devices are visible here; use --device cpu")
    if number or here.alone:
        return name
    return f"cuda:{here.local_rank % devices}"


def asked_models(
    flags: ModelFlags, names: Sequence[str] = (), **settings: object
) -> tuple[list[ModelOptions], ModelOptions]:
    """The models that a command is asked for, and the settings for all of them.

    names: models beside those of `--model`. settings: further options for all models, by their words.

    Raises:
        SpecError: a model or setting that makes no sense, or no model at all.
    """
    from robustkpca.models.options import ModelOptions, read_models_file, with_checkpoints
    from robustkpca.models.settings import EMBEDDED

    shared = {
        "weights": flags.weights,
        "iterations": flags.iterations,
        "lambda": flags.lam,
        "layers": flags.layers,
        "heads": flags.heads,
        "img_size": flags.img_size,
        "classes": flags.classes,
    }
    named = [ModelOptions.of_text(text) for text in (*names, *(flags.model or ()))]
    models = with_checkpoints(named, flags.checkpoint or ())
    models += read_models_file(flags.models_file) if flags.models_file is not None else []
    if not models:
        known = ", ".join(EMBEDDED)
        raise SpecError(f"--model: expected at least one of {known}, another name with --checkpoint, or timm:NAME")
    refuse_missing([model.checkpoint for model in models])
    return models, ModelOptions.of_flags(shared | settings)


def refuse_missing(files: Sequence[str | None]) -> None:
    """Raises CheckpointError where every model is a file that is not there; of some, the others are evaluated."""
    if all(file is not None and (no_file(Path(file)) is not None) for file in files):
        lines = (f"checkpoint {file}: {no_file(Path(str(file)))}" for file in dict.fromkeys(files))
        raise CheckpointError("; ".join(lines))


def asked_data(data: str, in_distribution: str | None = None) -> Source | None:
    """The data set that a command is asked for, before torch is imported; None for an import path.

    Raises:
        DataError: there is no such data set or folder.
    """
    from robustkpca.datasets.registry import find

    found = find(data, in_distribution)
    return None if found is None else found.source


def import_code(models: Sequence[ModelOptions], data: str) -> None:
    """Imports the modules of models and data that are import paths. Raises SpecError, as import_object."""
    from robustkpca.datasets.registry import DATASETS
    from robustkpca.extensions import import_object, is_import_path

    for options in models:
        if options.model is not None and is_import_path(options.model):
            import_object(options.model, what="model")
    if is_import_path(data, DATASETS):
        import_object(data, what="data")


def load(
    asked: tuple[list[ModelOptions], ModelOptions], device: str, how: Load | None = None
) -> list[Model | Unusable]:
    """The models of `asked_models`, loaded by `how`. Of several, one whose weights do not load is Unusable. What the
    settings for all of them went to is said."""
    from robustkpca.models.loading import load_models
    from robustkpca.runtime.place import place

    models, shared = asked
    return load_models(models, shared, device, load=how, on_notice=say if place().rank == 0 else None)


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


def start(
    plan: Plan,
    device: str,
    out_dir: Path | None,
    workers: int | None,
    cache: Path | None = None,
    cache_limit: float = 0,
    *,
    quiet: bool = False,
) -> Run:
    """Announce what is about to be run (not where `quiet`), and run or continue it.
    Of several processes only the leading one comes back from here."""
    from robustkpca.datasets.cache import PixelCache
    from robustkpca.evaluation.loop import Resources, carry_out
    from robustkpca.runtime.place import place

    if out_dir is None:
        parts = [s.name for s in plan.suites] or [plan.samples.name.partition(":")[0]]
        out_dir = Path("runs") / f"{'-'.join(parts)}-{plan.request.fingerprint[:8]}"
    here = place()
    if here.rank == 0 and not quiet:
        for line in announcement(plan, device):
            say(line)
        if not here.alone:
            say(f"shared   among {here.world} processes")
    pixels = None if cache is None else PixelCache(cache, limit=cache_limit * 2**30, on_notice=say)
    with watched("starting", out_dir, quiet=quiet) as show:
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
        what = "entry that is no sample" if len(samples.ignored) == 1 else "entries that are no samples"
        lines.append(f"ignored  {len(samples.ignored)} {what}: {shown}")
    lines += [f"attack   {suite.name}: {suite.describe()}" for suite in plan.suites]
    return [
        *lines,
        f"device   {device}, {plan.request.dtype}, seed {plan.request.seed}, batch size {plan.request.batch_size}",
    ]


def progress_bar(*, disable: bool = False) -> Bar:
    """A bar on a terminal; elsewhere, in a log or a notebook, lines from time to time. `disable`: neither."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from robustkpca.runtime.progress import Lines

    lines = None if disable or err.is_terminal else Lines(say)

    class Shown(Progress):
        def update(self, task_id: TaskID, *args: Any, **fields: Any) -> None:
            super().update(task_id, *args, **fields)
            task = self._tasks[task_id]
            if lines is not None and task.total:
                lines(task.description, task.completed, task.total)

    return Shown(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        disable=disable or lines is not None,
    )


@contextlib.contextmanager
def watched(title: str, out_dir: Path, *, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A progress bar, moved by what is yielded; an interruption says what is kept in `out_dir`."""
    from robustkpca.runtime.place import place

    def left() -> str:
        chunks = sum(1 for file in out_dir.rglob("*.parquet") if "rows" in file.parts)
        return f"{chunks} chunks are kept in {out_dir}; the same command goes on from there"

    with interruptible(left), progress_bar(disable=quiet or place().rank > 0) as progress:
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
