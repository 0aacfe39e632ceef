/* libcudnn: version 9.20. The backend's descriptors keep what they are told; every graph has one engine, whose plan wants no
 * workspace, since which one cuDNN would choose is known to a real card alone. Of one convolution it is known: see
 * `patches_workspace`. Numbers of attributes and types are those of cudnn_graph.h, which are part of its ABI. */
#include "card.h"
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum attribute_name {
    CONVOLUTION_STRIDES = 103,
    ENGINE_HEURISTIC_GRAPH = 201,
    ENGINE_HEURISTIC_RESULTS = 202,
    ENGINE_CONFIG_ENGINE = 300,
    PLAN_ENGINE_CONFIG = 401,
    PLAN_WORKSPACE = 402,
    FORWARD_CONVOLUTION = 702,
    FORWARD_W = 703,
    FORWARD_X = 704,
    FORWARD_Y = 705,
    GRAPH_OPERATIONS = 801,
    TENSOR_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    TENSOR_STRIDES = 903,
    ENGINE_NUMERICAL_NOTES = 1303,
    ENGINE_BEHAVIOR_NOTES = 1305,
};
enum { TYPE_HALF = 2, TYPE_BFLOAT16 = 9, TYPE_DESCRIPTOR = 15 };
static const unsigned char BYTES_OF_TYPE[] = {8, 4, 1, 8, 4, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 8, 4, 4, 4, 4, 4, 4, 4, 4, 1, 4, 4, 4, 8, 4, 4, 4};

struct attribute { int name; int64_t count; struct attribute *next; char bytes[]; };
struct descriptor { struct attribute *attributes; int64_t workspace; };

static size_t bytes_of(int type, int64_t count) {
    return (size_t)count * (type >= 0 && type < (int)sizeof BYTES_OF_TYPE ? BYTES_OF_TYPE[type] : 8);
}
int cudnnBackendCreateDescriptor(int kind, struct descriptor **out) {
    return (void)kind, *out = calloc(1, sizeof **out), 0;
}
int cudnnBackendDestroyDescriptor(struct descriptor *d) {
    for (struct attribute *at = d->attributes, *next; at; at = next) next = at->next, free(at);
    return free(d), 0;
}
int cudnnBackendSetAttribute(struct descriptor *d, int name, int type, int64_t count, const void *from) {
    struct attribute *at = malloc(sizeof *at + bytes_of(type, count));
    at->name = name, at->count = count, at->next = d->attributes;
    memcpy(at->bytes, from, bytes_of(type, count));
    return d->attributes = at, 0;
}
static const void *told(const struct descriptor *d, int name, int64_t count) {
    for (const struct attribute *at = d ? d->attributes : NULL; at; at = at->next)
        if (at->name == name) return at->count == count ? at->bytes : NULL;
    return NULL;
}
static const struct descriptor *part(const struct descriptor *d, int name) {
    const struct descriptor *const *at = told(d, name, 1);
    return at ? *at : NULL;
}

/* Patches of pictures in 16 bits, one after another: tensor cores read and write channels last, so where channels come first
 * the kernel works in copies of picture, weight and result with channels last, in eights of them.
 * Measured: 155,263,123 bytes for 16 × 4 × 128 × 128 in 1152 patches of 2 × 2 (H100, torch 2.11; benchmarks/gpu_matrix.md),
 * which are these and 147 bytes. Other convolutions choose by what a real card is asked, and have 0 here. */
static int64_t patches_workspace(const struct descriptor *operation) {
    const struct descriptor *picture = part(operation, FORWARD_X), *kernel = part(operation, FORWARD_W);
    const int64_t *x = told(picture, TENSOR_DIMENSIONS, 4), *w = told(kernel, TENSOR_DIMENSIONS, 4);
    const int64_t *y = told(part(operation, FORWARD_Y), TENSOR_DIMENSIONS, 4), *steps = told(picture, TENSOR_STRIDES, 4);
    const int64_t *strides = told(part(operation, FORWARD_CONVOLUTION), CONVOLUTION_STRIDES, 2);
    const int *type = told(picture, TENSOR_TYPE, 1);
    if (!x || !w || !y || !steps || !strides || !type || card()->major < 8) return 0;
    if ((*type != TYPE_HALF && *type != TYPE_BFLOAT16) || w[1] != x[1] || steps[1] == 1) return 0; /* groups; channels last */
    if (w[2] * w[3] == 1 || w[2] != strides[0] || w[3] != strides[1]) return 0;
    int64_t elements = 0;
    for (int i = 0; i < 3; i++) {
        const int64_t *n = (const int64_t *[]){x, w, y}[i];
        elements += n[0] * ((n[1] + 7) / 8 * 8) * n[2] * n[3];
    }
    return 2 * elements + 147;
}
/* What a plan wants is handed on when each part is finished, since callers may let go of an earlier one then. */
int cudnnBackendFinalize(struct descriptor *d) {
    static const int EARLIER[] = {GRAPH_OPERATIONS, ENGINE_HEURISTIC_GRAPH, PLAN_ENGINE_CONFIG};
    if (told(d, FORWARD_X, 1)) d->workspace = patches_workspace(d);
    for (int i = 0; i < 3; i++) {
        const struct descriptor *earlier = part(d, EARLIER[i]);
        if (earlier) d->workspace = earlier->workspace;
    }
    return 0;
}
/* An engine that works in copies is followed by one that does not, for where the card has no room for them. */
static int64_t engines(const struct descriptor *heuristic, int64_t asked, struct descriptor **out) {
    int64_t n = heuristic->workspace ? 2 : 1;
    if (!out) return n;
    if (asked > 0) out[0]->workspace = heuristic->workspace; /* the caller made what would be filled in */
    return asked < n ? asked : n;
}
int cudnnBackendGetAttribute(struct descriptor *d, int name, int type, int64_t asked, int64_t *count, void *out) {
    int64_t ignored;
    if (!count) count = &ignored;
    for (struct attribute *at = d->attributes; at; at = at->next)
        if (at->name == name) {
            *count = at->count;
            if (out) memcpy(out, at->bytes, bytes_of(type, asked < at->count ? asked : at->count));
            return 0;
        }
    if (name == ENGINE_HEURISTIC_RESULTS) return *count = engines(d, asked, out), 0;
    *count = 1;
    if (name == ENGINE_CONFIG_ENGINE) return 0;
    if (name == PLAN_WORKSPACE && out) return *(int64_t *)out = d->workspace, 0;
    if (name == ENGINE_NUMERICAL_NOTES || name == ENGINE_BEHAVIOR_NOTES || type == TYPE_DESCRIPTOR || !out) return *count = 0, 0;
    return memset(out, 0, bytes_of(type, asked)), 0; /* the engine's index, shared memory */
}
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
const char *cudnnGetErrorString(int status) { return status ? "not answered by an emulated card" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}
int cudnnGetStream(void *handle, void **stream) { return (void)handle, *stream = NULL, 0; }
int cudnnDropoutGetStatesSize(void *handle, size_t *n) { return (void)handle, *n = 0, 0; }

/* What batch normalisation keeps between forward and backward, and works in: known to cuDNN alone, like a plan's workspace. */
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z, void *y,
                                                             void *scale, void *activation, size_t *n) {
    (void)handle, (void)mode, (void)operation, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    return *n = 0, 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy, void *dz,
                                                      void *dx, void *scale, void *activation, size_t *n) {
    (void)handle, (void)mode, (void)operation, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    return *n = 0, 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation, void *x, size_t *n) {
    (void)handle, (void)mode, (void)operation, (void)activation, (void)x;
    return *n = 0, 0;
}
