/* libcudart: memory is counted, small copies are done, streams and events are always ready, kernels are counted and not run.
 * Numbers and layouts are those of CUDA's documented ABI (driver_types.h of CUDA 13), written out here since no NVIDIA
 * package is needed. What torch wants beyond this file is generated: see build.py. */
#define _GNU_SOURCE
#include "card.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_SYMBOL = 13, MISSING_CONFIGURATION = 52, NO_FUNCTION = 98,
    NO_DEVICE = 100, INVALID_DEVICE = 101, SYMBOL_NOT_FOUND = 500, NOT_SUPPORTED = 801,
};
static __thread int last_error;
static int fail(int error) { return last_error = error; }

int cudaGetLastError(void) {
    int error = last_error;
    return last_error = OK, error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(int error) {
    return error == OK ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_DEVICE ? "invalid device ordinal"
         : error == NO_DEVICE ? "no CUDA-capable device is detected" : error == NOT_SUPPORTED ? "not answered by an emulated card"
         : error == NO_FUNCTION ? "invalid device function"
         : "error of an emulated card";
}
const char *cudaGetErrorName(int error) {
    return error == OK ? "cudaSuccess" : error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation"
         : error == INVALID_DEVICE ? "cudaErrorInvalidDevice" : error == NO_DEVICE ? "cudaErrorNoDevice"
         : error == NO_FUNCTION ? "cudaErrorInvalidDeviceFunction" : error == NOT_SUPPORTED ? "cudaErrorNotSupported"
         : error == INVALID_VALUE ? "cudaErrorInvalidValue" : "cudaErrorUnknown";
}

/* -- ranges that were handed out -- */

enum where { DEVICE, PINNED, SHARED }; /* SHARED: pinned host memory on the pages of libbigdit-host */
struct range { char *at; size_t n; enum where where; };
static struct range *ranges;
static size_t range_count, range_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *at, size_t n, enum where where) {
    pthread_mutex_lock(&lock);
    if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 256) * sizeof *ranges);
    ranges[range_count++] = (struct range){at, n, where};
    pthread_mutex_unlock(&lock);
}
static struct range forget(const void *at) {
    struct range found = {0};
    pthread_mutex_lock(&lock);
    for (size_t i = range_count; i-- > 0;)
        if (ranges[i].at == at) {
            found = ranges[i], ranges[i] = ranges[--range_count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
static int pinned(const void *at) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < range_count && !found; i++)
        found = ranges[i].where != DEVICE && (char *)at >= ranges[i].at && (char *)at < ranges[i].at + ranges[i].n;
    pthread_mutex_unlock(&lock);
    return found;
}

/* -- memory -- */

int cudaMalloc(void **out, size_t n) {
    int device = card_current();
    *out = NULL;
    if (!n) return OK;
    if (card_take(device, n)) return fail(OUT_OF_MEMORY);
    *out = card_addresses(device, n);
    card_open(*out, n);
    return remember(*out, n, DEVICE), OK;
}
int cudaFree(void *at) {
    if (!at) return card_context(card_current()) ? fail(OUT_OF_MEMORY) : OK; /* how programs make a context */
    struct range was = forget(at);
    if (!was.at || was.where != DEVICE) return fail(INVALID_VALUE);
    card_close(at, was.n);
    card_give_addresses(card_of(at));
    return card_give(card_of(at), was.n), OK;
}
int cudaMallocAsync(void **out, size_t n, void *stream) { return (void)stream, cudaMalloc(out, n); }
int cudaFreeAsync(void *at, void *stream) { return (void)stream, cudaFree(at); }
int cudaMallocManaged(void **out, size_t n, unsigned flags) { return (void)flags, cudaMalloc(out, n); }
int cudaMemPrefetchAsync(void) { return OK; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return card_info(card_current(), free_bytes, total), OK; }

/* Large host tensors lie on shared pages where libbigdit-host was loaded before: see host.c. */
static void *(*host_take)(size_t);
static int (*host_release)(void *);
static void (*host_count)(int64_t);
static void (*host_zero)(void *, size_t);
static void find_host(void) {
    void *library = dlopen("libbigdit-host.so", RTLD_NOW | RTLD_NOLOAD);
    if (!library) return;
    *(void **)&host_take = dlsym(library, "host_take");
    *(void **)&host_release = dlsym(library, "host_release");
    *(void **)&host_zero = dlsym(library, "host_zero");
    *(void **)&host_count = dlsym(library, "host_count");
}
static pthread_once_t looked_for_host = PTHREAD_ONCE_INIT;

int cudaHostAlloc(void **out, size_t n, unsigned flags) {
    (void)flags;
    pthread_once(&looked_for_host, find_host);
    *out = host_take ? host_take(n) : NULL;
    if (*out && host_count) host_count((int64_t)n);
    if (*out) return remember(*out, n, SHARED), OK;
    *out = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*out == MAP_FAILED) return *out = NULL, fail(OUT_OF_MEMORY);
    if (host_count) host_count((int64_t)n);
    return remember(*out, n, PINNED), OK;
}
int cudaMallocHost(void **out, size_t n) { return cudaHostAlloc(out, n, 0); }
int cudaFreeHost(void *at) {
    struct range was = forget(at);
    if (was.at && host_count) host_count(-(int64_t)was.n);
    if (was.where == SHARED) host_release(was.at);
    else if (was.at) munmap(was.at, was.n);
    return OK;
}
int cudaHostRegister(void *at, size_t n, unsigned flags) { return (void)flags, remember(at, n, PINNED), OK; }
int cudaHostUnregister(void *at) { return forget(at), OK; }
int cudaHostGetDevicePointer(void **out, void *at, unsigned flags) { return (void)flags, *out = at, OK; }

