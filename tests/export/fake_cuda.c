/* A libcuda of a GPU of compute capability 9.0 that writes launches down, for tests of the launcher and of hosts.
   FAKE_CUDA_LOG names a file for a line a launch: the machine code's text, and the grid. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct {
    int count;
    int attribute;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void *stream;
    uint64_t parameters[64];
} last_launch;
int major_version = 9, has_context = 1, parameter_count = 0, refuse = 0, loaded_modules = 0, loaded_functions = 0;

int cuInit(unsigned flags) { return (int)flags; }
int cuCtxGetCurrent(void **context) { *context = has_context ? &last_launch : 0; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 75 ? major_version : attribute == 76 ? 0 : attribute == 97 ? 232448 : -1;
    return device;
}
int cuModuleLoadData(void **module, const void *image)
{
    if (refuse || memcmp(image, "\177ELF", 4) != 0)
        return 200;
    loaded_modules++;
    *module = strcpy(malloc(strlen(image) + 1), image);
    return 0;
}
int cuModuleUnload(void *module) { loaded_modules--; free(module); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = module;
    return strcmp(name, "symbol") != 0;
}
int cuFuncLoad(void *function) { loaded_functions++; return function == 0; }
int cuFuncSetAttribute(void *function, int attribute, int value)
{
    last_launch.attribute = value;
    return function == 0 || attribute != 8;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    unsigned grid[] = {x, y, z}, block[] = {bx, by, bz};
    const char *log = getenv("FAKE_CUDA_LOG");
    last_launch.count++;
    memcpy(last_launch.grid, grid, sizeof grid);
    memcpy(last_launch.block, block, sizeof block);
    last_launch.shared = shared;
    last_launch.stream = stream;
    for (int i = 0; i < parameter_count; i++)
        memcpy(&last_launch.parameters[i], parameters[i], 8);
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%s %u %u %u\n", (const char *)function + 4, x, y, z);
        fclose(file);
    }
    return refuse || function == 0 || extra != 0;
}
int cuGetErrorName(int code, const char **name) { *name = code == 200 ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR"; return 0; }

/* What hosts use beside the launcher; memory of the device is that of the process. */
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &last_launch; return device; }
int cuCtxSetCurrent(void *context) { return context == 0; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { *address = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) { memset((void *)to, value, bytes); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = &last_launch; return flags != 1; }
int cuStreamBeginCapture_v2(void *stream, int mode) { return stream == 0 || mode != 0; }
int cuStreamEndCapture(void *stream, void **graph) { *graph = stream; return 0; }
int cuGraphInstantiateWithFlags(void **ready, void *graph, unsigned long long flags) { *ready = graph; return (int)flags; }
int cuGraphLaunch(void *ready, void *stream) { return ready != stream; }
int cuStreamSynchronize(void *stream) { return stream == 0; }
