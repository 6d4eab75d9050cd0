"""PyTorch's operators on the GPU against the same operators on the processor, with PyTorch's own sample inputs."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_device_type import skipCPUIfNoFFT  # noqa: F401 (its import registers devices)

OPS = [op for op in op_db if torch.float32 in op.dtypes]


def _to(x, device):
    if isinstance(x, torch.Tensor):
        return x.detach().to(device)
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)(_to(y, device) for y in x) if type(x) in (list, tuple) else x
    if isinstance(x, dict):
        return {k: _to(v, device) for k, v in x.items()}
    return x


@pytest.mark.parametrize("op", OPS, ids=lambda op: (op.name + "." + op.variant_test_name).rstrip("."))
def test_op(op):
    torch.manual_seed(0)
    random = any(w in op.name for w in ("rand", "empty", "bernoulli", "dropout", "normal", "uniform", "multinomial", "rrelu"))
    n = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        n += 1
        if n > 4:
            break
        kwargs = _to(sample.kwargs, "cuda")
        if "device" in kwargs:
            kwargs["device"] = "cuda"
        got = op.op(_to(sample.input, "cuda"), *_to(list(sample.args), "cuda"), **kwargs)
        torch.cuda.synchronize()
        if random or "eig" in op.name or "svd" in op.name or "lu" in op.name or "qr" in op.name:
            continue  # the results are not one
        want = op.op(_to(sample.input, "cpu"), *_to(list(sample.args), "cpu"), **sample.kwargs)
        torch.testing.assert_close(_to(got, "cpu"), want, rtol=2e-3, atol=2e-3, equal_nan=True, check_stride=False)
