"""ZeroMQ sockets around one Stream: the live subscription, replay requests, and the connection's health.

One task owns all sockets, so the state machine is never entered twice. It sleeps until the descriptor of one of them
shows that something changed (and not: that something is there), and then takes from each until there is no more. A
replay gets a fresh DEALER socket each time: replies to an abandoned request die with their socket. Engines that
publish nothing are silent, as is a dead link; the socket monitor tells the two apart.

Bounds: `MAX_MESSAGE` per message; `LIVE_HWM` messages queued by ZeroMQ for the live subscription (a slower consumer
loses messages, sees a gap and replays it); at most `BURST` messages are taken before the event loop gets its turn.
The replay socket has no receive mark on purpose: with one, engines drop replayed batches silently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, cast

import zmq
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
        self._dealer: zmq.Socket[bytes] | None = None
        self._wake = asyncio.Event()
        self._request = 0
        self._links = 0
        """Connections of the subscription; more than one only where we bind."""

    async def run(self) -> None:
        """Until cancelled."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sub = context.socket(zmq.SUB)
        monitor = None
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
            self._watch(sub)
            self._watch(monitor)
            await self._loop(context, sub, monitor)
        finally:
            self._close_dealer()
            self._unwatch(sub)
            if monitor is not None:
                self._unwatch(monitor)
                sub.disable_monitor()
            sub.close(0)
            context.destroy(linger=0)

    async def _loop(
        self, context: zmq.Context[zmq.Socket[bytes]], sub: zmq.Socket[bytes], monitor: zmq.Socket[bytes]
    ) -> None:
        stream, clock, wake = self._stream, self._clock, self._wake
        loop = asyncio.get_running_loop()
        while True:
            tick = loop.call_later(TICK_S, wake.set)
            await wake.wait()
            tick.cancel()
            wake.clear()
            now = clock()
            # ZeroMQ reports a connection before what comes through it. Taking the messages first and the reports
            # second, no message of a new connection is ever applied ahead of its report.
            messages = self._drain(sub)
            for frames in self._drain(monitor):
                event = parse_monitor_message(frames)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._links += 1
                    self._do(context, stream.connected(now))
                elif event == zmq.EVENT_DISCONNECTED and self._links:
                    self._links -= 1
                    if not self._links:
                        self._do(context, stream.disconnected(now))
            if self._dealer is not None:
                request = self._request
                for frames in self._drain(self._dealer):
                    self._do(context, stream.replayed(frames, request, now))
            for frames in messages:
                self._do(context, stream.live(frames, now))
            self._do(context, stream.tick(now))
            if self._dealer is not None and not stream.waiting:
                self._close_dealer()
            if wake.is_set():
                await asyncio.sleep(0)

    def _do(self, context: zmq.Context[zmq.Socket[bytes]], actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._close_dealer()
                if self._replay is None:
                    continue
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RCVHWM, 0)
                dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
                attach(dealer, self._replay)
                # Queued by ZeroMQ until the connection stands; never blocks on a fresh socket.
                dealer.send_multipart([b"", action.start.to_bytes(8, "big")], flags=zmq.NOBLOCK)
                self._watch(dealer)
                self._wake.set()  # sending may have taken note of a change that nobody looked at
                self._dealer, self._request = dealer, action.request
        if actions:
            self._handle(actions)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        asyncio.get_running_loop().add_reader(socket.fileno(), self._wake.set)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        asyncio.get_running_loop().remove_reader(socket.fileno())

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._unwatch(self._dealer)
            self._dealer.close(0)
            self._dealer = None

    def _drain(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        """What has arrived; of more than BURST messages the rest with the next turn."""
        messages: list[list[bytes]] = []
        # Asked before each: the exception that tells of none costs six times as much.
        while cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN:
            if len(messages) == BURST:
                self._wake.set()
                break
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        return messages


def attach(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect, or bind where the endpoint has a `*`. Only IPv6 literals turn ZeroMQ's IPv6 on: with it, names would
    resolve to their IPv6 address alone."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if "*" in endpoint:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
