"""The training tool's own judgements: what parses, what is accepted, what a row is, what is learnt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_pair import corpus, measuring, publish
from demo_pair.model import TARGET_SHAPE, Llama, empty_cache
from demo_pair.optimizer import orthogonalise
from demo_pair.streams import Mixture, TokenStream
from demo_pair.training import Student, TrainingRecipe, teacher_losses, train

TINY = replace(
    TARGET_SHAPE, num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16
)
CPU = torch.device("cpu")


def tiny(seed: int, vocab_size: int = 8) -> Llama:
    torch.manual_seed(seed)
    model = Llama(replace(TINY, vocab_size=vocab_size))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize(
    ("text", "finished", "good"),
    [
        ("x = 1\ny = ", False, True),
        ("def f():\n    return [\n        1,\n", False, True),
        ("class A:\n    '''doc\n    more\n", False, True),
        ("try:\n    x = 1\n", False, True),
        ("try:\n    x = 1\n", True, False),
        ("x = = 1\ny = 2\n", False, False),
        ("if a:\n    b\n  c\nd\n", False, False),
        ("x = 1\n", True, True),
    ],
)
def test_parses_up_to_the_last_whole_statement(text: str, *, finished: bool, good: bool) -> None:
    assert measuring.parses(text, finished=finished) is good


def test_a_draft_equal_to_the_target_is_always_accepted_and_another_is_not() -> None:
    target, other = tiny(1), tiny(2)
    prompts = torch.randint(2, 8, (4, 6), generator=torch.Generator().manual_seed(0))
    shares = []
    for draft in (target, other):
        counts = measuring.speculate(
            target,
            draft,
            prompts,
            draft_length=3,
            new_tokens=24,
            temperature=1.0,
            generator=torch.Generator().manual_seed(1),
        )
        shares.append(counts.accepted / counts.judged)
    assert shares[0] == 1.0
    assert shares[1] < 0.9


def test_the_reference_loop_keeps_the_targets_distribution() -> None:
    target, draft = tiny(3), tiny(4)
    rows = 20_000
    prompts = torch.randint(2, 8, (1, 4), generator=torch.Generator().manual_seed(0)).expand(rows, -1)
    ids = torch.full((rows, 8), 1)
    ids[:, :4] = prompts
    lengths = torch.full((rows,), 4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        proposed, draft_probs = measuring.propose(
            draft, ids, lengths, draft_length=2, temperature=1.0, generator=generator
        )
        target_probs = measuring.score(target, ids, lengths, 2, 1.0)
        accepted, following = measuring.judge(proposed, draft_probs, target_probs, generator)
    first = torch.where(accepted > 0, proposed[:, 0], following)
    expected = target_probs[0, 0] * rows
    observed = torch.bincount(first, minlength=8)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3  # 7 degrees of freedom, one in a thousand


def test_bits_per_byte_of_a_model_that_knows_nothing_is_the_vocabulary() -> None:
    model = Llama(replace(TINY, vocab_size=8))
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    ids = np.array([0, 5, 6, 1, 0, 7, 1], dtype=np.uint16)
    assert measuring.bits_per_byte(model, ids, 5, CPU) == pytest.approx(3.0 * 5 / 5)


def test_the_cache_gives_what_the_whole_row_gives() -> None:
    model = tiny(5)
    ids = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(0))
    cache = empty_cache(model.shape, 2, 9, CPU, torch.float32)
    with torch.no_grad():
        parts = [model(ids[:, :5], cache), *(model(ids[:, i : i + 1], cache) for i in range(5, 9))]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids))


def test_orthogonalise_levels_the_singular_values() -> None:
    matrices = torch.randn(2, 24, 10, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert torch.linalg.svdvals(matrices).amax() / torch.linalg.svdvals(matrices).amin() > 2.0
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_teacher_losses_vanish_only_at_the_teacher() -> None:
    teacher = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    _, variation = teacher_losses(teacher, teacher)
    _, reversed_variation = teacher_losses(teacher.flip(-1), teacher)
    assert variation.item() == 0.0
    assert reversed_variation.item() > 0.1


def test_rows_begin_with_bos_only_before_a_statement() -> None:
    text = "import os\n" + "def f():\n    return 1\n" * 50
    tokenizer = corpus.train_tokenizer([text] * 20, 300)
    ids = corpus.pack(tokenizer, [corpus.SourceFile("a.py", text)])
    assert ids[0] == corpus.BOS_ID
    assert ids[-1] == corpus.EOS_ID
    stream = TokenStream.of(ids, CPU, tokenizer)
    rows = stream.rows(64, 8, torch.Generator().manual_seed(0))
    second = {tokenizer.decode([token]) for token in rows[rows[:, 0] == corpus.BOS_ID, 1].tolist()}
    assert second
    assert all("def ".startswith(piece) or "import ".startswith(piece) for piece in second)


def test_no_held_out_file_is_trained_on(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(f"unique_{number} = {number}\n" * 3)
    (tmp_path / "broken.py").write_text("x = = 1\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    tokenizer, packed = corpus.build(300, tmp_path)
    assert sum(packed.num_files.values()) == 60
    names = {name: set(tokenizer.decode(getattr(packed, name).tolist()).split()) for name in ("library", "held_out")}
    assert packed.num_files["held_out"] > 0
    assert not {word for word in names["held_out"] if word.startswith("unique_")} & names["library"]


def test_training_lowers_the_loss_and_publishing_keeps_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = np.tile(np.arange(8, dtype=np.uint16), 40)
    data = Mixture([(TokenStream.of(ids, CPU), 1.0)], torch.Generator().manual_seed(0))
    student = Student(Llama(replace(TINY, vocab_size=8)), TrainingRecipe(steps=60, rows=4, length=16))
    held_out = torch.from_numpy(ids.astype(np.int64))
    train([student], data, None, lambda model: measuring.nats_per_token(model, held_out, 16), every=30)
    assert student.history.held_out[-1][1] < np.log(8) / 4

    (tmp_path / "tokenizer.json").write_text("{}")
    publish.publish(student.model.state_dict(), student.model.shape, tmp_path / "tokenizer.json", tmp_path / "out")
    again = publish.load(tmp_path / "out")
    for name, tensor in student.model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor.to(torch.bfloat16).float(), rtol=0, atol=0)
