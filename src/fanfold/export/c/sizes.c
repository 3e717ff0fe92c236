/* Formulas of sizes, and what hosts need around launches. Sums and products stop at INT64_MAX. */

static inline int64_t fanfold_add(int64_t a, int64_t b)
{
    return b > 0 && a > INT64_MAX - b ? INT64_MAX : a + b;
}

static inline int64_t fanfold_sub(int64_t a, int64_t b)
{
    return a - b;
}

static inline int64_t fanfold_mul(int64_t a, int64_t b)
{
    return a > 0 && b > 0 && a > INT64_MAX / b ? INT64_MAX : a * b;
}

static inline int64_t fanfold_div(int64_t a, int64_t b)
{
    return b > 0 ? a / b : 0;
}

static inline int64_t fanfold_mod(int64_t a, int64_t b)
{
    return b > 0 ? a % b : 0;
}

static inline int64_t fanfold_ceil_div(int64_t a, int64_t b)
{
    return b > 0 ? a / b + (a % b != 0) : 0;
}

static inline int64_t fanfold_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t fanfold_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t fanfold_power_of_two(int64_t n)
{
    int64_t power = 1;
    while (power < n && power < INT64_MAX / 2)
        power *= 2;
    return power;
}

int64_t fanfold_row_to_token(int64_t row, int64_t top_k)
{
    return fanfold_div(row, top_k);
}

int64_t fanfold_padded_rank(int64_t rank)
{
    return fanfold_mul(fanfold_ceil_div(rank, RANK_ALIGN), RANK_ALIGN);
}

int64_t fanfold_work_slots(int64_t rows, int64_t experts, int64_t tile)
{
    return fanfold_add(fanfold_div(rows, tile), experts);
}

int64_t fanfold_block_count(int64_t rows, int64_t experts, int64_t block_rows)
{
    if (experts == 0)
        return 0;
    return fanfold_div(fanfold_add(rows, fanfold_mul(fanfold_min(rows, experts), block_rows - 1)), block_rows);
}

int fanfold_plan_takes_one_launch(int64_t rows, int64_t experts)
{
    return rows <= ONE_LAUNCH_ROWS && fanfold_mul(rows, experts) <= ONE_LAUNCH_READS;
}

int64_t fanfold_plan_chunks(int64_t rows)
{
    int64_t chunk = fanfold_power_of_two(fanfold_ceil_div(rows, 128));
    return fanfold_ceil_div(rows, fanfold_min(2048, fanfold_max(256, chunk)));
}

int64_t fanfold_product_tile(int dtype, int64_t rows, int64_t experts)
{
    int64_t with_rows = fanfold_max(1, fanfold_min(rows, experts));
    if (dtype == FANFOLD_DTYPE_FP32)
        return PRODUCT_TILES[0];
    for (int i = 0; i < PRODUCT_TILE_COUNT - 1; i++)
        if (rows <= fanfold_mul(PRODUCT_MOST_ROWS[i], with_rows))
            return PRODUCT_TILES[i];
    return PRODUCT_TILES[PRODUCT_TILE_COUNT - 1];
}

int64_t fanfold_row_tile(int64_t rows, int64_t experts, int64_t adapter_slots)
{
    int64_t pairs = fanfold_max(1, fanfold_min(rows, fanfold_mul(experts, adapter_slots)));
    for (int i = 0; i < ROW_TILE_COUNT - 1; i++)
        if (fanfold_mul(2, rows) <= fanfold_mul(ROW_TILES[i], pairs))
            return ROW_TILES[i];
    return ROW_TILES[ROW_TILE_COUNT - 1];
}

int64_t fanfold_work_items(int64_t rows, int64_t experts, int64_t adapter_slots, int64_t tile)
{
    int64_t kinds = fanfold_mul(experts, fanfold_add(adapter_slots, 1));
    return fanfold_add(fanfold_div(rows, tile), fanfold_min(rows, kinds));
}

