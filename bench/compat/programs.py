#!/usr/bin/env python3
"""Small programs that each do one thing that users of a GPU do. Without an argument: their names; with one: it runs.

A line that begins with "= " is the program's answer, which has to be the same natively and remotely.
"""

import os
import sys
import tempfile

PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def say(*what):
    print("=", *what, flush=True)


def _torch():
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def _close(x):
    return "%.4g" % float(x)


@program
def torch_matmul():
    t = _torch()
    a = t.arange(512 * 512, device="cuda", dtype=t.float32).reshape(512, 512) % 7
    say(_close((a @ a.T).sum()))


@program
def torch_half_matmul():
    t = _torch()
    for d in (t.float16, t.bfloat16):
        a = (t.arange(256 * 256, device="cuda") % 5).to(d).reshape(256, 256)
        say(d, _close((a @ a).float().sum()))


@program
def torch_train_conv():
    t = _torch()
    m = t.nn.Sequential(t.nn.Conv2d(3, 16, 3), t.nn.BatchNorm2d(16), t.nn.ReLU(), t.nn.Flatten(), t.nn.LazyLinear(10)).cuda()
    x, y = t.randn(32, 3, 16, 16).cuda(), t.randint(0, 10, (32,)).cuda()
    m(x)
    o = t.optim.SGD(m.parameters(), 0.05, momentum=0.9)
    first = None
    for _ in range(30):
        o.zero_grad()
        loss = t.nn.functional.cross_entropy(m(x), y)
        loss.backward()
        o.step()
        first = first if first is not None else loss.item()
    say(loss.item() < first / 2)


@program
def torch_amp():
    t = _torch()
    m = t.nn.Linear(128, 128).cuda()
    o = t.optim.AdamW(m.parameters(), 1e-2, fused=True)
    s = t.amp.GradScaler("cuda")
    x = t.randn(64, 128).cuda()
    for _ in range(20):
        o.zero_grad(set_to_none=True)
        with t.autocast("cuda", dtype=t.float16):
            loss = (m(x) - x).square().mean()
        s.scale(loss).backward()
        s.step(o)
        s.update()
    say(loss.item() < 1.2)


@program
def torch_graph():
    t = _torch()
    m = t.nn.Sequential(t.nn.Linear(64, 64), t.nn.ReLU(), t.nn.Linear(64, 1)).cuda()
    o = t.optim.Adam(m.parameters(), 1e-2, capturable=True)
    x, y = t.randn(128, 64).cuda(), t.randn(128, 1).cuda()

    def step():
        o.zero_grad(set_to_none=True)
        loss = (m(x) - y).square().mean()
        loss.backward()
        o.step()
        return loss

    s = t.cuda.Stream()
    s.wait_stream(t.cuda.current_stream())
    with t.cuda.stream(s):
        for _ in range(3):
            step()
    t.cuda.current_stream().wait_stream(s)
    g = t.cuda.CUDAGraph()
    with t.cuda.graph(g):
        loss = step()
    for _ in range(200):
        g.replay()
    say(loss.item() < 0.2)


@program
def torch_graphed_callables():
    t = _torch()
    m = t.nn.Sequential(t.nn.Linear(32, 32), t.nn.Tanh()).cuda()
    x = t.randn(8, 32, device="cuda", requires_grad=True)
    want = m(x).sum().item()
    g = t.cuda.make_graphed_callables(m, (x,))
    say(abs(g(x).sum().item() - want) < 1e-3)


@program
def torch_graph_debug():
    t = _torch()
    g = t.cuda.CUDAGraph()
    g.enable_debug_mode()
    x = t.ones(10, device="cuda")
    with t.cuda.graph(g):
        y = x * 2
    f = tempfile.mktemp()
    g.debug_dump(f)
    g.replay()
    say(y.sum().item(), os.path.getsize(f) > 0)


@program
def torch_compile():
    t = _torch()

    @t.compile
    def f(x, y):
        return (t.sin(x) * y + t.cos(y)).sum(dim=1)

    x, y = t.randn(64, 1000).cuda(), t.randn(64, 1000).cuda()
    say(t.allclose(f(x, y), (t.sin(x) * y + t.cos(y)).sum(dim=1), rtol=1e-3, atol=1e-3))


