"""Policies: which of these replicas should serve this request? `base` says what one is and how to add one."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from ...proto.errors import InvalidField
from .base import (
    MAX_EXPLAINED,
    NO_CHAIN,
    TYPICAL_SPEED,
    Candidate,
    Candidates,
    Decision,
    Policy,
    Roster,
    RoutingRequest,
    Speed,
    SpeedRow,
    Speeds,
)
from .peers import (
    ApproximateScore,
    BlockCost,
    DualHash,
    ExploitExplore,
    RayServe,
    SglangGateway,
    WeightedScore,
)
from .plain import AffinityOnly, Hybrid, LeastLoaded, PowerOfTwo, Random, RoundRobin, SessionAffinity, Sticky
from .priced_delay import PricedDelay

__all__ = [
    "DEFAULT_POLICY",
    "MAX_EXPLAINED",
    "NO_CHAIN",
    "POLICIES",
    "TYPICAL_SPEED",
    "Candidate",
    "Candidates",
    "Decision",
    "Policy",
    "Roster",
    "RoutingRequest",
    "Speed",
    "SpeedRow",
    "Speeds",
    "make_policy",
]

DEFAULT_POLICY = PricedDelay.name

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        PricedDelay,
        Random,
        RoundRobin,
        PowerOfTwo,
        LeastLoaded,
        AffinityOnly,
        Hybrid,
        SessionAffinity,
        Sticky,
        RayServe,
        SglangGateway,
        ApproximateScore,
        WeightedScore,
        BlockCost,
        DualHash,
        ExploitExplore,
    )
}


def make_policy(name: str, parameters: Mapping[str, object], rng: random.Random, *, field: str = "policy") -> Policy:
    """A policy by name. Raises InvalidField, naming the choices, for an unknown policy or a parameter that does not
    fit; `field` is where the caller said it."""
    kind = POLICIES.get(name)
    if kind is None:
        raise InvalidField("no such policy", field=field, remedy=f"choose one of: {', '.join(POLICIES)}")
    known = kind.Parameters.__struct_fields__
    for parameter in parameters:
        if parameter not in known:
            raise InvalidField(
                f"policy {name} has no such parameter",
                field=f"{field}.{parameter}",
                remedy=f"parameters of {name}: {', '.join(known) or 'none'}",
            )
    for parameter, value in parameters.items():
        try:
            msgspec.convert({parameter: value}, kind.Parameters)
        except msgspec.ValidationError as error:
            problem = str(error).partition(" - at ")[0].replace("`", "")
            raise InvalidField(problem, field=f"{field}.{parameter}", remedy=f"see policy {name}") from None
    return kind(msgspec.convert(dict(parameters), kind.Parameters), rng)
