/* libcuda.so.1: the GPU, and the part of CUDA's driver interface that torch, NCCL's users and Triton's launcher use.
 * Numbers and layouts are those of CUDA's documented ABI (cuda.h). They are repeated here to need no NVIDIA package. */
#define _GNU_SOURCE
#include "gpu.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ADDRESSES ((size_t)64 << 40) /* of all GPUs, more than runs need */
#define PROCESSES_MOST 1024

/* The state that the processes of an emulation share: a row of bytes by GPU for each. Rows of dead processes are free. */
struct row { pid_t process; size_t taken[GPUS_MOST]; };
struct state { struct row rows[PROCESSES_MOST]; };

static struct gpu the_gpu;
static size_t context_bytes, nccl_bytes, values = 65536;
static int installed = 1, visible[GPUS_MOST], visible_count;
static struct state *state;
static struct row *mine;
static int state_file = -1;
static char *first, *next[GPUS_MOST];
static size_t each; /* addresses of one GPU */
static size_t held[GPUS_MOST]; /* allocated ranges of addresses of each GPU */
static char *lowest(int device) { return (char *)(((uintptr_t)first + device * each + GPU_PAGE - 1) & ~(GPU_PAGE - 1)); }
static int has_context[GPUS_MOST], has_nccl[GPUS_MOST];
static size_t limit; /* the most bytes of a process without context and NCCL's buffers; 0: no limit */
static int vast; /* whether one allocation was larger than the GPU, and got no addresses */
static int final, full_once; /* whether everything is refused after one refusal, and whether one was */
static struct gpu_counts counts;
static const char *refused[64];
static int refused_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread int current;

/* -- settings -- */

static void unusable(const char *what) {
    fprintf(stderr, "emulated GPU: %s\n", what);
    _exit(1);
}

static size_t number(const char *settings, const char *key) {
    char sought[64];
    snprintf(sought, sizeof sought, " %s=", key);
    const char *at = strstr(settings, sought);
    return at ? strtoull(at + strlen(sought), NULL, 10) : 0;
}

static void share(const char *settings) {
    char path[256] = "";
    const char *at = strstr(settings, " state=");
    if (at) sscanf(at, " state=%255s", path);
    state_file = *path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (*path && state_file < 0) unusable("the emulation that this process belongs to has ended");
    int flags = state_file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, flags, state_file, 0);
    if (state == MAP_FAILED) unusable("no memory for its state");
}

/* CUDA_VISIBLE_DEVICES as CUDA reads it: numbers or UUIDs, up to the first invalid one. */
static int named(const char *text) {
    for (int i = 0; i < installed; i++) {
        char known[64];
        gpu_uuid_text(i, known, sizeof known);
        if (!strcmp(known, text)) return i;
    }
    char *end;
    long at = strtol(text, &end, 10);
    return end == text || *end || at < 0 || at >= installed ? -1 : (int)at;
}

static void see(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (; visible_count < installed; visible_count++) visible[visible_count] = visible_count;
        return;
    }
    char *copy = strdup(text), *rest = copy, *word;
    while ((word = strsep(&rest, ",")) && visible_count < GPUS_MOST) {
        while (*word == ' ') word++;
        int found = named(word);
        if (found < 0) break;
        visible[visible_count++] = found;
    }
    free(copy);
}

