/* libnvrtc: a program compiles to nothing. The driver loads it, and counts its launches. */
#include <stddef.h>
#include <string.h>

static int a_program;
const char *nvrtcGetErrorString(int result) { return result ? "not supported by an emulated GPU" : "NVRTC_SUCCESS"; }
int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
int nvrtcCreateProgram(void **program) { return *program = &a_program, 0; }
int nvrtcDestroyProgram(void **program) { return *program = NULL, 0; }
int nvrtcCompileProgram(void) { return 0; }
int nvrtcAddNameExpression(void) { return 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { return (void)program, *lowered = name, 0; }
int nvrtcGetPTXSize(void *program, size_t *n) { return (void)program, *n = 1, 0; }
int nvrtcGetPTX(void *program, char *text) { return (void)program, *text = 0, 0; }
int nvrtcGetCUBINSize(void *program, size_t *n) { return nvrtcGetPTXSize(program, n); }
int nvrtcGetCUBIN(void *program, char *text) { return nvrtcGetPTX(program, text); }
int nvrtcGetProgramLogSize(void *program, size_t *n) { return nvrtcGetPTXSize(program, n); }
int nvrtcGetProgramLog(void *program, char *text) { return nvrtcGetPTX(program, text); }
