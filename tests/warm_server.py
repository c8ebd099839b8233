"""Forks processes from an interpreter that has imported what they need: the other end of ``warm_python.py``.

A process that it forks runs a script or a module as ``__main__``, by the code that the product has for its ranks, and
exits as an interpreter exits. Usage: ``python warm_server.py SOCKET MODULE...``, with the number of an open socket.
"""

import gc
import io
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module

from allranks.agent.workers.rank import _renew_interpreter, _reset_signals, run_as_main

LENGTH = struct.Struct("!I")
_FIRST_OWN_DESCRIPTOR, _MOST_DESCRIPTORS = 3, 4096


def serve(channel):
    """Fork a process for each request; in a forked process, return the request."""
    awake, alarm = socket.socketpair()
    for end in (awake, alarm):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    reports = {}  # process id -> descriptor that its exit status is written to
    while True:
        readable, _, _ = select.select([channel, awake], [], [])
        if awake in readable:
            awake.recv(4096)
            reap(reports)
        if channel in readable:
            request, descriptors = receive(channel)
            if request is None:
                os._exit(0)
            pid, ready = fork()
            if pid == 0:
                for own in (channel, awake, alarm):
                    own.close()
                enter(request, descriptors, ready)
                return request
            reports[pid] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            channel.sendall(LENGTH.pack(pid))


def receive(channel):
    """Return the next request and its descriptors: stdin, stdout, stderr, exit status; None when the tests are over."""
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 4)
    if not head:
        return None, []
    data, missing = b"", LENGTH.unpack(head)[0]
    while len(data) < missing:
        data += channel.recv(missing - len(data))
    return json.loads(data), descriptors


def fork():
    """Fork; the parent returns once the child has a session of its own, so that its group can be signalled."""
    ready, unready = os.pipe()
    pid = os.fork()
    if pid:
        os.close(unready)
        os.read(ready, 1)
        os.close(ready)
    return pid, unready


def enter(request, descriptors, ready):
    """Make a forked process one of its own: session, signals, streams, environment, directory and umask."""
    os.setsid()
    _reset_signals()
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.write(ready, b".")
    os.closerange(_FIRST_OWN_DESCRIPTOR, _MOST_DESCRIPTORS)


def reap(reports):
    """Write the exit status of each process that has ended where its test waits for it."""
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        report = reports.pop(pid)
        with suppress(BrokenPipeError):  # The test has not waited for it: it has failed.
            os.write(report, struct.pack("!i", os.waitstatus_to_exitcode(status)))
        os.close(report)


def main():
    """Import what is named, then serve; a forked process runs what it was requested."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # It would go over all that is imported, again and again.
    for name in sys.argv[2:]:
        import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    request = serve(channel)
    _renew_interpreter(io.FileIO(0, closefd=False))
    run_as_main(request["kind"], request["target"], request["args"])


main()