@program
def torch_compile_graphs():
    t = _torch()
    m = t.nn.Sequential(t.nn.Linear(64, 64), t.nn.GELU(), t.nn.Linear(64, 8)).cuda().eval()
    f = t.compile(m, mode="reduce-overhead")
    x = t.randn(16, 64).cuda()
    with t.no_grad():
        for _ in range(4):
            y = f(x).clone()
        say(t.allclose(y, m(x), rtol=1e-3, atol=1e-3))


@program
def torch_dataloader():
    t = _torch()
    d = t.utils.data.TensorDataset(t.arange(1000).float(), t.arange(1000))
    total = 0
    for x, y in t.utils.data.DataLoader(d, batch_size=64, num_workers=2, pin_memory=True):
        total += (x.cuda(non_blocking=True) + y.cuda(non_blocking=True)).sum().item()
    say(total)


@program
def torch_pin_and_streams():
    t = _torch()
    p = t.arange(1 << 20, dtype=t.float32).pin_memory()
    s = t.cuda.Stream()
    with t.cuda.stream(s):
        d = p.to("cuda", non_blocking=True)
        d = d * 2
        back = t.empty_like(p).pin_memory()
        back.copy_(d, non_blocking=True)
        e = s.record_event()
    e.synchronize()
    say(back.sum().item() == (p * 2).sum().item())


@program
def torch_events():
    t = _torch()
    a, b = t.cuda.Event(enable_timing=True), t.cuda.Event(enable_timing=True)
    x = t.randn(2048, 2048, device="cuda")
    a.record()
    for _ in range(20):
        x = x @ x / 2048
    b.record()
    b.synchronize()
    say(a.elapsed_time(b) > 0)


@program
def torch_oom():
    t = _torch()
    try:
        t.empty(1 << 50, dtype=t.uint8, device="cuda")
    except t.cuda.OutOfMemoryError as e:
        say("out of memory" in str(e))
    say(t.ones(3, device="cuda").sum().item())


@program
def torch_expandable():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    t = _torch()
    x = [t.full((n << 20,), n, dtype=t.uint8, device="cuda") for n in (1, 5, 30, 3)]
    say([int(y[-1]) for y in x])
    del x
    t.cuda.empty_cache()
    say(t.cuda.memory_reserved() >= 0)


@program
def torch_async_pool():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    t = _torch()
    x = t.randn(1000, 1000, device="cuda")
    say(_close((x - x).sum()))


@program
def torch_fft():
    t = _torch()
    x = t.arange(4096, device="cuda", dtype=t.float32)
    say(t.allclose(t.fft.ifft(t.fft.fft(x)).real, x, atol=1e-1), t.stft(x, 256, window=t.hann_window(256, device="cuda"), return_complex=True).shape)


@program
def torch_linalg():
    t = _torch()
    a = t.randn(64, 64, device="cuda", dtype=t.float64)
    a = a @ a.T + 64 * t.eye(64, device="cuda", dtype=t.float64)
    b = t.ones(64, device="cuda", dtype=t.float64)
    say(t.allclose(a @ t.linalg.solve(a, b), b), t.allclose(t.linalg.cholesky(a) @ t.linalg.cholesky(a).T, a))
    u, s, v = t.linalg.svd(a)
    say(t.allclose(u @ t.diag(s) @ v, a), bool((t.linalg.eigvalsh(a) > 0).all()))


@program
def torch_sparse():
    t = _torch()
    a = t.eye(100, device="cuda").to_sparse_csr()
    say((a @ t.arange(100.0, device="cuda").reshape(100, 1)).sum().item())


@program
def torch_sdpa():
    t = _torch()
    q = t.randn(2, 4, 128, 64, device="cuda", dtype=t.float16)
    want = None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for b in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(b):
            o = t.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).float()
        want = o if want is None else want
        say(b.name, t.allclose(o, want, atol=2e-2))


