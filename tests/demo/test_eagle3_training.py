"""The training-time test of EAGLE-3 heads: every step and column is what the head says when it drafts."""

from dataclasses import replace
from pathlib import Path

import torch
from demo_pair import publish
from demo_pair.heads.eagle3 import NUM_STEPS, Eagle3, HeadShape
from demo_pair.heads.eagle3_training import HeadRecipe, HeadTrainer, train_head
from demo_pair.model import TARGET_SHAPE, Llama, rotate
from demo_pair.streams import Mixture, TokenStream
from torch import Tensor

TINY = replace(
    TARGET_SHAPE, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16,
    vocab_size=24,
)  # fmt: skip
HEAD = HeadShape(layers=(1, 2, 3), intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=16)


def made() -> Eagle3:
    torch.manual_seed(0)
    head = Eagle3(HEAD, Llama(TINY).eval())
    for parameter in (*head.parameters(), *head.target.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def drafted(head: Eagle3, ids: Tensor, states: Tensor, column: int) -> list[Tensor]:
    """Logits of each step of one column: pairs one by one, with a cache."""
    own, attention = head.midlayer, head.midlayer.self_attn
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def pair(position: int, token: Tensor, state: Tensor) -> Tensor:
        x = torch.cat([own.input_layernorm(head.target.model.embed_tokens(token)), own.hidden_norm(state)])
        cos, sin = head.target.cos[position], head.target.sin[position]
        q, k = (rotate(product(x).view(-1, 1, 16), cos, sin) for product in (attention.q_proj, attention.k_proj))
        keys.append(k)
        values.append(attention.v_proj(x).view(-1, 1, 16))
        every_k, every_v = (torch.cat(each, 1).repeat_interleave(2, 0) for each in (keys, values))
        gathered = (q @ every_k.mT * 16**-0.5).softmax(-1) @ every_v
        state = state + attention.o_proj(gathered.flatten())
        return state + own.mlp(own.post_attention_layernorm(state))  # type: ignore[no-any-return]

    fused = head.fc(states)
    for position in range(column + 1):
        state = pair(position, ids[position + 1], fused[position])
    found = [head.logits(state)]
    for step in range(1, NUM_STEPS):
        state = pair(column + step, ids[column + step + 1], state)
        found.append(head.logits(state))
    return found


@torch.no_grad()
def test_all_columns_at_once_are_drafts_one_by_one() -> None:
    head = made()
    ids = torch.randint(0, 24, (2, 20))
    states = torch.randn(2, 20, 96)
    together = head(ids, states)
    for row, column in ((0, 0), (1, 3), (0, 14)):
        for step, alone in enumerate(drafted(head, ids[row], states[row], column)):
            torch.testing.assert_close(together[step][row, column], alone, atol=2e-5, rtol=1e-4)


def test_training_lowers_the_loss_and_publishing_keeps_the_head(tmp_path: Path) -> None:
    head = Eagle3(HEAD, Llama(TINY).eval())
    data = Mixture([(TokenStream.of(torch.arange(24).repeat(40).numpy().astype("uint16"), torch.device("cpu")), 1.0)],
                   torch.Generator().manual_seed(0))  # fmt: skip
    torch.nn.init.normal_(head.target.model.embed_tokens.weight, std=0.5)
    before = HeadTrainer(head, HeadRecipe(steps=1)).learn(0, data.rows(4, 24))
    history = train_head(head, HeadRecipe(steps=40, rows=4, length=24), data)
    assert history.train_loss[-1][1] < 0.7 * before.item()
    publish.publish_head(head, tmp_path)
    again = publish.load_head(tmp_path, head.target)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor.to(torch.bfloat16).float(), rtol=0, atol=0)
