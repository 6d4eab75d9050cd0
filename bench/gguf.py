"""Writes a GGUF file of the llama architecture with random weights and no vocabulary, for an engine to be timed with.

gguf.py FILE [--size 1b|tiny] [--type q8_0|f16]

The layout is that of GGUF version 3: header, metadata, one record a tensor, the tensors' bytes, each at a multiple of
32 bytes. The same arguments give the same bytes.
"""

import argparse
import struct

import numpy

U32, F32, STRING = 4, 6, 8  # metadata types
TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
ALIGNMENT = 32
SCALE = 0.02  # standard deviation of a weight
SIZES = {  # width, layers, heads, key and value heads, width of the feed-forward layer, vocabulary
    "1b": (2048, 16, 32, 8, 8192, 32000),
    "tiny": (128, 2, 4, 2, 256, 512),
}


def string(s):
    return struct.pack("<Q", len(s)) + s.encode()


def pair(key, value):
    if isinstance(value, str):
        return string(key) + struct.pack("<I", STRING) + string(value)
    if isinstance(value, float):
        return string(key) + struct.pack("<If", F32, value)
    return string(key) + struct.pack("<II", U32, value)


def shapes(width, layers, heads, kv, ff, vocabulary, weights):
    """Name, dimensions (the fastest first) and type of each tensor."""
    each = width // heads
    yield "token_embd.weight", (width, vocabulary), weights
    yield "output_norm.weight", (width,), "f32"
    yield "output.weight", (width, vocabulary), weights  # of its own: with the embedding's, each token predicts itself
    for i in range(layers):
        yield f"blk.{i}.attn_norm.weight", (width,), "f32"
        yield f"blk.{i}.attn_q.weight", (width, width), weights
        yield f"blk.{i}.attn_k.weight", (width, each * kv), weights
        yield f"blk.{i}.attn_v.weight", (width, each * kv), weights
        yield f"blk.{i}.attn_output.weight", (width, width), weights
        yield f"blk.{i}.ffn_norm.weight", (width,), "f32"
        yield f"blk.{i}.ffn_gate.weight", (width, ff), weights
        yield f"blk.{i}.ffn_up.weight", (width, ff), weights
        yield f"blk.{i}.ffn_down.weight", (ff, width), weights


def content(random, dims, kind):
    n = int(numpy.prod(dims))
    if kind == "f32":
        return numpy.ones(n, "<f4")
    if kind == "f16":
        return (random.standard_normal(n, "f4") * numpy.float32(SCALE)).astype("<f2")
    # q8_0: blocks of 32 weights, each block a scale in half precision and 32 signed bytes.
    blocks = numpy.empty(n // 32, numpy.dtype([("scale", "<f2"), ("weights", "i1", 32)]))
    blocks["scale"] = SCALE / (127 / 3**0.5)
    blocks["weights"] = random.integers(-127, 128, (n // 32, 32), "i1")
    return blocks


def write(path, size, weights):
    width, layers, heads, kv, ff, vocabulary = SIZES[size]
    metadata = {
        "general.architecture": "llama",
        "general.name": f"random {size}",
        "llama.context_length": 4096,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width // heads,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": vocabulary,
        "tokenizer.ggml.model": "none",
    }
    tensors = list(shapes(*SIZES[size], weights))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(pair(*m) for m in metadata.items())
    offset = 0
    for name, dims, kind in tensors:
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[kind], offset)
        n = int(numpy.prod(dims))
        offset += -(-{"f32": 4 * n, "f16": 2 * n, "q8_0": n // 32 * 34}[kind] // ALIGNMENT) * ALIGNMENT
    random = numpy.random.default_rng(1)
    with open(path, "wb") as f:
        f.write(head)
        for _, dims, kind in tensors:
            f.write(bytes(-f.tell() % ALIGNMENT))
            content(random, dims, kind).tofile(f)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("file")
    p.add_argument("--size", choices=SIZES, default="1b")
    p.add_argument("--type", choices=("q8_0", "f16"), default="q8_0")
    a = p.parse_args()
    write(a.file, a.size, a.type)


if __name__ == "__main__":
    main()
