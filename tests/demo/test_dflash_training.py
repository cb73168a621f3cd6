"""Training of block drafters: all blocks at once are blocks alone; what is published drafts so when it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from demo_pair import publish
from demo_pair.heads.dflash import BlockShape, DFlash
from demo_pair.heads.dflash_training import BlockDraft, BlockTrainer
from demo_pair.heads.eagle3_training import HeadRecipe, train_head
from demo_pair.measuring import speculate
from demo_pair.model import TARGET_SHAPE, Llama
from demo_pair.streams import Mixture, TokenStream

from outrider.demo import TARGET
from tests.draft_service.head_rig import REQUESTS, Checked, served

TINY = replace(
    TARGET_SHAPE, num_layers=3, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16
)
BLOCK = BlockShape(
    layers=(1, 2), block_size=5, num_layers=2, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=16
)


def made(vocab_size: int) -> DFlash:
    torch.manual_seed(0)
    head = DFlash(BLOCK, Llama(replace(TINY, vocab_size=vocab_size)).eval())
    for parameter in (*head.parameters(), *head.target.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@torch.no_grad()
def test_all_blocks_at_once_are_blocks_alone() -> None:
    """A block sees the states before its anchor and itself, and no other block and no later state."""
    head = made(24)
    ids, states = torch.randint(2, 24, (2, 20)), torch.randn(2, 20, 64)
    anchors = torch.tensor([[3, 1, 15], [9, 9, 4]])
    together = head(ids, states, anchors, 4)
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            text = slice(0, anchor + 1)
            alone = head(ids[row : row + 1, text], states[row : row + 1, text], torch.tensor([[anchor]]), 4)
            torch.testing.assert_close(together[row, place], alone[0, 0], atol=2e-5, rtol=1e-4)


def test_training_lowers_the_loss_and_a_drafter_that_knows_the_text_is_accepted() -> None:
    torch.manual_seed(0)
    head = DFlash(BLOCK, Llama(replace(TINY, vocab_size=8)).eval())
    torch.nn.init.normal_(head.target.model.embed_tokens.weight, std=0.5)
    ids = torch.arange(2, 8).repeat(60).numpy().astype("uint16")
    data = Mixture([(TokenStream.of(ids, torch.device("cpu")), 1.0)], torch.Generator().manual_seed(0))
    before = BlockTrainer(head, HeadRecipe(steps=1)).learn(0, data.rows(2, 24))
    history = train_head(head, HeadRecipe(steps=40, rows=2, length=24), data, BlockTrainer)
    assert history.train_loss[-1][1] < 0.7 * before.item()
    prompts = torch.randint(2, 8, (4, 6), generator=torch.Generator().manual_seed(0))
    counts = speculate(
        head.target, BlockDraft(head), prompts, draft_length=3, new_tokens=12, temperature=1.0,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert counts.judged > 20
    assert counts.accepted > 0


class Published:
    """The tool's own drafts, token by token the likeliest."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.draft_of = BlockDraft(publish.load_block_drafter(folder, publish.load(target)))

    def draft(self, text: list[int], count: int) -> list[int]:
        ids = torch.tensor([[*text, *[0] * count]])
        tokens, _ = self.draft_of.propose(
            ids, torch.tensor([len(text)]), draft_length=count, temperature=0.0, generator=torch.Generator()
        )
        assert ids[0, len(text) :].tolist() == tokens[0].tolist()
        return tokens[0].tolist()


def test_a_published_drafter_is_served_as_the_tool_has_it(tmp_path: Path) -> None:
    head = made(TINY.vocab_size)
    target = head.target
    publish.publish(target.state_dict(), target.shape, TARGET / "tokenizer.json", tmp_path / "target")
    publish.publish_block_drafter(head, tmp_path / "dflash")
    again = publish.load_block_drafter(tmp_path / "dflash", target)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor.to(torch.bfloat16).float(), rtol=0, atol=0)
    draft = served("dflash", tmp_path / "dflash", tmp_path / "target", "--dtype", "float32")
    rig = Checked(
        draft, Published(tmp_path / "dflash", tmp_path / "target"), tmp_path / "target",
        target_options={"dtype": "float32", "device": "cpu"},
    )  # fmt: skip
    found = rig.generate(REQUESTS[:4])
    assert [len(tokens) for tokens in found] == [10] * 4
