"""Translated kernels on disk, beside the compiled ones, so that a later process need not translate.

An entry is of one PTX text and of the emulator's own sources, Python and NumPy as they are: change
any of them and it is translated anew. Small kernels are not worth a file. Where there is no cache
folder, or it cannot be written, kernels are translated in every process (disk_cache.py warns once).
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import platform
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fa4 import disk_cache
from fa4.disk_cache import KernelKey

MIN_TEXT_BYTES = 50_000  # about 0.1 s of translating
_FORMAT = 1


def read(text: str, entry: str, target: str) -> Any | None:
    """What was stored for an entry of a PTX module for a target, or None."""
    if len(text) < MIN_TEXT_BYTES:
        return None
    found, _ = disk_cache.read_entry(_key(text, entry, target))
    # Read only after its digest was found right, and written by this program only.
    return None if found is None else pickle.loads(zlib.decompress(found.code))


def store(text: str, entry: str, target: str, translation: Any) -> None:
    if len(text) >= MIN_TEXT_BYTES:
        content = zlib.compress(pickle.dumps(translation, protocol=5), level=1)
        disk_cache.store_entry(_key(text, entry, target), content, is_library=False)


def _key(text: str, entry: str, target: str) -> KernelKey:
    facts = {
        "format": _FORMAT,
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "entry": entry,
        "sources": _sources_digest(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "numpy": np.__version__,
    }
    return KernelKey(f"{entry}_translated", target, facts)


@functools.cache
def _sources_digest() -> str:
    """Of everything that translation depends on: the modules of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
