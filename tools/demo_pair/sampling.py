"""Plain sampling from one model, in batches, with a cache.

Owns drawing tokens.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from demo_pair.model import Llama, empty_cache


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature; 0 puts everything on the best token.  # [..., V]"""
    if temperature == 0.0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row.  # [B, V] -> [B]"""
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)


@torch.no_grad()
def sample(
    model: Llama,
    prompts: Tensor,
    *,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """Prompts [B, T] of one length and what follows, [B, T + new_tokens]; nothing stops at eos."""
    device = prompts.device
    cache = empty_cache(model.shape, prompts.shape[0], prompts.shape[1] + new_tokens, device, dtype)
    ids = [prompts]
    with _eager(), _attention(), _arithmetic(device, dtype):
        for _ in range(new_tokens):
            logits = model.eval()(ids[-1], cache)[:, -1]
            ids.append(draw(distribution(logits, temperature), generator)[:, None])
    return torch.cat(ids, dim=1)


def _eager() -> contextlib.AbstractContextManager[object]:
    """The cache changes length with every token: compiling would start again each time."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _attention() -> contextlib.AbstractContextManager[object]:
    """All but cuDNN's attention, which plans anew for every length of the cache; that costs more than the step."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _arithmetic(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
