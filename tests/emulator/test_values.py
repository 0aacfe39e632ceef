"""Values on the emulated GPU: small tensors hold what their operators compute, and uncomputed values are reported."""

from __future__ import annotations

from gpus import answers, on_gpus

from bigdit import catalog
from bigdit.emulator import emulated_environment

COMPUTED = """
import json, torch
import torch.nn.functional as F
device = "cuda"
x = torch.arange(10, device=device)
half = torch.ones(3, device=device, dtype=torch.bfloat16)
weights = torch.ones(5, device=device, requires_grad=True)
((weights * 2) ** 2).sum().backward()
optimizer = torch.optim.AdamW([weights], lr=0.1)
optimizer.step()
part = torch.zeros(4, device=device)
part[1] = 5
scaler = torch.amp.GradScaler()
linear = torch.nn.Linear(4, 4, device=device)
scaler.scale(linear(torch.ones(2, 4, device=device)).sum()).backward()
scaler.step(torch.optim.SGD(linear.parameters(), lr=0.1))
scaler.update()
square = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
drawn = torch.randint(0, 1000, (64,), device=device)
texts = torch.ones(128, 1024, dtype=torch.bfloat16)
texts[:, 7:] = 0
mask = texts.to(device)
tokens = [mask.bool().sum(1).unique().tolist(), mask.nonzero().shape[0], (mask > 0.5).sum().item()]
del mask
tokens.append(torch.empty(128, 1024, dtype=torch.bfloat16, device=device).bool().sum().item())
print(json.dumps({
    "tokens": tokens,
    "sum": x.sum().item(),
    "where": (x == 3).nonzero().tolist(),
    "masked": x[x > 5].tolist(),
    "unique": torch.unique(x % 3).tolist(),
    "scalars": [(half * 0.5).tolist(), (1 - half).tolist(), (x ** 2).tolist()],
    "dtypes": [str((half * 0.5).dtype), str((2 * x).dtype), str((x / 2).dtype)],
    "gradient": weights.grad.tolist(),
    "stepped": bool((weights < 1).all()),
    "part": part.tolist(),
    "softmax": F.softmax(torch.zeros(2, 4, device=device), -1).tolist(),
    "converted": square.t().contiguous().to(torch.float16).cpu().tolist(),
    "scale": scaler.get_scale(),
    "unscaled": linear.weight.grad[0].tolist(),
    "drawn": [int(drawn.min()) >= 0, int(drawn.max()) < 1000, drawn.unique().numel() > 32],
    "sorted": torch.sort(x, descending=True)[0][:3].tolist(),
    "equal": torch.equal(x, x.clone()),
    "empty": x[10:].add_(1).tolist(),
    "norm": round(torch.nn.utils.get_total_norm([torch.full((4,), 3.0, device=device)]).item(), 3),
}))
"""


def test_small_tensors_are_computed():
    assert answers("a40", COMPUTED) == {
        "tokens": [[7], 7 * 128, 7 * 128, 0],  # of a mask of 256 KiB, and where it lay
        "sum": 45,
        "where": [[3]],
        "masked": [6, 7, 8, 9],
        "unique": [0, 1, 2],
        "scalars": [[0.5] * 3, [0.0] * 3, [n**2 for n in range(10)]],
        "dtypes": ["torch.bfloat16", "torch.int64", "torch.float32"],
        "gradient": [8.0] * 5,
        "stepped": True,
        "part": [0.0, 5.0, 0.0, 0.0],
        "softmax": [[0.25] * 4] * 2,
        "converted": [[1.0, 3.0], [2.0, 4.0]],
        "scale": 65536.0,
        "unscaled": [2.0] * 4,
        "drawn": [True, True, True],
        "sorted": [9, 8, 7],
        "equal": True,
        "empty": [],
        "norm": 6.0,
    }


UNKNOWN = """
import json, torch
from bigdit_emulated import notices
big = torch.ones(1 << 20, device="cuda")
total = big.sum()
derived = (total * 2 + 1).isnan()
conditions = [bool(derived), bool(total.isfinite())]
read = [total.item(), *conditions, big[5].item(), (big > 0).nonzero().shape[0], torch.full_like(total, 7).item()]
print(json.dumps([read, [[found["text"], found["count"]] for found in notices.found()]]))
"""


def test_what_no_kernel_computed_reads_zero_and_is_reported():
    read, printed = answers("a40", UNKNOWN)
    assert read == [0.0, False, True, 0.0, 0, 7.0]  # zero is finite: a script that checks it continues
    assert printed == [
        ["a condition on values that no kernel computed was read: they are 0", 2],
        ["a value that no kernel computed was read: it is 0", 2],
        ["nonzero read values that no kernel computed: they are 0", 1],
    ]


