/* libcublasLt: the heuristic finds one algorithm, which needs no workspace beyond torch's own. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct result { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int asked,
                                   struct result *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = asked > 0;
    if (*found) memset(results, 0, sizeof *results);
    return 0;
}
