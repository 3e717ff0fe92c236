"""The LoRA fold: the order of rows by adapter, shrink, expand, and both in one launch for ranks of up to 32."""

from __future__ import annotations

from fanfold.export.description import Buffer, Check, Choice, Function, Size
from fanfold.kernels.lora.config import ENOUGH_PROGRAMS
from fanfold.kernels.lora.sizes import MOST_RANK, RANK_TILE

TABLE = (
    Buffer("table_a", "addresses of A, stored [padded rank, K]; 0: no pair; [P, adapter_slots, table_experts]"),
    Buffer("table_b", "addresses of B, stored [N, padded rank]"),
    Buffer("table_scale", "factors"),
    Buffer("table_rank", "ranks, at most max_rank"),
)
PLANNED = (
    Buffer("items", "tiles of rows of lora_order, [item_count, 4]", optional=True),
    Buffer("places", "place -> sorted position, of lora_order, [R]", optional=True),
    Buffer("rows_of_places", "place -> row, of lora_order, [R]", optional=True),
)
GATHERED = (
    Buffer("topk_ids", "expert of each row, [T, k], where there are no items", optional=True),
    Buffer("adapter_ids", "adapter slot of each token, [T], where there are no items", optional=True),
    Buffer("sorted_rows", "sorted position -> row, [R], where y lies in sorted order", optional=True),
    Buffer("unknown", "counts tokens whose adapter id is no slot's, [1]", written=True, optional=True),
)
SIZES = (
    Size("tokens", "T"),
    Size("top_k", "k", 1),
    Size("experts", "E"),
    Size("adapter_slots", "slots of the tables", 1),
    Size("table_experts", "experts of the tables, at most E"),
    Size("max_rank", "the largest rank of a pair", 1),
    Size("outputs", "N of a pair: I for gate_up, H for down", 1),
    Size("inputs", "K of a pair: H for gate_up, I for down", 1),
)
WINDOW = (
    Size("row_offset", "first sorted position of the window"),
    Size("row_end", "behind its last one; at most R"),
    Size("cap", "rows that xa has room for"),
)
DTYPE = Choice("dtype", "of activations and pairs")
PROJECTION = Choice("projection", "gate_up (two pairs a row, x by token) or down (one, x by position)")
SOURCE = Choice("source", "0: rows as they come; 1: rows in sorted order; 2: items of lora_order",
                "2 if has_items else 1 if has_sorted_rows else 0")  # fmt: skip
TILE = Choice("tile", "rows of an item, of lora_order; 8 without items")
ACTIVATION = Choice("activation", "none: y is changed in place; silu: h = silu(gate) * up of all rows with a slot")
RANK = Choice("block_r", "columns of the rank that a program holds", "16 if max_rank <= 16 else 32")
ONE_TILE = Choice("one_tile", "1 where a program folds one tile of outputs", "1 if tiles == 1 else 0")
ROWS = ("rows", "tokens * top_k")
PADDED = ("padded_rank", "ceil_div(max_rank, 8) * 8")
ITEMS = ("item_count", "rows // tile + min(rows, experts * (adapter_slots + 1)) if has_items else rows")
BLOCK_N = (
    "(64 if element_bytes == 4 else 256 if (tile == 8) * (block_r == 16) * ((arch == 90) + (arch == 100)) else 128)"
)
"""Outputs of a tile: `kernels.lora.config.config_for`, as a formula."""
CHECK_TABLE = Check("table_experts", "experts", "experts of the tables")
CHECK_WINDOW = (
    Check("row_end", "max(rows, row_offset)", "the end of the window"),
    Check("row_end", "row_offset + cap", "the end of the window, with the rows of xa"),
)


