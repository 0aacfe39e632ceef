/* libcudnn: version 9.20. The backend's descriptors store their attributes. Every graph has an engine whose plan needs no
 * workspace, since only a real GPU shows which one cuDNN chooses. Workspaces of convolutions were measured: see
 * `copies_with_channels_last`. Numbers of attributes and types are those of cudnn_graph.h, part of its ABI. */
#include "gpu.h"
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
enum { NOTE_TENSOR_CORE = 0 };
enum { FORWARD = 0, BACKWARD_INPUT = 6, BACKWARD_WEIGHT = 12 }; /* offsets of attributes from FORWARD_… */
enum { TYPE_FLOAT = 0, TYPE_HALF = 2, TYPE_BFLOAT16 = 9, TYPE_DESCRIPTOR = 15 };
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
static const void *stored(const struct descriptor *d, int name, int64_t count) {
    for (const struct attribute *at = d ? d->attributes : NULL; at; at = at->next)
        if (at->name == name) return at->count == count ? at->bytes : NULL;
    return NULL;
}
static int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static const struct descriptor *part(const struct descriptor *d, int name) {
    const struct descriptor *const *at = stored(d, name, 1);
    return at ? *at : NULL;
}

/* Tensor cores read and write channels last. If channels come first, kernels work in copies of input, weight and result with
 * channels last, padded to multiples of 16 bytes, whichever of the three they compute, and 16 or 147 bytes more.
 * Measured on an H200: benchmarks/on_gpu/convolutions.json; docs/limits.md says how many of its rows agree. Kernels of one point,
 * groups, weights' gradients in TF32, and fewer than 8 channels (except patches in 16 bits) make no copies.
 * Published peaks of VAEs (benchmarks/peers.md): in bf16, HiDream's has all three copies, on an unnamed GPU; in TF32, fast-DiT's,
 * on an A100, has no room for the result's. Ampere's kernels write the result channels first (`nhwckrsc_nchw`). */
static int64_t copies_with_channels_last(const struct descriptor *operation, int way) {
    const struct descriptor *input = part(operation, FORWARD_X + way), *kernel = part(operation, FORWARD_W + way);
    const int64_t n = stored(input, TENSOR_DIMENSIONS, 5) ? 5 : 4;
    const int64_t *x = stored(input, TENSOR_DIMENSIONS, n), *w = stored(kernel, TENSOR_DIMENSIONS, n);
    const int64_t *y = stored(part(operation, FORWARD_Y + way), TENSOR_DIMENSIONS, n), *steps = stored(input, TENSOR_STRIDES, n);
    const int64_t *strides = stored(part(operation, FORWARD_CONVOLUTION + way), CONVOLUTION_STRIDES, n - 2);
    const int *type = stored(input, TENSOR_TYPE, 1);
    if (!x || !w || !y || !steps || !strides || !type || gpu()->major < 8) return 0;
    const int bits_16 = *type == TYPE_HALF || *type == TYPE_BFLOAT16, multiple = bits_16 ? 8 : 4;
    if ((!bits_16 && (*type != TYPE_FLOAT || way == BACKWARD_WEIGHT)) || w[1] != x[1] || steps[1] == 1) return 0;
    int64_t points = 1, patches = bits_16, elements = 0;
    for (int i = 2; i < n; i++) points *= w[i], patches &= w[i] == strides[i - 2];
    if (points == 1 || (x[1] < 8 && !patches)) return 0;
    for (int i = 0; i < (bits_16 || gpu()->major > 8 ? 3 : 2); i++) {
        const int64_t *of = (const int64_t *[]){x, w, y}[i];
        int64_t rows = of == w ? up_to(of[0], multiple) : of[0];
        for (int j = 2; j < n; j++) rows *= of[j];
        elements += rows * up_to(of[1], multiple);
    }
    return elements * 16 / multiple + 147;
}
/* A workspace is copied when each descriptor is finalized, since callers may destroy earlier ones then. */
int cudnnBackendFinalize(struct descriptor *d) {
    static const int EARLIER[] = {GRAPH_OPERATIONS, ENGINE_HEURISTIC_GRAPH, PLAN_ENGINE_CONFIG};
    for (int way = FORWARD; way <= BACKWARD_WEIGHT; way += BACKWARD_INPUT)
        if (stored(d, FORWARD_X + way, 1)) d->workspace = copies_with_channels_last(d, way);
    for (int i = 0; i < 3; i++) {
        const struct descriptor *earlier = part(d, EARLIER[i]);
        if (earlier) d->workspace = earlier->workspace;
    }
    return 0;
}
/* An engine that works in copies is followed by one that does not. torch uses that if the GPU has no room, or without TF32: then
 * it leaves out engines of fp32 with the note on tensor cores (filterEngineConfigs in torch's Conv_v8.cpp). */
static int64_t engines(const struct descriptor *heuristic, int64_t asked, struct descriptor **out) {
    int64_t n = heuristic->workspace ? 2 : 1;
    if (!out) return n;
    if (asked > 0) out[0]->workspace = heuristic->workspace; /* the caller created the descriptor */
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
    if (name == ENGINE_CONFIG_ENGINE && out) return (*(struct descriptor **)out)->workspace = d->workspace, 0;
    if (name == PLAN_WORKSPACE && out) return *(int64_t *)out = d->workspace, 0;
    if (name == ENGINE_NUMERICAL_NOTES && d->workspace && out) return *(int *)out = NOTE_TENSOR_CORE, 0;
    if (name == ENGINE_NUMERICAL_NOTES || name == ENGINE_BEHAVIOR_NOTES || type == TYPE_DESCRIPTOR || !out) return *count = 0, 0;
    return memset(out, 0, bytes_of(type, asked)), 0; /* the engine's index, shared memory */
}
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
const char *cudnnGetErrorString(int status) { return status ? "not supported by an emulated GPU" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}
int cudnnGetStream(void *handle, void **stream) { return (void)handle, *stream = NULL, 0; }
int cudnnDropoutGetStatesSize(void *handle, size_t *n) { return (void)handle, *n = 0, 0; }

/* Batch normalisation's workspaces: only cuDNN knows their sizes, like a plan's workspace. */
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
