"""Start ranks through the real fork server, without torch: what to run as JSON on stdin, exits as JSON on stdout."""

import json
import os
import resource
import select
import signal
import sys
import time
from importlib import import_module

from allranks.agent.main import fork_server
from allranks.agent.workers.fork_server import ForkClient
from allranks.agent.workers.rank import RankStart
from allranks.errors import AllranksError
from allranks.record.spec import NodeSpec


def start_all(ranks, raw):
    try:
        ranks.start([RankStart(**start) for start in raw["starts"]])
    except AllranksError as error:
        return {"error": [error.what, error.why]}
    finally:
        if raw["signal"]:
            ranks.signal(getattr(signal, raw["signal"]))
        deadline = time.monotonic() + 150
        while ranks.pids and time.monotonic() < deadline:
            ranks.wait(1.0)
    return {"codes": {ended.local_rank: ended.code for ended in ranks.exits}}


def die_without_reading(channel):
    """Let the ranks end, and exit while the fork server's report of that is unread."""
    open("go", "w").close()
    select.select([channel], [], [])
    print("{}", flush=True)
    os._exit(0)


def main():
    raw = json.load(sys.stdin)
    for name in raw["preload"]:
        import_module(name)
    if raw["open_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raw["open_files"], raw["open_files"]))
    channel = fork_server(NodeSpec.from_json(raw["node"]), (sys.executable,) if raw["plain"] else None)
    ranks = ForkClient(channel, lambda: None, lambda: None)
    if raw["abandoned"]:
        ranks.start([RankStart(**start) for start in raw["starts"]])
        die_without_reading(channel)
    result = start_all(ranks, raw)
    began = time.monotonic()
    ranks.quit(clean=raw["clean"])
    print(json.dumps({**result, "quit": time.monotonic() - began}))


main()