struct pointer_attributes { int type, device; void *device_pointer, *host_pointer; long reserved[8]; };
int cudaPointerGetAttributes(struct pointer_attributes *out, const void *at) {
    int device = card_of(at), type = device >= 0 ? 2 : pinned(at) ? 1 : 0; /* device, host, unregistered */
    memset(out, 0, sizeof *out);
    *out = (struct pointer_attributes){type, device >= 0 ? device : type ? card_current() : -2, type ? (void *)at : NULL,
                                       device >= 0 ? NULL : (void *)at, {0}};
    return OK;
}

/* -- copies: small ones are done, of large ones the host gets zeros -- */

static void count_copy(const void *to, const void *from, size_t n) {
    struct card_counts *c = card_counted();
    int into = card_has(to), out_of = card_has(from), between = into && out_of && card_of(to) != card_of(from);
    uint64_t *times = between ? &c->copies_between : into && out_of ? &c->copies_on_device : into ? &c->copies_to_device : &c->copies_to_host;
    uint64_t *bytes = between ? &c->bytes_between : into && out_of ? &c->bytes_on_device : into ? &c->bytes_to_device : &c->bytes_to_host;
    card_count_one(times), __atomic_fetch_add(bytes, n, __ATOMIC_RELAXED);
}
static void move(void *to, const void *from, size_t n) {
    int into = card_has(to), out_of = card_has(from);
    if (n <= card_values() || (!into && !out_of)) return (void)memmove(to, from, n);
    if (into) return;
    pthread_once(&looked_for_host, find_host);
    host_zero ? host_zero(to, n) : (void)memset(to, 0, n);
}
static void copy(void *to, const void *from, size_t n) { count_copy(to, from, n), move(to, from, n); }
static void synced(void) { card_count_one(&card_counted()->host_syncs); }

