"""cuBLAS and cuBLASLt through PyTorch: products of several types and shapes, printed as digests."""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts

import torch  # noqa: E402

from digest import seeded, show  # noqa: E402


def main():
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        for m, n, k in ((1, 1, 1), (7, 5, 3), (128, 128, 128), (1024, 512, 2048), (4096, 4096, 1024)):
            a, b = seeded(m, k, dtype=dtype), seeded(k, n, dtype=dtype, seed=1)
            show(f"gemm {short} {m}x{n}x{k}", a @ b)
        show(f"gemm-transposed {short}", seeded(300, 200, dtype=dtype).t() @ seeded(300, 100, dtype=dtype))
        show(f"batched {short}", torch.bmm(seeded(16, 64, 48, dtype=dtype), seeded(16, 48, 80, dtype=dtype)))
        show(f"gemv {short}", seeded(1000, 700, dtype=dtype) @ seeded(700, dtype=dtype))
        show(f"bias {short}", torch.nn.functional.linear(seeded(64, 256, dtype=dtype), seeded(512, 256, dtype=dtype), seeded(512, dtype=dtype)))
    torch.backends.cuda.matmul.allow_tf32 = True
    show("gemm tf32", seeded(2048, 1024) @ seeded(1024, 512))
    a = torch.complex(seeded(96, 64), seeded(96, 64, seed=2))
    show("gemm complex64", torch.view_as_real(a @ a.t()))
    spd = seeded(64, 64, dtype=torch.float64)
    spd = spd @ spd.t() + 64 * torch.eye(64, dtype=torch.float64, device="cuda")
    show("triangular", torch.linalg.solve_triangular(torch.tril(spd), seeded(64, 8, dtype=torch.float64), upper=False))
    # And right, not only the same.
    a, b = seeded(511, 257, dtype=torch.float64), seeded(257, 129, dtype=torch.float64)
    torch.testing.assert_close((a @ b).cpu(), a.cpu() @ b.cpu())
    print("right")


if __name__ == "__main__":
    main()
