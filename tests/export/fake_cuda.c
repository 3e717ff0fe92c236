/* A libcuda of a GPU of compute capability 9.0 that writes launches down, for tests of the launcher. */
#include <stdint.h>
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
int major_version = 9, has_context = 1, parameter_count = 0, refuse = 0, loaded_modules = 0;

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
    *module = &last_launch;
    return 0;
}
int cuModuleUnload(void *module) { loaded_modules--; return module == 0; }
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = module;
    return strcmp(name, "symbol") != 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value)
{
    last_launch.attribute = value;
    return function == 0 || attribute != 8;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    unsigned grid[] = {x, y, z}, block[] = {bx, by, bz};
    last_launch.count++;
    memcpy(last_launch.grid, grid, sizeof grid);
    memcpy(last_launch.block, block, sizeof block);
    last_launch.shared = shared;
    last_launch.stream = stream;
    for (int i = 0; i < parameter_count; i++)
        memcpy(&last_launch.parameters[i], parameters[i], 8);
    return refuse || function == 0 || extra != 0;
}
int cuGetErrorName(int code, const char **name) { *name = code == 200 ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR"; return 0; }
