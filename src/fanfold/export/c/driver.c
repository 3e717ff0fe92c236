/* Errors, and the CUDA driver: loaded when a folder is opened, so that this file builds where there is none. */

static int fail(fanfold_error *error, int status, const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        error->status = status;
        va_start(arguments, format);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
    }
    return status;
}

static int succeed(fanfold_error *error)
{
    if (error != NULL) {
        error->status = FANFOLD_OK;
        error->message[0] = '\0';
    }
    return FANFOLD_OK;
}

const char *fanfold_status_name(int status)
{
    static const char *const names[] = {"OK",   "INVALID_ARGUMENT", "NOT_EXPORTED", "BAD_METADATA",
                                        "FILE", "NO_DRIVER",        "DRIVER",       "NO_MEMORY"};
    return status >= 0 && status <= FANFOLD_NO_MEMORY ? names[status] : "UNKNOWN";
}

typedef struct driver {
    void *library;
    int (*init)(unsigned);
    int (*get_current)(void **);
    int (*get_device)(int *);
    int (*get_attribute)(int *, int, int);
    int (*load_data)(void **, const void *);
    int (*unload)(void *);
    int (*get_function)(void **, void *, const char *);
    int (*set_attribute)(void *, int, int);
    int (*load_function)(void *); /* NULL before CUDA 12.4, where getting a function loads it */
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*error_name)(int, const char **);
} driver;

typedef struct loaded {
    const fanfold_kernel *kernel;
    void *module;
    void *function;
} loaded;

struct fanfold_context {
    driver cuda;
    char *folder;
    int32_t arch;
    int32_t most_shared;
    loaded *kernels;
    int32_t count, capacity;
};

enum { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, MOST_SHARED_OPTIN = 97, DYNAMIC_SHARED = 8, SHARED_WITHOUT_OPTIN = 49152 };

static int driver_failed(const driver *cuda, int code, const char *function, const char *what, fanfold_error *error)
{
    const char *name = NULL;
    cuda->error_name(code, &name);
    return fail(error, FANFOLD_DRIVER, "%s: %s returned %d (%s)", what, function, code, name ? name : "unknown");
}

static int find_symbol(driver *cuda, const char *name, void *function)
{
    void *found = dlsym(cuda->library, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast from an object pointer to a function's */
    return found != NULL;
}

static int open_driver(driver *cuda, fanfold_error *error)
{
    struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"cuInit", &cuda->init},
        {"cuCtxGetCurrent", &cuda->get_current},
        {"cuCtxGetDevice", &cuda->get_device},
        {"cuDeviceGetAttribute", &cuda->get_attribute},
        {"cuModuleLoadData", &cuda->load_data},
        {"cuModuleUnload", &cuda->unload},
        {"cuModuleGetFunction", &cuda->get_function},
        {"cuFuncSetAttribute", &cuda->set_attribute},
        {"cuLaunchKernel", &cuda->launch},
        {"cuGetErrorName", &cuda->error_name},
    };
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW);
    if (cuda->library == NULL)
        return fail(error, FANFOLD_NO_DRIVER, "libcuda.so.1: %s; install an NVIDIA driver", dlerror());
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!find_symbol(cuda, wanted[i].name, wanted[i].function))
            return fail(error, FANFOLD_NO_DRIVER, "libcuda.so.1 has no %s; install a newer driver", wanted[i].name);
    find_symbol(cuda, "cuFuncLoad", &cuda->load_function);
    return FANFOLD_OK;
}

static int has_arch(int32_t arch)
{
    int32_t count;
    const fanfold_kernel *kernels = fanfold_kernels(&count);
    for (int32_t i = 0; i < count; i++)
        if (kernels[i].arch == arch)
            return 1;
    return 0;
}

static int ask_device(fanfold_context *context, fanfold_error *error)
{
    const driver *cuda = &context->cuda;
    void *current = NULL;
    int device, major, minor, shared, code = cuda->init(0);
    if (code != 0)
        return driver_failed(cuda, code, "cuInit", "fanfold_open", error);
    if (cuda->get_current(&current) != 0 || current == NULL)
        return fail(error, FANFOLD_NO_DRIVER, "fanfold_open: no CUDA context is current; create one before");
    if ((code = cuda->get_device(&device)) != 0)
        return driver_failed(cuda, code, "cuCtxGetDevice", "fanfold_open", error);
    if ((code = cuda->get_attribute(&major, COMPUTE_MAJOR, device)) != 0 ||
        (code = cuda->get_attribute(&minor, COMPUTE_MINOR, device)) != 0 ||
        (code = cuda->get_attribute(&shared, MOST_SHARED_OPTIN, device)) != 0)
        return driver_failed(cuda, code, "cuDeviceGetAttribute", "fanfold_open", error);
    context->arch = 10 * major + minor;
    context->most_shared = shared;
    return FANFOLD_OK;
}

static int open_context(const char *folder, int arch, fanfold_context **context, fanfold_error *error)
{
    fanfold_context *made;
    int status = FANFOLD_OK;
    if (folder == NULL || context == NULL)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_open: %s is NULL", folder == NULL ? "folder" : "context");
    *context = NULL;
    made = calloc(1, sizeof *made);
    if (made == NULL || (made->folder = malloc(strlen(folder) + 1)) == NULL) {
        free(made);
        return fail(error, FANFOLD_NO_MEMORY, "fanfold_open: no memory for a context");
    }
    strcpy(made->folder, folder);
    made->arch = arch;
    made->most_shared = INT32_MAX;
    if (arch == 0 && (status = open_driver(&made->cuda, error)) == FANFOLD_OK)
        status = ask_device(made, error);
    if (status == FANFOLD_OK && !has_arch(made->arch))
        status = fail(error, FANFOLD_NOT_EXPORTED,
                      "fanfold_open: this GPU is sm_%d; exported for %s: export it again with --arch %d", (int)made->arch,
                      ARCHS_OF_THIS_FILE, (int)made->arch);
    if (status != FANFOLD_OK) {
        fanfold_close(made);
        return status;
    }
    *context = made;
    return succeed(error);
}

int fanfold_open(const char *folder, fanfold_context **context, fanfold_error *error)
{
    return open_context(folder, 0, context, error);
}

int fanfold_open_without_gpu(const char *folder, int arch, fanfold_context **context, fanfold_error *error)
{
    if (arch < 1)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "fanfold_open_without_gpu: arch: found %d, expected e.g. 90", arch);
    return open_context(folder, arch, context, error);
}

void fanfold_close(fanfold_context *context)
{
    if (context == NULL)
        return;
    for (int32_t i = 0; i < context->count; i++)
        context->cuda.unload(context->kernels[i].module);
    if (context->cuda.library != NULL)
        dlclose(context->cuda.library);
    free(context->kernels);
    free(context->folder);
    free(context);
}

