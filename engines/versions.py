"""What changed when in vLLM, as far as it shows outside: one table, so that no other module compares versions."""

from __future__ import annotations

import msgspec

from ..proto.errors import ConfigError
from .pool import ExtraKeyForm

DEFAULT_VERSION = "0.33.0"
_OLDEST = (0, 10, 2)


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The visible behaviour of one vLLM version."""

    version: str
    map_events: bool
    """Events are maps with a `type` key (0.24), not arrays."""
    lora_name: bool
    """BlockStored has lora_name (0.14)."""
    extra_keys: bool
    """BlockStored has extra_keys (0.17)."""
    group_idx: bool
    """Events have group_idx (0.20)."""
    spec_kind: bool
    """BlockStored has kv_cache_spec_kind and its window (0.22)."""
    wide_header: bool
    """BlockStored is declared with more than 15 fields, so its map header is three bytes long (0.33)."""
    replay_topic: bool
    """Replay replies carry the topic frame (0.26)."""
    publish_first: bool
    """A step's events leave before its forward pass (up to 0.11.0), not after."""
    unhashed_first: bool
    """Freed blocks without a hash are taken before cached ones."""
    hash_extras: ExtraKeyForm


def traits_of(version: str) -> Traits:
    """Raises ConfigError for a text that is no version, and for versions before `sha256_cbor` chains (0.10.2)."""
    try:
        number = tuple(int(part) for part in version.split("."))
    except ValueError:
        number = ()
    if len(number) not in (2, 3):
        raise ConfigError("version", f"{version!r} is not a version", "write it like 0.33.0")
    if number < _OLDEST:
        raise ConfigError("version", f"{version} is not simulated", "use 0.10.2 or later")
    form: ExtraKeyForm = "tagged"
    if number <= (0, 11, 0):
        form = "lora_id"
    elif number < (0, 31):
        form = "untagged"
    return Traits(
        version=version,
        map_events=number >= (0, 24),
        lora_name=number >= (0, 14),
        extra_keys=number >= (0, 17),
        group_idx=number >= (0, 20),
        spec_kind=number >= (0, 22),
        wide_header=number >= (0, 33),
        replay_topic=number >= (0, 26),
        publish_first=number <= (0, 11, 0),
        # Observed: absent in 0.11.0, present in 0.26.0; the versions between were not recorded.
        unhashed_first=number > (0, 11, 0),
        hash_extras=form,
    )
