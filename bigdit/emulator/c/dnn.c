/* libcudnn: version 9.20. The backend's descriptors keep what they are told; every graph has one engine, whose plan wants no
 * workspace: which one cuDNN would choose is known to a real card alone. Numbers of attributes and types are those of
 * cudnn_graph.h, which are part of its ABI. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum attribute_name {
    ENGINE_HEURISTIC_RESULTS = 202,
    ENGINE_CONFIG_ENGINE = 300,
    ENGINE_NUMERICAL_NOTES = 1303,
    ENGINE_BEHAVIOR_NOTES = 1305,
};
enum { TYPE_DESCRIPTOR = 15 };
static const unsigned char BYTES_OF_TYPE[] = {8, 4, 1, 8, 4, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 8, 4, 4, 4, 4, 4, 4, 4, 4, 1, 4, 4, 4, 8, 4, 4, 4};

struct attribute { int name; int64_t count; struct attribute *next; char bytes[]; };
struct descriptor { struct attribute *attributes; };

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
int cudnnBackendGetAttribute(struct descriptor *d, int name, int type, int64_t asked, int64_t *count, void *out) {
    int64_t ignored;
    if (!count) count = &ignored;
    for (struct attribute *at = d->attributes; at; at = at->next)
        if (at->name == name) {
            *count = at->count;
            if (out) memcpy(out, at->bytes, bytes_of(type, asked < at->count ? asked : at->count));
            return 0;
        }
    *count = 1;
    if (name == ENGINE_HEURISTIC_RESULTS || name == ENGINE_CONFIG_ENGINE) return 0; /* the caller made what would be filled in */
    if (name == ENGINE_NUMERICAL_NOTES || name == ENGINE_BEHAVIOR_NOTES || type == TYPE_DESCRIPTOR || !out) return *count = 0, 0;
    return memset(out, 0, bytes_of(type, asked)), 0; /* the engine's index, a plan's workspace, shared memory */
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
