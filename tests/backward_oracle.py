"""The right gradients and how far from them gradients may be: shared by the CPU and the GPU tests.

How good is good enough, as in tests/oracle.py
    The answer is autograd through float64 attention of the very inputs. The peer is PyTorch math in
    the inputs' dtype, from what a fused forward pass leaves: its output, rounded to that dtype.
    Every matrix product takes operands in that dtype and sums in float32, so the probabilities,
    their gradients and the gradients of the scores are each rounded once on the way, and the
    results once more.

        allowed = 1.5 x the peer's largest error + one rounding (eps / 2) of the largest exact value
                  + 1e-5 for inputs of order 1

    Of a few rows the largest error says little: it may be one rounding that went well. So with few
    rows the peer rounds several times over, each time multiples of what it rounds, and its largest
    error is the largest of them all.

    The last term is for sums whose terms cancel, such as dq of a query that sees a single key:
    their float32 roundings remain. Both maxima are taken over rows that sum up about as many terms
    (within a factor of four): keys that a query sees for dq, queries that see a key for dk and dv.
    NaN and infinities must stand where the exact ones do, and rows that sum up nothing must be
    exactly 0.

    A sink's gradient is one sum over all rows, with one rounding of the output in each term: no
    group of rows shows how large that error gets. It is told apart instead: the exact gradient
    takes its terms from the output that the backward pass was given, so that only the backward
    pass's own float32 errors remain, a random walk over the rows.

        allowed = 1e-4 x the root of the summed squares of the terms' sizes + one rounding
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa4.reference import attention_reference, mask_bounds
from fa4.reference_backward import Gradients
from tests.oracle import (
    PEER_FACTOR,
    Case,
    Inputs,
    error_of,
    exact_answer,
    first_index,
    group_max,
    index_of_largest,
    num_visible_keys,
    readable_rows,
    row_max,
    row_shapes,
    sequences,
)

NAN = float("nan")
FLOAT32_ROUNDINGS = 1e-5
SINK_ROUNDINGS = 1e-4
FEW_ROWS = 256  # rows times heads
ROUNDINGS_OF_FEW = 8


class Incoming(NamedTuple):
    """Gradients of the output, in its dtype, and of the LSE; grad_lse may be None."""

    grad_out: Tensor
    grad_lse: Tensor | None


def make_incoming(inputs: Inputs, has_grad_lse: bool, seed: int = 0) -> Incoming:
    """Normal random gradients, with NaN in every row that must not be read."""
    case, device = inputs.case, inputs.q.device
    gen = torch.Generator(device).manual_seed((inputs.seed or 0) + seed + 1)
    live, _ = readable_rows(case, device)
    shape = (*inputs.q.shape[:-1], case.dim_v)
    grad_out = torch.randn(shape, generator=gen, dtype=torch.float32, device=device)
    grad_out = grad_out.to(case.dtype).masked_fill_(~live[..., None, None], NAN)
    if not has_grad_lse:
        return Incoming(grad_out, None)
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    rows_lse = torch.randn(shape[:-1], generator=gen, dtype=dtype, device=device)
    rows_lse.masked_fill_(~live[..., None], NAN)
    return Incoming(grad_out, rows_lse.transpose(-1, -2).contiguous())


def exact_gradients(inputs: Inputs, incoming: Incoming) -> Gradients:
    """In float64, by autograd through the reference."""
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    options = inputs.options
    if inputs.sink is not None:
        options["sink"] = inputs.sink.double().requires_grad_()
        leaves.append(options["sink"])
    out, lse = attention_reference(*leaves[:3], **options, **inputs.lengths)
    results, gradients = [out], [incoming.grad_out.double()]
    if incoming.grad_lse is not None:
        results.append(lse)
        gradients.append(incoming.grad_lse.double())
    found = torch.autograd.grad(results, leaves, gradients)
    return Gradients(*found[:3], found[3] if inputs.sink is not None else None)


def peer_gradients(
    inputs: Inputs, incoming: Incoming, out: Tensor, factor: float = 1.0
) -> Gradients:
    """PyTorch math in the inputs' dtype, as described at the top; dsink is not judged by it.

    out     the forward pass's output that the gradients to be judged were worked out from
    factor  what is rounded on the way is rounded times this, which rounds other values up and down
    """
    case, dtype = inputs.case, inputs.case.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return (x * factor).to(dtype).to(wide) / factor

    dq, dk, dv = (torch.zeros_like(t) for t in (inputs.q, inputs.k, inputs.v))
    live, seen = readable_rows(case, inputs.q.device)
    left, right = mask_bounds(case.causal, case.window_size)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    members = list(sequences(case))
    if not case.is_varlen:
        lengths = (inputs.q.shape[1], inputs.k.shape[1])
        members = [((b,), (b,), *lengths) for b in range(inputs.q.shape[0])]
    for b, (iq, ik, seqlen_q, seqlen_k) in enumerate(members):
        rows, keys = live[iq].nonzero()[:, 0], seen[ik].nonzero()[:, 0]
        if not rows.numel():
            continue
        q, grad, o = (
            t[iq][rows].to(wide).transpose(0, 1) for t in (inputs.q, incoming.grad_out, out)
        )
        group = case.heads_q // case.heads_kv
        k, v = (
            t[ik][keys].to(wide).transpose(0, 1).repeat_interleave(group, dim=0)
            for t in (inputs.k, inputs.v)
        )
        x = q @ k.transpose(1, 2) * scale
        slope = torch.ones_like(x)
        if case.softcap:
            x = torch.tanh(x / case.softcap) * case.softcap
            slope = 1.0 - (x / case.softcap) ** 2
        distance = keys - (rows[:, None] + seqlen_k - seqlen_q)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right is not None:
            hidden |= distance > right
        if left is not None:
            hidden |= distance < -left
        x = x.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(x, dim=-1, keepdim=True)
        if inputs.sink is not None:
            lse = torch.logaddexp(lse, inputs.sink.to(wide).reshape(-1, 1, 1))
        p = torch.exp(x - lse)
        dp = rounded(grad @ v.transpose(1, 2))
        drawn = (grad * o).sum(dim=-1, keepdim=True)
        if incoming.grad_lse is not None:
            by_head = incoming.grad_lse if case.packed_q else incoming.grad_lse[b]
            at = rows + (iq[0].start if case.packed_q else 0)
            drawn = drawn - by_head[:, at, None].to(wide)
        ds = rounded((p * (dp - drawn) * slope).masked_fill(hidden, 0.0))
        p = rounded(p)

        dq[iq][rows] = (ds @ k * scale).transpose(0, 1).to(dtype)
        dk[ik][keys] = _over_groups(ds.transpose(1, 2) @ q * scale, group).to(dtype)
        dv[ik][keys] = _over_groups(p.transpose(1, 2) @ grad, group).to(dtype)
    return Gradients(dq, dk, dv, None)


def exact_sink_gradient(inputs: Inputs, incoming: Incoming, out: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient, size), each (heads_q,) in float64, of the sink of inputs that have one.

    out   the forward pass's output; its rounding is part of the gradient
    size  root of the summed squares of the sizes of the terms

    From -sum_i exp(sink - lse[i]) (dO[i] . O[i] - grad_lse[i]) over the rows that see a key.
    """
    assert inputs.sink is not None
    _, lse = exact_answer(inputs)
    lse = lse.transpose(-1, -2)  # as out: (.., rows, heads)
    sees = (num_visible_keys(inputs.case, out.device) > 0)[..., None]
    weight = torch.exp(inputs.sink.double() - lse).masked_fill(~sees, 0.0)
    products = (incoming.grad_out.double() * out.double()).masked_fill(~sees[..., None], 0.0)
    drawn, size = products.sum(dim=-1), products.abs().sum(dim=-1)
    if incoming.grad_lse is not None:
        grad_lse = incoming.grad_lse.double().transpose(-1, -2).masked_fill(~sees, 0.0)
        drawn, size = drawn - grad_lse, size + grad_lse.abs()
    heads = inputs.sink.numel()
    gradient = -(weight * drawn).reshape(-1, heads).sum(dim=0)
    return gradient, (weight * size).reshape(-1, heads).norm(dim=0)


