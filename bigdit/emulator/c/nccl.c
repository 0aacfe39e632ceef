/* libnccl: collectives of small payloads run among the processes of this machine, through shared memory. Large ones move no
 * data. Without peers (BIGDIT_EMULATED_PEERS=0) the other processes do not exist, and are assumed to have the same values.
 *
 * The shared memory is an anonymous file. Its creator keeps it open, and the others open it under /proc. So nothing is left,
 * whoever is killed. */
#define _GNU_SOURCE
#include "gpu.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SLOT 65536 /* bytes of a small payload */
#define RING 16    /* waiting messages from one rank to another */
#define RANKS_MOST 1024

enum { OK = 0, UNHANDLED_CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum type { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT, FP8_E4M3, FP8_E5M2 };
static const unsigned char BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum operation { SUM, PRODUCT, MAX, MIN, MEAN, SCALED_SUM }; /* from SCALED_SUM on, each is a sum with its own factor */

struct id { char path[128]; };
struct mailbox { _Atomic uint64_t sent, taken; char messages[RING][SLOT]; }; /* from one rank to another */
struct shared { _Atomic int arrived, phase; _Atomic int processes[RANKS_MOST]; };
struct comm { int ranks, rank, device; struct shared *shared; char (*slots)[SLOT]; struct mailbox *mail; size_t n; };

static int peers(void) {
    const char *text = getenv("BIGDIT_EMULATED_PEERS");
    return !text || *text != '0';
}

/* -- waiting -- */

/* The caller may hold Python's lock. It is released while the caller waits, so other threads and signal handlers run, as with
 * a real GPU. */
static int (*holds_python)(void);
static void *(*release_python)(void);
static void (*take_python)(void *);
static void find_python(void) {
    *(void **)&holds_python = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    *(void **)&release_python = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    *(void **)&take_python = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}
static pthread_once_t looked_for_python = PTHREAD_ONCE_INIT;

struct wait { unsigned times; void *python; };

/* Wait, longer each time. REMOTE_ERROR if a rank has ended. */
static int wait_for(struct comm *c, struct wait *w) {
    if (++w->times < 200) return sched_yield(), OK;
    if (w->times == 200) {
        pthread_once(&looked_for_python, find_python);
        if (holds_python && release_python && take_python && holds_python()) w->python = release_python();
    }
    usleep(w->times < 2000 ? 50 : 1000);
    if (w->times % 1000) return OK;
    for (int rank = 0; rank < c->ranks; rank++) {
        pid_t process = c->shared->processes[rank];
        if (!process || !kill(process, 0) || errno != ESRCH) continue;
        fprintf(stderr, "emulated NCCL: rank %d (process %d) has ended, and rank %d waits for it\n", rank, process, c->rank);
        return REMOTE_ERROR;
    }
    return OK;
}
static int waited(struct wait *w, int error) {
    if (w->python) take_python(w->python);
    return error;
}
static int barrier(struct comm *c) {
    int phase = c->shared->phase, error = OK;
    struct wait w = {0, NULL};
    if (atomic_fetch_add(&c->shared->arrived, 1) == c->ranks - 1) {
        c->shared->arrived = 0;
        atomic_fetch_add(&c->shared->phase, 1);
        return OK;
    }
    while (c->shared->phase == phase && !error) error = wait_for(c, &w);
    return waited(&w, error);
}

/* -- communicators -- */

static int share(struct id *out) {
    int file = memfd_create("bigdit-nccl", 0);
    if (file < 0) return SYSTEM_ERROR;
    memset(out, 0, sizeof *out);
    snprintf(out->path, sizeof out->path, "/proc/%d/fd/%d", (int)getpid(), file);
    return OK;
}
static void keep_no_more(const struct id *id) { /* the creator closes the file; mappings stay */
    int process, file;
    if (sscanf(id->path, "/proc/%d/fd/%d", &process, &file) == 2 && process == (int)getpid()) close(file);
}
static int join(struct comm **out, int ranks, int rank, const struct id *id) {
    struct comm *c = calloc(1, sizeof *c);
    *out = c;
    c->ranks = ranks, c->rank = rank, c->device = gpu_current();
    if (ranks > RANKS_MOST) return INVALID_ARGUMENT;
    if (ranks == 1) return OK;
    if (gpu_nccl(c->device)) return UNHANDLED_CUDA_ERROR;
    if (!id || !peers()) return OK;
    size_t slots = (size_t)ranks * SLOT;
    c->n = sizeof *c->shared + slots + (size_t)ranks * ranks * sizeof *c->mail;
    int file = open(id->path, O_RDWR | O_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)c->n)) return SYSTEM_ERROR;
    char *at = mmap(NULL, c->n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (at == MAP_FAILED) return SYSTEM_ERROR;
    c->shared = (void *)at, c->slots = (void *)(at + sizeof *c->shared), c->mail = (void *)(at + sizeof *c->shared + slots);
    c->shared->processes[rank] = getpid();
    int error = barrier(c);
    keep_no_more(id);
    return error;
}
int ncclGetUniqueId(struct id *out) { return share(out); }
int ncclCommInitRank(struct comm **out, int ranks, struct id id, int rank) { return join(out, ranks, rank, &id); }
int ncclCommInitRankConfig(struct comm **out, int ranks, struct id id, int rank, void *config) {
    return (void)config, join(out, ranks, rank, &id);
}
int ncclCommInitRankScalable(struct comm **out, int ranks, int rank, int n, struct id *ids, void *config) {
    return (void)n, (void)config, join(out, ranks, rank, ids);
}
int ncclCommInitAll(struct comm **out, int n, const int *devices) { /* one process with several GPUs */
    for (int i = 0; i < n; i++) {
        join(&out[i], n, i, NULL);
        if (devices) out[i]->device = devices[i];
    }
    return OK;
}
static int leave(struct comm *c) {
    if (c->shared) munmap(c->shared, c->n);
    return free(c), OK;
}
int ncclCommDestroy(struct comm *c) { return leave(c); }
int ncclCommAbort(struct comm *c) { return leave(c); }
int ncclCommFinalize(struct comm *c) { return (void)c, OK; }
int ncclCommCount(struct comm *c, int *count) { return *count = c->ranks, OK; }
int ncclCommUserRank(struct comm *c, int *rank) { return *rank = c->rank, OK; }
int ncclCommCuDevice(struct comm *c, int *device) { return *device = c->device, OK; }
int ncclCommGetAsyncError(struct comm *c, int *state) { return (void)c, *state = OK, OK; }
int ncclGetVersion(int *version) { return *version = 22907, OK; }
const char *ncclGetErrorString(int result) {
    return result == OK ? "no error" : result == REMOTE_ERROR ? "a rank has ended" : "error of an emulated GPU";
}
const char *ncclGetLastError(struct comm *c) { return (void)c, ""; }