ORDER = Function(
    op="lora_order",
    name="lora_order",
    meaning="the rows of a plan ordered inside each expert by adapter slot, in tiles of one (expert, slot)",
    sizes=(*SIZES[:3], Size("adapter_slots", "slots of the tables", 1)),
    buffers=(
        Buffer("expert_offsets", "of plan_sort, [E + 1]"),
        Buffer("sorted_rows", "of plan_sort, [R]"),
        Buffer("adapter_ids", "adapter slot of each token, [T]; outside [0, adapter_slots): the base"),
        Buffer("items", "(expert or -1, slot or -1, first place, rows), [item_count, 4]", written=True),
        Buffer("places", "place -> sorted position, [R]", written=True),
        Buffer("rows_of_places", "place -> row, [R]", written=True),
        Buffer("unknown", "grows by the tokens whose id is >= adapter_slots, [1]", written=True),
    ),
    choices=(
        Choice("tile", "rows of an item; fanfold_row_tile says which"),
        Choice("chunk", "rows that a program places at once", "min(1024, max(64, power_of_two(usual)))"),
        Choice("bins", "slots and the base, rounded up", "max(32, power_of_two(adapter_slots + 2))"),
    ),
    derived=(
        ROWS,
        ("usual", "2 * ceil_div(rows, max(1, min(rows, experts)))"),
        ("item_count", "rows // tile + min(rows, experts * (adapter_slots + 1))"),
    ),
)
_FOLD_CHECKS = (Check("max_rank", str(RANK_TILE), "the largest rank of one launch (use lora_shrink and lora_expand)"),)
_OUT = (
    Buffer("y", "the base product: y1 [R, 2 * N] at positions, or y2 [R, N] by row; changed where there is no "
           "activation", written=True),
    Buffer("h", "[R, N] at positions, with an activation", written=True, optional=True),
)  # fmt: skip
FOLD = Function(
    op="lora_fold",
    name="lora_fold",
    meaning="y = act(y + scale * act(act(x A^T) B^T)), of rows with a pair, in one launch; ranks of up to 32",
    sizes=SIZES,
    buffers=(Buffer("x", "[T, K] for gate_up, [R, K] at positions for down"), *TABLE, *PLANNED, *GATHERED, *_OUT),
    choices=(DTYPE, PROJECTION, ACTIVATION, SOURCE, TILE, RANK, ONE_TILE),
    derived=(
        ROWS,
        ITEMS,
        ("column_tiles", f"ceil_div(outputs, {BLOCK_N})"),
        ("parts", f"max(1, min(column_tiles, {ENOUGH_PROGRAMS} // max(item_count, 1)))"),
        ("tiles", "ceil_div(column_tiles, parts)"),
    ),
    checks=(CHECK_TABLE, *_FOLD_CHECKS),
)
SHRINK = Function(
    op="lora_shrink",
    name="lora_shrink",
    meaning="xa = act(x A^T) of a window of sorted positions",
    sizes=(*SIZES, *WINDOW),
    buffers=(
        Buffer("x", "[T, K] for gate_up, [R, K] at positions for down"),
        *TABLE,
        *PLANNED,
        *GATHERED,
        Buffer("xa", "[P, cap, padded_rank], the row of a position is position - row_offset", written=True),
    ),
    choices=(DTYPE, PROJECTION, SOURCE, TILE, RANK),
    derived=(ROWS, PADDED, ITEMS, ("parts", "ceil_div(padded_rank, block_r)")),
    checks=(CHECK_TABLE, *CHECK_WINDOW, Check("max_rank", str(MOST_RANK), "the largest rank")),
)
EXPAND = Function(
    op="lora_expand",
    name="lora_expand",
    meaning="y = act(y + scale * act(xa B^T)) of the same window",
    sizes=(*SIZES, *WINDOW),
    buffers=(Buffer("xa", "of lora_shrink, [P, cap, padded_rank]"), *TABLE, *PLANNED, *GATHERED[:3], *_OUT),
    choices=(DTYPE, PROJECTION, ACTIVATION, SOURCE, TILE, RANK),
    derived=(ROWS, PADDED, ITEMS),
    checks=(CHECK_TABLE, *CHECK_WINDOW, Check("max_rank", str(MOST_RANK), "the largest rank")),
)
