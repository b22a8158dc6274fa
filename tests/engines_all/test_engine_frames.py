"""Recorded socket traffic through the stream machine: live frames, both framings of replay, and a gap in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.stream import Apply, Phase, RequestReplay, Stream
from metatrie.engines.rules import rule_for
from metatrie.proto.events import decode_batch
from metatrie.proto.hashing import Namespace

WIRE = Path(__file__).parents[1] / "data" / "vectors" / "wire"
NAMES = sorted(path.stem for path in WIRE.glob("frames-*.json"))


def test_every_file_is_there() -> None:
    assert NAMES == [
        "frames-sglang-0.5.23",
        "frames-vllm-0.11.0",
        "frames-vllm-0.26.0",
        "frames-vllm-0.33.0",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_gap_is_filled_from_the_recorded_replay(name: str) -> None:
    """The subscription loses everything from the first replayed batch on but the last one; the replay has it all."""
    recording: dict[str, Any] = json.loads((WIRE / f"{name}.json").read_text())
    live = [[bytes.fromhex(frame) for frame in frames] for frames in recording["live"]]
    replay = [[bytes.fromhex(frame) for frame in frames] for frames in recording["replay"]]
    start = int.from_bytes(bytes.fromhex(recording["replay_request_frames_hex"][1]), "big")
    assert 0 < start < len(live) - 1
    family = "sglang" if "sglang" in name else "vllm"
    namespace = Namespace(model="m", block_size=16)
    whole, followed = (Inventory(namespace, rule=rule_for(family)) for _ in range(2))
    for _, _, payload in live:
        whole.apply(decode_batch(payload))

    stream = Stream(replay=True)
    applied: list[int] = []

    def take(actions: list[Any]) -> list[RequestReplay]:
        for action in actions:
            if isinstance(action, Apply):
                applied.append(action.seq)
                followed.apply(action.batch)
        return [action for action in actions if isinstance(action, RequestReplay)]

    (request,) = take(stream.connected(0.0))
    # Nothing was published yet: the end marker alone, in this version's framing.
    take(stream.replayed(replay[-1], request.request, 0.0))
    for frames in live[:start]:
        assert take(stream.live(frames, 1.0)) == []
    assert stream.phase is Phase.EXACT
    (request,) = take(stream.live(live[-1], 2.0))
    assert request.start == start - 1, "from the last batch applied, which proves that the same process answers"
    # The recorded replay begins one later than asked here; that batch is known from the live side.
    take(stream.replayed([*replay[0][:-2], *live[start - 1][1:]], request.request, 2.0))
    for frames in replay:
        take(stream.replayed(frames, request.request, 2.0))
    assert applied == list(range(len(live)))
    assert stream.phase is Phase.EXACT
    assert followed.tables() == whole.tables()
    assert followed.expected() == whole.expected()
    assert any(followed.tables().values())