/* -- small payloads -- */

/* Copy all ranks' `n` bytes into the slots. `theirs` reads them, until `gathered` lets the next collective begin. */
static int gather(struct comm *c, const void *from, size_t n) {
    if (!c->shared) return OK;
    return memcpy(c->slots[c->rank], from, n), barrier(c);
}
static int gathered(struct comm *c) { return c->shared ? barrier(c) : OK; }
static const void *theirs(struct comm *c, int rank, const void *own) { return c->shared ? c->slots[rank] : own; }

int ncclCommSplit(struct comm *c, int color, int key, struct comm **out, void *config) {
    struct place { int color, key; struct id id; } mine = {color, key, {""}};
    (void)config, *out = NULL;
    if (share(&mine.id)) return SYSTEM_ERROR;
    int error = gather(c, &mine, sizeof mine), ranks = 0, rank = 0, first = -1;
    for (int r = 0; r < c->ranks && !error; r++) {
        const struct place *other = theirs(c, r, &mine);
        if (other->color != color) continue;
        if (first < 0) first = r;
        ranks++;
        rank += other->key < key || (other->key == key && r < c->rank);
    }
    struct id id = error || first < 0 ? mine.id : ((const struct place *)theirs(c, first, &mine))->id;
    if (!c->shared) rank = c->rank;
    if (error || (error = gathered(c))) return error;
    error = color < 0 ? OK : join(out, ranks, rank, c->shared ? &id : NULL);
    if (strcmp(id.path, mine.id.path) || color < 0 || ranks == 1 || !c->shared) keep_no_more(&mine.id);
    return error;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *c, void *stream) {
    size_t n = count * BYTES[type];
    (void)stream, gpu_count_one(&gpu_counted()->all_gathers);
    if (n > SLOT) return OK;
    if (gather(c, from, n)) return REMOTE_ERROR;
    for (int r = 0; r < c->ranks; r++) memmove((char *)to + (size_t)r * n, theirs(c, r, from), n);
    return gathered(c);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *c, void *stream) {
    size_t n = count * BYTES[type];
    (void)stream, gpu_count_one(&gpu_counted()->broadcasts);
    if (n > SLOT) return OK;
    if (gather(c, from, n)) return REMOTE_ERROR;
    memmove(to, theirs(c, root, from), n);
    return gathered(c);
}
int ncclBcast(void *at, size_t count, int type, int root, struct comm *c, void *stream) {
    return ncclBroadcast(at, at, count, type, root, c, stream);
}

