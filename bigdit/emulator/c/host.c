/* libbigdit-host: CPU tensors of 32 MiB and more share the same 64 MiB of RAM, so a model of 12 billion parameters can be built
 * on a small machine. Their values are lost, which changes no count of bytes.
 *
 * torch allocates CPU memory by libc10's calls of posix_memalign and free. `host_share` replaces both in this library only, so
 * other libraries' data is safe. Memory that a thread allocates between `host_own(1)` and `host_own(0)` is not shared. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAST ((size_t)32 << 20)
#define KNOWN ((size_t)1 << 20) /* from this size on, blank.c tracks memory */
#define CHUNK ((size_t)64 << 20)
#define PAGE ((size_t)2 << 20)
#define ARENA ((size_t)16 << 40)

void blank_remember(const void *at, size_t n); /* blank.c */
void blank_forget(const void *at);
void blank_zero(char *at, size_t n);

static char *arena, *next;
static size_t *sizes; /* of the allocation at each page of the arena */
static size_t live_bytes, peak_bytes;
static int64_t tensor_bytes, most_tensor_bytes; /* of all CPU tensors, including pinned ones */
static int chunk = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int own;

/* Count `n` more bytes of CPU tensors, or fewer if negative. */
void host_count(int64_t n) {
    int64_t now = __atomic_add_fetch(&tensor_bytes, n, __ATOMIC_RELAXED);
    int64_t most = __atomic_load_n(&most_tensor_bytes, __ATOMIC_RELAXED);
    while (now > most && !__atomic_compare_exchange_n(&most_tensor_bytes, &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
int64_t host_tensor_bytes(void) { return __atomic_load_n(&tensor_bytes, __ATOMIC_RELAXED); }
/* The peak since the last call. */
int64_t host_most_tensor_bytes(void) { return __atomic_exchange_n(&most_tensor_bytes, host_tensor_bytes(), __ATOMIC_RELAXED); }

static void prepare(void) {
    chunk = memfd_create("bigdit-host", MFD_CLOEXEC);
    if (chunk < 0 || ftruncate(chunk, CHUNK)) return;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    sizes = mmap(NULL, ARENA / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE, flags, -1, 0);
    char *at = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED || (void *)sizes == MAP_FAILED) return;
    arena = next = (char *)(((uintptr_t)at + CHUNK - 1) & ~(CHUNK - 1));
}

int host_has(const void *at) { return arena && (const char *)at >= arena && (const char *)at < next; }
size_t host_peak_bytes(void) { return peak_bytes; }
/* Make memory zeros. Shared pages exist only if they were written or read. These are freed, and all others are zeros already.
 * Writing through a tensor's addresses would take a page fault each. */
void host_zero(void *at, size_t n) {
    if (!host_has(at)) return blank_zero(at, n);
    size_t start = (size_t)((char *)at - arena) % CHUNK, stop = start + n;
    if (stop > CHUNK) start = 0, stop = CHUNK; /* it wraps around */
    off_t there = lseek(chunk, (off_t)start, SEEK_DATA);
    if (there < 0 || there >= (off_t)stop) return;
    if (fallocate(chunk, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start, (off_t)(stop - start))) memset(at, 0, n);
}

void host_own(int on) { own = on; }

/* Memory for `n` bytes on shared pages; NULL if `n` is small, or there is no room. */
void *host_take(size_t n) {
    if (n < LEAST || own || pthread_once(&once, prepare) || !arena) return NULL;
    size_t whole = (n + PAGE - 1) & ~(PAGE - 1);
    pthread_mutex_lock(&lock);
    char *at = next;
    if (at + whole > arena + ARENA - 2 * CHUNK) at = NULL;
    else next += (whole + CHUNK - 1) & ~(CHUNK - 1), sizes[(at - arena) / PAGE] = whole, live_bytes += whole;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    pthread_mutex_unlock(&lock);
    for (size_t done = 0; at && done < whole; done += CHUNK) {
        size_t part = whole - done < CHUNK ? whole - done : CHUNK;
        if (mmap(at + done, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, chunk, 0) == MAP_FAILED) return NULL;
    }
    return at;
}
int host_release(void *at) {
    if (!host_has(at)) return 0;
    size_t n = sizes[((char *)at - arena) / PAGE];
    mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    pthread_mutex_lock(&lock);
    live_bytes -= n;
    pthread_mutex_unlock(&lock);
    return 1;
}

static size_t size_of(const void *at) { return sizes[((const char *)at - arena) / PAGE]; }

static int take_aligned(void **out, size_t align, size_t n) {
    void *at = align <= PAGE ? host_take(n) : NULL;
    if (at) return host_count((int64_t)size_of(at)), *out = at, 0;
    int problem = posix_memalign(out, align, n);
    if (problem) return problem;
    size_t usable = malloc_usable_size(*out);
    host_count((int64_t)usable);
    if (usable >= KNOWN) blank_remember(*out, n);
    return 0;
}
static void give(void *at) {
    size_t usable = host_has(at) ? size_of(at) : malloc_usable_size(at);
    host_count(-(int64_t)usable);
    if (host_release(at)) return;
    if (usable >= KNOWN) blank_forget(at);
    free(at);
}

static int put(void **slot, void *function) {
    long page = sysconf(_SC_PAGESIZE);
    void *at = (void *)((uintptr_t)slot & ~(uintptr_t)(page - 1));
    if (mprotect(at, (size_t)page, PROT_READ | PROT_WRITE)) return 0; /* it may be read-only after relocation */
    return *slot = function, 1;
}
static int replace(const ElfW(Rela) *entries, size_t n, const ElfW(Sym) *symbols, const char *names, ElfW(Addr) base) {
    int done = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned type = ELF64_R_TYPE(entries[i].r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
        const char *name = names + symbols[ELF64_R_SYM(entries[i].r_info)].st_name;
        void **slot = (void **)(base + entries[i].r_offset);
        if (!strcmp(name, "posix_memalign")) done |= put(slot, (void *)take_aligned) << 0;
        if (!strcmp(name, "free")) done |= put(slot, (void *)give) << 1;
    }
    return done;
}

/* Share CPU memory of the libc10 that is loaded from `path`. Returns 0, or 1 if its calls were not found. */
int host_share(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    struct link_map *map;
    if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) return 1;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *calls = NULL, *data = NULL;
    size_t call_bytes = 0, data_bytes = 0;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) switch (d->d_tag) {
        case DT_SYMTAB: symbols = (void *)d->d_un.d_ptr; break;
        case DT_STRTAB: names = (void *)d->d_un.d_ptr; break;
        case DT_JMPREL: calls = (void *)d->d_un.d_ptr; break;
        case DT_PLTRELSZ: call_bytes = d->d_un.d_val; break;
        case DT_RELA: data = (void *)d->d_un.d_ptr; break;
        case DT_RELASZ: data_bytes = d->d_un.d_val; break;
    }
    /* `give` also frees memory that was allocated before */
    int done = replace(calls, call_bytes / sizeof *calls, symbols, names, map->l_addr);
    done |= replace(data, data_bytes / sizeof *data, symbols, names, map->l_addr);
    return done == 3 ? 0 : 1;
}
