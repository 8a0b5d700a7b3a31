"""A process that has torch and torchtitan loaded and forks ranks: they start in a fraction of a second, not in six.

multiprocessing has such a server too, but it swallows errors of the preloaded module, reruns the caller's main module
in every rank, and needs a second helper process. This one speaks JSON lines over a socket, and knows three words:

- in: ``{"start": SPEC}``, ``{"signal": NUMBER, "pid": PID}``; the end of the stream means: kill what runs, and leave;
- out: ``{"event": "ready", "seconds": S}`` or ``{"event": "broken", "error": TEXT}`` once, then
  ``{"event": "started", "rank": R, "pid": P}`` and ``{"event": "ended", "rank": R, "pid": P, "code": C}``
  (a negative code is a signal).

Only for CPU: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from europa_exp.launch import processes
from europa_exp.launch.worker import RankSpec, run_rank

PRELOAD = "europa_exp.training.preload"
"""Module that is imported before the first rank is forked."""


class _Server:
    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.ranks: dict[int, int] = {}
        """Process id -> rank, of the ranks that are not reaped yet: only these ids are safe to signal."""
        self.buffer = b""
        self.wake_in, self.wake_out = os.pipe()
        os.set_blocking(self.wake_in, False)
        os.set_blocking(self.wake_out, False)
        self.selector = selectors.DefaultSelector()

    def tell(self, **event: Any) -> None:
        self.stream.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)
        self.selector.register(self.stream, selectors.EVENT_READ, "stream")
        self.selector.register(self.wake_in, selectors.EVENT_READ, "wake")
        while True:
            for key, _ in self.selector.select():
                if key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_in, 4096)
                elif not self.listen():
                    return
            self.reap()

    def listen(self) -> bool:
        data = self.stream.recv(65536)
        if not data:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "start" in message:
                self.start(RankSpec(**message["start"]))
            elif message["pid"] in self.ranks:
                # The rank's whole group, so that its helpers go with it.
                processes.send(message["pid"], message["signal"])
                processes.send(message["pid"], message["signal"], group=True)
        return True

    def start(self, spec: RankSpec) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            # Nothing runs, so nothing ends by itself: report it as a rank that ended at once.
            print(f"rank {spec.rank} can't be forked: {error}", file=sys.stderr, flush=True)
            self.tell(event="started", rank=spec.rank, pid=-1)
            self.tell(event="ended", rank=spec.rank, pid=-1, code=errno.EAGAIN)
            return
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.selector.close()
                self.stream.close()
                os.close(self.wake_in)
                os.close(self.wake_out)
                run_rank(spec, preloaded=True)
            finally:
                os._exit(1)
        self.ranks[pid] = spec.rank
        self.tell(event="started", rank=spec.rank, pid=pid)

    def reap(self) -> None:
        for pid in list(self.ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = self.ranks.pop(pid)
                self.tell(event="ended", rank=rank, pid=pid, code=os.waitstatus_to_exitcode(status))

    def stop(self) -> None:
        for pid in self.ranks:
            processes.send(pid, signal.SIGKILL)
            processes.send(pid, signal.SIGKILL, group=True)
        for pid in self.ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main() -> None:
    """Serve on the inherited socket: ``forkserver DESCRIPTOR PARENT PRELOAD``."""
    stream = socket.socket(fileno=int(sys.argv[1]))
    stream.set_inheritable(False)
    processes.die_with_parent(int(sys.argv[2]))
    processes.set_name("europa-fork")
    # A terminal's Ctrl-C and a job's SIGTERM are the supervisor's to act on; it ends this process by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(stream)
    begin = time.perf_counter()
    try:
        if sys.argv[3]:
            importlib.import_module(sys.argv[3])
    except BaseException:
        with contextlib.suppress(OSError):
            server.tell(event="broken", error=traceback.format_exc())
        os._exit(1)
    # What is loaded stays for ever; out of the collector's way its pages stay shared between the ranks.
    gc.collect()
    gc.freeze()
    if threading.active_count() > 1:
        print("a preloaded module started threads; forked ranks lack them", file=sys.stderr, flush=True)
    try:
        server.tell(event="ready", seconds=round(time.perf_counter() - begin, 2))
        server.serve()
    except OSError:
        pass  # the supervisor is gone
    finally:
        server.stop()
        os._exit(0)


if __name__ == "__main__":
    main()
