/* libnvidia-ml: all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says, and the memory of all processes. */
#include "gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

/* A device handle is its index plus one; NULL is invalid. */
static int index_of(void *device) { return (int)(intptr_t)device - 1; }

int nvmlInit_v2(void) { return gpu(), OK; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "Not supported by an emulated GPU" : "Success"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { return *version = 13000, OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.00"), OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = (unsigned)gpu_installed(), OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= gpu_installed()) return INVALID_ARGUMENT;
    return *device = (void *)(intptr_t)(index + 1), OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2 || !bus || (int)bus > gpu_installed()) return NOT_FOUND;
    return *device = (void *)(intptr_t)bus, OK;
}
int nvmlDeviceGetHandleByUUID(const char *id, void **device) {
    for (int i = 0; i < gpu_installed(); i++) {
        char text[64];
        gpu_uuid_text(i, text, sizeof text);
        if (!strcmp(text, id)) return *device = (void *)(intptr_t)(i + 1), OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { return gpu_uuid_text(index_of(device), text, size), OK; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = (unsigned)index_of(device), OK; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { return (void)device, snprintf(name, size, "%s", gpu()->name), OK; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    return (void)device, *major = gpu()->major, *minor = gpu()->minor, OK;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
    /* the driver's own memory is neither free nor used; nvidia-smi shows it as reserved */
    size_t used = gpu_used(index_of(device));
    return *out = (struct memory){gpu()->total_bytes, gpu()->usable_bytes - used, used}, OK;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out) {
    struct memory found;
    nvmlDeviceGetMemoryInfo(device, &found);
    out->total = found.total, out->reserved = gpu()->total_bytes - gpu()->usable_bytes, out->free = found.free, out->used = found.used;
    return OK;
}
/* There is no NVSwitch fabric over several machines. torch asks before it shares expandable segments. */
struct fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *out) { return (void)device, out->status = 0, out->state = 0, OK; }

/* The processes of a GPU. `*count`: first the size of `rows`, then the number of processes. */
static int processes(void *device, unsigned *count, void (*put)(void *rows, unsigned i, int process, size_t bytes), void *rows) {
    unsigned room = *count, n = 0;
    int process;
    size_t bytes;
    for (; gpu_process(index_of(device), (int)n, &process, &bytes); n++)
        if (n < room) put(rows, n, process, bytes);
    return *count = n, n > room ? INSUFFICIENT_SIZE : OK;
}
struct process_v1 { unsigned process; unsigned long long bytes; };
struct process_v2 { unsigned process; unsigned long long bytes; unsigned instance, compute_instance; };
static void put_v1(void *rows, unsigned i, int process, size_t bytes) {
    ((struct process_v1 *)rows)[i] = (struct process_v1){(unsigned)process, bytes};
}
static void put_v2(void *rows, unsigned i, int process, size_t bytes) {
    ((struct process_v2 *)rows)[i] = (struct process_v2){(unsigned)process, bytes, ~0u, ~0u};
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *rows) { return processes(device, count, put_v1, rows); }
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, void *rows) { return processes(device, count, put_v2, rows); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *rows) { return processes(device, count, put_v2, rows); }
