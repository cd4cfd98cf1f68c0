"""Caches that plug in where `model.KVCache` is: in int8, or read by a CPU's own operator.

A model's caches are made by its `make_cache`; the one here knows every dtype. The decoder and its
compiled step see the methods of `KVCache` only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_kernels import load_kernels
from model import KVCache, write_at
from quantize import quantize_int8


class StepCache(KVCache):
    """KVCache whose single steps run in the CPU's own operator, in float32, where there is one.

    It reads as far as the mask shows, so a mask must show a beginning of the context.
    """

    def __init__(self, n_rows: int, n_ctx: int, n_head: int, head_dim: int, dtype: torch.dtype):
        super().__init__(n_rows, n_ctx, n_head, head_dim, dtype)
        is_known = self.k_cache.device.type == "cpu" and dtype in (torch.float32, torch.int8)
        self.has_kernel = is_known and load_kernels()

    def attend(self, rows: slice, q: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.has_kernel or q.shape[2] != 1:
            return super().attend(rows, q, mask)
        k, v = self.k_cache[rows], self.v_cache[rows]
        return torch.ops.whisper_fast.attend_one(q, k, v, None, None, mask).to(q.dtype)


class Int8KVCache(StepCache):
    """int8 keys and values, with one scale per position and head [n_rows, H, n_ctx]."""

    def __init__(self, n_rows: int, n_ctx: int, n_head: int, head_dim: int, dtype: torch.dtype):
        super().__init__(n_rows, n_ctx, n_head, head_dim, torch.int8)
        for name in ("k_scales", "v_scales"):
            self.register_buffer(name, torch.zeros(n_rows, n_head, n_ctx), persistent=False)

    def write(self, rows: slice, k: Tensor, v: Tensor, input_pos: Tensor | None = None) -> None:
        for values, cache, scales in (
            (k, self.k_cache[rows], self.k_scales[rows]),
            (v, self.v_cache[rows], self.v_scales[rows]),
        ):
            q, q_scales = quantize_int8(values)  # [B, H, S, D], [B, H, S]
            if input_pos is None:
                cache.copy_(q)
                scales.copy_(q_scales)
            else:
                write_at(cache, input_pos, q)
                write_at(scales, input_pos, q_scales)

    def keys(self, rows: slice, heads: Tensor | slice = slice(None)) -> Tensor:
        return self.k_cache[rows][:, heads] * self.k_scales[rows][:, heads, :, None]

    def attend(self, rows: slice, q: Tensor, mask: Tensor | None = None) -> Tensor:
        k, k_scales = self.k_cache[rows], self.k_scales[rows]
        v, v_scales = self.v_cache[rows], self.v_scales[rows]
        if self.has_kernel and q.shape[2] == 1:
            return torch.ops.whisper_fast.attend_one(q, k, v, k_scales, v_scales, mask).to(q.dtype)
        if q.is_cuda and q.shape[2] == 1 and torch.compiler.is_compiling():
            # Sums instead of matrix products: the compiler reads int8 in them, without a copy.
            scores = (q * k).sum(-1, dtype=torch.float32) * k_scales * q.shape[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[:, :, 0], -torch.inf)  # [B, H, n_ctx]
            probs = scores.softmax(dim=-1) * v_scales
            return (probs[..., None] * v).sum(-2, keepdim=True).to(q.dtype)  # [B, H, 1, D]
        k, v = ((t * s[..., None]).to(q.dtype) for t, s in ((k, k_scales), (v, v_scales)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def make_cache(n_rows: int, n_ctx: int, n_head: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    """The cache for a dtype, for `Whisper.setup_caches`: int8, or what torch can attend in."""
    kind = Int8KVCache if dtype == torch.int8 else StepCache
    return kind(n_rows, n_ctx, n_head, head_dim, dtype)