static void plug_in(void) {
    const char *text = getenv("BIGDIT_EMULATED_GPU");
    if (!text) unusable("BIGDIT_EMULATED_GPU is not set");
    char settings[1024];
    snprintf(settings, sizeof settings, " %s", text);
    const char *name = strstr(settings, " name=");
    if (!name) unusable("BIGDIT_EMULATED_GPU has no name");
    snprintf(the_gpu.name, sizeof the_gpu.name, "%s", name + 6);
    the_gpu.major = (int)number(settings, "major"), the_gpu.minor = (int)number(settings, "minor");
    the_gpu.multiprocessors = (int)number(settings, "multiprocessors");
    the_gpu.threads_per_multiprocessor = (int)number(settings, "threads");
    the_gpu.blocks_per_multiprocessor = (int)number(settings, "blocks");
    the_gpu.shared_per_multiprocessor = number(settings, "shared");
    the_gpu.shared_per_block_optin = number(settings, "shared_optin");
    the_gpu.l2_bytes = number(settings, "l2");
    the_gpu.total_bytes = number(settings, "total"), the_gpu.usable_bytes = number(settings, "usable");
    context_bytes = number(settings, "context"), nccl_bytes = number(settings, "nccl");
    values = number(settings, "values"), installed = (int)number(settings, "count");
    if (installed > GPUS_MOST) unusable("more than 16 GPUs");
    each = ADDRESSES / installed;
    share(settings);
    see();
    first = mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (first == MAP_FAILED) unusable("no address space for its memory (ulimit -v?)");
    madvise(first, ADDRESSES, MADV_DONTDUMP);
    madvise(first, ADDRESSES, MADV_NOHUGEPAGE);
    for (int i = 0; i < installed; i++) next[i] = lowest(i);
}