/* -- reductions, in double -- */

static float of_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, sign = bits >> 15;
    float fraction = (bits & 1023) / 1024.0f, value;
    if (exponent == 31) value = fraction > 0 ? __builtin_nanf("") : __builtin_inff();
    else value = exponent ? __builtin_ldexpf(1 + fraction, exponent - 15) : __builtin_ldexpf(fraction, -14);
    return sign ? -value : value;
}
static uint16_t to_half(double v) {
    uint16_t sign = __builtin_signbit(v) ? 0x8000 : 0;
    double size = sign ? -v : v;
    if (v != v) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    int exponent;
    if (size == 0 || (__builtin_frexp(size, &exponent), exponent < -13)) return sign | (uint16_t)__builtin_rint(__builtin_ldexp(size, 24));
    return sign | (uint16_t)(((exponent + 13) << 10) + (int)__builtin_rint(__builtin_ldexp(size, 11 - exponent)));
}
static float of_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    return memcpy(&value, &wide, 4), value;
}
static uint16_t to_bfloat(double v) {
    float value = (float)v;
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return v != v ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
static double get(const void *at, enum type type, size_t i) {
    switch (type) {
    case INT8: return ((const int8_t *)at)[i];
    case UINT8: return ((const uint8_t *)at)[i];
    case INT32: return ((const int32_t *)at)[i];
    case UINT32: return ((const uint32_t *)at)[i];
    case INT64: return (double)((const int64_t *)at)[i];
    case UINT64: return (double)((const uint64_t *)at)[i];
    case HALF: return of_half(((const uint16_t *)at)[i]);
    case FLOAT: return ((const float *)at)[i];
    case DOUBLE: return ((const double *)at)[i];
    case BFLOAT: return of_bfloat(((const uint16_t *)at)[i]);
    default: return 0; /* no library reduces 8-bit floats */
    }
}
static void put(void *at, enum type type, size_t i, double v) {
    switch (type) {
    case INT8: ((int8_t *)at)[i] = (int8_t)v; break;
    case UINT8: ((uint8_t *)at)[i] = (uint8_t)v; break;
    case INT32: ((int32_t *)at)[i] = (int32_t)v; break;
    case UINT32: ((uint32_t *)at)[i] = (uint32_t)v; break;
    case INT64: ((int64_t *)at)[i] = (int64_t)v; break;
    case UINT64: ((uint64_t *)at)[i] = (uint64_t)v; break;
    case HALF: ((uint16_t *)at)[i] = to_half(v); break;
    case FLOAT: ((float *)at)[i] = (float)v; break;
    case DOUBLE: ((double *)at)[i] = v; break;
    case BFLOAT: ((uint16_t *)at)[i] = to_bfloat(v); break;
    default: break;
    }
}
static double factors[256]; /* of operations made by ncclRedOpCreatePreMulSum */
static int factor_count;
int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, struct comm *c) {
    (void)residence, (void)c; /* in CPU memory, or in the GPU's memory, which is CPU memory too */
    *operation = SCALED_SUM + factor_count;
    return factors[factor_count++ % 256] = get(scalar, type, 0), OK;
}
static void reduce(struct comm *c, const void *own, void *to, size_t skip, size_t count, enum type type, int operation) {
    char *out = malloc(count * BYTES[type] + 1); /* `to` may be `own` */
    for (size_t i = 0; i < count; i++) {
        double sum = get(theirs(c, 0, own), type, skip + i);
        for (int r = 1; r < c->ranks; r++) {
            double v = get(theirs(c, r, own), type, skip + i);
            sum = operation == PRODUCT ? sum * v : operation == MAX ? (v > sum ? v : sum) : operation == MIN ? (v < sum ? v : sum) : sum + v;
        }
        if (operation == MEAN) sum /= c->ranks;
        put(out, type, i, operation >= SCALED_SUM ? sum * factors[(operation - SCALED_SUM) % 256] : sum);
    }
    memcpy(to, out, count * BYTES[type]);
    free(out);
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, struct comm *c, void *stream) {
    (void)stream, gpu_count_one(&gpu_counted()->all_reduces);
    if (count * BYTES[type] > SLOT) return OK;
    if (gather(c, from, count * BYTES[type])) return REMOTE_ERROR;
    reduce(c, from, to, 0, count, type, operation);
    return gathered(c);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, struct comm *c, void *stream) {
    (void)stream, gpu_count_one(&gpu_counted()->reduces);
    if (count * BYTES[type] > SLOT) return OK;
    if (gather(c, from, count * BYTES[type])) return REMOTE_ERROR;
    if (c->rank == root) reduce(c, from, to, 0, count, type, operation);
    return gathered(c);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, struct comm *c, void *stream) {
    (void)stream, gpu_count_one(&gpu_counted()->reduce_scatters);
    if (count * (size_t)c->ranks * BYTES[type] > SLOT) return OK;
    if (gather(c, from, count * (size_t)c->ranks * BYTES[type])) return REMOTE_ERROR;
    reduce(c, from, to, count * (size_t)c->rank, count, type, operation);
    return gathered(c);
}

