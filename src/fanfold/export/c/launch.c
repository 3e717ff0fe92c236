/* Metadata and operands are checked, then a kernel is loaded (once) and launched. */

int fanfold_check_kernel(const fanfold_kernel *kernel, fanfold_error *error)
{
    const char *missing = NULL;
    if (kernel == NULL)
        return fail(error, FANFOLD_BAD_METADATA, "kernel is NULL");
    if (kernel->id == NULL)
        return fail(error, FANFOLD_BAD_METADATA, "a kernel without an id");
    if (kernel->function == NULL)
        missing = "function";
    else if (kernel->symbol == NULL || kernel->symbol[0] == '\0')
        missing = "symbol";
    else if (kernel->file == NULL || kernel->file[0] == '\0')
        missing = "file";
    else if (kernel->parameters == NULL || kernel->parameter_count < 1)
        missing = "parameters";
    else if (kernel->needs == NULL || kernel->need_count < 1)
        missing = "needs";
    if (missing != NULL)
        return fail(error, FANFOLD_BAD_METADATA, "%s: no %s", kernel->id, missing);
    if (kernel->warps < 1 || kernel->warps > 32 || (kernel->warps & (kernel->warps - 1)) != 0)
        return fail(error, FANFOLD_BAD_METADATA, "%s: found %d warps, expected a power of two from 1 to 32", kernel->id,
                    (int)kernel->warps);
    if (kernel->shared_bytes < 0 || kernel->shared_bytes > 1 << 20)
        return fail(error, FANFOLD_BAD_METADATA, "%s: found %d bytes of shared memory, expected 0 to %d", kernel->id,
                    (int)kernel->shared_bytes, 1 << 20);
    if (kernel->parameter_count > MOST_PARAMETERS)
        return fail(error, FANFOLD_BAD_METADATA, "%s: found %d parameters, expected at most %d", kernel->id,
                    (int)kernel->parameter_count, MOST_PARAMETERS);
    if (kernel->cubin_bytes < 1)
        return fail(error, FANFOLD_BAD_METADATA, "%s: found %lld bytes of machine code", kernel->id,
                    (long long)kernel->cubin_bytes);
    for (int32_t i = 0; i < kernel->parameter_count; i++)
        if (kernel->parameters[i].kind == '\0' || strchr("pilfs", kernel->parameters[i].kind) == NULL ||
            kernel->parameters[i].multiple < 1)
            return fail(error, FANFOLD_BAD_METADATA, "%s: parameter %d is of no kind, or a multiple of 0", kernel->id,
                        (int)i);
    return FANFOLD_OK;
}

static int check_indices(const fanfold_kernel *kernel, const fanfold_operands *operands, fanfold_error *error)
{
    int good = operands->value_count > 0 && operands->values != NULL && operands->formulas != NULL &&
               operands->buffers != NULL && operands->buffer_names != NULL;
    for (int i = 0; good && i < 3; i++)
        good = kernel->grid[i] < operands->value_count;
    for (int32_t i = 0; good && i < kernel->need_count; i++)
        good = kernel->needs[i].buffer < operands->buffer_count && kernel->needs[i].elements < operands->value_count;
    for (int32_t i = 0; good && i < kernel->parameter_count; i++) {
        const fanfold_parameter *p = &kernel->parameters[i];
        good = p->kind == 's' || p->index < (p->kind == 'p'   ? operands->buffer_count
                                             : p->kind == 'f' ? operands->number_count
                                                              : operands->value_count);
    }
    if (!good)
        return fail(error, FANFOLD_BAD_METADATA, "%s: names a value or buffer that the launch has not", kernel->id);
    return FANFOLD_OK;
}

static int check_buffers(const fanfold_kernel *kernel, const fanfold_operands *operands, fanfold_error *error)
{
    for (int32_t i = 0; i < kernel->need_count; i++) {
        const fanfold_need *need = &kernel->needs[i];
        const char *name = operands->buffer_names[need->buffer];
        fanfold_buffer buffer = operands->buffers[need->buffer];
        int64_t bytes = fanfold_mul(operands->values[need->elements], need->element_bytes);
        if (buffer.address == 0 && bytes > 0)
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s: found address 0, expected %lld bytes (%s elements)",
                        kernel->function, name, (long long)bytes, operands->formulas[need->elements]);
        if (buffer.address % 16 != 0)
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s: found address %llu, expected a multiple of 16 bytes",
                        kernel->function, name, (unsigned long long)buffer.address);
        if (buffer.bytes < (uint64_t)bytes)
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s: found %llu bytes, expected %lld (%s elements of %d bytes)",
                        kernel->function, name, (unsigned long long)buffer.bytes, (long long)bytes,
                        operands->formulas[need->elements], (int)need->element_bytes);
    }
    return FANFOLD_OK;
}