@program
def torch_rnn():
    t = _torch()
    m = t.nn.LSTM(32, 64, 2, batch_first=True).cuda()
    x = t.randn(4, 10, 32, device="cuda")
    y, _ = m(x)
    y.sum().backward()
    say(tuple(y.shape), m.weight_ih_l0.grad is not None)


@program
def torch_extension():
    t = _torch()
    from torch.utils.cpp_extension import load_inline

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    m = load_inline(
        "twice",
        "torch::Tensor twice(torch::Tensor x);",
        """
        __global__ void k(float *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[i] *= 2; }
        torch::Tensor twice(torch::Tensor x) { k<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), x.numel()); return x; }
        """,
        functions=["twice"],
        build_directory=tempfile.mkdtemp(),
    )
    say(m.twice(t.ones(1000, device="cuda")).sum().item())


@program
def torch_multiprocessing():
    t = _torch()
    import torch.multiprocessing as mp

    ctx = mp.get_context("spawn")
    q, r = ctx.Queue(), ctx.Queue()
    p = ctx.Process(target=_mp_child, args=(q, r))
    p.start()
    x = t.arange(10.0, device="cuda")
    q.put(x)
    say(r.get(timeout=60))
    say(x.sum().item())
    p.join()


def _mp_child(q, r):
    x = q.get()
    s = x.sum().item()
    x += 1
    import torch

    torch.cuda.synchronize()
    del x
    r.put(s)


@program
def torch_fork_child():
    t = _torch()
    import torch.multiprocessing as mp

    p = mp.get_context("fork").Process(target=lambda: print("child"))
    p.start()
    p.join()
    say(p.exitcode, t.ones(4, device="cuda").sum().item())


@program
def torch_ddp_one():
    t = _torch()
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1)
    m = t.nn.parallel.DistributedDataParallel(t.nn.Linear(8, 8).cuda())
    m(t.ones(2, 8).cuda()).sum().backward()
    x = t.ones(5, device="cuda")
    dist.all_reduce(x)
    say(x.sum().item(), m.module.weight.grad.abs().sum().item() > 0)
    dist.destroy_process_group()


@program
def torch_fsdp_one():
    t = _torch()
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1)
    m = fully_shard(t.nn.Linear(8, 8).cuda())
    m(t.ones(2, 8).cuda()).sum().backward()
    say("done")
    dist.destroy_process_group()


@program
def torch_checkpoint():
    t = _torch()
    m = t.nn.Linear(100, 100).cuda()
    f = tempfile.mktemp()
    t.save(m.state_dict(), f)
    n = t.nn.Linear(100, 100).cuda()
    n.load_state_dict(t.load(f, map_location="cuda"))
    say(t.equal(m.weight, n.weight))


@program
def torch_profiler_cpu():
    t = _torch()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as p:
        t.ones(10, device="cuda").sum().item()
    say(any("aten::sum" in e.key for e in p.key_averages()))


@program
def torch_memory_stats():
    t = _torch()
    x = t.empty(100 << 20, dtype=t.uint8, device="cuda")
    say(t.cuda.memory_allocated() >= 100 << 20, t.cuda.max_memory_allocated() >= 100 << 20)
    t.cuda.memory._record_memory_history()
    y = x + 1
    say(len(t.cuda.memory._snapshot()["segments"]) > 0, y.numel())


@program
def torch_int8_fp8():
    t = _torch()
    a = t.randint(-5, 5, (64, 64), device="cuda", dtype=t.int8)
    say(t._int_mm(a, a.T.contiguous().T).sum().item())
    x = t.ones(64, 64, device="cuda").to(t.float8_e4m3fn)
    one = t.tensor(1.0, device="cuda")
    say(t._scaled_mm(x, x.T, scale_a=one, scale_b=one, out_dtype=t.bfloat16).float().sum().item())


@program
def torch_uva_zero_copy():
    t = _torch()
    import ctypes

    rt = t.cuda.cudart()
    x = t.zeros(1 << 16, dtype=t.float32)
    say(int(rt.cudaHostRegister(x.data_ptr(), x.numel() * 4, 0)))
    d = t.arange(1 << 16, dtype=t.float32, device="cuda")
    x.copy_(d, non_blocking=True)
    t.cuda.synchronize()
    say(x.sum().item() == d.sum().item())
    say(int(rt.cudaHostUnregister(x.data_ptr())), ctypes.sizeof(ctypes.c_void_p))


