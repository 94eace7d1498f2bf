"""A linear layer that, on a CPU, multiplies by weights laid out for its matrix kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The packed layout depends on the number of rows only below four; decoding in batches wants the one for more.
_PACKING_ROWS = 16

# With AVX-512, oneDNN takes 1 row 1.2 times and 2 rows 1.4 times as long as 4; with AVX2 fewer rows are faster.
_MIN_ROWS_AVX512 = 4


class Linear(nn.Module):
    """`y = x W^T + b`. The output may be several projections side by side, so that they cost one product.

    `F.linear` runs through a general matrix product that is made for many rows; at the few rows of a decode step oneDNN
    with weights packed once is faster. Measured on SmolLM2-135M's layers in fp32, one x86 thread, as shares of
    F.linear's time: 0.7 at 1 row and 0.5 at 8 with AVX-512, 0.9 and 0.75 with AVX2; never slower up to 256 rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shared_weight: nn.Parameter | None = None,
    ) -> None:
        """Leave the parameters uninitialised.

        Args:
            shared_weight: another module's parameter [out_features, in_features] to use as the weight.
        """
        super().__init__()
        weight = shared_weight
        if weight is None:
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), False)
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = weight
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), False) if bias else None
        self._is_shared = shared_weight is not None
        self._cpu_weight: Tensor | None = None
        self._min_rows = 0

    def prepare(self) -> None:
        """Lay the loaded weight out for the device. On a CPU `weight` is replaced and becomes None, unless shared."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or not _has_onednn_linear(weight.dtype):
            return
        if self._is_shared:
            # Its other user looks rows up in it, and a packed second copy would double it: plain, still faster.
            self._cpu_weight = weight.data
        else:
            self._cpu_weight = torch.ops.mkldnn._reorder_linear_weight(weight.data, _PACKING_ROWS)
            self.weight = None
            if torch.backends.cpu.get_cpu_capability() == "AVX512":
                self._min_rows = _MIN_ROWS_AVX512

    def forward(self, x: Tensor) -> Tensor:
        """float [num_tokens, in_features] -> [num_tokens, out_features], same dtype."""
        if self._cpu_weight is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if num_rows < self._min_rows:
            x = F.pad(x, (0, 0, 0, self._min_rows - num_rows))
        return torch.ops.mkldnn._linear_pointwise(x, self._cpu_weight, self.bias, "none", [], "")[:num_rows]


def _has_onednn_linear(dtype: torch.dtype) -> bool:
    """Whether this build and CPU have the oneDNN linear that torch's own compiler emits, for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
