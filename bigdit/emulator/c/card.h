/* The card that is not there: its figures, its bytes, its addresses. Every stub library asks libcuda.so.1 (card.c) for it.
 *
 * Device memory is address space without RAM behind it: a page comes into being where a small value is written.
 * Bytes are counted in pages of 2 MiB, together with those of the other processes of the same emulation, and refused
 * when the card is full.
 *
 * All settings come in one variable, BIGDIT_EMULATED_CARD, as `key=value` between blanks, the name last:
 *   major minor multiprocessors threads blocks shared shared_optin l2 total usable context nccl count values state name
 * Sizes are bytes; `state` is the file in which the processes of an emulation count together (none: this process alone);
 * `values`: copies of up to so many bytes are done, of larger ones nothing is moved.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define CARD_PAGE ((size_t)2 << 20)
#define CARDS_MOST 16

struct card {
    char name[96];
    int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t shared_per_multiprocessor, shared_per_block_optin, l2_bytes;
    size_t total_bytes;  /* what nvidia-smi shows */
    size_t usable_bytes; /* what a CUDA process is told */
};

/* What was done since the process began; `bytes_*` count whole copies, moved or not. `library_calls` are those that
 * cuBLAS and cuDNN answer with a kernel at least, `fills` are memsets; a copy between cards is none on the card. */
struct card_counts {
    uint64_t launches, copies_to_device, copies_to_host, copies_on_device, host_syncs;
    uint64_t bytes_to_device, bytes_to_host, bytes_on_device;
    uint64_t library_calls, fills, copies_between, bytes_between;
    uint64_t all_reduces, all_gathers, reduce_scatters, broadcasts, reduces, sends, receives;
};

const struct card *card(void);
int card_attribute(int attribute, int device); /* cudaDeviceAttr and CUdevice_attribute number alike */
int card_count(void);                          /* cards that CUDA_VISIBLE_DEVICES leaves */
int card_installed(void);                      /* cards in the machine */
int card_index(int device);                    /* which of those a visible one is */
void card_uuid(int installed, unsigned char *sixteen_bytes);

int card_current(void);
int card_use(int device);              /* 0, or 1 where there is no such card */
int card_context(int device);          /* make sure of its context; 1 where the card is too full for one */
int card_nccl(int device);             /* the same for what NCCL takes */
int card_take(int device, size_t n);   /* 0, or 1 where the card is full */
void card_limit(size_t n, int final);  /* this process may take `n` beside context and NCCL's, in place of what there is;
                                          `final`: and nothing more once it was refused */
void card_give(int device, size_t n);
void card_info(int device, size_t *free_bytes, size_t *usable_bytes);
size_t card_used(int installed);       /* by all processes of the emulation */
int card_process(int installed, int i, int *process, size_t *bytes); /* the i-th that uses a card; 0 past the last */

void *card_addresses(int device, size_t n); /* they rise until all are given back; not yet accessible */
void card_give_addresses(int device);       /* one range of them; with the last one all begin anew */
void card_open(void *at, size_t n);
void card_close(void *at, size_t n);        /* and forget what was written there */
int card_has(const void *at);
int card_of(const void *at);                /* the device of an address, -1 for none */

size_t card_values(void);
void card_leave_values(void); /* from now on nothing is moved, and the host reads zeros */
struct card_counts *card_counted(void);
void card_count_one(uint64_t *counter);
int card_called(void); /* a library's call that launches: counted, and 0 */
int card_refuse(const char *function, int status); /* say once that a function has no answer here; returns `status` */
const char *card_refused(int i);                   /* the i-th function that was refused, NULL past the last */
