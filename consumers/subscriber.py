"""ZeroMQ sockets around one Stream: the live subscription, replay requests, and the connection's health.

One task owns all sockets, so the state machine is never entered twice. A replay gets a fresh DEALER socket each time:
replies to an abandoned request die with their socket. Engines that publish nothing are silent, as is a dead link; the
socket monitor tells the two apart.

Bounds: `MAX_MESSAGE` per message; `LIVE_HWM` messages queued by ZeroMQ for the live subscription (a slower consumer
loses messages, sees a gap and replays it); at most `BURST` messages are taken before the event loop gets its turn.
The replay socket has no receive mark on purpose: with one, engines drop replayed batches silently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ..proto.events import MAX_PAYLOAD_BYTES
from .stream import Action, RequestReplay, Stream

MAX_MESSAGE: Final = 2 * MAX_PAYLOAD_BYTES
"""A batch too large to be decoded is counted and costs itself; only one beyond this costs ZeroMQ's connection."""
LIVE_HWM: Final = 100_000
BURST: Final = 256
TICK_S: Final = 0.25


class Subscriber:
    """Feeds one stream and hands its actions, in order, to `handle`, which must not block."""

    def __init__(
        self,
        stream: Stream,
        *,
        events: str,
        replay: str | None,
        topic: str,
        handle: Callable[[list[Action]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """events, replay: ZeroMQ endpoints; one with a `*` is bound (the engine then connects out to us).
        topic: prefix filter, as ZeroMQ applies it to the first frame."""
        self._stream, self._handle, self._clock = stream, handle, clock
        self._events, self._replay, self._topic = events, replay, topic.encode()
        self._dealer: zmq.asyncio.Socket | None = None
        self._request = 0
        self._links = 0
        """Connections of the subscription; more than one only where we bind."""

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context()
        sub = context.socket(zmq.SUB)
        monitor = None
        poller = zmq.asyncio.Poller()
        try:
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.RCVHWM, LIVE_HWM)
            sub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            sub.setsockopt(zmq.RECONNECT_IVL, 100)
            sub.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            sub.setsockopt(zmq.TCP_KEEPALIVE, 1)
            sub.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
            sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            attach(sub, self._events)
            poller.register(sub, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            await self._loop(context, poller, sub, monitor)
        finally:
            self._close_dealer(poller)
            if monitor is not None:
                sub.disable_monitor()
            sub.close(0)
            context.destroy(linger=0)

    async def _loop(
        self,
        context: zmq.asyncio.Context,
        poller: zmq.asyncio.Poller,
        sub: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
    ) -> None:
        stream, clock = self._stream, self._clock
        while True:
            ready = dict(await poller.poll(TICK_S * 1000))
            now = clock()
            # ZeroMQ reports a connection before what comes through it. Taking the messages first and the reports
            # second, no message of a new connection is ever applied ahead of its report.
            messages = _drain(sub) if sub in ready else []
            for frames in _drain(monitor):
                event = parse_monitor_message(frames)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._links += 1
                    self._do(context, poller, stream.connected(now))
                elif event == zmq.EVENT_DISCONNECTED and self._links:
                    self._links -= 1
                    if not self._links:
                        self._do(context, poller, stream.disconnected(now))
            if self._dealer is not None and self._dealer in ready:
                request = self._request
                for frames in _drain(self._dealer):
                    self._do(context, poller, stream.replayed(frames, request, now))
            for frames in messages:
                self._do(context, poller, stream.live(frames, now))
            self._do(context, poller, stream.tick(now))
            if self._dealer is not None and not stream.waiting:
                self._close_dealer(poller)
            if ready:
                await asyncio.sleep(0)

    def _do(self, context: zmq.asyncio.Context, poller: zmq.asyncio.Poller, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._close_dealer(poller)
                if self._replay is None:
                    continue
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RCVHWM, 0)
                dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
                attach(dealer, self._replay)
                # Queued by ZeroMQ until the connection stands; never blocks on a fresh socket.
                dealer.send_multipart([b"", action.start.to_bytes(8, "big")], flags=zmq.NOBLOCK)
                poller.register(dealer, zmq.POLLIN)
                self._dealer, self._request = dealer, action.request
        if actions:
            self._handle(actions)

    def _close_dealer(self, poller: zmq.asyncio.Poller) -> None:
        if self._dealer is not None:
            poller.unregister(self._dealer)
            self._dealer.close(0)
            self._dealer = None


def attach(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect, or bind where the endpoint has a `*`. Only IPv6 literals turn ZeroMQ's IPv6 on: with it, names would
    resolve to their IPv6 address alone."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if "*" in endpoint:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)


def _drain(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """What has arrived, at most BURST messages."""
    # A synchronous view of the same socket: a future per message would cost more than the message.
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
    messages: list[list[bytes]] = []
    try:
        while len(messages) < BURST:
            messages.append(plain.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
