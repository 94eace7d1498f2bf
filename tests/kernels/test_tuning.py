from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from kernels import tuning
from kernels.ops.projection import Tiles, default_tiles
from kernels.tuning import TOKEN_BUCKETS, TUNED, LinearOp, Shape, TileTable, default_choice, load_table

CUDA = torch.device("cuda")
FILES = sorted(TUNED.glob("*.json"))
MAX_SHARED_BYTES = 227 * 1024  # of a program, on compute capability 9.0
LAYER = Shape("norm_linear", 64, 48)
CHOSEN = Tiles(16, 64, 128, 4, 3)


def assert_valid(tiles: Tiles, shape: Shape, element_bytes: int) -> None:
    """What a launch needs: powers of two, a matrix unit's least, and room for the loads that are under way."""
    if tiles.fragments:
        assert tiles.block_m in (8, 16), tiles
        assert tiles.block_n in (16, 32), tiles
        assert tiles.num_warps in (2, 4, 8), tiles
        shares = tiles.block_k * tiles.num_warps
        assert shares - 32 * tiles.num_warps < shape.num_columns <= shares, "each warp holds its share, and no more"
        # Of a thread's 255 registers: rows g and g + 8, and a token of every eight, 8 columns of each a step.
        assert tiles.block_k // 32 * (tiles.block_n // 16 * 2 + tiles.block_m // 8) * 8 * element_bytes // 4 < 200
        return
    assert all(size >= 1 and size & (size - 1) == 0 for size in tiles[:4]), tiles
    assert tiles.block_m == 1 or tiles.block_m >= 16, tiles
    assert tiles.block_m == 1 or (tiles.block_k >= 16 and tiles.block_n >= 16), tiles
    assert tiles.num_warps <= 16, tiles
    assert tiles.num_stages >= 1, tiles
    if shape.op != "norm_linear":
        assert tiles.block_n >= 2, tiles  # halves that belong together
    if tiles.block_m > 1:  # a single token's rows go to registers
        step = (tiles.block_m + tiles.block_n) * tiles.block_k * element_bytes
        # A matrix unit that reads its operands from shared memory holds a step more, and has none for four bytes.
        num_steps = tiles.num_stages - (element_bytes > 2)
        assert step * num_steps <= MAX_SHARED_BYTES, tiles


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_tables_are_whole_and_valid(path: Path) -> None:
    """Every shape has each of its buckets once, the first and the last among them; tiles suit weights of two bytes."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem in content["card"].lower()
    table = TileTable.from_json(path.read_text(encoding="utf-8"))
    buckets: dict[Shape, list[int]] = {}
    for row in content["rows"]:
        assert set(row) - {"us", "library_us"} == {"op", "num_rows", "num_columns", "num_tokens", "tiles"}
        assert row["op"] in get_args(LinearOp)
        shape = Shape(row["op"], row["num_rows"], row["num_columns"])
        buckets.setdefault(shape, []).append(row["num_tokens"])
        chosen = table.choose(shape, row["num_tokens"])
        assert chosen == (None if row["tiles"] is None else Tiles(*row["tiles"]))
        if chosen is not None:
            assert_valid(chosen, shape, 2)
            assert chosen.block_m > 1 or row["num_tokens"] == 1, "a program per token reads the weight for each"
            if chosen.fragments and row["num_tokens"] > chosen.block_m:
                assert row["num_rows"] * row["num_columns"] <= 2**22, "another program reads the weight again"
    assert buckets
    for tokens in buckets.values():
        assert len(set(tokens)) == len(tokens)
        assert {TOKEN_BUCKETS[0], TOKEN_BUCKETS[-1]} <= set(tokens) <= set(TOKEN_BUCKETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_row_chooses_was_the_faster(path: Path) -> None:
    """By the times beside it, which only the rows lack that are left of a table's first version: see `kernels.tuning`."""
    num_untimed = 0
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if "us" not in row:
            assert "library_us" not in row
            num_untimed += 1
        elif row["tiles"] is None:
            assert row["us"] == row["library_us"], row
        else:
            assert 0 < row["us"] < row["library_us"], row
    assert num_untimed == {"h100": 41}.get(path.stem, 0), "every new row comes with its times"


def test_there_is_a_table_to_fall_back_on() -> None:
    assert "h100" in [path.stem for path in FILES]


def table_of(rows: dict[int, Tiles | None]) -> TileTable:
    """The table of one layer, by way of its file's format."""
    records = [
        {"op": LAYER.op, "num_rows": LAYER.num_rows, "num_columns": LAYER.num_columns, "num_tokens": n, "tiles": t}
        for n, t in rows.items()
    ]
    return TileTable.from_json(json.dumps({"card": "a card", "rows": records}))


