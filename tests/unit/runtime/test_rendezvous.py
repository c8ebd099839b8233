"""The ranks meet over a real store, with identities of our choosing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from allranks.errors import DeviceError, RankError
from allranks.runtime.rendezvous import HostPlace, RankIdentity, find_shared_gpu, meet, places

LIMIT = timedelta(seconds=20)


def test_shared_gpus_are_found():
    same = [
        RankIdentity(0, "n1", "GPU-a"),
        RankIdentity(1, "n2", "GPU-a"),
        RankIdentity(2, "n1", "GPU-a"),
        RankIdentity(3, "n1", "GPU-b"),
    ]
    error = find_shared_gpu(same)
    assert isinstance(error, DeviceError)
    assert str(error) == (
        "ranks 0 and 2 on n1 are bound to the same GPU, GPU-a\n"
        "  why: each rank takes the GPU numbered by its LOCAL_RANK among those it sees\n"
        "  fix: give each rank of a host its own LOCAL_RANK, as allranks run and torchrun do; let all "
        "of them see all GPUs; start no more ranks per node than it has GPUs"
    )


def test_many_ranks_on_one_gpu_stay_readable():
    error = find_shared_gpu(RankIdentity(rank, "n1", "GPU-a") for rank in range(40))
    assert error is not None
    assert "ranks 0, 1, 2" in error.what
    assert "14, 15 and 24 more on n1" in error.what


def test_ranks_on_the_cpu_and_the_same_gpu_number_of_two_hosts_share_nothing():
    assert find_shared_gpu([RankIdentity(0, "n1"), RankIdentity(1, "n1")]) is None
    assert find_shared_gpu([RankIdentity(0, "n1", "GPU-a"), RankIdentity(1, "n2", "GPU-a")]) is None


def test_places_count_hosts_by_their_lowest_rank():
    arrivals = [RankIdentity(2, "a"), RankIdentity(0, "b"), RankIdentity(1, "b")]
    assert places(arrivals) == {"b": HostPlace(2, 0), "a": HostPlace(1, 1)}


def meet_all(arrivals, world_size, limit=LIMIT):
    """Let each rank meet in a thread of its own, over its own connection; give places or errors."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(arrival):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        try:
            return meet(dist.PrefixStore("allranks/0/0", store), arrival, world_size, limit)
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(arrivals)) as pool:
        return list(pool.map(one, arrivals))


def test_all_ranks_learn_where_they_are():
    met = meet_all([RankIdentity(0, "a", "GPU-0"), RankIdentity(1, "a", "GPU-1"), RankIdentity(2, "b", "GPU-0")], 3)
    assert met == [HostPlace(2, 0), HostPlace(2, 0), HostPlace(1, 1)]


def test_all_ranks_get_the_same_device_error():
    met = meet_all([RankIdentity(0, "a", "GPU-0"), RankIdentity(1, "a", "GPU-0"), RankIdentity(2, "b", "GPU-0")], 3)
    assert [type(error) for error in met] == [DeviceError] * 3
    assert {error.what for error in met} == {"ranks 0 and 1 on a are bound to the same GPU, GPU-0"}
    assert all(error.fix for error in met)


def test_all_ranks_hear_who_is_missing():
    met = meet_all([RankIdentity(0, "a"), RankIdentity(2, "a")], 3, timedelta(seconds=1))
    assert [error.what for error in met] == ["rank 1 did not reach allranks.init() within 1 s"] * 2


def test_a_silent_rank_0_is_named(monkeypatch):
    monkeypatch.setattr("allranks.runtime.rendezvous._PATIENCE", timedelta(0))
    with pytest.raises(RankError, match=re.escape("rank 1 got no answer from rank 0 within 0.5 s")):
        meet(dist.HashStore(), RankIdentity(1, "a"), 2, timedelta(seconds=0.5))
