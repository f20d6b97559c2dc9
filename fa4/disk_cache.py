"""How compiled kernels lie on disk: one file an entry, written in one step, checked when read.

    machine code    a shared library (``.so``) or, where there was no linker, an object (``.o``)
    description     JSON: the kernel's name and its whole key
    footer          length of the description, SHA-256 of everything before it, a magic number

Loaders ignore bytes behind an ELF image, so code, key and digest are one file, which replaces an
older one in one step and is loaded as it is. Code goes to a loader only after its digest and key
were found right: dlopen of a damaged library can take the process down.

Between processes each kernel has a lock file. It is flock'ed, so a dead process never holds it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import struct
import time
import uuid
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no flock on this system: every process builds for itself
    fcntl = None  # type: ignore[assignment]

LOCK_TIMEOUT_S = 300.0  # many times the longest compile on a loaded machine
LOCK_POLL_S = 0.02
ABANDONED_S = 3600.0  # age at which a temporary file is taken to be a killed writer's

_FOOTER = struct.Struct("<Q32s8s")  # description length, SHA-256, magic
_MAGIC = b"fa4entry"

# The files of the cache folder that are ours; nothing else in it is ever removed.
_ENTRY_FILE = re.compile(r".+-[0-9a-f]{32}\.(so|o)")
_LOCK_FILE = re.compile(r".+-[0-9a-f]{32}\.lock")
_TEMPORARY_FILE = re.compile(r"\..+-[0-9a-f]{32}\.(so|o)\.[0-9a-f]{32}\.tmp")


class CacheWarning(UserWarning):
    """The disk cache could not be used as asked; the call goes on without it."""


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """What an entry must be of: `facts` is everything that changes the code, as JSON types."""

    name: str
    arch: str
    facts: dict[str, Any]

    @functools.cached_property
    def stem(self) -> str:
        """File name without suffix: for people up to the digest, which alone would be enough."""
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        return f"{self.name[:120]}-{self.arch}-{digest[:32]}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An intact entry of the key that was looked for."""

    path: Path
    code: bytes

    @property
    def is_library(self) -> bool:
        return self.path.suffix == ".so"


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """A line of a cache listing.

    path     file
    size     bytes
    name     kernel, see `fa4.compiler.KernelSpec.name`
    arch     target, "" where it cannot be read
    problem  what is wrong with the file, None for an intact one
    """

    path: Path
    size: int
    name: str
    arch: str
    problem: str | None


class DamagedEntryError(Exception):
    """Why a file is not an entry to be loaded. The message continues a sentence about the file."""


