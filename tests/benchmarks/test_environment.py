"""The commit of a result."""

from outrider.benchmarks.environment import measured_commit


def test_a_copy_without_git_is_told_its_commit() -> None:
    assert measured_commit({"GIT_COMMIT": "a" * 40}) == ("a" * 40, False)
    assert measured_commit({"GIT_COMMIT": f"{'a' * 40}-dirty"}) == ("a" * 40, True)
