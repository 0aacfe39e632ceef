/* libcublas: functions that return values. Handles, products and the rest are generated, and succeed without computing. */
int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }
int cublasGetVersion_v2(void *handle, int *version) { return (void)handle, *version = 130100, 0; }
int cublasGetProperty(int which, int *value) { return *value = which == 0 ? 13 : which == 1 ? 1 : 0, 0; }
const char *cublasGetStatusString(int status) { return status ? "not supported by an emulated GPU" : "success"; }
const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