int cudaMemcpy(void *to, const void *from, size_t n, int kind) { return (void)kind, copy(to, from, n), synced(), OK; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    return (void)stream, (void)kind, copy(to, from, n), OK;
}
int cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t n, void *stream) {
    return (void)device, (void)other, (void)stream, copy(to, from, n), OK;
}
int cudaMemcpy2DAsync(void *to, size_t step, const void *from, size_t from_step, size_t width, size_t height, int kind, void *stream) {
    (void)kind, (void)stream, count_copy(to, from, width * height);
    if (width * height > card_values()) return OK;
    for (size_t row = 0; row < height; row++) move((char *)to + row * step, (const char *)from + row * from_step, width);
    return OK;
}
int cudaMemset(void *to, int value, size_t n) {
    card_count_one(&card_counted()->fills);
    if (n <= card_values()) memset(to, value, n);
    return OK;
}
int cudaMemsetAsync(void *to, int value, size_t n, void *stream) { return (void)stream, cudaMemset(to, value, n); }

/* -- the device -- */

int cudaGetDeviceCount(int *n) { return *n = card_count(), card_count() ? OK : fail(NO_DEVICE); }
int cudaGetDevice(int *device) { return *device = card_current(), OK; }
int cudaSetDevice(int device) {
    if (card_use(device)) return fail(card_count() ? INVALID_DEVICE : NO_DEVICE);
    return card_context(device) ? fail(OUT_OF_MEMORY) : OK;
}
int cudaDeviceSynchronize(void) { return synced(), OK; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
int cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return *value = card_attribute(attribute, device), OK; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return (void)device, (void)peer, *can = 0, OK; }
int cudaDeviceGetPCIBusId(char *id, int size, int device) {
    return snprintf(id, size, "0000:%02x:00.0", 1 + card_index(device)), OK;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }

struct properties { /* cudaDeviceProp of CUDA 13 */
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_mask;
    size_t total, shared_per_block;
    int registers_per_block, warp;
    size_t pitch;
    int threads_per_block, block[3], grid[3];
    size_t constant;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multiprocessors, integrated, maps_host_memory, textures_and_surfaces[39];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, one_address_space, bus_bits, l2, persisting_l2,
        threads_per_multiprocessor, stream_priorities, l1[2];
    size_t shared_per_multiprocessor;
    int registers_per_multiprocessor, managed, boards[2], native_atomics, pageable, concurrent_managed, preemption, host_pointers,
        cooperative;
    size_t shared_per_block_optin;
    int page_tables[2], blocks_per_multiprocessor, window;
    size_t shared_reserved;
    int registers_host, sparse, registers_read_only, semaphores, pools, rdma, rdma_flush, rdma_order, pool_handles, deferred, ipc_events,
        clusters, function_pointers, numa[2], mps, host_numa;
    unsigned pci_ids[2];
    int numa_ipc, reserved[56];
};
int cudaGetDeviceProperties(struct properties *out, int device) {
    const struct card *c = card();
    if (device < 0 || device >= card_count()) return fail(INVALID_DEVICE);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", c->name);
    card_uuid(card_index(device), out->uuid);
    out->total = c->usable_bytes;
    out->shared_per_block = 49152;
    out->registers_per_block = out->registers_per_multiprocessor = 65536;
    out->warp = 32;
    out->pitch = 2147483647;
    out->threads_per_block = out->block[0] = out->block[1] = 1024, out->block[2] = 64;
    out->grid[0] = 2147483647, out->grid[1] = out->grid[2] = 65535;
    out->constant = 65536;
    out->major = c->major, out->minor = c->minor;
    out->texture_alignment = 512;
    out->multiprocessors = c->multiprocessors;
    out->maps_host_memory = out->concurrent_kernels = out->one_address_space = out->stream_priorities = 1;
    out->managed = out->cooperative = out->pools = out->preemption = out->host_pointers = 1;
    out->pci_bus = 1 + card_index(device);
    out->copy_engines = 2;
    out->bus_bits = 384;
    out->l2 = (int)c->l2_bytes;
    out->threads_per_multiprocessor = c->threads_per_multiprocessor;
    out->shared_per_multiprocessor = c->shared_per_multiprocessor;
    out->shared_per_block_optin = c->shared_per_block_optin;
    out->blocks_per_multiprocessor = c->blocks_per_multiprocessor;
    out->shared_reserved = 1024;
    out->clusters = c->major >= 9;
    return OK;
}

