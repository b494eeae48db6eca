"""What a run was asked for: its fingerprint, and where two requests differ."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(request: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of everything that decides a number."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two requests differ, as `place: ours, theirs` lines."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(ours.keys() | theirs.keys())
        return [
            line
            for key in keys
            for line in differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}[{i}]")]
    return [] if ours == theirs else [f"{path}: {_short(ours)} here, {_short(theirs)} there"]


def _short(value: Any) -> str:
    """A value in one line that can be read; of models their labels."""
    if isinstance(value, list) and all(isinstance(v, dict) and "label" in v for v in value):
        return ", ".join(str(v["label"]) for v in value)
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
