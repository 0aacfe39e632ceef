/* libcufft: plans with an empty work area, since only cuFFT knows its size. */
#include <stddef.h>

static int plans;
int cufftCreate(int *plan) { return *plan = ++plans, 0; }
int cufftXtMakePlanMany(int plan, int rank, void *n, void *in, long long in_stride, long long in_distance, int in_type, void *out,
                        long long out_stride, long long out_distance, int out_type, long long batch, size_t *work, int type) {
    (void)plan, (void)rank, (void)n, (void)in, (void)in_stride, (void)in_distance, (void)in_type, (void)out, (void)out_stride;
    (void)out_distance, (void)out_type, (void)batch, (void)type;
    return *work = 0, 0;
}
