/* One expert layer with LoRA, int4 weights in GPTQ's layout, bf16 activations: exported kernels in one CUDA graph.

   Usage: host EXPORT LAYER
   EXPORT: a folder of `fanfold export` with the ops plan_sort, grouped_int4, lora_order, lora_fold and combine.
   LAYER: sizes.txt, pairs.txt and the raw arrays that make_layer.py writes. The graph is captured once and replayed for
   each batch I of LAYER; results go to LAYER/outI.bin. */
#include "cuda.h"
#include "fanfold_kernels.h"

enum { FEW_ROWS = 512 }; /* up to here the library folds single rows */

static struct {
    int64_t batches, tokens, top_k, experts, hidden, intermediate, adapter_slots, max_rank;
} size;

static fanfold_buffer x, ids, weights, adapter_ids, out;                                         /* of a batch */
static fanfold_buffer up_codes, up_scales, down_codes, down_scales;                              /* of the layer */
static fanfold_buffer up_a, up_b, up_scale, up_rank, down_a, down_b, down_scale, down_rank;      /* its adapters */
static fanfold_buffer offsets, sorted_rows, positions, work, items, places, rows_of_places;      /* of the plan */
static fanfold_buffer y1, h, y2, unknown;
static const fanfold_buffer none;

static fanfold_error error;
static void check(int status)
{
    if (status != FANFOLD_OK) {
        fprintf(stderr, "%s: %s\n", fanfold_status_name(status), error.message);
        exit(1);
    }
}

static fanfold_buffer room(int64_t bytes)
{
    fanfold_buffer made = {0, (uint64_t)bytes};
    CUDA(cuda.alloc(&made.address, (size_t)(bytes > 0 ? bytes : 1)));
    CUDA(cuda.fill(made.address, 0xff, (size_t)bytes)); /* NaN, and ids of no expert: nothing stale may be read */
    return made;
}

static FILE *open_file(const char *folder, const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    return file;
}

static void read_into(fanfold_buffer buffer, const char *folder, const char *name)
{
    FILE *file = open_file(folder, name, "rb");
    char *bytes = malloc((size_t)buffer.bytes + 1);
    if (bytes == NULL || fread(bytes, 1, (size_t)buffer.bytes + 1, file) != buffer.bytes) {
        fprintf(stderr, "%s/%s: expected %llu bytes\n", folder, name, (unsigned long long)buffer.bytes);
        exit(1);
    }
    fclose(file);
    CUDA(cuda.to_device(buffer.address, bytes, (size_t)buffer.bytes));
    free(bytes);
}

static fanfold_buffer from_file(int64_t bytes, const char *folder, const char *name)
{
    fanfold_buffer made = room(bytes);
    read_into(made, folder, name);
    return made;
}

static void read_sizes(const char *folder)
{
    FILE *file = open_file(folder, "sizes.txt", "r");
    int64_t *all[] = {&size.batches, &size.tokens, &size.top_k, &size.experts, &size.hidden, &size.intermediate,
                      &size.adapter_slots, &size.max_rank};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        long long found;
        if (fscanf(file, "%*s %lld", &found) != 1) {
            fprintf(stderr, "%s/sizes.txt: no line %zu\n", folder, i);
            exit(1);
        }
        *all[i] = found;
    }
    fclose(file);
}

/* One array of a table: values of `length` experts at the place of a projection and slot. */
static void write_entries(fanfold_buffer table, int64_t row, const void *values, int64_t length, size_t bytes)
{
    device_address at = table.address + (uint64_t)(row * size.experts) * bytes;
    CUDA(cuda.to_device(at, values, (size_t)length * bytes));
}

/* Pairs lie in pairs.bin in the order of pairs.txt: slot, projection (0 gate, 1 up, 2 down), expert, rank, bits of the
   scale. A is [padded rank, K], B [N, padded rank]. */
