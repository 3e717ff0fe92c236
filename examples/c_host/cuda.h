/* The few functions of the CUDA driver that this host needs beside the launcher, loaded at run time. */
#ifndef CUDA_H
#define CUDA_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t device_address;

static struct {
    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(device_address *, size_t);
    int (*to_device)(device_address, const void *, size_t);
    int (*to_host)(void *, device_address, size_t);
    int (*fill)(device_address, unsigned char, size_t);
    int (*stream_create)(void **, unsigned);
    int (*begin_capture)(void *, int);
    int (*end_capture)(void *, void **);
    int (*instantiate)(void **, void *, unsigned long long);
    int (*graph_launch)(void *, void *);
    int (*synchronize)(void *);
} cuda;

static void load_cuda(void)
{
    struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"cuInit", &cuda.init},
        {"cuDeviceGet", &cuda.device_get},
        {"cuDevicePrimaryCtxRetain", &cuda.retain},
        {"cuCtxSetCurrent", &cuda.set_current},
        {"cuMemAlloc_v2", &cuda.alloc},
        {"cuMemcpyHtoD_v2", &cuda.to_device},
        {"cuMemcpyDtoH_v2", &cuda.to_host},
        {"cuMemsetD8_v2", &cuda.fill},
        {"cuStreamCreate", &cuda.stream_create},
        {"cuStreamBeginCapture_v2", &cuda.begin_capture},
        {"cuStreamEndCapture", &cuda.end_capture},
        {"cuGraphInstantiateWithFlags", &cuda.instantiate},
        {"cuGraphLaunch", &cuda.graph_launch},
        {"cuStreamSynchronize", &cuda.synchronize},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = library == NULL ? NULL : dlsym(library, wanted[i].name);
        if (found == NULL) {
            fprintf(stderr, "libcuda.so.1: no %s\n", wanted[i].name);
            exit(1);
        }
        memcpy(wanted[i].function, &found, sizeof found);
    }
}

/* Ends the program where the driver refuses. */
#define CUDA(call)                                                            \
    do {                                                                      \
        int code_ = (call);                                                   \
        if (code_ != 0) {                                                     \
            fprintf(stderr, "%s: CUDA error %d\n", #call, code_);             \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

#endif