static int check_values(const fanfold_kernel *kernel, const fanfold_operands *operands, fanfold_error *error)
{
    static const int64_t most_programs[3] = {INT32_MAX, 65535, 65535};
    for (int32_t i = 0; i < kernel->parameter_count; i++) {
        const fanfold_parameter *p = &kernel->parameters[i];
        int64_t value = p->kind == 'i' || p->kind == 'l' ? operands->values[p->index] : 0;
        if (p->kind == 'i' && (value > INT32_MAX || value < INT32_MIN))
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s (%s): found %lld, expected at most %d", kernel->function,
                        operands->formulas[p->index], p->name, (long long)value, INT32_MAX);
        if (value % p->multiple != 0)
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s (%s): found %lld, expected a multiple of %d",
                        kernel->function, operands->formulas[p->index], p->name, (long long)value, (int)p->multiple);
    }
    for (int i = 0; i < 3; i++) {
        int64_t programs = operands->values[kernel->grid[i]];
        if (programs < 0 || programs > most_programs[i])
            return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: grid %d (%s): found %lld programs, expected at most %lld",
                        kernel->function, i, operands->formulas[kernel->grid[i]], (long long)programs,
                        (long long)most_programs[i]);
    }
    return FANFOLD_OK;
}

static int read_cubin(const char *folder, const fanfold_kernel *kernel, char **bytes, fanfold_error *error)
{
    size_t length = strlen(folder) + strlen(kernel->file) + 2, found = 0;
    char *path = malloc(length);
    FILE *file;
    *bytes = malloc((size_t)kernel->cubin_bytes + 1);
    if (path == NULL || *bytes == NULL) {
        free(path);
        return fail(error, FANFOLD_NO_MEMORY, "%s: no memory for %lld bytes of machine code", kernel->id,
                    (long long)kernel->cubin_bytes);
    }
    snprintf(path, length, "%s/%s", folder, kernel->file);
    file = fopen(path, "rb");
    free(path);
    if (file == NULL)
        return fail(error, FANFOLD_FILE, "%s/%s: %s", folder, kernel->file, strerror(errno));
    found = fread(*bytes, 1, (size_t)kernel->cubin_bytes + 1, file);
    fclose(file);
    if (found != (size_t)kernel->cubin_bytes || memcmp(*bytes, "\177ELF", 4) != 0)
        return fail(error, FANFOLD_FILE, "%s/%s: not the machine code that was exported with this file (%lld bytes)", folder,
                    kernel->file, (long long)kernel->cubin_bytes);
    return FANFOLD_OK;
}

static int load(fanfold_context *context, const fanfold_kernel *kernel, void **function, fanfold_error *error)
{
    const driver *cuda = &context->cuda;
    loaded made = {kernel, NULL, NULL};
    char *bytes = NULL;
    int status, code;
    if (cuda->library == NULL)
        return fail(error, FANFOLD_NO_DRIVER, "%s: opened without a GPU; open the folder where there is one", kernel->id);
    for (int32_t i = 0; i < context->count; i++)
        if (context->kernels[i].kernel == kernel) {
            *function = context->kernels[i].function;
            return FANFOLD_OK;
        }
    if (context->count == context->capacity) {
        int32_t capacity = 2 * context->capacity + 16;
        loaded *grown = realloc(context->kernels, (size_t)capacity * sizeof *grown);
        if (grown == NULL)
            return fail(error, FANFOLD_NO_MEMORY, "%s: no memory for another kernel", kernel->id);
        context->kernels = grown;
        context->capacity = capacity;
    }
    status = read_cubin(context->folder, kernel, &bytes, error);
    if (status == FANFOLD_OK && (code = cuda->load_data(&made.module, bytes)) != 0)
        status = driver_failed(cuda, code, "cuModuleLoadData", kernel->id, error);
    free(bytes);
    if (status != FANFOLD_OK)
        return status;
    if ((code = cuda->get_function(&made.function, made.module, kernel->symbol)) != 0)
        status = driver_failed(cuda, code, "cuModuleGetFunction", kernel->id, error);
    else if (kernel->shared_bytes > SHARED_WITHOUT_OPTIN &&
             (code = cuda->set_attribute(made.function, DYNAMIC_SHARED, kernel->shared_bytes)) != 0)
        status = driver_failed(cuda, code, "cuFuncSetAttribute", kernel->id, error);
    else if (cuda->load_function != NULL && (code = cuda->load_function(made.function)) != 0)
        status = driver_failed(cuda, code, "cuFuncLoad", kernel->id, error);
    if (status != FANFOLD_OK) {
        cuda->unload(made.module);
        return status;
    }
    context->kernels[context->count++] = made;
    *function = made.function;
    return FANFOLD_OK;
}