static void read_pairs(const char *folder)
{
    FILE *list = open_file(folder, "pairs.txt", "r"), *data = open_file(folder, "pairs.bin", "rb");
    int64_t capacity = 3 * size.adapter_slots * size.experts, count = 0;
    fanfold_entry *entries = calloc((size_t)capacity, sizeof *entries);
    int *rows = calloc((size_t)capacity, sizeof *rows); /* projection * slots + slot */
    int slot, projection, expert, rank;
    unsigned bits;
    while (fscanf(list, "%d %d %d %d %u", &slot, &projection, &expert, &rank, &bits) == 5 && count < capacity) {
        int64_t inputs = projection == 2 ? size.intermediate : size.hidden;
        int64_t outputs = projection == 2 ? size.hidden : size.intermediate;
        int64_t padded = fanfold_padded_rank(rank), bytes = 2 * padded * (inputs + outputs);
        fanfold_buffer pair = room(bytes);
        char *values = malloc((size_t)bytes);
        if (values == NULL || fread(values, 1, (size_t)bytes, data) != (size_t)bytes) {
            fprintf(stderr, "%s/pairs.bin: too short\n", folder);
            exit(1);
        }
        CUDA(cuda.to_device(pair.address, values, (size_t)bytes));
        free(values);
        entries[count].expert = expert;
        entries[count].a = pair.address;
        entries[count].b = pair.address + (uint64_t)(2 * padded * inputs);
        memcpy(&entries[count].scale, &bits, sizeof bits);
        entries[count].rank = rank;
        rows[count++] = projection * (int)size.adapter_slots + slot;
    }
    fclose(list);
    fclose(data);

    uint64_t *a = calloc((size_t)size.experts, sizeof *a), *b = calloc((size_t)size.experts, sizeof *b);
    float *scale = calloc((size_t)size.experts, sizeof *scale);
    int32_t *ranks = calloc((size_t)size.experts, sizeof *ranks);
    fanfold_entry *of_row = calloc((size_t)capacity, sizeof *of_row);
    for (int row = 0; row < 3 * size.adapter_slots; row++) {
        int64_t found = 0, length, down = row >= 2 * size.adapter_slots;
        for (int64_t i = 0; i < count; i++)
            if (rows[i] == row)
                of_row[found++] = entries[i];
        check(fanfold_pack_entries(of_row, found, size.experts, a, b, scale, ranks, &length, &error));
        int64_t at = down ? row - 2 * size.adapter_slots : row;
        write_entries(down ? down_a : up_a, at, a, length, sizeof *a);
        write_entries(down ? down_b : up_b, at, b, length, sizeof *b);
        write_entries(down ? down_scale : up_scale, at, scale, length, sizeof *scale);
        write_entries(down ? down_rank : up_rank, at, ranks, length, sizeof *ranks);
    }
    free(entries), free(rows), free(of_row), free(a), free(b), free(scale), free(ranks);
}

static fanfold_buffer table_of(int64_t projections, int64_t bytes)
{
    fanfold_buffer made = room(projections * size.adapter_slots * size.experts * bytes);
    CUDA(cuda.fill(made.address, 0, (size_t)made.bytes)); /* no pairs */
    return made;
}

static void make_buffers(const char *folder)
{
    int64_t rows = size.tokens * size.top_k, tile = fanfold_product_tile(FANFOLD_DTYPE_BF16, rows, size.experts);
    int64_t matrix = size.experts * size.hidden * size.intermediate;
    int64_t fold_tile = fanfold_row_tile(rows, size.experts, size.adapter_slots);
    x = room(2 * size.tokens * size.hidden), ids = room(4 * rows), weights = room(4 * rows);
    adapter_ids = room(4 * size.tokens), out = room(2 * size.tokens * size.hidden);
    up_codes = from_file(matrix, folder, "gate_up_qweight.bin");
    up_scales = from_file(4 * (matrix / 128), folder, "gate_up_scales.bin");
    down_codes = from_file(matrix / 2, folder, "down_qweight.bin");
    down_scales = from_file(2 * (matrix / 128), folder, "down_scales.bin");
    up_a = table_of(2, 8), up_b = table_of(2, 8), up_scale = table_of(2, 4), up_rank = table_of(2, 4);
    down_a = table_of(1, 8), down_b = table_of(1, 8), down_scale = table_of(1, 4), down_rank = table_of(1, 4);
    read_pairs(folder);
    offsets = room(4 * (size.experts + 1)), sorted_rows = room(4 * rows), positions = room(4 * rows);
    work = room(16 * fanfold_work_slots(rows, size.experts, tile));
    items = room(16 * fanfold_work_items(rows, size.experts, size.adapter_slots, fold_tile));
    places = room(4 * rows), rows_of_places = room(4 * rows);
    y1 = room(4 * rows * size.intermediate), h = room(2 * rows * size.intermediate), y2 = room(2 * rows * size.hidden);
    unknown = room(4);
    CUDA(cuda.fill(unknown.address, 0, 4));
}

