"""KV cache groups: layers by shape and reach, and the bytes that a token takes in all of them."""

from __future__ import annotations

from outrider.kv_cache import AttentionReach, KVCacheLayout, KVCacheSpec

FULL, WINDOWED, WIDE = KVCacheSpec(2, 8), KVCacheSpec(2, 8, window=16), KVCacheSpec(4, 8)


def test_layers_of_one_spec_are_one_group() -> None:
    layout = KVCacheLayout.of([FULL] * 3)
    assert [(group.spec, group.layers) for group in layout.groups] == [(FULL, (0, 1, 2))]
    assert layout.indices == [(0, 0), (0, 1), (0, 2)]


def test_each_layer_finds_its_place_in_its_group() -> None:
    layout = KVCacheLayout.of([WINDOWED, FULL, WINDOWED, WIDE, FULL])
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 4), (3,)]
    assert layout.indices == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]
    assert layout.windows == (16, None, None)
    for layer, (group, place) in enumerate(layout.indices):
        assert layout.groups[group].layers[place] == layer


def test_a_token_takes_what_its_keys_and_values_take_in_every_layer() -> None:
    layout = KVCacheLayout.of([WINDOWED, FULL, WIDE])
    assert layout.bytes_per_token(2) == 2 * 2 * (2 * 8 + 2 * 8 + 4 * 8)


def test_pages_leave_only_where_every_layer_has_a_window() -> None:
    narrow = KVCacheSpec(2, 8, window=12, num_sinks=4)
    assert KVCacheLayout.of([WINDOWED, FULL]).reach is None
    assert KVCacheLayout.of([WINDOWED, narrow]).reach == AttentionReach(window=16, num_sinks=4)


def test_unseen_pages_are_between_the_sinks_and_the_window_of_the_earliest_query() -> None:
    reach = AttentionReach(window=16, num_sinks=5, num_rewind_tokens=4)
    assert reach.unseen_pages(26, page_size=4) == (2, 2)
    assert reach.unseen_pages(31, page_size=4) == (2, 3)  # the query at 27 attends to 12 to 27
    assert reach.unseen_pages(30, page_size=4) == (2, 2)
