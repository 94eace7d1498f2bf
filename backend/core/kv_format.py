"""`cache.dtype`: what a vector, which is a key or a value of one token and KV head, takes in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How vectors are stored; how they are computed is in `kernels.reference.kv_quantization`."""

    name: str  # of `cache.dtype`
    bits: int | None = None  # of an element; None: those of the model's dtype
    num_scales: int = 0  # fp16 numbers beside each vector
    # Keys, and queries with them, by a Hadamard matrix, which takes a head_dim that is a power of two. Values are not: on
    # SmolLM2-135M, over 512 tokens of WikiText-2, that lowers the error of int4 keys from 13.0 to 8.6 %, that of values only
    # from 10.1 to 8.9 %, and the KL divergence not at all, while every output would have to be rotated back.
    rotates_keys: bool = False

    def bytes_per_vector(self, head_dim: int, dtype_bytes: int) -> int:
        """Data and scales of one vector.

        Args:
            dtype_bytes: of an element in the model's dtype.
        """
        return head_dim * (self.bits or 8 * dtype_bytes) // 8 + 2 * self.num_scales

    def problem(self, head_dim: int) -> str | None:
        """Why vectors of this length cannot be stored so, or None."""
        if self.rotates_keys and (head_dim < 2 or head_dim & (head_dim - 1)):
            return f"it takes a head_dim that is a power of two, and this model's is {head_dim}"
        return None


PLAIN = KVFormat("auto")
KV_FORMATS = {
    kv_format.name: kv_format
    for kv_format in (
        PLAIN,
        KVFormat("fp8_e4m3", bits=8, num_scales=1),
        KVFormat("int8", bits=8, num_scales=1),
        KVFormat("int4", bits=4, num_scales=2, rotates_keys=True),
    )
}
