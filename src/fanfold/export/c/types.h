/* What a function returns; the error says more. */
enum {
    FANFOLD_OK = 0,
    FANFOLD_INVALID_ARGUMENT = 1, /* an argument is missing, too small, not aligned, or out of range */
    FANFOLD_NOT_EXPORTED = 2,     /* no kernel of this folder is for these choices or this GPU */
    FANFOLD_BAD_METADATA = 3,     /* what is said of a kernel can't be launched */
    FANFOLD_FILE = 4,             /* a file of the folder is missing or not as it was written */
    FANFOLD_NO_DRIVER = 5,        /* no libcuda here, or no current CUDA context */
    FANFOLD_DRIVER = 6,           /* the CUDA driver refused */
    FANFOLD_NO_MEMORY = 7
};

typedef struct fanfold_error {
    int status;
    char message[480];
} fanfold_error;

/* Memory of the device. `bytes` is what is there from `address` on; an address of 0 leaves an optional buffer out. */
typedef struct fanfold_buffer {
    uint64_t address;
    uint64_t bytes;
} fanfold_buffer;

typedef void *fanfold_stream; /* a CUstream */

/* The kernels of one folder, for the GPU of the CUDA context that was current when it was opened. A context may be used
   by one thread at a time. Every function takes an error to fill, or NULL. */
typedef struct fanfold_context fanfold_context;

int fanfold_open(const char *folder, fanfold_context **context, fanfold_error *error);
/* The same without a GPU, for kernels of compute capability `arch`, e.g. 90: functions check their arguments, and return
   FANFOLD_NO_DRIVER where they would launch. */
int fanfold_open_without_gpu(const char *folder, int arch, fanfold_context **context, fanfold_error *error);
/* Loads every kernel for this GPU now, so that no later call does: before a CUDA graph is captured. */
int fanfold_load_all(fanfold_context *context, fanfold_error *error);
/* Unloads the kernels; nothing may run them any more. */
void fanfold_close(fanfold_context *context);
/* E.g. "INVALID_ARGUMENT". */
const char *fanfold_status_name(int status);

/* One argument of a kernel, in order. */
typedef struct fanfold_parameter {
    char kind;       /* 'p' a buffer's address, 'i' int32, 'l' int64, 'f' float, 's' a scratch pointer, always null */
    uint16_t index;  /* of the buffer, value or number */
    uint16_t multiple;
    const char *name;
} fanfold_parameter;

/* What a kernel expects of a buffer. */
typedef struct fanfold_need {
    uint16_t buffer;
    uint16_t elements; /* index of the value */
    uint16_t element_bytes;
} fanfold_need;

/* What is said of one compiled kernel, as in manifest.json. */
typedef struct fanfold_kernel {
    const char *id;
    const char *function;
    const char *symbol;
    const char *file;
    int32_t arch;
    int32_t warps;
    int32_t shared_bytes;
    int64_t cubin_bytes;
    const int32_t *choices;
    int32_t choice_count;
    const fanfold_parameter *parameters;
    int32_t parameter_count;
    const fanfold_need *needs;
    int32_t need_count;
    uint16_t grid[3]; /* indices of values */
} fanfold_kernel;

/* What a launch is given: values of formulas with their texts, buffers and numbers with their names. */
typedef struct fanfold_operands {
    const int64_t *values;
    const char *const *formulas;
    int32_t value_count;
    const fanfold_buffer *buffers;
    const char *const *buffer_names;
    int32_t buffer_count;
    const float *numbers;
    int32_t number_count;
} fanfold_operands;

/* All kernels of this file, for every GPU. */
const fanfold_kernel *fanfold_kernels(int32_t *count);
/* Whether the metadata can be launched. */
int fanfold_check_kernel(const fanfold_kernel *kernel, fanfold_error *error);
/* Checks metadata and operands, then launches once on the stream; a grid of no programs launches nothing. The typed
   functions below end here. */
int fanfold_launch(fanfold_context *context, const fanfold_kernel *kernel, const fanfold_operands *operands,
                   fanfold_stream stream, fanfold_error *error);

/* Sizes of plans, grids and windows: what fanfold's Python functions of the same names give. Arguments are at least 0,
   tiles and columns at least 1. */
int64_t fanfold_row_to_token(int64_t row, int64_t top_k);
int64_t fanfold_padded_rank(int64_t rank);
int64_t fanfold_work_slots(int64_t rows, int64_t experts, int64_t tile);           /* slots of plan_sort's work list */
int64_t fanfold_block_count(int64_t rows, int64_t experts, int64_t block_rows);    /* of a block-aligned plan */
int fanfold_plan_takes_one_launch(int64_t rows, int64_t experts);                  /* else plan_count and plan_place */
int64_t fanfold_plan_chunks(int64_t rows);                                         /* of plan_count */
int64_t fanfold_product_tile(int dtype, int64_t rows, int64_t experts);            /* `tile` of the plan and products */
int64_t fanfold_row_tile(int64_t rows, int64_t experts, int64_t adapter_slots);    /* `tile` of lora_order */
int64_t fanfold_work_items(int64_t rows, int64_t experts, int64_t adapter_slots, int64_t tile);
int fanfold_fold_takes_one_launch(int64_t max_rank);                               /* else lora_shrink, lora_expand */
/* Tiles of the rows of each (expert, slot). */
int64_t fanfold_tile_count(const int64_t *rows_of_pairs, int64_t pairs, int64_t tile);
/* Programs of a launch over work items: for any routing, for a known one, and for single rows; grid[2]. */
void fanfold_worst_case_grid(int64_t rows, int64_t experts, int64_t adapter_slots, int64_t tile, int64_t columns,
                             int64_t block, int64_t *grid);
void fanfold_exact_grid(const int64_t *rows_of_pairs, int64_t pairs, int64_t tile, int64_t columns, int64_t block,
                        int64_t *grid);
void fanfold_gather_grid(int64_t rows, int64_t columns, int64_t block, int64_t *grid);
/* Window `index` of those of at most `cap` positions that cover [0, rows) once, in order:
   for (i = 0; (status = fanfold_window(rows, cap, i, &first, &end, &error)) == FANFOLD_OK && first < end; i++) ...
   Behind the last one first == end. */
int fanfold_window(int64_t rows, int64_t cap, int64_t index, int64_t *first, int64_t *end, fanfold_error *error);

/* One pair of an adapter. */
typedef struct fanfold_entry {
    int64_t expert;
    uint64_t a;
    uint64_t b;
    float scale;
    int32_t rank;
} fanfold_entry;

/* Entries by expert, for one slot and projection of a table: arrays of `length` = largest expert + 1, gaps hold 0; of two
   entries for one expert the last wins. Without entries the length is 0 and there is nothing to write. With NULL for the
   arrays the length alone is given; `capacity` is the room that they have. */
int fanfold_pack_entries(const fanfold_entry *entries, int64_t count, int64_t capacity, uint64_t *a, uint64_t *b,
                         float *scale, int32_t *rank, int64_t *length, fanfold_error *error);

