"""Checked mode: validate what a call's length tensors contain, which the normal mode trusts.

    FA4_CHECKED=1 python train.py           for a process
    with fa4.checked(): ...                 for a part of it

Lengths lie on the device, and reading them waits for it. So the normal mode does not, and a wrong
entry makes it read or skip rows in silence. Checked mode reads them at every call.
"""

import contextlib
import contextvars
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

# None: the environment decides. New threads start with None, as with any context variable.
_enabled: contextvars.ContextVar[bool | None] = contextvars.ContextVar("fa4_checked", default=None)


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Context manager (and decorator) in which calls of this thread or task are checked.

    ``checked(False)`` switches the mode off, also where FA4_CHECKED=1 or an outer ``checked()``
    has switched it on. The innermost one counts.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_checked() -> bool:
    """Whether checked mode is on here: by the innermost `checked`, else by FA4_CHECKED.

    Raises ValueError for a value of FA4_CHECKED other than 0, 1 and nothing.
    """
    enabled = _enabled.get()
    if enabled is not None:
        return enabled
    value = os.environ.get("FA4_CHECKED")
    if value is None or value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ValueError(f"FA4_CHECKED is {value!r}; it must be 0 or 1.")


def check_varlen(
    *,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> None:
    """Validate the contents of length tensors, as `fa4.flash_attn_varlen_func` takes them.

    q, k           (rows, heads, head_dim) packed, or (batch, rows, heads, head_dim) dense
    cu_seqlens_*   (batch + 1,) starts at 0, never decreases, ends within the rows of its tensor
    seqused_*      (batch,) each at least 0 and at most the rows of its sequence
    max_seqlen_*   at least the longest length in use, if given

    Raises ValueError that names the argument, its first offending entry and what is allowed.
    One transfer from the device, which waits for it; during a CUDA graph capture that is not
    possible, and one warning says so. Tensors of a wrong shape, dtype or device are passed over:
    `fa4.problem` refuses those in either mode.
    """
    tensors = {
        name: tensor
        for name, tensor in (
            ("cu_seqlens_q", cu_seqlens_q),
            ("cu_seqlens_k", cu_seqlens_k),
            ("seqused_q", seqused_q),
            ("seqused_k", seqused_k),
        )
        if tensor is not None
    }
    if not _are_well_formed(q, k, tensors):
        return
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            "Checked mode cannot read lengths during a CUDA graph capture; captured calls are not "
            "checked.",
            stacklevel=3,
        )
        return
    contents = _on_host(tensors)
    for side, tensor, max_seqlen in (("q", q, max_seqlen_q), ("k", k, max_seqlen_k)):
        _check_side(
            side,
            tensor,
            contents.get(f"cu_seqlens_{side}"),
            contents.get(f"seqused_{side}"),
            max_seqlen,
        )


def _check_side(
    side: str,
    tensor: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    max_seqlen: int | None,
) -> None:
    if cu_seqlens is None:
        batch, rows = tensor.shape[:2]
        lengths = torch.full((batch,), rows)
    else:
        _check_cumulative(side, cu_seqlens, tensor.shape[0])
        lengths = cu_seqlens.diff()
    if seqused is not None:
        entry = _first((seqused < 0) | (seqused > lengths))
        if entry is not None:
            raise ValueError(
                f"seqused_{side}[{entry}] is {seqused[entry]}; sequence {entry} of {side} has "
                f"{lengths[entry]} rows, so it must be from 0 to {lengths[entry]}."
            )
        lengths = seqused
    if max_seqlen is not None:
        entry = _first(lengths > max_seqlen)
        if entry is not None:
            raise ValueError(
                f"max_seqlen_{side} is {max_seqlen}, but sequence {entry} has length "
                f"{lengths[entry]}; it must be at least the longest, {lengths.max()}."
            )


def _check_cumulative(side: str, cu_seqlens: Tensor, rows: int) -> None:
    name = f"cu_seqlens_{side}"
    if cu_seqlens[0] != 0:
        raise ValueError(f"{name}[0] is {cu_seqlens[0]}; the first sequence must start at 0.")
    decrease = _first(cu_seqlens.diff() < 0)
    beyond = _first(cu_seqlens > rows)
    if decrease is not None and (beyond is None or decrease + 1 < beyond):
        before, after = cu_seqlens[decrease], cu_seqlens[decrease + 1]
        raise ValueError(
            f"{name}[{decrease + 1}] is {after}, below {name}[{decrease}], which is {before}; "
            "cumulative lengths must never decrease."
        )
    if beyond is not None:
        raise ValueError(
            f"{name}[{beyond}] is {cu_seqlens[beyond]}, but {side} has {rows} rows; no entry may "
            "be above that."
        )


def _first(is_offending: Tensor) -> int | None:
    """Index of the first True, None without one."""
    found = is_offending.nonzero()
    return int(found[0]) if len(found) else None


def _are_well_formed(q: Tensor, k: Tensor, tensors: dict[str, Tensor]) -> bool:
    """Whether shapes, dtypes and devices are such that the contents mean anything."""
    batches = set()
    for side, tensor in (("q", q), ("k", k)):
        cu_seqlens = tensors.get(f"cu_seqlens_{side}")
        if tensor.dim() != (4 if cu_seqlens is None else 3):
            return False
        if cu_seqlens is None:
            batches.add(tensor.shape[0])
    for name, lengths in tensors.items():
        is_integer = not (lengths.is_floating_point() or lengths.is_complex())
        if lengths.dim() != 1 or not is_integer or lengths.device != q.device:
            return False
        batches.add(len(lengths) - 1 if name.startswith("cu") else len(lengths))
    return len(batches) == 1 and min(batches) >= 0


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as int64 on the CPU, by a single transfer."""
    if not tensors:
        return {}
    joined = torch.cat([tensor.long() for tensor in tensors.values()]).cpu()
    parts = joined.split([len(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, parts, strict=True))