static int check_gpu(const fanfold_context *context, const fanfold_kernel *kernel, fanfold_error *error)
{
    if (kernel->arch != context->arch)
        return fail(error, FANFOLD_NOT_EXPORTED, "%s: compiled for sm_%d, this GPU is sm_%d", kernel->id, (int)kernel->arch,
                    (int)context->arch);
    if (kernel->shared_bytes > context->most_shared)
        return fail(error, FANFOLD_BAD_METADATA, "%s: found %d bytes of shared memory, expected at most %d on this GPU",
                    kernel->id, (int)kernel->shared_bytes, (int)context->most_shared);
    return FANFOLD_OK;
}

int fanfold_load_all(fanfold_context *context, fanfold_error *error)
{
    int32_t count;
    const fanfold_kernel *kernels = fanfold_kernels(&count);
    if (context == NULL)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_load_all: context is NULL");
    for (int32_t i = 0; i < count; i++) {
        void *function;
        int status = FANFOLD_OK;
        if (kernels[i].arch == context->arch && (status = check_gpu(context, &kernels[i], error)) == FANFOLD_OK)
            status = load(context, &kernels[i], &function, error);
        if (status != FANFOLD_OK)
            return status;
    }
    return succeed(error);
}

int fanfold_launch(fanfold_context *context, const fanfold_kernel *kernel, const fanfold_operands *operands,
                   fanfold_stream stream, fanfold_error *error)
{
    union {
        uint64_t address;
        int32_t word;
        int64_t wide;
        float number;
    } held[MOST_PARAMETERS];
    void *pointers[MOST_PARAMETERS];
    void *function = NULL;
    unsigned grid[3];
    int status = fanfold_check_kernel(kernel, error), code;
    if (status != FANFOLD_OK)
        return status;
    if (context == NULL || operands == NULL)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s is NULL", kernel->function,
                    context == NULL ? "context" : "operands");
    if ((status = check_indices(kernel, operands, error)) != FANFOLD_OK ||
        (status = check_buffers(kernel, operands, error)) != FANFOLD_OK ||
        (status = check_values(kernel, operands, error)) != FANFOLD_OK ||
        (status = check_gpu(context, kernel, error)) != FANFOLD_OK)
        return status;
    for (int i = 0; i < 3; i++)
        grid[i] = (unsigned)operands->values[kernel->grid[i]];
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)
        return succeed(error);
    if ((status = load(context, kernel, &function, error)) != FANFOLD_OK)
        return status;
    for (int32_t i = 0; i < kernel->parameter_count; i++) {
        const fanfold_parameter *p = &kernel->parameters[i];
        memset(&held[i], 0, sizeof held[i]);
        if (p->kind == 'p')
            held[i].address = operands->buffers[p->index].address;
        else if (p->kind == 'i')
            held[i].word = (int32_t)operands->values[p->index];
        else if (p->kind == 'l')
            held[i].wide = operands->values[p->index];
        else if (p->kind == 'f')
            held[i].number = operands->numbers[p->index];
        pointers[i] = &held[i];
    }
    code = context->cuda.launch(function, grid[0], grid[1], grid[2], 32 * (unsigned)kernel->warps, 1, 1,
                                (unsigned)kernel->shared_bytes, stream, pointers, NULL);
    if (code != 0)
        return driver_failed(&context->cuda, code, "cuLaunchKernel", kernel->id, error);
    return succeed(error);
}