/* The fold of gate_up (onto y1, and through the activation into h) or of down (onto y2). */
static void fold(fanfold_context *kernels, int projection, void *stream)
{
    int64_t rows = size.tokens * size.top_k, gate_up = projection == FANFOLD_PROJECTION_GATE_UP;
    int few = rows <= FEW_ROWS, planned = size.tokens > 1;
    fanfold_lora_fold_arguments call = {
        .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .adapter_slots = size.adapter_slots,
        .table_experts = size.experts, .max_rank = size.max_rank,
        .outputs = gate_up ? size.intermediate : size.hidden, .inputs = gate_up ? size.hidden : size.intermediate,
        .dtype = FANFOLD_DTYPE_BF16, .projection = projection,
        .activation = gate_up ? FANFOLD_ACTIVATION_SILU : FANFOLD_ACTIVATION_NONE,
        .tile = few ? 8 : (int32_t)fanfold_row_tile(rows, size.experts, size.adapter_slots),
        .x = gate_up ? x : h, .y = gate_up ? y1 : y2, .h = gate_up ? h : none,
        .table_a = gate_up ? up_a : down_a, .table_b = gate_up ? up_b : down_b,
        .table_scale = gate_up ? up_scale : down_scale, .table_rank = gate_up ? up_rank : down_rank,
        .items = few ? none : items, .places = few ? none : places, .rows_of_places = few ? none : rows_of_places,
        .topk_ids = ids, .adapter_ids = adapter_ids, .sorted_rows = planned ? sorted_rows : none, .unknown = unknown};
    check(fanfold_lora_fold(kernels, &call, stream, &error));
}

/* What the library launches for this many tokens. */
static void run_layer(fanfold_context *kernels, void *stream)
{
    int64_t rows = size.tokens * size.top_k;
    int32_t tile = (int32_t)fanfold_product_tile(FANFOLD_DTYPE_BF16, rows, size.experts);
    int planned = size.tokens > 1;
    if (planned) {
        fanfold_plan_sort_arguments plan = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .tile = tile, .topk_ids = ids,
            .expert_offsets = offsets, .sorted_rows = sorted_rows, .positions = positions, .work = work};
        fanfold_grouped_int4_gate_up_arguments up = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .outputs = size.intermediate,
            .inputs = size.hidden, .adapter_slots = size.adapter_slots, .dtype = FANFOLD_DTYPE_BF16,
            .format = FANFOLD_FORMAT_GPTQ4_G128, .activation = FANFOLD_ACTIVATION_SILU, .tile = tile, .x = x,
            .codes = up_codes, .scales = up_scales, .y1 = y1, .adapter_ids = adapter_ids, .work = work,
            .sorted_rows = sorted_rows, .out = h};
        check(fanfold_plan_sort(kernels, &plan, stream, &error));
        check(fanfold_grouped_int4_gate_up(kernels, &up, stream, &error));
    } else {
        fanfold_grouped_int4_gather_gate_up_arguments up = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .outputs = size.intermediate,
            .inputs = size.hidden, .adapter_slots = size.adapter_slots, .dtype = FANFOLD_DTYPE_BF16,
            .format = FANFOLD_FORMAT_GPTQ4_G128, .activation = FANFOLD_ACTIVATION_SILU, .x = x, .codes = up_codes,
            .scales = up_scales, .y1 = y1, .adapter_ids = adapter_ids, .topk_ids = ids, .out = h};
        check(fanfold_grouped_int4_gather_gate_up(kernels, &up, stream, &error));
    }
    if (rows > FEW_ROWS) {
        fanfold_lora_order_arguments order = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .adapter_slots = size.adapter_slots,
            .tile = (int32_t)fanfold_row_tile(rows, size.experts, size.adapter_slots), .expert_offsets = offsets,
            .sorted_rows = sorted_rows, .adapter_ids = adapter_ids, .items = items, .places = places,
            .rows_of_places = rows_of_places, .unknown = unknown};
        check(fanfold_lora_order(kernels, &order, stream, &error));
    }
    fold(kernels, FANFOLD_PROJECTION_GATE_UP, stream);
    if (planned) {
        fanfold_grouped_int4_down_arguments down = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .outputs = size.hidden,
            .inputs = size.intermediate, .dtype = FANFOLD_DTYPE_BF16, .format = FANFOLD_FORMAT_GPTQ4_G128, .tile = tile,
            .x = h, .codes = down_codes, .scales = down_scales, .work = work, .sorted_rows = sorted_rows, .out = y2};
        check(fanfold_grouped_int4_down(kernels, &down, stream, &error));
    } else {
        fanfold_grouped_int4_gather_down_arguments down = {
            .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .outputs = size.hidden,
            .inputs = size.intermediate, .dtype = FANFOLD_DTYPE_BF16, .format = FANFOLD_FORMAT_GPTQ4_G128, .x = h,
            .codes = down_codes, .scales = down_scales, .topk_ids = ids, .out = y2};
        check(fanfold_grouped_int4_gather_down(kernels, &down, stream, &error));
    }
    fold(kernels, FANFOLD_PROJECTION_DOWN, stream);
    fanfold_combine_arguments sum = {
        .tokens = size.tokens, .top_k = size.top_k, .experts = size.experts, .outputs = size.hidden,
        .dtype = FANFOLD_DTYPE_BF16, .y2 = y2, .topk_ids = ids, .topk_weights = weights, .out = out};
    check(fanfold_combine(kernels, &sum, stream, &error));
}