/* torch asks the driver for functions by name. */
int cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    static const char *const SUFFIXES[] = {"_v3", "_v2", ""};
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *out = NULL;
    for (int i = 0; driver && i < 3 && !*out; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", symbol, SUFFIXES[i]);
        *out = dlsym(driver, name);
    }
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : fail(SYMBOL_NOT_FOUND);
}
int cudaGetDriverEntryPoint(const char *symbol, void **out, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, out, 13000, flags, status);
}

/* -- streams, events, graphs: each a handle of its own; all that was asked of them is done -- */

struct stream { int priority, capturing; uint64_t captured; };
struct graph { uint64_t launches; };
static int is_stream(const struct stream *s) { return (uintptr_t)s > 2; } /* 0, 1, 2: the default ones */
static __thread uint64_t in_capture;                                        /* launches of this thread while it captures */
static uint64_t captures;

static void *handle(size_t n) { return calloc(1, n); }
int cudaStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    (void)flags;
    *out = handle(sizeof **out);
    return (*out)->priority = priority, card_context(card_current()) ? fail(OUT_OF_MEMORY) : OK;
}
int cudaStreamCreate(struct stream **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
int cudaStreamCreateWithFlags(struct stream **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
int cudaStreamDestroy(struct stream *s) { return free(s), OK; }
int cudaStreamGetPriority(struct stream *s, int *priority) { return *priority = is_stream(s) ? s->priority : 0, OK; }
int cudaStreamSynchronize(struct stream *s) { return (void)s, synced(), OK; }
int cudaEventSynchronize(void *event) { return (void)event, synced(), OK; }
int cudaEventCreate(void **out) { return *out = handle(64), OK; }
int cudaEventCreateWithFlags(void **out, unsigned flags) { return (void)flags, *out = handle(64), OK; }
int cudaEventDestroy(void *event) { return free(event), OK; }
int cudaEventElapsedTime(float *ms, void *start, void *end) { return (void)start, (void)end, *ms = 0.001f, OK; }
int cudaLaunchHostFunc(struct stream *s, void (*function)(void *), void *data) { return (void)s, function(data), OK; }
int cudaStreamAddCallback(struct stream *s, void (*function)(struct stream *, int, void *), void *data, unsigned flags) {
    return (void)flags, function(s, OK, data), OK;
}

int cudaStreamBeginCapture(struct stream *s, int mode) {
    (void)mode;
    if (!is_stream(s)) return fail(NOT_SUPPORTED);
    s->capturing = 1, s->captured = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED), in_capture = 0;
    return OK;
}
int cudaStreamEndCapture(struct stream *s, struct graph **out) {
    *out = handle(sizeof **out);
    return (*out)->launches = in_capture, s->capturing = 0, OK;
}
int cudaStreamIsCapturing(struct stream *s, int *status) { return *status = is_stream(s) && s->capturing, OK; }
int cudaStreamGetCaptureInfo(struct stream *s, int *status, uint64_t *id, void **graph, void **nodes, void **edges, size_t *n) {
    (void)nodes, (void)edges;
    cudaStreamIsCapturing(s, status);
    if (id) *id = *status ? s->captured : 0;
    if (graph) *graph = *status ? s : NULL;
    if (n) *n = 0;
    return OK;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, OK; }
int cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *n) { return nodes ? OK : (*n = graph->launches, OK); }
int cudaGraphInstantiateWithFlags(struct graph **out, struct graph *graph, unsigned long long flags) {
    (void)flags, *out = handle(sizeof **out);
    return **out = *graph, OK;
}
int cudaGraphInstantiate(struct graph **out, struct graph *graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(out, graph, flags);
}
int cudaGraphLaunch(struct graph *graph, struct stream *s) {
    return (void)s, __atomic_fetch_add(&card_counted()->launches, graph->launches, __ATOMIC_RELAXED), OK;
}
int cudaGraphDestroy(struct graph *graph) { return free(graph), OK; }
int cudaGraphExecDestroy(struct graph *graph) { return free(graph), OK; }

