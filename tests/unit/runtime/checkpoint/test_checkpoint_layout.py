"""Which rank writes what, and reading boxes back from the pieces."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RankError
from allranks.record.checkpoints import Chunk, TensorEntry
from allranks.runtime.checkpoint.restore import read_box, read_tensor
from allranks.runtime.checkpoint.snapshot import ALIGNMENT, choose_writers, make_layout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=8)


def written(folder: Path, layouts) -> dict[str, TensorEntry]:
    """Write what the layouts say, as the writer does, and return what an index would tell."""
    found: dict[str, TensorEntry] = {}
    for rank, layout in enumerate(layouts):
        data = bytearray(layout.size)
        for piece in layout.pieces:
            raw = piece.source.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            data[piece.offset : piece.offset + len(raw)] = raw
            chunk = Chunk(f"{rank}", piece.offset, piece.start, tuple(piece.source.shape))
            old = found[piece.name].chunks if piece.name in found else ()
            found[piece.name] = TensorEntry("float32", 4, piece.whole, (*old, chunk))
        (folder / str(rank)).write_bytes(data)
    return found


@given(SHAPES, st.integers(1, 5))
def test_every_element_is_written_once_whoever_shares(tmp_path_factory, shapes, writers):
    folder = tmp_path_factory.mktemp("layout")
    tensors = {str(n): torch.randn(shape) for n, shape in enumerate(shapes)}
    layouts = [make_layout(tensors, set(tensors), rank, list(range(writers))) for rank in range(writers)]
    elements = sum(piece.source.numel() for layout in layouts for piece in layout.pieces)
    assert elements == sum(tensor.numel() for tensor in tensors.values())
    found = written(folder, layouts)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(folder, found[name]), tensor)


def test_shares_are_even():
    tensors = {str(n): torch.zeros(1000, 10) for n in range(3)}
    sizes = [make_layout(tensors, set(tensors), rank, [0, 1, 2, 3]).size for rank in range(4)]
    assert max(sizes) - min(sizes) <= 2 * 40 + 4 * ALIGNMENT


def test_what_is_not_shared_is_of_rank_0():
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    assert [piece.name for piece in make_layout(tensors, {"a"}, 0, [1, 2]).pieces] == ["b"]
    assert [piece.name for piece in make_layout(tensors, set(), 0, [0]).pieces] == ["a", "b"]
    assert not make_layout(tensors, set(), 1, [0]).pieces


def test_tied_tensors_are_written_once():
    weight = torch.ones(3, 2)
    layout = make_layout({"in": weight, "out": weight, "part": weight[0]}, set(), 0, [0])
    assert [piece.name for piece in layout.pieces] == ["in", "part"]
    assert layout.aliases == {"out": "in"}


@pytest.mark.parametrize(
    ("size", "ranks", "writers"),
    [(0, 4, [0]), (1 << 20, 4, [0]), (1 << 30, 2, [0, 1]), (1 << 40, 64, list(range(0, 64, 4))), (1 << 27, 8, [0, 4])],
)
def test_writers_are_spread(size, ranks, writers):
    assert choose_writers(size, ranks) == writers


@given(st.data())
def test_any_box_can_be_read_from_any_chunks(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    folder = tmp_path_factory.mktemp("chunks")
    chunks, content = [], b""
    for box in itertools.product(*[list(itertools.pairwise(cut)) for cut in cuts]):
        part = whole[tuple(slice(a, b) for a, b in box)]
        chunks.append(Chunk("data", len(content), tuple(a for a, _ in box), tuple(part.shape)))
        content += part.contiguous().numpy().tobytes()
    (folder / "data").write_bytes(content)
    entry = TensorEntry("int16", 2, tuple(shape), tuple(chunks))
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    extent = [data.draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True)]
    expected = whole[tuple(slice(at, at + n) for at, n in zip(start, extent, strict=True))]
    assert torch.equal(read_box(folder, entry, start, extent), expected)


def test_a_missing_chunk_is_told(tmp_path):
    (tmp_path / "data").write_bytes(bytes(8))
    entry = TensorEntry("int16", 2, (4, 2), (Chunk("data", 0, (0, 0), (2, 2)),))
    with pytest.raises(RankError, match="does not hold all"):
        read_tensor(tmp_path, entry)
