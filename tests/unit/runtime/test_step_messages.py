"""The messages of gradients that an estimate expects, against those that torch's DDP and ours send."""

from __future__ import annotations

SENT = """
import torch
from torch import distributed, nn
import allranks
from allranks.runtime.model.allreduce import Message
from allranks.runtime.estimate import of_buckets, of_flat

sizes = []

def count(_, bucket):
    sizes.append(bucket.buffer().nbytes)
    return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

def send(self):
    sizes.append(self._sent.nbytes)
    message_send(self)

message_send, Message.send = Message.send, send
with allranks.init() as ctx:
    # Compressed gradients do not go through shared memory.
    for strategy, compress, expected in (("ddp", None, of_buckets), ("flat", "bf16", lambda all: of_flat(all, 2))):
        net = nn.Sequential(*[nn.Linear(600, 600) for _ in range(24)])
        model = ctx.prepare(net, strategy=strategy, compress=compress)
        if strategy == "ddp":
            model.register_comm_hook(None, count)
        for _ in range(3):
            sizes.clear()
            model(torch.ones(2, 600)).sum().backward()
        parameters = [*net.parameters()]
        if ctx.rank == 0:
            print(sorted(sizes) == sorted(expected(parameters).messages), len(sizes), of_flat(parameters).shared)
"""


def test_messages_are_those_of_ddp_and_flat(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(SENT)
    assert [code for code, _, _ in results] == [0, 0], results
    total = 24 * (600 * 600 + 600) * 4
    assert results[0][1].splitlines()[-2:] == [f"True 3 {total}", f"True 25 {total}"]
