/* The emulated GPU: its properties, bytes and addresses. All stub libraries get them from libcuda.so.1 (gpu.c).
 *
 * Device memory is address space without RAM. A page gets RAM when a small value is written there. Bytes are counted in
 * pages of 2 MiB, together with those of other processes of the same emulation. When the GPU is full, they are refused.
 *
 * The variable BIGDIT_EMULATED_GPU has all settings as `key=value`, separated by blanks, with the name last:
 *   major minor multiprocessors threads blocks shared shared_optin l2 total usable context nccl count values state name
 * Sizes are bytes. `state`: the file that the processes of an emulation share (none: only this process). `values`: only
 * copies of at most so many bytes move data.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define GPU_PAGE ((size_t)2 << 20)
#define GPUS_MOST 16

struct gpu {
    char name[96];
    int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t shared_per_multiprocessor, shared_per_block_optin, l2_bytes;
    size_t total_bytes;  /* what nvidia-smi shows */
    size_t usable_bytes; /* what a CUDA process is told */
};

/* Counts since the start of the process. `bytes_*` count all copies, also those that move no data. `library_calls`: calls
 * of cuBLAS and cuDNN that launch at least one kernel; `fills`: memsets. A copy between GPUs is not one on a device. */
struct gpu_counts {
    uint64_t launches, copies_to_device, copies_to_host, copies_on_device, host_syncs;
    uint64_t bytes_to_device, bytes_to_host, bytes_on_device;
    uint64_t library_calls, fills, copies_between, bytes_between;
    uint64_t all_reduces, all_gathers, reduce_scatters, broadcasts, reduces, sends, receives;
};

struct stream { int priority, capturing; uint64_t captured; };
static inline int is_stream(const struct stream *s) { return (uintptr_t)s > 2; } /* 0, 1, 2: the default ones */

const struct gpu *gpu(void);
int gpu_attribute(int attribute, int device); /* cudaDeviceAttr and CUdevice_attribute number alike */
int gpu_count(void);                          /* GPUs in CUDA_VISIBLE_DEVICES */
int gpu_installed(void);                      /* GPUs in the machine */
int gpu_index(int device);                    /* which of those a visible one is */
void gpu_uuid(int installed, unsigned char *sixteen_bytes);
void gpu_uuid_text(int installed, char *text, size_t n); /* as CUDA_VISIBLE_DEVICES has it */

int gpu_current(void);
int gpu_use(int device);              /* 0, or 1 if there is no such GPU */
int gpu_context(int device);          /* allocate its context once; 1 if the GPU is full */
int gpu_nccl(int device);             /* the same for NCCL's buffers */
int gpu_take(int device, size_t n);   /* 0, or 1 if the GPU is full */
void gpu_limit(size_t n, int final);  /* limit this process to `n` without context and NCCL's buffers;
                                         `final`: after one refusal, refuse everything */
size_t gpu_told(void);                /* the bytes that torch is told, which reserves as many addresses at a time:
                                         more than the GPU has once a higher limit's allocation needs them */
void gpu_give(int device, size_t n);
void gpu_info(int device, size_t *free_bytes, size_t *usable_bytes);
size_t gpu_used(int installed);       /* by all processes of the emulation */
int gpu_process(int installed, int i, int *process, size_t *bytes); /* the i-th that uses a GPU; 0 past the last */

void *gpu_addresses(int device, size_t n); /* rising addresses, not accessible yet */
void gpu_give_addresses(int device);       /* free one range; after the last one, addresses begin again */
void gpu_open(void *at, size_t n);
void gpu_close(void *at, size_t n);        /* drops what was written there */
int gpu_has(const void *at);
int gpu_of(const void *at);                /* the device of an address, -1 for none */

int gpu_capturing(const struct stream *s); /* whether it records a graph */
size_t gpu_values(void);
void gpu_leave_values(void); /* from now on copies move no data, and the CPU reads zeros */
struct gpu_counts *gpu_counted(void);
void gpu_count_one(uint64_t *counter);
int gpu_launched(void); /* count a launched kernel; returns 0 */
struct gpu_here { uint64_t launches, library_calls; };
struct gpu_here gpu_counted_here(void); /* of this thread */
int gpu_called(void); /* count a library's call that launches; returns 0 */
int gpu_refuse(const char *function, int status); /* print once that a function is not supported; returns `status` */
const char *gpu_refused(int i);                   /* the i-th function that was refused, NULL past the last */
