"""Greedy decoding with a transformer of GPT-2's size from a cold start, and the cost of attention with a new shape.

decode.py tokens [--new N]     random weights, a key-value cache that grows by one position a token, one wait a token
decode.py attention [--new N]  cuDNN's attention with N lengths, each new to the process, then the same lengths again

Both print one JSON line. Times are in milliseconds; start_ms counts from before torch is imported. A run with an empty
folder in CUDA_CACHE_PATH pays for every compilation; a second run with the same folder has them from the cache.
"""

import argparse
import hashlib
import json
import statistics
import time

BEGUN = time.perf_counter()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

IMPORTED = time.perf_counter()
WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS = 768, 12, 12, 50257, 1024


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cache):
        """x is (batch, positions, WIDTH); cache is the keys and values of the positions before, or None."""
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), (k, v)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(POSITIONS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, words, caches, at):
        x = self.words(words) + self.positions(torch.arange(at, at + words.shape[1], device=words.device))
        new = []
        for block, cache in zip(self.blocks, caches):
            x, cache = block(x, cache)
            new.append(cache)
        return F.linear(self.norm(x[:, -1]), self.words.weight), new


def decode(model, prompt, n):
    """The n tokens after the prompt, and when each of them was known, in seconds from the call."""
    words, caches, at, out, when = prompt, [None] * LAYERS, 0, [], []
    begun = time.perf_counter()
    for _ in range(n):
        logits, caches = model(words, caches, at)
        at += words.shape[1]
        words = logits.argmax(dim=-1, keepdim=True)
        out.append(words.item())
        when.append(time.perf_counter() - begun)
    return out, when


def rates(when):
    gaps = sorted(1e3 * (b - a) for a, b in zip(when, when[1:]))
    return {
        "first_ms": round(1e3 * when[0], 2),
        "tokens_s": round(len(when) / when[-1], 2),
        "p50_ms": round(statistics.median(gaps), 3),
        "p99_ms": round(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 3),
    }


def tokens(n):
    torch.manual_seed(7)
    model = Model().half().eval()
    loading = time.perf_counter()
    model.cuda()
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    prompt = torch.arange(11, 27, device="cuda")[None]
    with torch.inference_mode():
        out, when = decode(model, prompt, n)
        cold = time.perf_counter()
        again, known = decode(model, prompt, n)
        third, known = decode(model, prompt, n)
    q = torch.empty(1, HEADS, 1, 64, device="cuda", dtype=torch.float16)
    return {
        "start_ms": round(1e3 * (cold - BEGUN), 1),
        "import_ms": round(1e3 * (IMPORTED - BEGUN), 1),
        "cuda_and_weights_ms": round(1e3 * (loaded - loading), 1),
        "cold": rates(when),
        "known": rates(known),
        "cold_total_tokens_s": round(n / (cold - loading), 2),
        "same": out == again == third,
        "tokens": hashlib.sha256(json.dumps(out).encode()).hexdigest()[:16],
        "backend": int(torch._fused_sdp_choice(q, q, q)),
    }


def attention(n):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(7)
    q = torch.randn(1, HEADS, 64 + 8 * n, 64, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()

    def pass_over():
        ms, sums = [], []
        for i in range(n):
            x = q[:, :, : 64 + 8 * i].contiguous()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch.cuda.synchronize()
            ms.append(1e3 * (time.perf_counter() - begun))
            sums.append(y.float().sum().item())
        return ms, sums

    with torch.inference_mode(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        new, a = pass_over()
        known, b = pass_over()
    return {
        "new_first_ms": round(new[0], 2),
        "new_ms": [round(t, 2) for t in new[1:]],
        "new_median_ms": round(statistics.median(new[1:]), 2),
        "known_median_ms": round(statistics.median(known), 4),
        "same": a == b,
        "sums": hashlib.sha256(json.dumps(a).encode()).hexdigest()[:16],
    }


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("tokens", "attention"))
    p.add_argument("--new", type=int, default=64, help="tokens, or lengths")
    a = p.parse_args()
    result = {"bench": a.what, "new": a.new, **(tokens if a.what == "tokens" else attention)(a.new)}
    print(json.dumps({**result, "gpu": torch.cuda.get_device_name(0)}))


if __name__ == "__main__":
    main()