# -- the folder ----------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Folder of the disk cache; may not exist yet.

    FA4_CACHE_DIR, read at every use, else ``fa4`` in XDG_CACHE_HOME, else in ``~/.cache``. Code is
    loaded from it: share it only with people who are trusted to run code as you.
    Raises RuntimeError when none of these is set and the user has no home folder.
    """
    chosen = os.environ.get("FA4_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore relative ones
        return Path(base) / "fa4"
    return Path.home() / ".cache" / "fa4"


def cache_entries() -> list[CacheEntry]:
    """Every entry on disk by file name, damaged ones too. Empty where there is no folder."""
    entries = []
    for path in _own_files(_ENTRY_FILE):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # removed by another process since the folder was listed
            continue
        try:
            description, _ = _unpack(content)
            name, arch, problem = description["name"], description["arch"], None
        except DamagedEntryError as error:
            name, arch, problem = path.stem, "", str(error)
        entries.append(CacheEntry(path, len(content), name, arch, problem))
    return entries


def clear_cache() -> int:
    """Remove our files, and nothing else, from the cache folder; returns the number of entries.

    Kernels that processes have loaded stay usable. Raises OSError when a file cannot be removed.
    """
    entries = _own_files(_ENTRY_FILE)
    for path in entries + _own_files(_LOCK_FILE) + _own_files(_TEMPORARY_FILE):
        path.unlink(missing_ok=True)
    return len(entries)


def _own_files(pattern: re.Pattern[str]) -> list[Path]:
    folder = cache_dir()
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if pattern.fullmatch(name)]


# -- entries -------------------------------------------------------------------------------------


def read_entry(key: KernelKey) -> tuple[Entry | None, str | None]:
    """The intact entry of a key, or None; and then what is wrong with its file, if it has one."""
    problem = None
    for suffix in (".so", ".o"):
        try:
            path = cache_dir() / f"{key.stem}{suffix}"
            description, code = _unpack(path.read_bytes())
            if description["facts"] != key.facts:
                raise DamagedEntryError("belongs to another kernel")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except RuntimeError:  # no folder to look in; storing gives the warning
            return None, None
        except DamagedEntryError as error:
            problem = problem or f"{path} {error}"
        except OSError as error:
            problem = problem or f"{path} cannot be read ({error})"
        else:
            return Entry(path, code), None
    return None, problem


def store_entry(key: KernelKey, code: bytes, is_library: bool) -> Path | None:
    """Write an entry; a reader sees the whole of it or nothing.

    Returns None, with one `CacheWarning` a process and folder, where it cannot be written.
    """
    try:
        folder = cache_dir()
    except RuntimeError as error:
        _warn_not_stored(f"there is no cache folder ({error})", once=None)
        return None
    path = folder / f"{key.stem}{'.so' if is_library else '.o'}"
    temporary = folder / f".{path.name}.{uuid.uuid4().hex}.tmp"
    description = {"name": key.name, "arch": key.arch, "facts": key.facts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_files()
        try:
            with open(temporary, "xb") as file:
                file.write(_pack(description, code))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn_not_stored(f"{folder} cannot be written ({error})", once=folder)
        return None
    return path


def _pack(description: dict[str, Any], code: bytes) -> bytes:
    text = json.dumps(description, sort_keys=True).encode()
    return code + text + _FOOTER.pack(len(text), hashlib.sha256(code + text).digest(), _MAGIC)


def _unpack(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Description and code. Raises DamagedEntryError unless every byte is as it was written."""
    body, footer = content[: -_FOOTER.size], content[-_FOOTER.size :]
    if len(footer) < _FOOTER.size:
        raise DamagedEntryError("is truncated")
    length, digest, magic = _FOOTER.unpack(footer)
    if magic != _MAGIC:
        raise DamagedEntryError("is truncated or was not written by fa4")
    if length > len(body) or hashlib.sha256(body).digest() != digest:
        raise DamagedEntryError("is damaged (its content does not have its digest)")
    split = len(body) - length
    return json.loads(body[split:]), body[:split]


def _remove_abandoned_files() -> None:
    """Remove what writers left that were killed in the middle of a write."""
    for path in _own_files(_TEMPORARY_FILE):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


# -- between processes ---------------------------------------------------------------------------


@contextlib.contextmanager
def only_builder(key: KernelKey) -> Iterator[Entry | None]:
    """Hold the kernel's lock; or yield the entry that its holder has stored in the meantime.

    The caller builds unless an entry is yielded, also where no lock is to be had (a folder that
    cannot be written, a file system without flock) and when it was waited for in vain for
    LOCK_TIMEOUT_S seconds.
    """
    handle = _open_lock_file(key)
    if handle is None:
        yield None
        return
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    entry, is_holder = None, False
    try:
        while entry is None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_holder = True
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    warn(
                        f"Another process has been building {key.name} for {key.arch} for "
                        f"{LOCK_TIMEOUT_S:g} s; this one builds it too."
                    )
                    break
            except OSError:  # a file system without flock
                break
            time.sleep(LOCK_POLL_S)
            entry, _ = read_entry(key)
        yield entry
    finally:
        if is_holder:
            # Said explicitly: a child that was forked meanwhile shares the lock, and would keep it.
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _open_lock_file(key: KernelKey) -> int | None:
    if fcntl is None:
        return None
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / f"{key.stem}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except (OSError, RuntimeError):  # storing will fail alike, and give the warning
        return None


# -- warnings ------------------------------------------------------------------------------------

_warned: set[Hashable] = set()


def warn(message: str) -> None:
    """Give a `CacheWarning`."""
    warnings.warn(message, CacheWarning, stacklevel=3)


def warn_once(message: str, about: Hashable) -> None:
    """Give a `CacheWarning` unless this process has given one about the same thing."""
    if about not in _warned:
        _warned.add(about)
        warn(message)


def _warn_not_stored(reason: str, once: Hashable) -> None:
    warn_once(
        f"Compiled kernels are not stored, so every process compiles its own: {reason}. Set "
        "FA4_CACHE_DIR to a folder that can be written.",
        about=("not stored", once),
    )
