"""Rows and draft tokens of other links, by the forwards between a link's reports."""

from __future__ import annotations

from outrider.serving.link_loads import LinkLoads


def end_forward(loads: LinkLoads, **links: tuple[int, int]) -> None:
    """A forward with so many rows and draft tokens of each link."""
    rows, drafts = ({int(link[1:]): load[index] for link, load in links.items()} for index in (0, 1))
    loads.note_forward(rows, lambda: drafts)


def test_links_that_share_forwards_are_told_of_each_other() -> None:
    loads = LinkLoads()
    for _ in range(3):
        end_forward(loads, _1=(3, 0), _2=(5, 20), _3=(1, 2))
        assert [loads.others_of(link) for link in (1, 2, 3)] == [(6, 22), (4, 2), (8, 20)]


def test_links_that_take_turns_are_told_of_each_other() -> None:
    loads, found = LinkLoads(), dict[int, tuple[int, int]]()
    for _ in range(3):
        for link, load in ((1, (3, 9)), (2, (5, 20)), (3, (1, 2))):
            end_forward(loads, **{f"_{link}": load})
            found[link] = loads.others_of(link)
    assert found == {1: (6, 22), 2: (4, 11), 3: (8, 29)}


def test_forwards_of_one_link_between_two_reports_count_once() -> None:
    loads = LinkLoads()
    end_forward(loads, _1=(3, 9))
    loads.others_of(1)
    for load in ((5, 0), (8, 8), (2, 16)):
        end_forward(loads, _2=load)
        assert loads.others_of(2) == (0, 0)  # link 1 had no forward meanwhile
    end_forward(loads, _1=(3, 9))
    assert loads.others_of(1) == (8, 8)
    assert loads.others_of(1) == (8, 8)  # answers of the same forward, in another message
    end_forward(loads, _1=(3, 9))
    assert loads.others_of(1) == (0, 0)


def test_a_link_that_is_alone_or_unknown_has_no_others() -> None:
    loads = LinkLoads()
    loads.note_forward({1: 4}, lambda: 1 / 0)  # type: ignore[arg-type,return-value] # nobody asks
    assert loads.others_of(1) == loads.others_of(2) == (0, 0)


def test_a_link_that_is_gone_is_told_of_no_more() -> None:
    loads = LinkLoads()
    end_forward(loads, _1=(3, 0), _2=(5, 0), _3=(1, 0))
    loads.others_of(2)
    loads.drop_link(2)
    assert loads.others_of(1) == (1, 0)
    end_forward(loads, _1=(3, 0))
    assert loads.others_of(3) == (3, 0)
