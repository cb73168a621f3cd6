"""The four forms of the streams: known answers, equal bits, noise that is right where winners sit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.randomness import philox_numpy, philox_torch, scalar
from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.streams import Stream

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

SEEDS = [0, 1, 2**32, 2**64 - 1, 0x9E3779B97F4A7C15, 5]
STREAMS = list(Stream)
BASES = [0, 7, 1000, 131_071, 3, 64]
POSITIONS = [0, 7, 1003, 131_075, 2**31, 65]


def rows_of() -> StreamRows:
    return StreamRows.of(SEEDS, STREAMS, BASES, POSITIONS)


def columns() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    seeds, streams, bases, positions = (
        np.array(values, dtype=np.uint64)[:, None] for values in (SEEDS, STREAMS, BASES, POSITIONS)
    )
    return seeds, streams, bases, positions


def numpy_bits(tokens: np.ndarray) -> np.ndarray:
    return philox_numpy.random_bits(*columns(), tokens[None])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: scalar.Block, key: tuple[int, int], answer: scalar.Block) -> None:
    assert scalar.philox4x32(counter, key) == answer
    block, position, base, stream = counter
    tokens = (block << 2) + np.arange(4)
    assert tuple(philox_numpy.random_bits(key[1] << 32 | key[0], stream, base, position, tokens).tolist()) == answer
    rows = StreamRows(torch.tensor([[[key[0]]], [[key[1]]], [[position]], [[base]], [[stream]]]))
    assert tuple(int(word) for word in philox_torch.philox4x32(torch.tensor([[block]]), rows)) == answer


def test_counter_layout() -> None:
    """Key from the seed, counter (token >> 2, position, base, stream), lane token & 3."""
    seed, base, position, token = (5 << 32) | 6, 11, 13, 4 * 17 + 2
    block = scalar.philox4x32((17, position, base, 3), (6, 5))
    assert scalar.bits(seed, Stream.RESIDUAL, base, position, token) == block[2]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 97, 40_001])
def test_rows_of_bits_are_equal_in_numpy_and_torch(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, on_host: bool
) -> None:
    monkeypatch.setattr(StreamRows, "on_host", on_host)
    bits = philox_torch.row_bits(rows_of(), num_tokens).numpy()
    np.testing.assert_array_equal(bits, numpy_bits(np.arange(num_tokens)))


@pytest.mark.parametrize("on_host", [True, False])
def test_bits_of_chosen_tokens_are_those_of_the_row(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    monkeypatch.setattr(StreamRows, "on_host", on_host)
    tokens = torch.tensor([[0, 5, 96], [3, 2, 1], [7, 7, 8], [90, 0, 4], [11, 12, 13], [1, 64, 33]])
    rows = rows_of()
    assert torch.equal(philox_torch.token_bits(rows, tokens), philox_torch.row_bits(rows, 97).gather(1, tokens))
    noise = philox_torch.row_gumbel(rows, 97).gather(1, tokens)
    torch.testing.assert_close(philox_torch.token_gumbel(rows, tokens), noise, rtol=1e-6, atol=1e-6)


def test_scalar_form_agrees() -> None:
    expected = philox_numpy.uniform(SEEDS[4], Stream.ACCEPTANCE, 40, np.arange(40, 48))
    assert scalar.coins(SEEDS[4], Stream.ACCEPTANCE, 40, range(40, 48)) == expected.tolist()
    assert scalar.coin(SEEDS[4], Stream.ACCEPTANCE, 40, 41) == expected[1]
    bits = philox_numpy.random_bits(SEEDS[3], Stream.COUPLED, 0, 9, np.arange(9))
    assert [scalar.bits(SEEDS[3], Stream.COUPLED, 0, 9, token) for token in range(9)] == bits.tolist()


def test_uniforms_are_equal_and_in_range() -> None:
    bits = philox_torch.row_bits(rows_of(), 50)
    uniforms = philox_torch.uniform(bits).numpy()
    np.testing.assert_array_equal(uniforms, numpy_bits(np.arange(50)) * 2.0**-32)
    extremes = philox_torch.uniform(torch.tensor([0, 2**32 - 1]))
    assert extremes.tolist() == [0.0, 1 - 2.0**-32]


def test_gumbel_agrees_between_numpy_and_torch() -> None:
    noise = philox_torch.row_gumbel(rows_of(), 4000).numpy()
    expected = philox_numpy.gumbel(*columns(), np.arange(4000)[None])
    np.testing.assert_allclose(noise, expected, rtol=5e-7, atol=5e-7)


def test_gumbel_is_exact_where_winners_sit() -> None:
    """The largest noise comes from the smallest bits: each of them has a value of its own, right to float32."""
    bits = torch.cat([torch.arange(2**16), torch.logspace(16, 31.99, 5000, base=2, dtype=torch.float64).long()])
    noise = philox_torch.gumbel(bits)
    exact = -torch.log(-torch.log1p(-((bits.double() + 0.5) * 2.0**-32)))
    torch.testing.assert_close(noise.double(), exact, rtol=1e-6, atol=1e-6)
    assert bool((noise[:1024].diff() < 0).all())
    assert noise[0].item() == pytest.approx(33 * np.log(2), rel=1e-6)


def test_gumbel_of_the_largest_bits_is_finite() -> None:
    noise = philox_torch.gumbel(torch.tensor([2**32 - 1, 2**32 - 2, 2**32 - 200]))
    assert noise[0].item() == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)
    assert bool(noise.isfinite().all())


def test_the_numpy_form_needs_neither_torch_nor_triton() -> None:
    code = "import sys, outrider.randomness.philox_numpy; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


TRITON_PROGRAM = """
import sys
import numpy as np
from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.philox_triton import row_bits_and_gumbel
from tests.randomness.test_philox import rows_of

bits, noise = row_bits_and_gumbel(rows_of(), 1500)
np.savez(sys.argv[1], bits=bits.numpy(), noise=noise.numpy())
"""


def test_triton_form_in_the_interpreter(tmp_path: Path) -> None:
    """Run in a process of its own: the interpreter is chosen before Triton is imported."""
    pytest.importorskip("triton")
    file = tmp_path / "triton.npz"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", TRITON_PROGRAM, str(file)], env=environment, check=True)
    with np.load(file) as arrays:
        np.testing.assert_array_equal(arrays["bits"], numpy_bits(np.arange(1500)))
        expected = philox_torch.row_gumbel(rows_of(), 1500).numpy()
        np.testing.assert_allclose(arrays["noise"], expected, rtol=1e-6, atol=1e-6)


COMPILE_PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.randomness import philox_triton

types = {"words_ptr": "*i64", "bits_ptr": "*i64", "gumbel_ptr": "*fp32", "num_rows": "i32", "num_tokens": "i32"}
source = ASTSource(philox_triton.row_kernel, {**types, "BLOCKS": "constexpr"}, {"BLOCKS": 256})
for capability in (80, 90):
    print("lg2.approx" in triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"])
"""


def test_triton_form_compiles_and_takes_no_approximate_logarithm() -> None:
    """No GPU needed. An approximate logarithm is wrong near 1, which is where winners come from."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE_PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
