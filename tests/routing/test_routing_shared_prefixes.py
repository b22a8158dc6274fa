"""Which prefixes count as shared: those that keep branching, not those that are merely busy."""

from __future__ import annotations

from metatrie.indexer.policies.shared_prefixes import STRIDE_TOKENS, SharedPrefixes
from metatrie.proto.hashing import BlockKey, Chain, none_hash

SIZE = 16
STRIDE = STRIDE_TOKENS // SIZE


def chain(*spans: tuple[str, int]) -> Chain:
    """A prompt of named spans of so many blocks; equal names at equal places are equal blocks."""
    tokens: list[int] = []
    for name, blocks in spans:
        seed = int.from_bytes(name.encode(), "big") % (1 << 30)
        tokens += [seed + i for i in range(blocks * SIZE)]
    return Chain(none_hash("0"), SIZE, tokens)


def system_and(name: str, blocks: int = 3) -> Chain:
    return chain(("system", 2 * STRIDE), (name, blocks))


def test_a_prefix_is_shared_once_enough_branches_hang_below_it() -> None:
    shared = SharedPrefixes(branches=3, window_s=60)
    seen = []
    for number in range(5):
        shared.saw(system_and(f"user{number}"), now=number)
        seen.append(shared.shared_blocks(system_and("new"), now=number))
    # The first prompt is the trunk; each later one is a branch.
    assert seen == [0, 0, 0, 2 * STRIDE, 2 * STRIDE]


def test_it_stops_being_shared_when_branches_stop() -> None:
    shared = SharedPrefixes(branches=3, window_s=60)
    for number in range(4):
        shared.saw(system_and(f"user{number}", 40), now=number)
    assert shared.shared_blocks(system_and("new"), now=61) == 2 * STRIDE
    assert shared.shared_blocks(system_and("new"), now=61.5) == 0


def test_a_busy_conversation_is_not_shared() -> None:
    for step in (3, STRIDE, STRIDE + 5):
        shared = SharedPrefixes(branches=2, window_s=1e9)
        for turn in range(1, 30):
            prompt = chain(("talk", 2 * STRIDE + turn * step))
            shared.saw(prompt, now=turn)
            shared.saw(prompt, now=turn)  # and asked again
            assert shared.shared_blocks(prompt, now=turn) == 0


def test_only_what_is_common_is_shared() -> None:
    shared = SharedPrefixes(branches=2, window_s=60)
    for number in range(6):
        shared.saw(chain(("system", STRIDE), ("document", STRIDE), (f"q{number}", STRIDE)), now=0)
        shared.saw(chain(("system", STRIDE), (f"other{number}", STRIDE)), now=0)
    assert shared.shared_blocks(chain(("system", STRIDE), ("unknown", STRIDE)), now=1) == STRIDE
    assert shared.shared_blocks(chain(("system", STRIDE), ("document", STRIDE)), now=1) == 2 * STRIDE
    assert shared.shared_blocks(chain(("elsewhere", STRIDE)), now=1) == 0


def test_prompts_shorter_than_a_stride_are_left_alone() -> None:
    shared = SharedPrefixes(branches=1, window_s=60)
    for number in range(4):
        shared.saw(chain((f"p{number}", STRIDE - 1)), now=0)
    assert shared.shared_blocks(chain(("p1", STRIDE - 1)), now=0) == 0


def test_a_block_larger_than_the_stride_is_a_stride() -> None:
    shared = SharedPrefixes(branches=2, window_s=60)

    def prompt(name: str) -> Chain:
        made = Chain(none_hash("0"), 1024, [])
        made.blocks = 2
        made._keys = [BlockKey(b"common"), BlockKey(name.encode())]
        return made

    for name in "abc":
        shared.saw(prompt(name), now=0)
    assert shared.shared_blocks(prompt("d"), now=0) == 1