@program
def transformers_gpt2():
    t = _torch()
    from transformers import GPT2Config, GPT2LMHeadModel

    m = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000)).cuda().eval()
    x = t.arange(10).reshape(1, 10).cuda()
    say(m.generate(x, max_new_tokens=20, do_sample=False, pad_token_id=0).tolist())


@program
def transformers_bert_train():
    t = _torch()
    from transformers import BertConfig, BertForSequenceClassification

    m = BertForSequenceClassification(BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=256, vocab_size=1000)).cuda()
    o = t.optim.AdamW(m.parameters(), 1e-3)
    x, y = t.randint(0, 1000, (8, 16)).cuda(), t.randint(0, 2, (8,)).cuda()
    for _ in range(20):
        o.zero_grad()
        loss = m(input_ids=x, labels=y).loss
        loss.backward()
        o.step()
    say(loss.item() < 0.3)


@program
def torchvision_models():
    t = _torch()
    import torchvision

    for n in ("resnet18", "mobilenet_v3_small", "vit_b_16"):
        m = getattr(torchvision.models, n)().cuda().eval()
        with t.no_grad():
            say(n, tuple(m(t.ones(2, 3, 224, 224, device="cuda")).shape))


@program
def torchaudio_spectrogram():
    t = _torch()
    import torchaudio

    say(tuple(torchaudio.transforms.MelSpectrogram().cuda()(t.randn(1, 16000, device="cuda")).shape))


@program
def torch_geometric_gcn():
    t = _torch()
    from torch_geometric.nn import GCNConv

    m = GCNConv(8, 4).cuda()
    e = t.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]).cuda()
    say(tuple(m(t.ones(4, 8).cuda(), e).shape))


@program
def lightning_fit():
    t = _torch()
    import lightning as L

    class M(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.l = t.nn.Linear(4, 1)

        def training_step(self, b, i):
            return self.l(b[0]).square().mean()

        def configure_optimizers(self):
            return t.optim.SGD(self.parameters(), 0.1)

    d = t.utils.data.DataLoader(t.utils.data.TensorDataset(t.randn(64, 4)), batch_size=16)
    L.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tempfile.mkdtemp()).fit(M(), d)
    say("fitted")


@program
def accelerate_train():
    t = _torch()
    from accelerate import Accelerator

    a = Accelerator(mixed_precision="bf16")
    m = t.nn.Linear(4, 1)
    o = t.optim.SGD(m.parameters(), 0.1)
    d = t.utils.data.DataLoader(t.utils.data.TensorDataset(t.randn(64, 4)), batch_size=16)
    m, o, d = a.prepare(m, o, d)
    for (x,) in d:
        loss = m(x).square().mean()
        a.backward(loss)
        o.step()
        o.zero_grad()
    say(str(a.device))


@program
def triton_kernel():
    t = _torch()
    import importlib.util

    f = tempfile.mktemp(suffix=".py")
    with open(f, "w") as out:
        out.write(
            "import triton, triton.language as tl\n@triton.jit\ndef add(x, y, o, n, B: tl.constexpr):\n"
            "    i = tl.program_id(0) * B + tl.arange(0, B)\n    m = i < n\n"
            "    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)\n"
        )
    spec = importlib.util.spec_from_file_location("k", f)
    k = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(k)
    x = t.arange(1000.0, device="cuda")
    o = t.empty_like(x)
    k.add[(8,)](x, x, o, 1000, B=128)
    say(o.sum().item())


@program
def jax_jit_grad():
    import jax
    import jax.numpy as jnp

    f = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))
    say(jnp.allclose(f(jnp.zeros((8, 4)), jnp.ones((2, 8))), 2.0))


@program
def jax_scan_while():
    import jax
    import jax.numpy as jnp

    c, ys = jax.lax.scan(lambda c, x: (c + x, c), 0.0, jnp.arange(100.0))
    n = jax.lax.while_loop(lambda i: i < 1000, lambda i: i + 7, 0)
    b = jax.lax.cond(n > 10, lambda: 1, lambda: 2)
    say(float(c), float(ys[-1]), int(n), int(b))


