"""The watch thread of one process."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..calls import CURRENT, Lost, NamedWait
from .board import Board, after_leaving
from .connections import shut_down
from .lines import WatchLine

Name = Callable[[int], str]  # returns a rank's name in messages

_TICK = 1.0
_LONG = 3.0  # seconds until a wait is reported
_TO_RAISE = 5.0  # seconds for a wait to end by an error, before the process ends
_AFTER_A_DEATH = 15.0  # seconds after a rank's death when waits for other ranks may still end
_REPORT_EVERY = 30.0
_EXIT_CODE = 1


class Watch:
    """Watches the ranks of torch.distributed from a thread. Without a hub or a listener, the rank cannot connect."""

    def __init__(
        self,
        rank: int,
        size: int,
        name: Name,
        *,
        hub: socket.socket | None = None,  # the connection to rank 0, on other ranks
        listener: socket.socket | None = None,  # the socket that others connect to, on rank 0
        secret: str = "",  # a word that every rank knows, sent first
        unreached: Callable[[list[int]], list[int]] = lambda ranks: [],  # on rank 0: ranks that cannot connect
    ) -> None:
        self.rank, self.size, self._name = rank, size, name
        self._hub = None if hub is None else WatchLine(hub)
        self._listener, self._secret, self._unreached = listener, secret, unreached
        self._board, self._lines, self._strangers = Board(size), dict[int, WatchLine](), list[WatchLine]()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.here, self._news, self._is_over = threading.Event(), threading.Condition(), False
        self.absent: list[int] = []  # ranks that have not arrived, as rank 0 last reported
        self._leaving: str | None = None  # the reason, once this process ends
        self._process = os.getpid()
        self._seen, self._seen_since, self._reported = 0, 0.0, False
        self._told_failures = len(CURRENT.failed)
        self._lost_since: float | None = None
        self._gone_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="functional_parallel watch", daemon=True)
        CURRENT.learn, CURRENT.wake = self.learn, self.wake
        if self._hub is not None:
            self._hub.send({"hello": rank, "secret": secret})
        self._board.arrives(0)
        self._thread.start()

    # --- for the other threads of this process ---

    def wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def learn(self, seconds: float) -> None:
        seconds = seconds if self._thread.is_alive() else 0
        with self._news:
            self._news.wait_for(lambda: CURRENT.gone or CURRENT.left or CURRENT.lost or self._is_over, seconds)

    def missing(self, seconds: float) -> str:
        return missing_text(self.absent, self.size, seconds, self._name)

    def leave(self, error: str = "") -> None:
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self._leaving = error
        self.wake()
        self._thread.join(2.0)

    def abandon(self) -> None:
        for each in (self._hub, self._listener, *self._lines.values(), *self._strangers, self._woken, self._waker):
            if each is not None:
                each.close()

    # --- the thread ---

    def _run(self) -> None:
        began = reported = time.monotonic()
        ticked = 0.0
        while self._leaving is None:
            self._read(max(0.0, min(_TICK, ticked + _TICK - time.monotonic())))
            now = time.monotonic()
            self._send_failures()
            if now - ticked < _TICK:
                continue
            ticked = now
            self._look(now)
            if self.rank == 0 and not self.here.is_set():
                self._count(now - began)
                if now - reported > _REPORT_EVERY and not self.here.is_set():
                    reported = now
                    report_missing(self.missing(now - began))
            if self.rank == 0 and CURRENT.lost is None and (lost := self._board.judge(now)):
                self._tell_all({"lost": [lost.text, lost.out_of_step]})
            self._end_waits(now)
        self._say_goodbye(self._leaving)

    def _say_goodbye(self, error: str) -> None:
        self._send_failures()
        if self.rank == 0:
            self._tell_all({"gone": [0, f"ended by {error}"]} if error else {"left": [0, CURRENT.count]})
        else:
            self._send({"ended": error} if error else {"left": CURRENT.count})
        self._is_over = True
        with self._news:
            self._news.notify_all()
        self.abandon()

    def _read(self, seconds: float) -> None:
        sources: list[Any] = [self._woken, *self._strangers, *self._lines.values()]
        sources += [each for each in (self._hub, self._listener) if each is not None]
        poll = select.poll()
        for each in sources:
            poll.register(each.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000 + 1)}
        strangers = [line for line in self._strangers if line.fileno() in ready]
        ranks = [(rank, line) for rank, line in self._lines.items() if line.fileno() in ready]
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        if self._hub is not None and self._hub.fileno() in ready:
            self._read_hub(self._hub)
        if self._listener is not None and self._listener.fileno() in ready:
            with suppress(OSError):
                self._strangers.append(WatchLine(self._listener.accept()[0]))
        for line in strangers:
            self._greet(line)
        for rank, line in ranks:
            self._read_rank(rank, line)

    # --- rank 0 and its connections ---

    def _greet(self, line: WatchLine) -> None:
        self._strangers.remove(line)
        try:
            hello, *others = line.read() or [{}]
        except ConnectionError:
            hello, others = {}, []
        rank = hello.get("hello")
        if hello.get("secret") != self._secret or not isinstance(rank, int) or rank in self._lines:
            line.close()
            return
        self._lines[rank] = line
        self._board.arrives(rank)
        for each, how in CURRENT.gone.items():  # ranks that ended before this rank arrived
            line.send({"gone": [each, how]})
        self._hear(rank, others)
        self._count(0.0)

    def _count(self, seconds: float) -> None:
        missing = self._board.missing()
        if missing and int(seconds) % 5 == 4:
            for rank in self._unreached(missing):
                self._board.arrives(rank)
            missing = self._board.missing()
        if not missing and not self.here.is_set():
            self._tell_all({"here": True})
        elif missing != self.absent:
            self._tell_all({"missing": missing})

    def _read_rank(self, rank: int, line: WatchLine) -> None:
        try:
            self._hear(rank, line.read())
        except ConnectionError:
            del self._lines[rank]
            line.close()
            if not self._board.has_left(rank):
                self._ended(rank, "died")

    def _ended(self, rank: int, how: str) -> None:
        self._board.ends(rank, time.monotonic())
        self._tell_all({"gone": [rank, how]})

    def _hear(self, rank: int, messages: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        for message in messages:
            if "waits" in message:
                self._board.waits(rank, message["waits"], now)
            if "failed" in message:
                self._board.fails(rank, *message["failed"])
            if "ended" in message:
                self._ended(rank, f"ended by {message['ended']}")
            if "left" in message:
                self._board.leaves(rank, message["left"])
                self._tell_all({"left": [rank, message["left"]]})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in list(self._lines.values()):
            line.send(message)
        self._learn_of(message)

    # --- every rank ---

    def _read_hub(self, hub: WatchLine) -> None:
        try:
            messages = hub.read()
        except ConnectionError:
            hub.close()
            self._hub = None
            self._is_over = True
            messages = [] if 0 in CURRENT.left else [{"gone": [0, "died"]}]
        for message in messages:
            self._learn_of(message)

    def _learn_of(self, message: dict[str, Any]) -> None:
        with self._news:
            if "here" in message:
                self.here.set()
            if "missing" in message:
                self.absent = message["missing"]
            if "gone" in message:
                rank, how = message["gone"]
                CURRENT.gone.setdefault(rank, how)
                self._gone_since = self._gone_since or time.monotonic()
            if "left" in message:
                rank, calls = message["left"]
                CURRENT.left[rank] = calls
            if "lost" in message and CURRENT.lost is None:
                CURRENT.lost = Lost(*message["lost"])
            self._news.notify_all()

    def _send(self, message: dict[str, Any]) -> None:
        if self.rank == 0:
            self._hear(0, [message])
        elif self._hub is not None:
            self._hub.send(message)

    def _send_failures(self) -> None:
        for call, error in list(CURRENT.failed.items())[self._told_failures :]:
            self._told_failures += 1
            self._send({"failed": [call, error]})

    def _look(self, now: float) -> None:
        on, waits = CURRENT.on, CURRENT.waits
        if on is None or waits != self._seen:
            if self._reported:
                self._send({"waits": None})
            self._seen, self._seen_since, self._reported = waits, now, False
        elif not self._reported and now - self._seen_since >= _LONG:
            self._reported = True
            self._send({"waits": _position(on)})

    def _end_waits(self, now: float) -> None:
        if CURRENT.lost is None and (lost := self._waits_without_hub(now)):
            self._learn_of({"lost": [lost.text, lost.out_of_step]})
        if CURRENT.lost is None:
            return
        if self._lost_since is None:
            self._lost_since = now
            shut_down()
        on = CURRENT.on
        long = min(now - self._lost_since, now - self._seen_since)
        if on is not None and CURRENT.waits == self._seen and long > _TO_RAISE:
            _end_process(on, now - self._seen_since)

    def _waits_without_hub(self, now: float) -> Lost | None:
        on = CURRENT.on
        if not self._reported or on is None:
            return None
        if self._gone_since is not None:
            needs_it = self._hub is None and self.rank != 0 and 0 in CURRENT.gone and 0 in on.ranks
            if now - self._gone_since > (_LONG if needs_it else _AFTER_A_DEATH):
                return Lost("")
        left = CURRENT.left.get(0)
        if self._hub is None and self.rank != 0 and 0 in on.ranks and left is not None and left < CURRENT.count:
            return Lost(after_leaving(0, left, f"{on.me} waits in {on.place()}"))
        return None


def _position(on: NamedWait) -> dict[str, Any]:
    return {
        "me": on.me,
        "ranks": list(on.ranks),
        "place": on.place(),
        "count": CURRENT.count,
        "calls": list(CURRENT.calls),
    }


def report_missing(text: str) -> None:
    print(f"functional_parallel: {text}", file=sys.stderr, flush=True)


def missing_text(missing: list[int], size: int, seconds: float, name: Name) -> str:
    told = ", ".join(map(name, missing[:16])) + (", …" if len(missing) > 16 else "")
    return f"{len(missing)} of {size} ranks did not arrive in {seconds:.0f} s: {told}"


def _end_process(on: NamedWait, seconds: float) -> None:
    """Write the error on stderr and end the process, for a wait that does not end by an error."""
    with suppress(Exception):
        error = on.failure(seconds)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(_EXIT_CODE)