static void read_batch(const char *folder, int64_t batch)
{
    struct {
        const char *name;
        fanfold_buffer buffer;
    } parts[] = {{"hidden", x}, {"topk_ids", ids}, {"topk_weights", weights}, {"adapter_ids", adapter_ids}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s%d.bin", parts[i].name, (int)batch);
        read_into(parts[i].buffer, folder, name);
    }
}

static void write_result(const char *folder, int64_t batch)
{
    char name[64], *bytes = malloc((size_t)out.bytes);
    snprintf(name, sizeof name, "out%d.bin", (int)batch);
    FILE *file = open_file(folder, name, "wb");
    CUDA(cuda.to_host(bytes, out.address, (size_t)out.bytes));
    if (fwrite(bytes, 1, (size_t)out.bytes, file) != out.bytes || fclose(file) != 0)
        exit(1);
    free(bytes);
}

int main(int count, char **arguments)
{
    void *device_context, *stream, *graph, *ready;
    fanfold_context *kernels;
    int device;
    if (count != 3) {
        fprintf(stderr, "usage: %s EXPORT LAYER\n", arguments[0]);
        return 2;
    }
    load_cuda();
    CUDA(cuda.init(0));
    CUDA(cuda.device_get(&device, 0));
    CUDA(cuda.retain(&device_context, device));
    CUDA(cuda.set_current(device_context));
    CUDA(cuda.stream_create(&stream, 1));
    check(fanfold_open(arguments[1], &kernels, &error));
    check(fanfold_load_all(kernels, &error)); /* no module is loaded while a graph is captured */
    read_sizes(arguments[2]);
    make_buffers(arguments[2]);

    CUDA(cuda.begin_capture(stream, 0));
    run_layer(kernels, stream);
    CUDA(cuda.end_capture(stream, &graph));
    CUDA(cuda.instantiate(&ready, graph, 0));
    for (int64_t batch = 0; batch < size.batches; batch++) {
        read_batch(arguments[2], batch);
        CUDA(cuda.fill(out.address, 0xff, (size_t)out.bytes));
        CUDA(cuda.graph_launch(ready, stream));
        CUDA(cuda.synchronize(stream));
        write_result(arguments[2], batch);
    }
    fanfold_close(kernels);
    printf("%lld batches of %lld tokens\n", (long long)size.batches, (long long)size.tokens);
    return 0;
}
