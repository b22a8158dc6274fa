"""Stand-ins: names for what cannot be tokenised, the same for the same conversation and unlike any tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.stand_ins import FIRST, MEDIA_TOKENS, MOST, about, stand_ins

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
parts = st.one_of(
    st.text(max_size=40).map(lambda text: {"type": "text", "text": text}), st.just(IMAGE), st.text(max_size=9)
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.one_of(st.text(max_size=80), st.lists(parts))}
)


@given(st.lists(messages, min_size=1, max_size=5), st.lists(messages, max_size=3))
def test_a_longer_conversation_begins_with_the_shorter_one(turn: list[Any], more: list[Any]) -> None:
    shorter, longer = stand_ins(turn), stand_ins([*turn, *more])
    assert longer[: len(shorter)] == shorter
    assert all(FIRST <= word < 1 << 32 for word in longer)


def test_another_image_is_another_conversation_from_there_on() -> None:
    def chat(url: str) -> list[int]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return stand_ins([{"role": "system", "content": "x" * 64}, {"role": "user", "content": [image]}])

    one, other = chat("data:,a"), chat("data:,b")
    assert one[:16] == other[:16]
    assert not set(one[16:]) & set(other[16:])


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ("x" * 400, 100),
        ([1, 2, 3], 3),
        ({"role": "user", "content": "x" * 400}, 100),
        ({"role": "user", "content": [{"type": "text", "text": "x" * 400}, IMAGE]}, 100 + MEDIA_TOKENS),
        ({"role": "user"}, 0),
        (None, 0),
    ],
)
def test_they_are_about_as_many_as_the_tokens(part: Any, tokens: int) -> None:
    assert about(part) == tokens
    assert len(stand_ins([part])) == max(1, tokens)


def test_they_are_bounded() -> None:
    assert len(stand_ins(["x" * (MOST * 5), *({"role": "user", "content": "y" * 99} for _ in range(9))])) == MOST
    assert len(stand_ins([])) == 1