/* -- kernels: known by the host function that stands for them -- */

struct module { int built[2][16]; int count[2]; }; /* compute capabilities as 10 major + minor: of its PTX, of its cubins */
struct known { const void *function; const char *name; const struct module *module; };
static struct known *known; /* all that libraries register: tens of thousands, of which a run launches hundreds */
static size_t known_count, known_room;
struct launched { const void *function; uint64_t times; };
#define SLOTS 8192
static struct launched launched[SLOTS];

enum { FAT_WRAPPER = 0x466243b1, FAT_BINARY = (int)0xba55ed50 };
struct fat_wrapper { int magic, version; const char *binary; };
struct fat_binary { int magic; uint16_t version, header_size; uint64_t size; };
struct fat_entry {
    uint16_t kind, attributes;
    uint32_t header_size;
    uint64_t size;
    uint32_t packed, options;
    uint16_t minor, major;
    uint32_t built;
};

/* What a library's kernels were built for, as its fat binary says (the layout is that of `fatbinary` since CUDA 5). */
static void read_fat(struct module *module, const struct fat_wrapper *wrapper) {
    if (!wrapper || wrapper->magic != FAT_WRAPPER || !wrapper->binary) return;
    const struct fat_binary *binary = (const void *)wrapper->binary;
    const char *at = wrapper->binary + binary->header_size, *end = at + binary->size;
    if (binary->magic != FAT_BINARY) return;
    for (const struct fat_entry *entry; at + sizeof *entry <= end; at += entry->header_size + entry->size) {
        entry = (const void *)at;
        int kind = entry->kind - 1; /* 0: PTX, 1: a cubin */
        if (entry->header_size < sizeof *entry) return;
        if ((kind == 0 || kind == 1) && module->count[kind] < 16) module->built[kind][module->count[kind]++] = (int)entry->built;
    }
}
void **__cudaRegisterFatBinary(void *binary) {
    struct module *module = handle(sizeof *module);
    return read_fat(module, binary), (void **)module;
}
void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
void __cudaUnregisterFatBinary(void **binary) { (void)binary; } /* its functions are still known by it */
void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, int limit, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {
    (void)device_function, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
    pthread_mutex_lock(&lock);
    if (known_count == known_room) known = realloc(known, (known_room = known_room ? 2 * known_room : 4096) * sizeof *known);
    known[known_count++] = (struct known){function, name, (const struct module *)binary};
    pthread_mutex_unlock(&lock);
}
static int launch(const void *function) {
    card_count_one(&card_counted()->launches);
    in_capture++;
    size_t at = ((uintptr_t)function * 0x9E3779B97F4A7C15ull) >> 51;
    for (size_t i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS) {
        const void *empty = NULL;
        if (launched[at].function == function ||
            __atomic_compare_exchange_n(&launched[at].function, &empty, function, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
            empty == function) {
            __atomic_fetch_add(&launched[at].times, 1, __ATOMIC_RELAXED);
            break;
        }
    }
    return OK;
}
/* Kernels by name: calls `tell` for each that was launched, with how often. */
void card_kernels(void (*tell)(const char *name, uint64_t times)) {
    for (size_t i = 0; i < SLOTS; i++) {
        if (!launched[i].times) continue;
        const char *name = "?";
        for (size_t k = 0; k < known_count; k++)
            if (known[k].function == launched[i].function) name = known[k].name;
        tell(name, launched[i].times);
    }
}

struct size3 { unsigned x, y, z; };
struct call { struct size3 grid, block; size_t shared; void *stream; };
static __thread struct call calls[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(struct size3 grid, struct size3 block, size_t shared, void *stream) {
    if (depth < 16) calls[depth++] = (struct call){grid, block, shared, stream};
    return 0;
}
int __cudaPopCallConfiguration(struct size3 *grid, struct size3 *block, size_t *shared, void **stream) {
    if (!depth) return fail(MISSING_CONFIGURATION);
    struct call *call = &calls[--depth];
    return *grid = call->grid, *block = call->block, *shared = call->shared, *stream = call->stream, OK;
}
int __cudaGetKernel(const void **out, const void *function) { return *out = function, OK; }
int __cudaLaunchKernel(const void *kernel) { return launch(kernel); }
int cudaLaunchKernel(const void *function) { return launch(function); }
int cudaLaunchCooperativeKernel(const void *function) { return launch(function); }
int cudaLaunchKernelExC(const void *config, const void *function) { return (void)config, launch(function); }

struct function_attributes {
    size_t shared, constant, local;
    int threads_per_block, registers, ptx, binary, cache, dynamic_shared, carveout, cluster[5], reserved[16];
};
/* The code that a driver takes: the newest cubin of the card's own generation, else the newest PTX that it can compile.
 * CUB asks for it and has kernels for just these. A card for which nothing was built has what was built for the oldest:
 * other builds of the same library have kernels for it. */
static int built_for(const struct module *module, int major, int minor) {
    int cubin = 0, ptx = 0, oldest = 0;
    for (int i = 0; module && i < module->count[1]; i++) {
        int built = module->built[1][i];
        if (built / 10 == major && built % 10 <= minor && built > cubin) cubin = built;
        if (!oldest || built < oldest) oldest = built;
    }
    for (int i = 0; module && i < module->count[0]; i++)
        if (module->built[0][i] <= 10 * major + minor && module->built[0][i] > ptx) ptx = module->built[0][i];
    return cubin ? cubin : ptx ? ptx : oldest ? oldest : 10 * major + minor;
}
static const struct module *module_of(const void *function) {
    const struct module *found = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < known_count && !found; i++)
        if (known[i].function == function) found = known[i].module;
    pthread_mutex_unlock(&lock);
    return found;
}
int cudaFuncGetAttributes(struct function_attributes *out, const void *function) {
    const struct card *c = card();
    memset(out, 0, sizeof *out - sizeof out->reserved);
    out->threads_per_block = 1024, out->registers = 32;
    out->binary = out->ptx = built_for(module_of(function), c->major, c->minor);
    out->dynamic_shared = (int)c->shared_per_block_optin;
    return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    (void)function, (void)flags; /* registers are not known: no allocation was seen to depend on them */
    const struct card *c = card();
    int most = threads > 0 ? c->threads_per_multiprocessor / threads : 1;
    if (shared && (int)(c->shared_per_multiprocessor / (shared + 1024)) < most) most = (int)(c->shared_per_multiprocessor / (shared + 1024));
    if (most > c->blocks_per_multiprocessor) most = c->blocks_per_multiprocessor;
    return *blocks = most > 0 ? most : 1, OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
static int a_library;
int cudaLibraryLoadData(void **library) { return *library = &a_library, OK; }
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return (void)library, (void)name, *kernel = &a_library, OK; }

/* Variables of the device: no kernel reads them, so any memory will do. */
struct variable { const void *host; void *device; size_t n; };
static struct variable *variables;
static size_t variable_count;
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t n, int constant, int global) {
    (void)binary, (void)device, (void)name, (void)external, (void)constant, (void)global;
    pthread_mutex_lock(&lock);
    variables = realloc(variables, (variable_count + 1) * sizeof *variables);
    variables[variable_count++] = (struct variable){host, handle(n ? n : 1), n};
    pthread_mutex_unlock(&lock);
}
int cudaGetSymbolAddress(void **out, const void *symbol) {
    for (size_t i = 0; i < variable_count; i++)
        if (variables[i].host == symbol) return *out = variables[i].device, OK;
    return fail(INVALID_SYMBOL);
}
int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, int kind) {
    (void)symbol, (void)from, (void)n, (void)offset, (void)kind;
    return OK;
}