@pytest.mark.parametrize("buckets", [TOKEN_BUCKETS, (1, 16, 256)])
def test_a_number_of_tokens_takes_the_next_larger_row(buckets: tuple[int, ...]) -> None:
    rows: dict[int, Tiles | None] = {
        bucket: CHOSEN._replace(num_stages=index + 1) for index, bucket in enumerate(buckets)
    }
    table = table_of(dict(reversed(rows.items())))
    for num_tokens in range(1, buckets[-1] + 1):
        bucket = min(bucket for bucket in buckets if bucket >= num_tokens)
        assert table.choose(LAYER, num_tokens) == rows[bucket]
    assert table.choose(LAYER, buckets[-1] + 1) is None
    assert table.choose(LAYER, 8192) is None


def test_none_is_a_choice_and_not_a_gap() -> None:
    table = table_of({1: None, 8: CHOSEN})
    assert table.choose(LAYER, 1) is None
    assert table.choose(LAYER, 2) == CHOSEN
    assert default_choice(LAYER, 1) is not None


def test_a_shape_that_was_not_measured_takes_the_default() -> None:
    """An op's name is part of the shape; past its last row, a shape that was measured takes the library."""
    table = table_of({1: CHOSEN})
    for shape in (Shape("norm_gated_linear", 64, 48), Shape("norm_linear", 48, 64)):
        assert table.choose(shape, 1) == default_tiles(1, shape.num_rows, shape.num_columns)
        assert table.choose(shape, 33) is None
    assert table.choose(LAYER, 7) is None


@pytest.mark.parametrize("op", get_args(LinearOp))
@pytest.mark.parametrize("num_columns", [1, 40, 576, 4096, 14336])
def test_default_tiles_are_valid(num_columns: int, op: LinearOp) -> None:
    shape = Shape(op, 4096, num_columns)
    for num_tokens in (1, 2, 16, 17, 32, 64, 1000):
        for element_bytes in (2, 4):
            assert_valid(default_tiles(num_tokens, shape.num_rows, num_columns), shape, element_bytes)


@pytest.mark.parametrize("num_columns", [32, 40, 576, 1536, 1728, 3072])
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 16])
def test_a_small_layer_that_was_not_measured_is_multiplied_in_fragments(num_tokens: int, num_columns: int) -> None:
    """Of two bytes, for as many tokens as fit one program."""
    table, shape = TileTable({}, fragments=True), Shape("norm_linear", 512, num_columns)
    chosen = table.choose(shape, num_tokens)
    assert chosen is not None
    assert chosen.fragments
    assert chosen.block_m == (8 if num_tokens <= 8 else 16)
    assert_valid(chosen, shape, 2)
    for other, count in (
        (shape, 1),
        (shape, 17),
        (Shape("norm_linear", 2**23 // num_columns, num_columns), num_tokens),
    ):
        assert (
            table.choose(other, count)
            == default_choice(other, count)
            == default_tiles(count, other.num_rows, num_columns)
        )
    assert TileTable({}).choose(shape, num_tokens) == default_choice(shape, num_tokens)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend a card; the tables of other tests are forgotten."""

    def pretend(name: str, capability: tuple[int, int]) -> TileTable:
        load_table.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return load_table(CUDA, torch.bfloat16)

    yield pretend
    load_table.cache_clear()


def test_a_card_takes_its_own_table_or_its_generations(
    card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem, stages in (("h100", 1), ("h200", 2)):
        row = {"op": LAYER.op, "num_rows": 64, "num_columns": 48, "num_tokens": 1, "tiles": [1, 4, 64, 4, stages]}
        (tmp_path / f"{stem}.json").write_text(json.dumps({"card": stem, "rows": [row]}))
    monkeypatch.setattr(tuning, "TUNED", tmp_path)

    def stages(table: TileTable) -> int:
        chosen = table.choose(LAYER, 1)
        assert chosen is not None
        return chosen.num_stages

    assert stages(card("NVIDIA H100 80GB HBM3", (9, 0))) == 1
    assert stages(card("NVIDIA H200", (9, 0))) == 2
    assert stages(card("NVIDIA GH200 480GB", (9, 0))) == 2
    assert stages(card("NVIDIA H800", (9, 0))) == 1
    assert card("NVIDIA H200", (9, 0)).name == "h200"
    assert card("NVIDIA H800", (9, 0)).name == "h100"
    assert card("NVIDIA GeForce RTX 4090", (8, 9)).name is None
    default = default_tiles(1, 64, 48)
    assert card("NVIDIA GeForce RTX 4090", (8, 9)).choose(LAYER, 1) == default
    (tmp_path / "h100.json").unlink()
    assert card("NVIDIA H800", (9, 0)).choose(LAYER, 1) == default


def test_a_cpu_has_no_table() -> None:
    assert load_table(torch.device("cpu"), torch.bfloat16).choose(LAYER, 1) == default_tiles(1, 64, 48)


def test_weights_of_four_bytes_take_the_default(card: Any) -> None:
    measured = Shape("norm_linear", 4096, 4096)
    assert card("NVIDIA H100 80GB HBM3", (9, 0)).choose(measured, 8) != default_tiles(8, 4096, 4096)
    assert load_table(CUDA, torch.float32).choose(measured, 8) == default_tiles(8, 4096, 4096)
