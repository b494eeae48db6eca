"""Files that may hold weights, opened as plain data: nothing in them is run, and what they claim is bounded."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from struct import pack
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from robustkpca.errors import CheckpointError, brief

RECORD_KEY = "robustkpca"  # the metadata entry of a safetensors file that holds the model's settings
INDEX = ".index.json"  # ends the name of the file that says which shard holds which tensor
_numpy: Any = np  # its core moved in version 2
_multiarray: Any = (_numpy.core if np.lib.NumpyVersion(np.__version__) < "2.0.0" else _numpy._core).multiarray
# What training scripts store beside the weights, and what is harmless to rebuild: plain data, no code. The classes of
# others are read as the plain data they extend, by name.
_SAFE: list[Any] = [
    argparse.Namespace,
    _multiarray.scalar,
    _multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"},
    *((kind, f"pathlib.{place}{pure}{name}") for place in ("", "_local.") for pure in ("", "Pure")
      for kind, name in ((PurePosixPath, "PosixPath"), (PureWindowsPath, "WindowsPath"))),
    *((OrderedDict, name) for name in (
        "lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict", "yacs.config.CfgNode", "easydict.EasyDict",
    )),
]  # fmt: skip
# Files that are no weights, by their first bytes. None of these is ever opened.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF", "HDF5, as Keras writes it"),
    (b"GGUF", "GGUF, quantised weights of a language model"),
    (b"\x93NUMPY", "one array without a name"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b"BZh", "a bzip2 archive; unpack it"),
    (b"\xfd7zXZ", "an xz archive; unpack it"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
    (b"Rar!", "a rar archive; unpack it"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"\x7fELF", "a program"),
)
HEAD = 512  # bytes that tell what a file is
_EXPANSION, _ALLOWANCE = 16, 64 * 2**20  # an honest file unpacks to at most so many times its size, and these bytes


def too_large(claimed: int, size: int) -> bool:
    """Whether a file of `size` bytes claims to hold more than any honest one does."""
    return claimed > _EXPANSION * size + _ALLOWANCE


def open_file(path: Path, about: str) -> tuple[Mapping[str, Any], Any]:
    """The content of a weight file, and our record in it (JSON, not checked, {} where it has none).

    safetensors; PyTorch's archives and its older form; npz; and the index of a file in shards. Raises CheckpointError
    for all else, saying what it is.
    """
    with path.open("rb") as file:
        head = file.read(HEAD)
    _refuse_others(path, head, about)
    if path.name.endswith(INDEX):
        return _open_shards(path, about), {}
    if shard := re.search(r"^(.*)-\d+-of-(\d+)(\.\w+)$", path.name):
        whole = f"{shard[1]}{shard[3]}{INDEX}"
        if (path.parent / whole).is_file():
            raise CheckpointError(f"{about}: one of {int(shard[2])} shards; give {path.parent / whole}")
    return _open_one(path, head, about)


def _open_one(path: Path, head: bytes, about: str) -> tuple[Mapping[str, Any], Any]:
    if _is_safetensors(head):
        return _open_safetensors(path, about)
    if head[:2] == b"PK":
        content = _open_zip(path, about)
    elif head[:2] == b"\x80\x02":
        content = _open_torch(path, about)
    else:
        return _open_safetensors(path, about)
    record = content.get(RECORD_KEY)  # in the states that `train` keeps
    return content, parse_json(record, about) if isinstance(record, str) else {}


def _is_safetensors(head: bytes) -> bool:
    """The length of a JSON header, eight bytes of which the last are zero, and its first character."""
    return head[6:9] == b"\0\0{"


def _refuse_others(path: Path, head: bytes, about: str) -> None:
    """Raise CheckpointError for what is no format of weights that can be opened, by its first bytes."""
    if not head:
        raise CheckpointError(f"{about}: the file is empty")
    if _is_safetensors(head):  # the length may look like anything
        return
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{about}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if head.lstrip()[:1] == b"<":
        raise CheckpointError(f"{about}: a web page, not weights; download the file itself")
    if head[:1] == b"\x80" and head[1:2] in (b"\x03", b"\x04", b"\x05"):
        raise CheckpointError(
            f"{about}: a plain pickle, and opening it could run code. Save `model.state_dict()` with torch.save and "
            "use that file"
        )
    what = next((words for magic, words in _OTHERS if head.startswith(magic)), "")
    if head[257:262] == b"ustar":
        what = "a tar archive; unpack it"
    elif path.suffix == ".onnx" or (head[0] == 8 and len(head) > 2 and head[2] in b"\x12\x1a\x22\x28\x32\x3a"):
        what = "an ONNX graph, without the network's names of its weights"
    elif head.lstrip()[:1] in (b"{", b"[") and not path.name.endswith(INDEX):
        what = "JSON text"
    if what:
        raise CheckpointError(f"{about}: expected safetensors or a PyTorch file, got {what}")


def parse_json(text: str | bytes, about: str) -> Any:
    """JSON that came with a file; one line where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{about}: its description cannot be read ({brief(error)[:80]})") from None


def _open_safetensors(path: Path, about: str) -> tuple[Mapping[str, Any], Any]:
    try:
        with safe_open(path, "pt") as file:
            record = (file.metadata() or {}).get(RECORD_KEY)
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # the library raises what it likes on what it cannot read
        raise CheckpointError(
            f"{about}: expected safetensors or a PyTorch file, cannot read it ({brief(error)}); torn or something else?"
        ) from None
    return state, parse_json(record, about) if record else {}