ROUTED = """
import json, torch
from bigdit_emulated import notices
found = []
for tokens in (100, 1 << 15):  # small and large scores
    scores = torch.randn(tokens, 4, device="cuda").mul(0.1).softmax(-1)
    if tokens == 100:
        scores = torch.randn(1 << 20, 4, device="cuda")[:tokens].contiguous()  # of unknown values
    chosen = scores.topk(2).indices
    copies = torch.empty(tokens, 8, device="cuda").repeat_interleave(2, 0)
    found.append([copies[chosen.view(-1) == expert].shape[0] for expert in range(4)])
    found.append([bool((chosen[:, 0] != chosen[:, 1]).all()), torch.topk(scores.t(), 3, 0).indices.unique().tolist()])
known = torch.tensor([3.0, 9.0, 5.0], device="cuda").topk(2).indices.tolist()
print(json.dumps([found, known, [note["text"] for note in notices.found()]]))
"""


def test_tokens_go_to_experts_evenly():
    found, known, notices = answers("a40", ROUTED)
    assert found == [[50] * 4, [True, [0, 1, 2, 3]], [1 << 14] * 4, [True, [0, 1, 2, 3]]]
    assert known == [1, 2]
    assert notices == ["topk chose among values that no kernel computed: each index as often as all others"]


def test_values_change_no_allocation():
    """A dispatch mode would: autograd then sums gradients into new tensors."""
    script = """
    import json, torch
    from torch import nn
    torch.cuda.memory._record_memory_history(max_entries=100000, stacks="python")
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512)).cuda()
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    y = model(x)
    (y + model(y) + y * 2).sum().backward()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    print(json.dumps([(e["action"], e["size"]) for e in trace]))
    """
    assert answers("a40", script) == answers("a40", script, BIGDIT_EMULATED_VALUES="0")


def test_a_gpu_without_values_reads_as_zeros():
    script = """
    import json, torch
    print(json.dumps([torch.ones(3, device="cuda").tolist(), torch.tensor([2.0]).cuda().item()]))
    """
    without = emulated_environment(catalog.resolve_gpu("a40"), values=False)
    assert answers("a40", script) == [[1.0, 1.0, 1.0], 2.0]
    assert answers("a40", script, **without) == [[0.0, 0.0, 0.0], 0.0]


EXCHANGE = """
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
summed = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(summed)
mean = torch.tensor([rank + 1.0], device=device, dtype=torch.bfloat16)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
objects = [None, None, None]
dist.all_gather_object(objects, {"rank": rank})
gathered = torch.empty(3, device=device)
dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)], device=device))
scattered = torch.empty(1, device=device)
dist.reduce_scatter_tensor(scattered, torch.arange(3.0, device=device))
told = torch.tensor([float(rank)], device=device)
dist.broadcast(told, 2)
swapped = torch.empty(1, device=device)
ahead, behind = (rank + 1) % 3, (rank - 1) % 3
own = torch.tensor([10.0 * rank], device=device)
requests = [dist.P2POp(dist.isend, own, ahead), dist.P2POp(dist.irecv, swapped, behind)]
for request in dist.batch_isend_irecv(requests):
    request.wait()
pair = dist.new_group([0, 2])
half = torch.tensor([1.0], device=device)
if rank != 1:
    dist.all_reduce(half, group=pair)
large = torch.ones(1 << 20, device=device)
dist.all_reduce(large)
leave([summed.item(), mean.item(), [o["rank"] for o in objects], gathered.tolist(), scattered.item(), told.item(),
       swapped.item(), half.item()])
dist.destroy_process_group()
"""


CONVERTED = """
import json, time, torch
torch.set_num_threads(1)
weight = torch.ones(1 << 27, dtype=torch.bfloat16)
torch.ones(1, device="cuda")
allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
began = time.process_time()
moved = [weight.to("cuda", torch.float32) for _ in range(8)]
seconds = time.process_time() - began
began = time.process_time()
weight.float()
converted = time.process_time() - began
allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
late = weight[: 1 << 24].to("cuda", torch.float32, non_blocking=True)
print(json.dumps({
    "allocated": allocated,
    "bytes": moved[0].nbytes,
    "at once": seconds < 4 * converted,
    "converted there": torch.cuda.max_memory_allocated() - before - late.nbytes,
}))
"""


def test_what_is_never_written_is_not_converted_on_the_host():
    """torch converts what is copied without waiting on the GPU. Source: copy_kernel_cuda in aten/src/ATen/native/cuda/
    Copy.cu."""
    right = {"allocated": 8, "bytes": 1 << 29, "at once": True, "converted there": 1 << 25}
    assert answers("a40", CONVERTED) == right


def test_processes_exchange_small_payloads(tmp_path):
    found = on_gpus("a40", tmp_path, EXCHANGE, processes=3)
    for rank, one in enumerate(found):
        behind, pair = 10.0 * ((rank - 1) % 3), 1.0 if rank == 1 else 2.0
        assert one == [6.0, 2.0, [0, 1, 2], [0.0, 1.0, 2.0], 3.0 * rank, 2.0, behind, pair]


DEAD = """
import time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
leave(x.item())
if rank == 1:
    os._exit(0)
try:
    dist.all_reduce(x)
    torch.cuda.synchronize()
except dist.DistBackendError as error:
    leave(str(error).splitlines()[0])
os._exit(0)
"""


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    waited, ended = on_gpus("a40", tmp_path, DEAD)
    assert ended == 2.0
    assert "NCCL" in waited