/* -- messages: a group's are sent before it waits for any; else two ranks that send to each other would wait forever -- */

struct message { const void *from; void *to; size_t n; int peer; struct comm *comm; };
static __thread struct message queued[4096];
static __thread int queue_length, group_depth;

static struct mailbox *box(struct comm *c, int from, int to) { return &c->mail[(size_t)from * c->ranks + to]; }
static int post(struct message *m) {
    struct mailbox *b = box(m->comm, m->comm->rank, m->peer);
    struct wait w = {0, NULL};
    int error = OK;
    while (b->sent - b->taken >= RING && !error) error = wait_for(m->comm, &w);
    if (waited(&w, error)) return error;
    memcpy(b->messages[b->sent % RING], m->from, m->n);
    return atomic_fetch_add(&b->sent, 1), OK;
}
static int fetch(struct message *m) {
    struct mailbox *b = box(m->comm, m->peer, m->comm->rank);
    struct wait w = {0, NULL};
    int error = OK;
    while (b->sent == b->taken && !error) error = wait_for(m->comm, &w);
    if (waited(&w, error)) return error;
    memcpy(m->to, b->messages[b->taken % RING], m->n);
    return atomic_fetch_add(&b->taken, 1), OK;
}
static int flush(void) {
    int error = OK;
    for (int i = 0; i < queue_length && !error; i++)
        if (queued[i].from) error = post(&queued[i]);
    for (int i = 0; i < queue_length && !error; i++)
        if (queued[i].to) error = fetch(&queued[i]);
    return queue_length = 0, error;
}
static int enqueue(struct message m) {
    if (m.n > SLOT || !m.comm->shared) return OK;
    if (queue_length == (int)(sizeof queued / sizeof *queued) && flush()) return REMOTE_ERROR;
    queued[queue_length++] = m;
    return group_depth ? OK : flush();
}
int ncclGroupStart(void) { return group_depth++, OK; }
int ncclGroupEnd(void) { return --group_depth > 0 ? OK : flush(); }
int ncclSend(const void *from, size_t count, int type, int peer, struct comm *c, void *stream) {
    return (void)stream, gpu_count_one(&gpu_counted()->sends), enqueue((struct message){from, NULL, count * BYTES[type], peer, c});
}
int ncclRecv(void *to, size_t count, int type, int peer, struct comm *c, void *stream) {
    return (void)stream, gpu_count_one(&gpu_counted()->receives), enqueue((struct message){NULL, to, count * BYTES[type], peer, c});
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct comm *c, void *stream) {
    size_t n = count * BYTES[type];
    ncclGroupStart();
    for (int r = 0; r < c->ranks; r++) {
        ncclSend((const char *)from + (size_t)r * n, count, type, r, c, stream);
        ncclRecv((char *)to + (size_t)r * n, count, type, r, c, stream);
    }
    return ncclGroupEnd();
}
