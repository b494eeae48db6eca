"""Random draws that depend on what is drawn for, never on what was drawn before.

Each draw is keyed by (seed, purpose, sample id), so it is the same for any batch size, order, worker or process count, and after
a resume. Draws are made on the CPU and moved, so that every device sees the same values.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator for one key, e.g. `generator(0, "pgd", "8/255", "test/00017")`."""
    text = "\x1f".join([str(int(seed)), *map(str, key)])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # torch takes 63 bits
