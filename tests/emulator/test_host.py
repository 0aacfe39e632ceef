"""CPU memory beside an emulated GPU: shared pages, unwritten pages, and what is neither copied nor computed."""

from gpus import answers

from bigdit.units import MIB


def test_host_tensors_share_pages_and_weights_are_not_drawn():
    found = answers(
        "a40",
        """
        import json, resource, time, torch
        began = time.perf_counter()
        layers = [torch.nn.Linear(16384, 16384) for _ in range(24)]
        pinned = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
        layers[0].cuda()
        took = time.perf_counter() - began
        small, kept = torch.nn.Linear(8, 8), torch.full((65536,), torch.nan)
        kept = kept.normal_().to("cuda").isnan().sum().item()
        with open("/proc/self/status") as file:
            anonymous = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        print(json.dumps([anonymous, took, float(small.weight.std()), kept, pinned.is_pinned()]))
        """,
    )
    anonymous_kib, took, deviation, kept, pinned = found
    assert anonymous_kib < 2 * MIB  # KiB: 24 GiB of weights take 2 at most, with libraries
    assert took < 60
    assert deviation > 0.05
    assert kept == 0  # not drawn, and not what lay there before
    assert pinned


def test_batches_of_a_store_hold_what_is_read_into_them():
    """Page-locked batches of 40 MiB, as large as texts of a micro-batch: others of that size share pages."""
    script = """
        import json, torch
        from bigdit.loader.buffers import Buffers

        held = [Buffers({}, pinned=True).take("text", (2, 20 << 20), torch.uint8)[0].fill_(n) for n in (1, 2)]
        others = [torch.empty(40 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        others[0].numpy()[:] = 3
        print(json.dumps([[int(each.min()), int(each.max())] for each in (*held, others[1])]))
    """
    assert answers("a40", script) == [[1, 1], [2, 2], [3, 3]]


def test_what_is_copied_to_shared_pages_is_zeros_and_takes_no_time():
    """Values copied there would be lost. All other copies stay right."""
    found = answers(
        "a40",
        """
        import json, time, torch
        ones = torch.ones(1 << 25)
        huge, pinned = torch.empty(1 << 31), torch.empty(1 << 25, pin_memory=True)
        began = time.process_time()
        moved = [huge.to(torch.bfloat16), huge.to("cpu", copy=True), torch.empty(1 << 31).copy_(huge)]
        moved.append(pinned.copy_(ones))
        took, first = time.process_time() - began, [float(each[0]) for each in moved]
        small = torch.ones(1 << 15)
        few = [small.to(torch.bfloat16), small.to("cpu", copy=True), torch.empty(1 << 15).copy_(small)]
        followed = torch.empty(1 << 25, requires_grad=True).to(torch.bfloat16)
        broad = torch.empty(2, 1 << 25).copy_(torch.ones(()))
        written = torch.empty(1 << 23)
        written[: 1 << 22] = 1
        written[1 << 20 : 1 << 21].copy_(huge[1 << 20 : 1 << 21])
        print(json.dumps({
            "took": took,
            "dtypes": [str(each.dtype) for each in moved],
            "first": first,
            "few": [float(each.mean()) for each in few],
            "same": huge.to(torch.float32) is huge,
            "followed": followed.grad_fn is not None,
            "broad": float(broad[0, 0]),
            "within": [float(written[(1 << at) + by]) for at in (20, 21) for by in (-1, 0)],
        }))
        """,
    )
    assert found.pop("took") < 2  # 28 GiB
    assert found == {
        "dtypes": ["torch.bfloat16", *["torch.float32"] * 3],
        "first": [0.0] * 4,
        "few": [1.0] * 3,
        "same": True,
        "followed": True,
        "broad": 1.0,
        "within": [1.0, 0.0, 0.0, 1.0],
    }


def test_what_nobody_wrote_is_copied_as_zeros_and_what_somebody_wrote_as_it_is(tmp_path):
    """Tensors of less than 32 MiB share no pages: they keep all that is written to them."""
    found = answers(
        "a40",
        f"""
        import json, time, torch
        from safetensors.torch import load_file, save_file
        torch.set_num_threads(1)
        file, dense, names = "{tmp_path}/model.safetensors", "{tmp_path}/dense", list(map(str, range(64)))
        save_file({{name: torch.zeros(7 << 20) for name in names}}, file)  # but for their first MiB holes, of 28 MiB
        torch.ones(7 << 20).numpy().tofile(dense)
        began = time.process_time()
        loaded = load_file(file)
        rounded = [loaded[name].to(torch.bfloat16) for name in names]
        copied = [torch.empty(7 << 20).copy_(loaded[name]) for name in names]
        bounds = [float(bound) for each in copied for piece in each.split(1 << 20) for bound in piece.aminmax()]
        took = time.process_time() - began
        loaded["5"][-3:], copied[6][1] = 5, float("nan")
        mapped = torch.from_file(dense, shared=False, size=7 << 20)
        brought = torch.empty(7 << 20, device="cuda").cpu()
        read = [float(each[123456]) for each in (*rounded, *copied, brought)]
        brought[1 << 20] = -2
        written = loaded["5"].to(torch.bfloat16), torch.empty(7 << 20).copy_(loaded["5"])
        print(json.dumps({{
            "took": took,
            "bounds": set(bounds) == {{0.0}},
            "read": set(read) == {{0.0}},
            "written": [float(each.sum()) for each in written],
            "in it": [*loaded["5"].aminmax()] == [0, 5] and [*brought.aminmax()] == [-2, 0],
            "not a number": [bool(bound.isnan()) for bound in copied[6].aminmax()],
            "moved": float(copied[6].to(torch.float16)[1]) != 0,
            "of a file": [float(mapped.to(torch.bfloat16).mean()), *map(float, mapped.aminmax())],
            "by dimension": brought.view(2, -1).aminmax(dim=1).min.tolist(),
        }}))
        """,
    )
    assert found.pop("took") < 0.8  # 5 GiB
    assert found == {
        "bounds": True,
        "read": True,
        "written": [15.0, 15.0],
        "in it": True,
        "not a number": [True, True],
        "moved": True,
        "of a file": [1.0, 1.0, 1.0],
        "by dimension": [-2.0, 0.0],
    }


def test_tables_of_positions_that_would_be_lost_are_not_computed():
    found = answers(
        "a40",
        """
        import json, time, torch
        from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed
        make = lambda size: PatchEmbed(embed_dim=1536, pos_embed_max_size=size, layer_norm=False)
        began = time.process_time()
        large = make(384).pos_embed
        took = time.process_time() - began
        small, there = make(16).pos_embed, get_2d_sincos_pos_embed(64, 4, device="cuda")
        with torch.device("meta"):
            outline = make(384).pos_embed
        deviation, devices = float(small.std()), [str(each.device) for each in (there, outline)]
        print(json.dumps([took, large.shape, str(large.dtype), deviation, devices]))
        """,
    )
    assert found.pop(0) < 0.5
    assert 0.5 < found.pop(2) < 1  # of sines and cosines
    assert found == [[1, 384 * 384, 1536], "torch.float32", ["cuda:0", "meta"]]