def _over_groups(x: Tensor, group: int) -> Tensor:
    """(heads_q, keys, dim) to sums (keys, heads_kv, dim) over query heads that share a key head."""
    return x.unflatten(0, (-1, group)).sum(dim=1).transpose(0, 1)


def num_seeing_rows(case: Case, device: str | torch.device = "cpu") -> Tensor:
    """Over the rows of k, how many queries see each."""
    left, right = mask_bounds(case.causal, case.window_size)

    def count(seqlen_q: int, seqlen_k: int) -> Tensor:
        aligned = torch.arange(seqlen_k) - (seqlen_k - seqlen_q)  # the query on a key's diagonal
        start = torch.zeros_like(aligned) if right is None else (aligned - right).clamp(min=0)
        end = torch.full_like(aligned, seqlen_q)
        if left is not None:
            end = (aligned + left + 1).clamp(max=seqlen_q)
        return (end - start).clamp(min=0)

    rows_q, rows_k = row_shapes(case)
    counts = torch.zeros(rows_k, dtype=torch.long)
    if not case.is_varlen and case.batch:
        counts[:] = count(rows_q[1], rows_k[1])
    else:
        for _, ik, seqlen_q, seqlen_k in sequences(case):
            counts[ik] = count(seqlen_q, seqlen_k)
    return counts.to(device)