int fanfold_fold_takes_one_launch(int64_t max_rank)
{
    return fanfold_padded_rank(max_rank) <= RANK_TILE;
}

int64_t fanfold_tile_count(const int64_t *rows_of_pairs, int64_t pairs, int64_t tile)
{
    int64_t tiles = 0;
    for (int64_t i = 0; i < pairs; i++)
        tiles = fanfold_add(tiles, fanfold_ceil_div(rows_of_pairs[i], tile));
    return tiles;
}

void fanfold_worst_case_grid(int64_t rows, int64_t experts, int64_t adapter_slots, int64_t tile, int64_t columns,
                             int64_t block, int64_t *grid)
{
    grid[0] = fanfold_work_items(rows, experts, adapter_slots, tile);
    grid[1] = fanfold_ceil_div(columns, block);
}

void fanfold_exact_grid(const int64_t *rows_of_pairs, int64_t pairs, int64_t tile, int64_t columns, int64_t block,
                        int64_t *grid)
{
    grid[0] = fanfold_tile_count(rows_of_pairs, pairs, tile);
    grid[1] = fanfold_ceil_div(columns, block);
}

void fanfold_gather_grid(int64_t rows, int64_t columns, int64_t block, int64_t *grid)
{
    grid[0] = rows;
    grid[1] = fanfold_ceil_div(columns, block);
}

int fanfold_window(int64_t rows, int64_t cap, int64_t index, int64_t *first, int64_t *end, fanfold_error *error)
{
    if (first == NULL || end == NULL)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_window: %s is NULL", first == NULL ? "first" : "end");
    if (cap < 1)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_window: cap: found %lld, expected at least 1 row",
                    (long long)cap);
    if (rows < 0 || index < 0)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_window: %s: found %lld, expected at least 0",
                    rows < 0 ? "rows" : "index", (long long)(rows < 0 ? rows : index));
    *first = fanfold_min(fanfold_mul(index, cap), rows);
    *end = fanfold_min(fanfold_add(*first, cap), rows);
    return succeed(error);
}

int fanfold_pack_entries(const fanfold_entry *entries, int64_t count, int64_t capacity, uint64_t *a, uint64_t *b,
                         float *scale, int32_t *rank, int64_t *length, fanfold_error *error)
{
    int64_t found = 0;
    if (length == NULL || (entries == NULL && count > 0) || count < 0)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_pack_entries: %s",
                    length == NULL ? "length is NULL" : count < 0 ? "count is below 0" : "entries is NULL");
    for (int64_t i = 0; i < count; i++) {
        if (entries[i].expert < 0 || entries[i].expert > INT32_MAX || entries[i].rank < 1 || entries[i].rank > MOST_RANK)
            return fail(error, FANFOLD_INVALID_ARGUMENT,
                        "fanfold_pack_entries: found expert %lld, rank %d, expected an expert of at least 0 and a rank of "
                        "1 to %d",
                        (long long)entries[i].expert, (int)entries[i].rank, MOST_RANK);
        found = fanfold_max(found, entries[i].expert + 1);
    }
    *length = found;
    if (a == NULL && b == NULL && scale == NULL && rank == NULL)
        return succeed(error);
    if (a == NULL || b == NULL || scale == NULL || rank == NULL || capacity < found)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_pack_entries: found room for %lld experts, expected %lld",
                    (long long)(a && b && scale && rank ? capacity : 0), (long long)found);
    for (int64_t i = 0; i < found; i++) {
        a[i] = b[i] = 0;
        scale[i] = 0.0f;
        rank[i] = 0;
    }
    for (int64_t i = 0; i < count; i++) {
        a[entries[i].expert] = entries[i].a;
        b[entries[i].expert] = entries[i].b;
        scale[entries[i].expert] = entries[i].scale;
        rank[entries[i].expert] = entries[i].rank;
    }
    return succeed(error);
}

