"""PyTorch reference of ``gated_delta``; runs on every device, and reads the rows on the host.

Few tokens follow the rule one by one. Many are computed in chunks: within a chunk the states are not made; what each
token writes to them comes from a triangular system over the chunk's keys (the WY form).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.kernels.gated_delta.layout import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights

_CHUNK = 64
_FEW_TOKENS = 8
"""Tokens up to which one by one is faster."""
_EPS = 1e-6
"""Epsilon of the normalisation of queries and keys."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of the rule for a run of tokens, heads first; float32."""

    queries: torch.Tensor  # [H, T, K] of length K ** -0.5
    keys: torch.Tensor  # [H, T, K] of length 1
    values: torch.Tensor  # [H, T, V]
    rates: torch.Tensor  # [H, T] b
    decays: torch.Tensor  # [H, T] g, at most 0

    def part(self, start: int, stop: int) -> Tokens:
        """Some of them."""
        return Tokens(*(
            tensor[:, start:stop] for tensor in (self.queries, self.keys, self.values, self.rates, self.decays)
        ))  # fmt: skip


def gated_delta(
    inputs: torch.Tensor,
    slots: DeltaSlots,
    rows: DeltaRows,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> torch.Tensor:
    """See the contract."""
    states, logs = slots
    out = torch.zeros(len(inputs), shape.num_heads, shape.value_dim, dtype=torch.float32, device=inputs.device)
    query_starts, columns = rows.query_starts.tolist(), (rows.context_lengths, rows.slots, rows.starts, rows.ends)
    for row, (length, slot, start, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        first, last = query_starts[row : row + 2]
        if slot >= 0 and last > first and rows.token_slots[first] >= 0:
            own, log, kept = inputs[first:last], logs[slot], length - (last - first)
            tokens = _tokens(torch.cat((_read_log(log, start, kept, shape.num_taps - 1), own)), weights, shape)
            state = states[slot].clone() if start else torch.zeros_like(states[slot])
            before, state = delta_rule(tokens.part(0, end - start), state)
            if end > start:
                states[slot] = state
            after, _ = delta_rule(tokens.part(end - start, length - start), state)
            out[first:last] = torch.cat((before, after), 1)[:, kept - start :].transpose(0, 1)
            _write_log(log, kept, own)
    return out


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the contract."""
    normed = F.rms_norm(x, weight.shape, eps=eps).to(gate.dtype) * weight
    return (normed * F.silu(gate.float())).to(gate.dtype)


def delta_rule(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [H, T, V] of tokens that follow a ``state`` [H, K, V], and the state after them."""
    count = tokens.keys.shape[1]
    if not count:
        return tokens.values, state
    if count <= _FEW_TOKENS:
        return _one_by_one(tokens, state)
    outputs = []
    for start in range(0, count, _CHUNK):
        output, state = _chunk(tokens.part(start, min(start + _CHUNK, count)), state)
        outputs.append(output)
    return torch.cat(outputs, 1), state


def _one_by_one(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    scales = tokens.decays.exp()
    for place in range(tokens.keys.shape[1]):
        key = tokens.keys[:, place, :, None]  # [H, K, 1]
        state = state * scales[:, place, None, None]
        error = tokens.values[:, place] - (state * key).sum(1)  # [H, V]
        state = state + key * (tokens.rates[:, place, None] * error)[:, None]
        outputs.append((state * tokens.queries[:, place, :, None]).sum(1))
    return torch.stack(outputs, 1), state


def _chunk(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk. With L the products of decays, token i writes b_i (v_i - L_i k_i^T S) less what those before it have
    written along its key, which a triangular system takes away.
    """
    queries, keys = tokens.queries, tokens.keys
    logs = tokens.decays.cumsum(1)  # [H, T]
    between = (logs[:, :, None] - logs[:, None, :]).tril().exp().tril()  # [H, T, T] decay from j to i
    scaled = keys * tokens.rates[..., None]
    system = (scaled @ keys.transpose(1, 2) * between).tril(-1)
    wanted = tokens.values * tokens.rates[..., None] - scaled * logs.exp()[..., None] @ state
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [H, T, V]
    output = queries * logs.exp()[..., None] @ state + (queries @ keys.transpose(1, 2) * between) @ written
    left = (logs[:, -1:] - logs).exp()[..., None]
    return output, state * logs[:, -1].exp()[:, None, None] + (keys * left).transpose(1, 2) @ written


def _tokens(inputs: torch.Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tokens:
    """Tokens of ``inputs`` [taps - 1 + T, N], the first of which only the convolution reads."""
    inputs = inputs.float()
    channels, gates = inputs[:, : shape.num_channels], inputs[shape.num_taps - 1 :, shape.num_channels :]
    convolved = F.conv1d(channels.T[None], weights.taps[:, None], groups=shape.num_channels)[0]  # [C, T]
    keys = shape.num_key_heads * shape.key_dim
    queries, keys_, values = torch.split(F.silu(convolved), [keys, keys, shape.num_channels - 2 * keys])
    rates, decays = torch.split(gates.T, shape.num_heads)
    return Tokens(
        _of_length_1(queries, shape) * shape.key_dim**-0.5,
        _of_length_1(keys_, shape),
        values.view(shape.num_heads, shape.value_dim, -1).transpose(1, 2),
        rates.sigmoid(),
        weights.decay[:, None] * F.softplus(decays + weights.bias[:, None]),
    )


def _of_length_1(heads: torch.Tensor, shape: DeltaShape) -> torch.Tensor:
    """[G K, T] to [H, T, K], each key head for its heads of values."""
    heads = heads.view(shape.num_key_heads, shape.key_dim, -1).transpose(1, 2)
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)
    return heads.repeat_interleave(shape.num_heads // shape.num_key_heads, 0)


def _read_log(log: torch.Tensor, start: int, stop: int, num_before: int) -> torch.Tensor:
    """Inputs of the tokens from ``start`` to ``stop``, and of ``num_before`` before them; 0 before the first."""
    positions = torch.arange(start - num_before, stop, device=log.device)
    return torch.where(positions[:, None] >= 0, log[positions % len(log)], 0.0)


def _write_log(log: torch.Tensor, start: int, inputs: torch.Tensor) -> None:
    """The last of ``inputs``, which are those of the tokens from ``start`` on."""
    count = min(len(inputs), len(log))
    stop = start + len(inputs)
    log[torch.arange(stop - count, stop, device=log.device) % len(log)] = inputs[-count:]
