"""Shards are cut and put together without a process group: the arithmetic of layouts, against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from spiral_mega.policy.megatron.checkpoint_state import cut_by_blocks, rectangles
from spiral_mega.policy.megatron.families import (
    ParamMapping,
    RowBlock,
    fuse,
    row_blocks,
    shard_range,
    to_local_name,
    unfuse,
)

pytestmark = pytest.mark.megatron


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_fused_heads_stand_group_by_group_as_megatron_core_splits_them(
    groups: int, heads: int, width: int, size: int
) -> None:
    """q of the group's heads, then its k, then its v; and ranks hold consecutive groups."""
    entry = ParamMapping("qkv", ("q", "k", "v"), 0, "grouped")
    sizes = {
        "q": groups * size * heads * width,
        "k": groups * size * width,
        "v": groups * size * width,
    }
    # Each row says whose it is: tensor, group of the whole model, row within the group.
    tensors = []
    for i, rows in enumerate(sizes.values()):
        per = rows // (groups * size)
        tensors.append(torch.tensor([[i, r // per, r % per] for r in range(rows)]))
    for rank in range(size):
        parts = [shard_range(entry, t.shape, rank, size) for t in tensors]
        mine = [t[p.start : p.stop] for t, p in zip(tensors, parts, strict=True)]
        blocks = row_blocks(entry, [len(m) for m in mine], groups)
        fused = fuse(mine, blocks).tolist()
        expected = []
        for group in range(rank * groups, (rank + 1) * groups):
            expected += [[0, group, r] for r in range(heads * width)]
            expected += [[i, group, r] for i in (1, 2) for r in range(width)]
        assert fused == expected
        for i, part in enumerate(mine):
            assert torch.equal(unfuse(torch.tensor(fused), blocks, i), part)


@given(st.integers(1, 40), st.integers(1, 7))
def test_a_vocabulary_that_no_size_divides_is_cut_as_dtensor_cuts_it(rows: int, size: int) -> None:
    entry = ParamMapping("embedding", ("embedding",), 0)
    parts = [shard_range(entry, (rows, 2), rank, size) for rank in range(size)]
    chunks = torch.arange(rows).chunk(size)
    for rank, part in enumerate(parts):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(part.start, part.stop)) == expected
    longest = max(part.stop - part.start for part in parts)
    assert longest * size >= rows  # what each rank allocates, padding included


@given(
    st.data(),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), min_size=1, max_size=5),
)
def test_a_flat_range_is_its_rectangles_each_number_once_and_in_its_place(
    data: st.DataObject, columns: int, kinds: list[tuple[int, int]]
) -> None:
    """Of a parameter of blocks of two tensors, and padding: the range's numbers are where their tensors have them."""
    filled, blocks = [0, 0], []
    for part, rows in kinds:
        blocks.append(RowBlock(part, filled[part], rows))
        filled[part] += rows
    padding = data.draw(st.integers(0, 2))
    tensors = [torch.arange(n * columns).view(n, columns) + 1000 * i for i, n in enumerate(filled)]
    flat = torch.cat([fuse(tensors, blocks), torch.full((padding, columns), -1)]).flatten()
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    share = flat[start:stop]
    found = []
    for whole in rectangles(start, stop, columns):
        for part, piece in cut_by_blocks(whole, blocks):
            values = share[piece.start : piece.start + piece.rows * piece.columns].view(
                piece.rows, piece.columns
            )
            row, column = (
                slice(piece.row, piece.row + piece.rows),
                slice(piece.column, piece.column + piece.columns),
            )
            assert torch.equal(values, tensors[part][row, column])
            found += values.flatten().tolist()
    assert sorted(found) == sorted(n for n in share.tolist() if n >= 0)


def test_transformer_engines_names_are_those_that_megatron_core_says_are_the_same() -> None:
    """Its local layers state under which names transformer-engine's store their norms in checkpoints."""
    same = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert len(same) == 2
    for local, fused in same.items():
        assert to_local_name(f"decoder.layers.3.{fused}weight") == f"decoder.layers.3.{local}weight"
        assert to_local_name(f"decoder.layers.3.{local}weight") == f"decoder.layers.3.{local}weight"


def test_experts_in_one_module_are_numbered_as_modules_of_their_own() -> None:
    grouped = "decoder.layers.3.mlp.experts.linear_fc1.weight12"
    assert (
        to_local_name(grouped) == "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight"
    )
    for name in (
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.router.weight",
        "output_layer.weight",
    ):
        assert to_local_name(name) == name