@program
def jax_pinned_host():
    import jax
    import jax.numpy as jnp

    s = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jnp.arange(100000.0)
    y = jax.device_put(x, s)
    z = jax.device_put(y, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    say(float(z.sum()) == float(x.sum()))


@program
def jax_callbacks():
    import jax
    import jax.numpy as jnp
    import numpy as np

    f = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((4,), jnp.float32), x))
    say(np.asarray(f(jnp.arange(4.0))).tolist())


@program
def jax_linalg_fft():
    import jax.numpy as jnp

    a = jnp.eye(20) * 3 + 1
    say(bool(jnp.allclose(jnp.linalg.inv(a) @ a, jnp.eye(20), atol=1e-4)))
    say(bool(jnp.allclose(jnp.fft.ifft(jnp.fft.fft(a)).real, a, atol=1e-4)))
    say(bool(jnp.allclose(jnp.linalg.cholesky(a) @ jnp.linalg.cholesky(a).T, a, atol=1e-4)))


@program
def flax_train():
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    m = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)])
    x = jnp.linspace(-1, 1, 64).reshape(64, 1)
    p = m.init(jax.random.key(0), x)
    o = optax.adam(1e-2)
    s = o.init(p)

    @jax.jit
    def step(p, s):
        loss, g = jax.value_and_grad(lambda p: jnp.mean((m.apply(p, x) - x**2) ** 2))(p)
        u, s = o.update(g, s)
        return optax.apply_updates(p, u), s, loss

    for _ in range(200):
        p, s, loss = step(p, s)
    say(float(loss) < 0.01)


@program
def jax_conv_train():
    import jax
    import jax.numpy as jnp

    w = jnp.ones((3, 3, 3, 8)) * 0.01
    x = jnp.ones((4, 16, 16, 3))

    @jax.jit
    def loss(w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    say(_close(loss(w)), _close(jax.grad(loss)(w).sum()))


@program
def jax_pallas():
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def k(x, o):
        o[...] = x[...] + 1

    say(float(pl.pallas_call(k, out_shape=jax.ShapeDtypeStruct((128,), jnp.float32))(jnp.zeros(128)).sum()))


@program
def cupy_basic():
    import cupy as cp

    x = cp.arange(10000, dtype=cp.float32)
    say(float((x * 2).sum()), int(cp.argsort(-x)[0]), float(cp.linalg.norm(x)))


@program
def cupy_fft():
    import cupy as cp

    x = cp.arange(1024, dtype=cp.float64)
    say(bool(cp.allclose(cp.fft.ifft(cp.fft.fft(x)).real, x)), cp.fft.rfft2(cp.ones((16, 16))).shape)


@program
def cupy_rawkernel():
    import cupy as cp

    k = cp.RawKernel(r'extern "C" __global__ void k(float *x) { x[threadIdx.x] += threadIdx.x; }', "k")
    x = cp.zeros(32, dtype=cp.float32)
    k((1,), (32,), (x,))
    say(float(x.sum()))


@program
def cupy_managed():
    import cupy as cp

    cp.cuda.set_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc)
    x = cp.arange(100000, dtype=cp.int64)
    say(int(x.sum()))


@program
def cupy_async_pool():
    import cupy as cp

    cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)
    x = cp.arange(100000, dtype=cp.int64)
    say(int((x + 1).sum()))


@program
def cupy_graph():
    import cupy as cp

    s = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(10)
    with s:
        s.begin_capture()
        x += 1
        g = s.end_capture()
        for _ in range(5):
            g.launch(s)
        s.synchronize()
    say(float(x.sum()))


@program
def cupy_pinned_and_dlpack():
    import cupy as cp
    import cupyx
    import torch

    p = cupyx.empty_pinned((1000,), dtype=cp.float32)
    p[...] = 3
    x = cp.asarray(p)
    t = torch.from_dlpack(x)
    t += 1
    torch.cuda.synchronize()
    say(float(x.sum()))


