"""Atomic file writes: under a temporary name in the same folder, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qkv.core.errors import QkvError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_parts(path, [text.encode("utf-8")])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically, part by part as they are computed."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(parts)

    _write(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors atomically as safetensors."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    _write(path, lambda temporary: save_file(whole, temporary, dict(metadata or {"format": "pt"})))


def read_tensors(path: Path, metadata: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, and its metadata into `metadata`; refuse a missing, truncated or foreign file."""
    try:
        with safe_open(path, framework="pt") as file:
            if metadata is not None:
                metadata.update(file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise QkvError(f"{path}: no such weights: look into {path.parent} for the ones there are") from None
    except (SafetensorError, OSError) as error:
        raise QkvError(f"{path}: truncated or not a safetensors file ({error}): restore it from a copy") from None


def read_json(path: Path, kind: str, version: int, remedy: str) -> dict[str, Any]:
    """Read a JSON file of format `qkv-KIND`; refuse a missing, damaged or foreign one, and another version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the {kind}: {error.strerror}") from None
    except ValueError:
        raise QkvError(f"{path}: not JSON, so not a {kind}, or cut off: {remedy}") from None
    if not isinstance(values, dict) or values.get("format") != f"qkv-{kind}":
        raise QkvError(f"{path}: not a qkv {kind}: expected a JSON file with format qkv-{kind}")
    if (found := values.get("version")) != version:
        raise QkvError(f"{path}: {kind} version {found!r}, this qkv reads {version}: {remedy}")
    return values


def content_hash(path: Path) -> str:
    """Return a hash of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise QkvError(f"{path}: cannot be written: {reason(error)}; what was there before is untouched") from None
    finally:
        with suppress(OSError):  # where nothing can be written, nothing can be removed either
            temporary.unlink()


def reason(error: Exception) -> str:
    # safetensors has the system's error only in its text: "… (os error 28) …".
    number = re.search(r"os error (\d+)", str(error))
    return os.strerror(int(number[1])) if number else str(getattr(error, "strerror", None) or error)
