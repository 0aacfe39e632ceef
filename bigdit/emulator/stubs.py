"""The functions that nobody wrote by hand: which succeed and do nothing, which make a handle, which refuse."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Manner:
    """How a library's functions answer: those that match `create` put a handle into what their first argument points
    to; those that match `launch` return 0 and are counted, since they launch a kernel at least; those that match
    `succeed` do nothing and return 0; all others refuse by name, with `refusal`, the library's own status for what is
    not supported."""

    succeed: str
    refusal: int
    create: str = r"(?!)"
    launch: str = r"(?!)"


NOTHING = r"(?!)"

MANNERS = {
    # Products are computed by kernels, which are not run.
    "libcublas.so": Manner(
        succeed=r".*", create=r"cublasCreate.*", launch=r"cublas(?!Create|Destroy|Get|Set)\w+", refusal=15
    ),
    "libcublasLt.so": Manner(succeed=r".*", create=r"cublasLt\w*Create", launch="cublasLtMatmul", refusal=15),
    # What asks for the size of something that cuDNN alone knows is refused, where dnn.c does not say 0 with the reason.
    "libcudnn.so": Manner(
        succeed=r"cudnn(Destroy|Set|Backend|Convolution|BatchNormalization|Pooling|SpatialTf|Restore)\w*",
        create=r"cudnnCreate\w*",
        launch=r"cudnn(BackendExecute|(Convolution|BatchNormalization|Pooling|SpatialTf)\w+)",
        refusal=3000,
    ),
    "libcufft.so": Manner(succeed=r"cufft(Destroy|Set|XtExec)\w*", refusal=16),
    # Their functions tell sizes of buffers, and results that the host reads.
    "libcusolver.so": Manner(succeed=r"cusolver\w*(Destroy|Set)\w*", create=r"cusolver\w*Create\w*", refusal=9),
    "libcusparse.so": Manner(succeed=r"cusparse\w*(Destroy|Set)\w*", create=r"cusparseCreate\w*", refusal=10),
    "libcusparseLt.so": Manner(succeed=NOTHING, refusal=10),
    "libcurand.so": Manner(succeed=NOTHING, refusal=103),
    "libcufile.so": Manner(succeed=NOTHING, refusal=5031),
    "libnvshmem_host.so": Manner(succeed=NOTHING, refusal=-1),
    # The profiler's records: none are made.
    "libcupti.so": Manner(succeed=r".*", refusal=27),
    "libnccl.so": Manner(succeed=r"nccl(CommRegister|CommDeregister|RedOpDestroy|GroupSimulateEnd)", refusal=5),
    "libnvrtc.so": Manner(succeed=NOTHING, refusal=6),
    "libnvidia-ml.so": Manner(succeed=NOTHING, refusal=3),
    "libcudart.so": Manner(
        succeed=r"__cudaInitModule|cuda(EventRecord|EventQuery|StreamQuery|StreamWaitEvent|StreamUpdateCapture|Profiler"
        r"|FuncSet|KernelSet|LibraryUnload|DeviceEnablePeerAccess|DeviceReset|DeviceSet|MemPoolSet|MemPoolTrim"
        r"|GraphDebugDotPrint|GraphRetainUserObject|UserObject)\w*",
        refusal=801,
    ),
    "libcuda.so": Manner(succeed=r"cu(Logs|StreamWriteValue|StreamSynchronize|MemsetD|LinkDestroy)\w*", refusal=801),
}
"""By the library's name less its version.

Source of refusals: *_STATUS_NOT_SUPPORTED and the like of each library's header; cuSOLVER and cuSPARSE 9 and 10,
cuFFT 16, cuRAND's TYPE_ERROR 103, cuFile's driver version 5031, NCCL's invalid usage 5, nvrtc's compilation 6.
"""


def sources(library: str, functions: Iterable[str]) -> str:
    """C for the functions of `library` (`libcudart.so.13`) that are not written by hand."""
    manner = MANNERS[re.sub(r"\.so\..*", ".so", library)]
    lines = ["#include <stdlib.h>", "int card_refuse(const char *function, int status);", "int card_called(void);"]
    for name in sorted(functions):
        if re.fullmatch(manner.create, name):
            lines.append(f"int {name}(void **out) {{ *out = calloc(1, 256); return 0; }}")
        elif re.fullmatch(manner.launch, name):
            lines.append(f"int {name}(void) {{ return card_called(); }}")
        elif re.fullmatch(manner.succeed, name):
            lines.append(f"int {name}(void) {{ return 0; }}")
        else:
            lines.append(f'int {name}(void) {{ return card_refuse("{name}", {manner.refusal}); }}')
    return "\n".join(lines) + "\n"