@program
def cupy_zero_copy():
    import cupyx
    import cupy as cp

    x = cupyx.zeros_pinned((1 << 16,), dtype=cp.float32)
    ptr = cp.cuda.runtime.hostGetDevicePointer(x.ctypes.data, 0) if hasattr(cp.cuda.runtime, "hostGetDevicePointer") else x.ctypes.data
    m = cp.cuda.UnownedMemory(ptr, x.nbytes, x)
    d = cp.ndarray(x.shape, x.dtype, cp.cuda.MemoryPointer(m, 0))
    d += 5
    cp.cuda.Device().synchronize()
    say(float(x.sum()))


@program
def cupy_sparse_solver():
    import cupy as cp
    import cupyx.scipy.sparse as sp
    import cupyx.scipy.sparse.linalg as la

    a = sp.diags([cp.full(100, 4.0), cp.full(99, -1.0), cp.full(99, -1.0)], [0, 1, -1], format="csr")
    b = cp.ones(100)
    say(bool(cp.allclose(a @ la.spsolve(a, b), b)), bool(cp.allclose(a @ la.cg(a, b)[0], b, atol=1e-4)))


@program
def numba_kernel():
    import numpy as np
    from numba import cuda

    @cuda.jit
    def k(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += i

    x = np.zeros(1000)
    k[4, 256](x)
    say(x.sum())


@program
def numba_mapped():
    import numpy as np
    from numba import cuda

    @cuda.jit
    def k(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = i

    m = cuda.mapped_array(5000, dtype=np.float64)
    k[20, 256](m)
    cuda.synchronize()
    say(m.sum())
    u = cuda.managed_array(5000, dtype=np.float64)
    k[20, 256](u)
    cuda.synchronize()
    say(u.sum())


@program
def numba_reduce_shared_atomics():
    import numpy as np
    from numba import cuda, float32

    @cuda.jit
    def k(x, o):
        s = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        s[t] = x[cuda.grid(1)]
        cuda.syncthreads()
        cuda.atomic.add(o, 0, s[127 - t])

    o = np.zeros(1, dtype=np.float32)
    k[8, 128](np.arange(1024, dtype=np.float32), o)
    say(float(o[0]))

    @cuda.reduce
    def total(a, b):
        return a + b

    say(float(total(np.arange(1000.0))))


@program
def numba_cooperative_and_print():
    import numpy as np
    from numba import cuda

    @cuda.jit
    def k(x):
        g = cuda.cg.this_grid()
        x[cuda.grid(1)] = 1
        g.sync()
        if cuda.grid(1) == 0:
            print("= from the kernel", x.size)

    x = cuda.to_device(np.zeros(256))
    k[2, 128](x)
    cuda.synchronize()
    say(x.copy_to_host().sum())


@program
def cuda_core_program():
    import numpy as np
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    d = Device()
    d.set_current()
    s = d.create_stream()
    p = Program('extern "C" __global__ void k(int *x) { x[threadIdx.x] = threadIdx.x; }', code_type="c++", options=ProgramOptions(std="c++17", arch="sm_%d%d" % d.compute_capability))
    k = p.compile("cubin").get_kernel("k")
    b = d.allocate(128, stream=s)
    launch(s, LaunchConfig(grid=1, block=32), k, b)
    h = np.zeros(32, dtype=np.int32)
    from cuda.bindings import driver

    s.sync()
    driver.cuMemcpyDtoH(h.ctypes.data, int(b.handle), 128)
    say(int(h.sum()))


@program
def cuda_core_linker():
    from cuda.core import Device, Linker, LinkerOptions, ObjectCode, Program, ProgramOptions

    d = Device()
    d.set_current()
    arch = "sm_%d%d" % d.compute_capability
    a = Program("__device__ int f(int x) { return x + 1; }", code_type="c++", options=ProgramOptions(relocatable_device_code=True, arch=arch)).compile("ptx")
    b = Program('extern __device__ int f(int); extern "C" __global__ void k(int *x) { *x = f(*x); }', code_type="c++", options=ProgramOptions(relocatable_device_code=True, arch=arch)).compile("ptx")
    o = Linker(a, b, options=LinkerOptions(arch=arch)).link("cubin")
    say(o.get_kernel("k").attributes.max_threads_per_block() > 0, isinstance(o, ObjectCode))


@program
def driver_link():
    from cuda.bindings import driver as d

    d.cuInit(0)
    _, c = d.cuDevicePrimaryCtxRetain(0)
    d.cuCtxSetCurrent(c)
    ptx = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n\0"
    e, st = d.cuLinkCreate(0, [], [])
    say(int(e))
    (e,) = d.cuLinkAddData(st, d.CUjitInputType.CU_JIT_INPUT_PTX, ptx, len(ptx), b"k", 0, [], [])
    e, cubin, size = d.cuLinkComplete(st)
    say(int(e), bool(size))
    e, m = d.cuModuleLoadData(cubin)
    e, f = d.cuModuleGetFunction(m, b"k")
    say(int(e))


@program
def driver_graph_by_hand():
    from cuda.bindings import runtime as rt
    import numpy as np

    e, g = rt.cudaGraphCreate(0)
    e, p = rt.cudaMalloc(1024)
    h = np.arange(256, dtype=np.int32)
    o = np.zeros(256, dtype=np.int32)
    e, a = rt.cudaGraphAddMemcpyNode1D(g, None, 0, p, h.ctypes.data, 1024, rt.cudaMemcpyKind.cudaMemcpyHostToDevice)
    say(int(e))
    if int(e):
        return
    e, b = rt.cudaGraphAddMemcpyNode1D(g, [a], 1, o.ctypes.data, p, 1024, rt.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    say(int(e))
    e, x = rt.cudaGraphInstantiate(g, 0)
    say(int(e))
    rt.cudaGraphLaunch(x, 0)
    say(int(rt.cudaDeviceSynchronize()[0]), int(o.sum()))


@program
def nvml_and_smi():
    import subprocess

    import pynvml as n

    n.nvmlInit()
    h = n.nvmlDeviceGetHandleByIndex(0)
    say(n.nvmlDeviceGetName(h), n.nvmlDeviceGetMemoryInfo(h).total > 0)
    say(subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode)


@program
def onnx_reference_and_opencv():
    import cv2
    import numpy as np

    t = _torch()
    x = cv2.GaussianBlur(np.ones((32, 32), np.float32), (3, 3), 0)
    say(_close(t.from_numpy(x).cuda().sum()))


@program
def gpytorch_gp():
    t = _torch()
    import gpytorch

    class M(gpytorch.models.ExactGP):
        def __init__(self, x, y, l):
            super().__init__(x, y, l)
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = t.linspace(0, 1, 50).cuda()
    l = gpytorch.likelihoods.GaussianLikelihood().cuda()
    m = M(x, x.sin(), l).cuda()
    m.eval()
    say(tuple(m(x[:5] + 0.01).mean.shape))


@program
def threads_many():
    import threading

    t = _torch()
    out = []

    def work(i):
        s = t.cuda.Stream()
        with t.cuda.stream(s):
            x = t.full((1000,), float(i), device="cuda")
            for _ in range(50):
                x = x + 1
            out.append(x.sum().item())

    ts = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [x.start() for x in ts]
    [x.join() for x in ts]
    say(sorted(out))


@program
def subprocess_with_gpu():
    import subprocess

    t = _torch()
    x = t.ones(10, device="cuda")
    r = subprocess.run([sys.executable, "-c", "import torch; print(torch.ones(5, device='cuda').sum().item())"], capture_output=True, text=True)
    say(r.stdout.strip(), x.sum().item())


@program
def illegal_address_is_told():
    t = _torch()
    x = t.arange(10, device="cuda")
    try:
        x[t.tensor([1 << 20], device="cuda")].sum().item()
        say("no error")
    except Exception as e:
        say(type(e).__name__, "device-side assert" in str(e))


def main():
    if len(sys.argv) < 2:
        print("\n".join(PROGRAMS))
        return
    PROGRAMS[sys.argv[1]]()


if __name__ == "__main__":
    main()
