/* Finds memory that nobody wrote, which is zeros, without reading it: the kernel tells which pages exist. That is useless for
 * pages of files, so known ranges are recorded here: libc10's tensors (host.c), and maps of files that are mostly holes
 * (inside/sparse.py). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((uintptr_t)4096)
#define AT_ONCE ((size_t)512)
#define GIVEN_BACK ((size_t)1 << 20) /* from this size on, a system call is cheaper than writing zeros */

struct range { const char *at; size_t n; };
static void *ranges; /* a tree, by address */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A forked process must begin with the lock free: it lacks the thread that would release it. */
static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void forks(void) { pthread_atfork(hold, let_go, let_go); }

static int order(const void *one, const void *other) {
    const struct range *a = one, *b = other;
    return a->at + a->n <= b->at ? -1 : b->at + b->n <= a->at;
}
/* Record a range of private memory without a file. */
void blank_remember(const void *at, size_t n) {
    struct range *new = malloc(sizeof *new), **kept;
    if (!new) return; /* unknown ranges are read */
    *new = (struct range){at, n};
    pthread_mutex_lock(&lock);
    kept = tsearch(new, &ranges, order);
    pthread_mutex_unlock(&lock);
    if (!kept || *kept != new) free(new);
}
void blank_forget(const void *at) {
    struct range asked = {at, 1}, **found, *was = NULL;
    pthread_mutex_lock(&lock);
    if ((found = tfind(&asked, &ranges, order))) was = *found, tdelete(was, &ranges, order);
    pthread_mutex_unlock(&lock);
    free(was);
}
int blank_known(const void *at, size_t n) {
    struct range asked = {at, 1}, **found;
    pthread_mutex_lock(&lock);
    found = tfind(&asked, &ranges, order);
    int known = found && (const char *)at + n <= (*found)->at + (*found)->n;
    pthread_mutex_unlock(&lock);
    return known;
}

static int zeros(const char *at, const char *end) { return at == end || (!*at && !memcmp(at, at + 1, (size_t)(end - at - 1))); }

/* Whether all of it is zeros. Only pages that exist, or are swapped out, are read. Source: the kernel's
 * Documentation/admin-guide/mm/pagemap.rst, bits 63 and 62. */
int blank_is(const void *from, size_t n) {
    const char *at = from, *end = at + n, *page = (const char *)((uintptr_t)at & ~(PAGE - 1));
    int pagemap = n && blank_known(from, n) ? open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) : -1;
    int blank = pagemap >= 0;
    while (blank && page < end) {
        uint64_t pages[AT_ONCE];
        size_t left = ((size_t)(end - page) + PAGE - 1) / PAGE, count = left < AT_ONCE ? left : AT_ONCE;
        ssize_t read = pread(pagemap, pages, count * sizeof *pages, (off_t)((uintptr_t)page / PAGE * sizeof *pages));
        blank = read == (ssize_t)(count * sizeof *pages);
        for (size_t i = 0; blank && i < count; i++, page += PAGE)
            if (pages[i] >> 62) blank = zeros(page < at ? at : page, page + PAGE > end ? end : page + PAGE);
    }
    if (pagemap >= 0) close(pagemap);
    return blank;
}

/* Make private memory zeros as if nobody had written it. The kernel frees whole pages, which costs no time. */
void blank_zero(char *at, size_t n) {
    char *first = (char *)(((uintptr_t)at + PAGE - 1) & ~(PAGE - 1));
    char *last = (char *)((uintptr_t)(at + n) & ~(PAGE - 1));
    if (n < GIVEN_BACK || madvise(first, (size_t)(last - first), MADV_DONTNEED)) memset(at, 0, n);
    else memset(at, 0, (size_t)(first - at)), memset(last, 0, (size_t)(at + n - last));
}