const struct gpu *gpu(void) { return pthread_once(&once, plug_in), &the_gpu; }
int gpu_count(void) { return gpu(), visible_count; }
int gpu_installed(void) { return gpu(), installed; }
int gpu_index(int device) { return gpu(), device >= 0 && device < visible_count ? visible[device] : -1; }
size_t gpu_values(void) { return gpu(), values; }
void gpu_leave_values(void) { gpu(), values = 0; }
struct gpu_counts *gpu_counted(void) { return &counts; }
void gpu_count_one(uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
static __thread struct gpu_here here;
struct gpu_here gpu_counted_here(void) { return here; }
int gpu_called(void) { return here.library_calls++, gpu_count_one(&counts.library_calls), 0; }
int gpu_launched(void) { return here.launches++, gpu_count_one(&counts.launches), 0; }
void gpu_uuid(int which, unsigned char *bytes) {
    memset(bytes, 0xb1, 16);
    bytes[15] = (unsigned char)which;
}
void gpu_uuid_text(int which, char *text, size_t n) { snprintf(text, n, "GPU-b1b1b1b1-b1b1-b1b1-b1b1-b1b1b1b1b1%02x", which); }

/* -- bytes -- */

static size_t pages(size_t n) { return (n + GPU_PAGE - 1) & ~(GPU_PAGE - 1); }

static void enter(void) {
    pthread_mutex_lock(&lock);
    if (state_file >= 0) {
        struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        while (fcntl(state_file, F_OFD_SETLKW, &whole) && errno == EINTR) {}
    }
    pid_t process = getpid();
    if (mine && mine->process == process) return;
    mine = NULL; /* the first call, or after a fork, or after an exec, which freed everything */
    for (struct row *row = state->rows; row < state->rows + PROCESSES_MOST && !mine; row++)
        if (row->process == process) mine = row;
    for (struct row *row = state->rows; row < state->rows + PROCESSES_MOST && !mine; row++)
        if (!row->process || (kill(row->process, 0) && errno == ESRCH)) mine = row;
    if (!mine) unusable("more processes than it can count");
    memset(mine, 0, sizeof *mine);
    mine->process = process;
}

static void leave(void) {
    if (state_file >= 0) fcntl(state_file, F_OFD_SETLK, &(struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET});
    pthread_mutex_unlock(&lock);
}

static size_t used(int which) {
    size_t sum = 0;
    for (struct row *row = state->rows; row < state->rows + PROCESSES_MOST; row++) {
        if (!row->process || !row->taken[which]) continue;
        if (row != mine && kill(row->process, 0) && errno == ESRCH) row->process = 0; /* it ended without freeing */
        else sum += row->taken[which];
    }
    return sum;
}

static size_t room(int device) {
    size_t unlimited = (has_context[device] ? context_bytes : 0) + (has_nccl[device] ? nccl_bytes : 0);
    size_t all = limit ? limit + unlimited : the_gpu.usable_bytes;
    size_t taken = limit ? mine->taken[visible[device]] : used(visible[device]);
    return taken < all ? all - taken : 0;
}

/* Take exactly `n` bytes of a GPU, once if `done` is given; under the lock. */
static int take(int device, size_t n, int *done) {
    if (done && *done) return 0;
    int full = (full_once || n > room(device)) && !(limit && done);
    full_once |= final && full;
    if (!full) mine->taken[visible[device]] += n;
    if (!full && done) *done = 1;
    return full;
}

static int taking(int device, size_t n, int *done) {
    gpu();
    if (device < 0 || device >= visible_count) return 1;
    enter();
    int full = take(device, context_bytes, &has_context[device]) || take(device, n, done);
    leave();
    return full;
}

int gpu_context(int device) { return has_context[device] ? 0 : taking(device, 0, NULL); }
int gpu_nccl(int device) { return taking(device, nccl_bytes, &has_nccl[device]); }
int gpu_take(int device, size_t n) { return taking(device, pages(n), NULL); }
void gpu_give(int device, size_t n) {
    enter();
    mine->taken[visible[device]] -= pages(n);
    leave();
}
void gpu_limit(size_t n, int ends) { limit = n, final = ends, full_once = 0; }
size_t gpu_told(void) { return gpu(), vast && limit > the_gpu.usable_bytes ? each / 128 : the_gpu.usable_bytes; }
size_t gpu_used(int which) {
    gpu(), enter();
    size_t found = used(which);
    leave();
    return found;
}
int gpu_process(int which, int i, int *process, size_t *bytes) {
    for (struct row *row = gpu() ? state->rows : NULL; row < state->rows + PROCESSES_MOST; row++)
        if (row->process && row->taken[which] && !i--) return *process = row->process, *bytes = row->taken[which], 1;
    return 0;
}
void gpu_info(int device, size_t *free_bytes, size_t *usable_bytes) {
    gpu_context(device);
    enter();
    if (free_bytes) *free_bytes = room(device);
    leave();
    if (usable_bytes) *usable_bytes = the_gpu.usable_bytes;
}

/* -- addresses -- */

int gpu_current(void) { return current; }
int gpu_use(int device) { return device < 0 || device >= gpu_count() ? 1 : (current = device, 0); }
int gpu_has(const void *at) { return first && (const char *)at >= first && (const char *)at < first + ADDRESSES; }
int gpu_of(const void *at) { return gpu_has(at) ? (int)(((const char *)at - first) / each) : -1; }

void *gpu_addresses(int device, size_t n) {
    pthread_mutex_lock(&lock);
    char *at = next[device];
    next[device] += pages(n);
    held[device]++;
    pthread_mutex_unlock(&lock);
    if (next[device] > first + (device + 1) * each) unusable("its addresses are used up");
    return at;
}
void gpu_give_addresses(int device) {
    pthread_mutex_lock(&lock);
    if (!--held[device]) next[device] = lowest(device);
    pthread_mutex_unlock(&lock);
}
void gpu_open(void *at, size_t n) {
    if (mprotect(at, pages(n), PROT_READ | PROT_WRITE)) unusable("its memory cannot be mapped (vm.max_map_count?)");
}
void gpu_close(void *at, size_t n) {
    madvise(at, pages(n), MADV_DONTNEED);
    mprotect(at, pages(n), PROT_NONE);
}

/* -- unsupported functions -- */

int gpu_refuse(const char *function, int status) {
    pthread_mutex_lock(&lock);
    int known = 0;
    for (int i = 0; i < refused_count; i++) known |= !strcmp(refused[i], function);
    if (!known && refused_count < 64) refused[refused_count++] = function;
    pthread_mutex_unlock(&lock);
    if (!known) fprintf(stderr, "emulated GPU: %s is not supported\n", function);
    return status;
}
const char *gpu_refused(int i) { return i < refused_count ? refused[i] : NULL; }

/* -- the driver: attributes -- */

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

int gpu_attribute(int attribute, int device) {
    const struct gpu *c = gpu();
    switch (attribute) { /* CUdevice_attribute */
    case 1: case 2: case 3: return 1024;            /* threads a block; its x, y */
    case 4: return 64;                              /* its z */
    case 5: return 2147483647;                      /* a grid's x */
    case 6: case 7: return 65535;                   /* its y, z */
    case 8: return 49152;                           /* shared memory a block */
    case 9: return 65536;                           /* constant memory */
    case 10: return 32;                             /* a warp */
    case 12: case 82: return 65536;                 /* registers a block, a multiprocessor */
    case 13: return 1500000;                        /* clock in kHz: no memory depends on it */
    case 14: return 512;                            /* texture alignment */
    case 16: return c->multiprocessors;
    case 19: case 31: case 41: case 78: case 83: case 90: case 91: case 95: case 115:
        return 1; /* maps host memory, concurrent kernels, one address space, stream priorities, managed memory,
                     preemption, host pointers, cooperative launch, memory pools */
    case 33: return 1 + gpu_index(device);         /* PCI bus */
    case 37: return 384;                            /* memory bus in bits: no memory depends on it */
    case 38: return (int)c->l2_bytes;
    case 39: return c->threads_per_multiprocessor;
    case 40: return 2;                              /* copy engines */
    case 75: return c->major;
    case 76: return c->minor;
    case 81: return (int)c->shared_per_multiprocessor;
    case 97: return (int)c->shared_per_block_optin;
    case 102: return 1;                             /* virtual memory: expandable segments */
    case 103: return 1;                             /* its handles as file descriptors */
    case 106: return c->blocks_per_multiprocessor;
    case 111: return 1024;                          /* the driver's shared memory of a block */
    case 120: return c->major >= 9;                 /* clusters */
    default: return 0;
    }
}

int cuInit(unsigned flags) { return (void)flags, gpu(), OK; }
int cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int cuDeviceGet(int *device, int ordinal) { return ordinal < gpu_count() ? (*device = ordinal, OK) : INVALID_DEVICE; }
int cuDeviceGetCount(int *count) { return *count = gpu_count(), OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = gpu_attribute(attribute, device), OK; }
int cuDeviceGetName(char *name, int size, int device) { return (void)device, snprintf(name, size, "%s", gpu()->name), OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = gpu()->usable_bytes, OK; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return gpu_uuid(gpu_index(device), uuid), OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = gpu_count() > device && has_context[device], OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = &the_gpu, gpu_context(device) ? OUT_OF_MEMORY : OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }
int cuCtxGetCurrent(void **context) { return *context = has_context[current] ? &the_gpu : NULL, OK; }
int cuCtxSetCurrent(void *context) { return (void)context, OK; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, OK; }
int cuCtxPopCurrent_v2(void **context) { return *context = &the_gpu, OK; }
int cuCtxGetDevice(int *device) { return *device = current, OK; }
static size_t limits[16]; /* of stack, printf, heap, L2: no kernel runs into them */
int cuCtxGetLimit(size_t *value, int which) { return which < 0 || which > 15 ? INVALID_VALUE : (*value = limits[which], OK); }
int cuCtxSetLimit(int which, size_t value) { return which < 0 || which > 15 ? INVALID_VALUE : (limits[which] = value, OK); }
int gpu_capturing(const struct stream *s) { return is_stream(s) && s->capturing; }
int cuStreamIsCapturing(const struct stream *s, int *status) { return *status = gpu_capturing(s), OK; }
int cuCtxSynchronize(void) { return __atomic_fetch_add(&counts.host_syncs, 1, __ATOMIC_RELAXED), OK; }
int cuGetErrorString(int error, const char **text) {
    return *text = error == OK ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "not supported by an emulated GPU", OK;
}
int cuGetErrorName(int error, const char **text) {
    return *text = error == OK ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NOT_SUPPORTED", OK;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return gpu_info(current, free_bytes, total), OK; }
int cuPointerGetAttribute(void *out, int attribute, uint64_t at) {
    int device = gpu_of((void *)at);
    switch (attribute) { /* CUpointer_attribute */
    case 1: return *(void **)out = &the_gpu, OK;                                      /* context */
    case 2: return *(int *)out = device < 0 ? 1 : 2, device < 0 ? INVALID_VALUE : OK;  /* memory type: device */
    case 3: return *(uint64_t *)out = at, OK;                                          /* device pointer */
    case 9: return *(int *)out = device < 0 ? 0 : device, OK;                          /* device ordinal */
    default: return INVALID_VALUE;
    }
}

/* -- the driver: virtual memory, for expandable segments -- */

struct physical { size_t n; int device; };
static __thread size_t unmapped; /* of one allocation, which torch asks for page by page */
struct allocation_properties { int type, handle_types, location_type, location_id; void *rest[4]; };

int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    return (void)properties, (void)option, *granularity = GPU_PAGE, OK;
}
int cuMemAddressReserve(uint64_t *at, size_t n, size_t align, uint64_t hint, unsigned long long flags) {
    (void)align, (void)hint, (void)flags;
    return *at = (uint64_t)gpu_addresses(current, n), OK;
}
int cuMemAddressFree(uint64_t at, size_t n) { return (void)n, gpu_give_addresses(gpu_of((void *)at)), OK; }
int cuMemCreate(uint64_t *handle, size_t n, const struct allocation_properties *properties, unsigned long long flags) {
    (void)flags;
    int device = properties->location_id;
    unmapped += n; /* torch reserves a little more addresses than it was told, and crashes where it maps more */
    if (unmapped > gpu_told()) return vast = 1, unmapped = 0, OUT_OF_MEMORY; /* it asks again */
    if (gpu_take(device, n)) return unmapped = 0, OUT_OF_MEMORY;
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){n, device};
    return *handle = (uint64_t)made, OK;
}
int cuMemRelease(uint64_t handle) {
    struct physical *was = (struct physical *)handle;
    gpu_give(was->device, was->n);
    return free(was), OK;
}
int cuMemMap(uint64_t at, size_t n, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)offset, (void)handle, (void)flags;
    return unmapped = 0, gpu_open((void *)at, n), OK;
}
int cuMemUnmap(uint64_t at, size_t n) { return gpu_close((void *)at, n), OK; }
int cuMemSetAccess(uint64_t at, size_t n, const void *description, size_t count) {
    return (void)at, (void)n, (void)description, (void)count, OK;
}

/* -- the driver: modules and kernels of nvrtc and Triton: launches are counted, and nothing runs -- */

static int a_module, a_function;
int cuModuleLoadData(void **module, const void *image) { return (void)image, *module = &a_module, OK; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void **values_of) {
    return (void)n, (void)options, (void)values_of, cuModuleLoadData(module, image);
}
int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
int cuModuleUnload(void *module) { return (void)module, OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return (void)module, (void)name, *function = &a_function, OK;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, OK; /* threads a block; registers; no spills */
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, OK; }
int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    (void)function, (void)shared;
    return *blocks = threads > 0 ? gpu()->threads_per_multiprocessor / threads : 1, OK;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)arguments;
    return (void)extra, gpu_launched();
}
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
    return (void)config, (void)function, (void)arguments, (void)extra, gpu_launched();
}
int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, void *stream, void **arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    return (void)function, (void)config, *clusters = gpu()->multiprocessors, OK;
}
int cuTensorMapEncodeTiled(void *map) { return memset(map, 0, 128), OK; }
int cuTensorMapEncodeIm2col(void *map) { return memset(map, 0, 128), OK; }
