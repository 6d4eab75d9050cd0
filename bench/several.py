"""Programs of several GPUs and several processes, for gpu-several.sh: one case a call, one line of JSON at its end.

several.py CASE [--seconds N] starts the case's processes, each with a GPU of its own where there are two, as torchrun
does, and ends them when the time is over. Each process then writes to stderr where it was.
What a process has measured before it failed is printed all the same, with "failed".
"""

import argparse
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

RANKS = {"collectives": 2, "ddp": 2, "fsdp": 2, "tensor": 2, "killed": 2, "onecomm": 1, "dataparallel": 1, "mp": 1, "copies": 1}


def launch(case, seconds):
    """Starts the ranks, collects what they say, and returns the case's line."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = RANKS[case]
    procs = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        out = tempfile.TemporaryFile("w+")
        procs.append((subprocess.Popen([sys.executable, __file__, case, "--seconds", str(seconds), "--rank"], env=env, stdout=out), out))
    end = time.monotonic() + seconds
    while any(p.poll() is None for p, _ in procs) and time.monotonic() < end:
        # A rank that failed leaves the others waiting: they get a little time to say where.
        if any(p.poll() for p, _ in procs) and case != "killed":
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)
    ranks, failed = [], []
    for rank, (p, out) in enumerate(procs):
        late = p.poll() is None
        if late:
            p.kill()
        status = p.wait()
        out.seek(0)
        said = {}
        for line in out.read().splitlines():
            if line.startswith("{"):
                said.update(json.loads(line))
            else:
                print(f"rank {rank}: {line}", file=sys.stderr)
        ranks.append(said)
        expected = case == "killed" and rank == 1 and status == -signal.SIGKILL and not late
        if status and not expected:
            failed.append(f"rank {rank} {'ran past its time' if late else f'ended with {status}'}")
    line = {"case": case, "ranks": ranks}
    if failed:
        line["failed"] = "; ".join(failed)
    return line


def say(**what):
    print(json.dumps(what), flush=True)


BEGUN = time.monotonic()


def note(text):
    """Where the process is, for who reads the log of a hang."""
    print(f"rank {os.environ['RANK']}: {time.monotonic() - BEGUN:.1f} s: {text}", file=sys.stderr, flush=True)


def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def group(timeout=60):
    import datetime

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    note("the process group begins")
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=timeout), device_id=device)
    note("the process group is there")
    return dist.get_rank(), dist.get_world_size(), device


# The name of each collective, the share of its bytes that each GPU sends (nccl-tests' bus bandwidth), and how it is made
# of a tensor of n elements.
def operations(n, world, device):
    whole, part = torch.ones(n, device=device), torch.ones(max(n // world, 1), device=device)
    out = torch.empty_like(whole)
    return {
        "all_reduce": (2 * (world - 1) / world, lambda: dist.all_reduce(whole)),
        "all_gather": ((world - 1) / world, lambda: dist.all_gather_into_tensor(out, part)),
        "reduce_scatter": ((world - 1) / world, lambda: dist.reduce_scatter_tensor(part, whole)),
        "all_to_all": ((world - 1) / world, lambda: dist.all_to_all_single(out, whole)),
        "broadcast": (1, lambda: dist.broadcast(whole, 0)),
    }


def right(rank, world, device):
    """Every collective once with numbers that show who sent what."""
    n = 1 << 16
    x = torch.arange(n, device=device, dtype=torch.float32) + rank
    dist.all_reduce(x)
    wrong = [] if torch.equal(x, world * torch.arange(n, device=device) + world * (world - 1) / 2) else ["all_reduce"]
    out = torch.empty(world * n, device=device)
    dist.all_gather_into_tensor(out, torch.full((n,), float(rank), device=device))
    if not torch.equal(out.view(world, n)[:, 0], torch.arange(world, device=device, dtype=torch.float32)):
        wrong.append("all_gather")
    part = torch.empty(n, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(world, device=device, dtype=torch.float32).repeat_interleave(n) + rank)
    if not bool((part == world * rank + world * (world - 1) / 2).all()):
        wrong.append("reduce_scatter")
    dist.all_to_all_single(out, (torch.arange(world, device=device, dtype=torch.float32) + 10 * rank).repeat_interleave(n))
    if not torch.equal(out.view(world, n)[:, -1], 10 * torch.arange(world, device=device, dtype=torch.float32) + rank):
        wrong.append("all_to_all")
    x = torch.full((n,), float(rank), device=device)
    dist.broadcast(x, 1)
    if not bool((x == 1).all()):
        wrong.append("broadcast")
    return wrong


def timed(f, count):
    """(seconds of one of count calls that are waited for at the end, median seconds of a call that is waited for)"""
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(count):
        f()
    torch.cuda.synchronize()
    together = (time.perf_counter() - t) / count
    each = []
    for _ in range(min(count, 20)):
        t = time.perf_counter()
        f()
        torch.cuda.synchronize()
        each.append(time.perf_counter() - t)
    return together, statistics.median(each)


def collectives():
    rank, world, device = group()
    say(wrong=right(rank, world, device))
    note("every collective has been made once")
    rows = []
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30):
        for name, (share, f) in operations(size // 4, world, device).items():
            note(f"{name} of {size} bytes")
            for _ in range(5 if size < 1 << 28 else 2):
                f()
            together, alone = timed(f, 100 if size < 1 << 22 else 30 if size < 1 << 28 else 8)
            rows.append({"what": name, "bytes": size, "us": together * 1e6, "waited_us": alone * 1e6, "bus_gb_s": size / together * share / 1e9})
        say(rows=rows)
    dist.destroy_process_group()


def losses_of(step, steps):
    """Hexadecimal: they are compared bit for bit."""
    return [loss.item().hex() for loss in [step() for _ in range(steps)]]


def steps_ms(step, steps, repeats):
    ms = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - t) * 1e3 / steps)
    return ms


def resnet_step(model, device, batch, seed):
    torch.manual_seed(seed)
    images, labels = torch.randn(batch, 3, 224, 224, device=device), torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp():
    import torchvision

    rank, _, device = group()

    def build():
        torch.manual_seed(1)
        return torch.nn.parallel.DistributedDataParallel(torchvision.models.resnet50().to(device).train(), device_ids=[device])

    step = resnet_step(build(), device, 32, 100 + rank)
    steps_ms(step, 10, 1)
    note("warm")
    ms = steps_ms(step, 20, 5)
    say(ms=ms, median_ms=statistics.median(ms))
    deterministic()
    say(losses=losses_of(resnet_step(build(), device, 32, 100 + rank), 12))
    dist.destroy_process_group()


def transformer(layers, width, heads, words):
    """A decoder of plain modules; how many heads a block has is told by the width of its projections, so that these can
    be shared out."""
    nn, f = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            y = self.n1(x)
            q, k, v = (p(y).unflatten(-1, (-1, width // heads)).transpose(1, 2) for p in (self.q, self.k, self.v))
            x = x + self.o(f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(f.gelu(self.up(self.n2(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

        def forward(self, tokens):
            x = self.words(tokens)
            for b in self.blocks:
                x = b(x)
            return self.head(self.norm(x))

    return Model()


def language_step(model, device, words, shape, seed, foreach=True):
    torch.manual_seed(seed)
    tokens = torch.randint(0, words, shape, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def fsdp():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    deterministic()
    rank, _, device = group()
    torch.manual_seed(1)
    with device:
        model = transformer(layers=24, width=1792, heads=14, words=32000)
    parameters = sum(p.numel() for p in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    note("sharded")
    step = language_step(model, device, 32000, (4, 513), 100 + rank)
    losses = losses_of(step, 6)
    say(parameters=parameters, losses=losses)
    ms = steps_ms(step, 4, 3)
    say(ms=ms, median_ms=statistics.median(ms))
    dist.destroy_process_group()


def tensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    deterministic()
    _, world, device = group()
    torch.manual_seed(1)
    with device:
        model = transformer(layers=6, width=1024, heads=16, words=8000)
    mesh = init_device_mesh("cuda", (world,))
    for b in model.blocks:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {name: RowwiseParallel() for name in ("o", "down")}
        parallelize_module(b, mesh, plan)
    note("shared out")
    step = language_step(model, device, 8000, (4, 257), 7, foreach=False)  # which takes no list with both kinds of tensors
    say(losses=losses_of(step, 8))
    ms = steps_ms(step, 8, 3)
    say(ms=ms, median_ms=statistics.median(ms))
    dist.destroy_process_group()


def onecomm():
    """One process, all GPUs, one communicator: the interface that DataParallel uses."""
    from torch.cuda import nccl

    rows = []
    for size in (1 << 10, 1 << 24, 1 << 28):
        note(f"{size} bytes")
        xs = [torch.full((size // 4,), float(1 + i), device=f"cuda:{i}") for i in range(2)]
        nccl.all_reduce(xs)
        for x in xs:
            if x.unique().tolist() != [3.0]:
                raise SystemExit(f"all_reduce of {size} bytes gave {x[:4].tolist()}")
        nccl.broadcast(xs)
        outs = [torch.empty(size // 2, device=x.device) for x in xs]
        nccl.all_gather(xs, outs)
        if outs[1].unique().tolist() != [3.0]:
            raise SystemExit(f"all_gather of {size} bytes gave {outs[1][:4].tolist()}")
        for i in range(2):
            torch.cuda.synchronize(i)
        t = time.perf_counter()
        count = 100 if size < 1 << 20 else 20
        for _ in range(count):
            nccl.all_reduce(xs)
        for i in range(2):
            torch.cuda.synchronize(i)
        took = (time.perf_counter() - t) / count
        rows.append({"what": "all_reduce", "bytes": size, "us": took * 1e6, "bus_gb_s": size / took / 1e9})
        say(rows=rows)


def dataparallel():
    import torchvision

    deterministic()
    torch.manual_seed(1)
    model = torch.nn.DataParallel(torchvision.models.resnet18().cuda().train())
    step = resnet_step(model, torch.device("cuda", 0), 64, 7)
    say(losses=losses_of(step, 8))
    ms = steps_ms(step, 10, 3)
    say(ms=ms, median_ms=statistics.median(ms))


def add_one(to_child, to_parent):
    """The other process of mp(): adds 1 to each tensor that comes, in place, and sends back a new one, twice that."""
    import torch  # this process has not been through main()

    while (x := to_child.get()) is not None:
        x += 1
        torch.cuda.synchronize(x.device)
        new = x.clone() * 2
        to_parent.put(new)
        to_child.get()  # the parent has read it
        del x, new
    to_parent.put("end")


def mp():
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    to_child, to_parent = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=add_one, args=(to_child, to_parent))
    child.start()
    sums = []
    for i in range(6):
        note(f"tensor {i}")
        x = torch.full((1 << (10 + 2 * i),), float(i), device=f"cuda:{i % 2}")
        to_child.put(x)
        y = to_parent.get()
        sums.append([x.sum().item(), y.sum().item(), y.device.index])
        if sums[-1][:2] != [(i + 1) * x.numel(), 2 * (i + 1) * x.numel()]:
            raise SystemExit(f"tensor {i} on cuda:{i % 2}: sums {sums[-1]}")
        del y
        to_child.put("read")
    to_child.put(None)
    to_parent.get()
    child.join()
    say(sums=sums, child=child.exitcode)


def copies():
    rows = []
    for a, b in ((0, 1), (1, 0)):
        for size in (1 << 12, 1 << 20, 1 << 24, 1 << 28, 1 << 30):
            x, y = torch.ones(size // 4, device=f"cuda:{a}"), torch.zeros(size // 4, device=f"cuda:{b}")

            def both(x=x, y=y):
                y.copy_(x, non_blocking=True)

            torch.cuda.set_device(a)
            both()
            for d in (0, 1):
                torch.cuda.synchronize(d)
            together, alone = timed(both, 50 if size < 1 << 28 else 10)
            torch.cuda.synchronize(b)
            if not bool((y == 1).all()):
                raise SystemExit(f"{size} bytes from {a} to {b}: not what was sent")
            rows.append({"what": f"copy {a} to {b}", "bytes": size, "us": together * 1e6, "waited_us": alone * 1e6, "bus_gb_s": size / together / 1e9})
    say(can_access=torch.cuda.can_device_access_peer(0, 1), rows=rows)


def killed():
    """Rank 1 is killed in the middle of a collective: rank 0 is told within its time limit."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    rank, _, device = group(timeout=8)
    x = torch.ones(1 << 28, device=device)
    for _ in range(5):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    t = time.monotonic()
    error = None
    try:
        for i in range(5):
            work = dist.all_reduce(x, async_op=True)
            if i == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            work.wait()
    except Exception as e:  # noqa: BLE001 what is raised is what is measured
        error = type(e).__name__
        note(f"{error}: {str(e)[:400]}")
    say(error=error, error_s=round(time.monotonic() - t, 1))
    note("the communicator is given up")
    dist.distributed_c10d._abort_process_group()
    after = torch.ones(1000, device=device).sum().item()
    say(after=after, aborted_s=round(time.monotonic() - t, 1))
    sys.stdout.flush()
    os._exit(0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("case", choices=RANKS)
    p.add_argument("--seconds", type=int, default=60)
    p.add_argument("--rank", action="store_true", help="be one of the processes")
    a = p.parse_args()
    if not a.rank:
        line = launch(a.case, a.seconds)
        print(json.dumps(line))
        sys.exit(1 if "failed" in line else 0)
    faulthandler.dump_traceback_later(max(a.seconds - 3, 1), exit=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
    global statistics, torch, dist
    import statistics

    import torch
    import torch.distributed as dist

    note("PyTorch is loaded")
    globals()[a.case]()
    note("done")


if __name__ == "__main__":
    main()