def near_groups(largest: Tensor) -> Tensor:
    """The largest of each group of rows and of the groups beside it, without that of no terms.

    A window's edges make groups of a few rows, too few to show how large an error gets.
    """
    padded = torch.cat([largest.new_zeros(1), largest[1:], largest.new_zeros(1)])
    return torch.cat([largest[:1], torch.stack([padded[:-2], padded[1:-1], padded[2:]]).amax(0)])


def assert_gradients_match(
    actual: Gradients,
    inputs: Inputs,
    incoming: Incoming,
    out: Tensor,
) -> None:
    """Fail, saying where and by how much, unless the gradients are right.

    out  the forward pass's output that they were worked out from
    """
    case = inputs.case
    context = f"\n  case {case}\n  seed {inputs.seed}"
    exact = exact_gradients(inputs, incoming)
    rows_and_heads = min(t.shape[:-1].numel() for t in (inputs.q, inputs.k))
    roundings = ROUNDINGS_OF_FEW if rows_and_heads < FEW_ROWS else 1
    peers = [peer_gradients(inputs, incoming, out, 1.0 + i / roundings) for i in range(roundings)]
    device = inputs.q.device
    terms = {
        "dq": num_visible_keys(case, device),
        "dk": num_seeing_rows(case, device),
        "dv": num_seeing_rows(case, device),
    }
    one_rounding = torch.finfo(case.dtype).eps / 2
    floor = FLOAT32_ROUNDINGS * max(1.0, case.spread)
    for name, source in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        found, right = getattr(actual, name), getattr(exact, name)
        assert found.shape == source.shape, f"{name} has shape {tuple(found.shape)}{context}"
        assert found.dtype == source.dtype, f"{name} has dtype {found.dtype}{context}"
        assert found.is_contiguous(), f"{name} has strides {found.stride()}{context}"
        wrong = found.isfinite() != right.isfinite()
        assert not wrong.any(), (
            f"{name}: finite or not is wrong in {int(wrong.sum())} of {wrong.numel()} elements, "
            f"first at {first_index(wrong)}: {found[first_index(wrong)].item()}{context}"
        )
        stray = (terms[name] == 0)[..., None, None] & (found != 0)
        assert not stray.any(), (
            f"{name}: {int(stray.sum())} elements of rows that sum up nothing are not 0, first at "
            f"{first_index(stray)}: {found[first_index(stray)].item()}{context}"
        )
        group = torch.where(
            terms[name] > 0, terms[name].double().clamp(min=1).log2().floor() + 1, 0
        ).long()
        errors = torch.stack([row_max(error_of(getattr(peer, name), right)) for peer in peers])
        peer_error = near_groups(group_max(errors.amax(0), group))
        magnitude = near_groups(group_max(row_max(right.abs().nan_to_num(0, 0, 0)), group))
        budget = (PEER_FACTOR * peer_error + one_rounding * magnitude)[group] + floor
        error = error_of(found, right)
        over = row_max(error) > budget
        if over.any():
            row = index_of_largest(row_max(error) / budget.clamp(min=1e-300) * over)
            at = (*row, *index_of_largest(error[row]))
            raise AssertionError(
                f"{name}: {int(over.sum())} of {over.numel()} rows are off, worst at {at}, which "
                f"sums up {int(terms[name][row])} terms: {found[at].item():.6g}, expected "
                f"{right[at].item():.6g}, error {error[at].item():.2e}, allowed "
                f"{budget[row].item():.2e}{context}"
            )
    assert (actual.dsink is None) == (inputs.sink is None), f"dsink {actual.dsink}{context}"
    if actual.dsink is not None and inputs.sink is not None:
        dtype = inputs.sink.dtype
        assert actual.dsink.dtype == dtype, f"dsink: {actual.dsink.dtype}{context}"
        right, size = exact_sink_gradient(inputs, incoming, out)
        error = (actual.dsink.double() - right).abs()
        allowed = SINK_ROUNDINGS * size + torch.finfo(dtype).eps / 2 * right.abs()
        assert bool((error <= allowed).all()), (
            f"dsink {actual.dsink.tolist()}, expected {right.tolist()}, errors {error.tolist()}, "
            f"allowed {allowed.tolist()}{context}"
        )