def _open_zip(path: Path, about: str) -> Mapping[str, Any]:
    """PyTorch's archive or numpy's; every other one by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
            protocol = archive.open(pickles[0]).read(2)[1:] if pickles else b""
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{about}: cannot read it, torn or half downloaded? ({brief(error)})") from None
    if too_large(claimed := sum(entry.file_size for entry in entries), path.stat().st_size):
        raise CheckpointError(f"{about}: it would unpack to {claimed / 2**30:.1f} GiB; no weight file does")
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise CheckpointError(f"{about}: a TorchScript program, which would have to be run; save `model.state_dict()`")
    if names and all(name.endswith(".npy") for name in names):
        return _open_npz(path, about)
    if pickles:
        return _open_torch(path if protocol <= b"\x02" else _in_protocol_2(path, pickles[0], about), about)
    if any("archive_format" in name or "exported_program" in name for name in names):
        raise CheckpointError(f"{about}: a program of torch.export, not weights; save `model.state_dict()`")
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise CheckpointError(f"{about}: a zip archive ({shown or 'empty'}); unpack it and give the weight file in it")


def _open_npz(path: Path, about: str) -> Mapping[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:
        raise CheckpointError(f"{about}: not plain arrays ({brief(error)})") from None


def _open_torch(file: Path | io.BytesIO, about: str) -> Mapping[str, Any]:
    try:
        with torch.serialization.safe_globals(_SAFE):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|global|class) `?([\w.]+)", str(error))
        asks = f" It asks for {name[1]}." if name else ""
        raise CheckpointError(
            f"{about}: not plain weights, and opening it could run code.{asks} Save `model.state_dict()` and use "
            "that file"
        ) from None
    except Exception as error:  # whatever a torn or forged pickle brings about
        reason = brief(error).split(". ")[0]
        raise CheckpointError(f"{about}: cannot read it, torn or half downloaded? ({reason})") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{about}: expected a dict of weights, got {type(content).__name__}")
    return content


def _open_shards(path: Path, about: str) -> dict[str, Any]:
    """The tensors of all shards that an index names, each from the shard that the index says."""
    if path.stat().st_size > _ALLOWANCE:
        raise CheckpointError(f"{about}: expected a small index of shards")
    index = parse_json(path.read_bytes(), about)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{about}: expected an index of shards with a weight_map")
    names = sorted(set(shards.values()))
    if absent := [name for name in names if Path(name).name != name or not (path.parent / name).is_file()]:
        raise CheckpointError(f"{about}: its shard {absent[0]!r} is not beside it")
    state: dict[str, Any] = {}
    for name in names:
        shard = path.parent / name
        whose = f"checkpoint {shard} ({shard.stat().st_size} bytes)"
        with shard.open("rb") as file:
            head = file.read(HEAD)
        _refuse_others(shard, head, whose)
        content, _ = _open_one(shard, head, whose)
        wanted = [key for key, place in shards.items() if place == name]
        if missing := [key for key in wanted if key not in content]:
            raise CheckpointError(f"{whose}: the index says it holds {missing[0]}, and it does not")
        state |= {key: content[key] for key in wanted}
    return state


def _in_protocol_2(path: Path, pickled: str, about: str) -> io.BytesIO:
    """The archive with its pickle written in protocol 2, the only one that torch's safe reader knows."""
    copy = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as new:
            for name in archive.namelist():
                content = archive.read(name)
                new.writestr(name, b"".join(_rewritten(content)) if name == pickled else content)
    except Exception as error:
        raise CheckpointError(f"{about}: cannot read it, torn or half downloaded? ({brief(error)})") from None
    copy.seek(0)
    return copy


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + pack("<I", len(encoded)) + encoded


def _rewritten(content: bytes) -> Iterator[bytes]:
    """The operations of a pickle of protocol 3 to 5 in those of protocol 2. What it asks for is judged by who reads it.

    Texts are held back until it is known that they are no names of a global, which protocol 2 writes in one operation;
    those that are memorised are written out again where they are used.
    """
    held: list[str] = []
    texts: dict[int, str] = {}  # memorised
    memorised = 0
    positions = [place for _, _, place in pickletools.genops(content)] + [len(content)]
    argument: Any
    for (operation, argument, place), end in zip(pickletools.genops(content), positions[1:], strict=True):
        name = operation.name
        if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            held.append(argument)
        elif name in ("BINGET", "LONG_BINGET") and argument in texts:
            held.append(texts[argument])
        elif name == "MEMOIZE" and held:
            texts[memorised] = held[-1]
            memorised += 1
        elif name == "STACK_GLOBAL":
            *rest, module, what = held
            yield from map(_text, rest)
            held = []
            yield b"c" + module.encode() + b"\n" + what.encode() + b"\n"
        else:
            yield from map(_text, held)
            held = []
            if name == "MEMOIZE":
                yield b"r" + pack("<I", memorised)
                memorised += 1
            elif name in ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"):
                yield b"c_codecs\nencode\n" + _text(argument.decode("latin1")) + _text("latin1") + b"\x86R"
            elif name == "PROTO":
                yield b"\x80\x02"
            elif name != "FRAME":
                yield content[place:end]
