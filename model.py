"""The Whisper network in plain PyTorch: audio encoder, text decoder and their static caches.

mel [B, n_mels, 3000] -> AudioEncoder -> audio_features [B, 1500, dim] -> TextDecoder -> logits.
Loading weights, sampling and audio are other files' work; this one needs only torch.

Source: "Robust Speech Recognition via Large-Scale Weak Supervision", Radford et al. 2022,
section 2.2. Layout of caches and fused projections: gpt-fast.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALL_ROWS = slice(None)

# Every released size: n_mels, n_vocab, dim, n_head, n_audio_layer, n_text_layer.
# Source: the published checkpoints' own dimensions (OpenAI `dims`, distil-whisper `config.json`).
# fmt: off
MODEL_SIZES = {
    "tiny.en":           ( 80, 51864,  384,  6,  4,  4),
    "tiny":              ( 80, 51865,  384,  6,  4,  4),
    "base.en":           ( 80, 51864,  512,  8,  6,  6),
    "base":              ( 80, 51865,  512,  8,  6,  6),
    "small.en":          ( 80, 51864,  768, 12, 12, 12),
    "small":             ( 80, 51865,  768, 12, 12, 12),
    "medium.en":         ( 80, 51864, 1024, 16, 24, 24),
    "medium":            ( 80, 51865, 1024, 16, 24, 24),
    "large-v1":          ( 80, 51865, 1280, 20, 32, 32),
    "large-v2":          ( 80, 51865, 1280, 20, 32, 32),
    "large-v3":          (128, 51866, 1280, 20, 32, 32),
    "large-v3-turbo":    (128, 51866, 1280, 20, 32,  4),
    "distil-small.en":   ( 80, 51864,  768, 12, 12,  4),
    "distil-medium.en":  ( 80, 51864, 1024, 16, 24,  2),
    "distil-large-v2":   ( 80, 51865, 1280, 20, 32,  2),
    "distil-large-v3":   (128, 51866, 1280, 20, 32,  2),
    "distil-large-v3.5": (128, 51866, 1280, 20, 32,  2),
}
# fmt: on

# Seconds of audio that a window should hold at most, where it is not all 30: distilled models lose
# text in longer ones. Source: distil-whisper README and paper, table 23.
CHUNK_S = {"distil-large-v2": 15, "distil-large-v3": 25, "distil-large-v3.5": 25}

# The cross-attention heads that follow the audio, as layer.head pairs.
# Source: openai/whisper `whisper/__init__.py`, `_ALIGNMENT_HEADS`, unpacked.
ALIGNMENT_HEADS = {
    "tiny.en": "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    "tiny": "2.2 3.0 3.2 3.3 3.4 3.5",
    "base.en": "3.3 4.7 5.1 5.5 5.7",
    "base": "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    "small.en": "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 "
    "11.4",
    "small": "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    "medium.en": "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 "
    "20.9 20.14 21.12",
    "medium": "13.15 15.4 15.15 16.1 20.0 23.4",
    "large-v1": "9.19 11.2 11.4 11.17 22.7 22.11 22.17 23.2 23.15",
    "large-v2": "10.12 13.17 16.11 16.12 16.13 17.15 17.16 18.4 18.11 18.19 19.11 21.2 21.3 22.3 "
    "22.9 22.12 23.5 23.7 23.13 25.5 26.1 26.12 27.15",
    "large-v3": "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6",
    "large-v3-turbo": "2.4 2.11 3.3 3.6 3.11 3.14",
}


@dataclass(frozen=True)
class ModelArgs:
    """Dimensions of one network; a checkpoint carries its own.

    Raises: ValueError from `from_name` for a name that is not in MODEL_SIZES.
    """

    n_mels: int  # mel bands of the input, 80 or 128
    n_vocab: int  # token ids, 51864 (English-only), 51865, 51866 or more
    dim: int  # width of encoder and decoder
    n_head: int
    n_audio_layer: int
    n_text_layer: int
    n_audio_ctx: int = 1500  # encoder positions of one window, 20 ms each
    n_text_ctx: int = 448  # decoder positions

    def __post_init__(self):
        if self.dim % self.n_head or self.dim % 2:
            raise ValueError(f"dim {self.dim} must be even and a multiple of n_head {self.n_head}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @classmethod
    def from_name(cls, name: str) -> "ModelArgs":
        if name not in MODEL_SIZES:
            raise ValueError(f"unknown model {name!r}; known models: {', '.join(MODEL_SIZES)}")
        return cls(*MODEL_SIZES[name])


class KVCache(nn.Module):
    """Static keys and values of one attention layer, [n_rows, H, n_ctx, D] each.

    The same class serves self-attention (written at `input_pos` as decoding goes on) and
    cross-attention (written once per window). Another storage, a quantized one say, plugs in by
    offering the same three methods. A row is one slot of the batch; `rows` is the slice of slots
    that a call is about.
    """

    def __init__(self, n_rows: int, n_ctx: int, n_head: int, head_dim: int, dtype: torch.dtype):
        super().__init__()
        shape = (n_rows, n_head, n_ctx, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def write(self, rows: slice, k: Tensor, v: Tensor, input_pos: Tensor | None = None) -> None:
        """Store k, v [B, H, S, D] at `input_pos` [B, S], or as the whole context without it."""
        k_cache, v_cache = self.k_cache[rows], self.v_cache[rows]
        if input_pos is None:
            k_cache.copy_(k)
            v_cache.copy_(v)
            return
        write_at(k_cache, input_pos, k)
        write_at(v_cache, input_pos, v)

    def keys(self, rows: slice, heads: Tensor | slice = slice(None)) -> Tensor:
        """The stored keys of all heads, or of those with some indices: [B, H, n_ctx, D]."""
        return self.k_cache[rows][:, heads]

    def attend(self, rows: slice, q: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of q [B, H, S, D] over the stored context -> [B, H, S, D].

        mask [B, 1, S, n_ctx] is True where a position may be seen; None shows all of them.
        """
        k, v = self.k_cache[rows].to(q.dtype), self.v_cache[rows].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SelfAttention(nn.Module):
    """Multi-head self-attention: full in the encoder, cached and causal in the decoder."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_head = args.n_head
        self.wqkv = nn.Linear(args.dim, 3 * args.dim)  # Whisper's keys have no bias: zeros here
        self.wo = nn.Linear(args.dim, args.dim)
        self.kv_cache: KVCache | None = None
        self.attend = F.scaled_dot_product_attention  # without a cache; another may plug in

    def forward(
        self, x: Tensor, input_pos: Tensor | None = None, mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
    ) -> Tensor:  # fmt: skip
        q, k, v = (split_heads(t, self.n_head) for t in self.wqkv(x).chunk(3, dim=-1))
        if input_pos is None:
            y = self.attend(q, k, v)  # [B, H, S, D]
        else:
            self.kv_cache.write(rows, k, v, input_pos)
            y = self.kv_cache.attend(rows, q, mask)  # [B, H, S, D]
        return self.wo(merge_heads(y))


class CrossAttention(nn.Module):
    """Attention from text positions to one window of audio.

    Where the checkpoint names alignment heads of this layer, their queries are kept as well: they
    tell which audio each token is about (see align.py).
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_head = args.n_head
        self.wq = nn.Linear(args.dim, args.dim)
        self.wkv = nn.Linear(args.dim, 2 * args.dim)  # the keys' half of the bias is zero
        self.wo = nn.Linear(args.dim, args.dim)
        self.kv_cache: KVCache | None = None
        self.alignment_heads: list[int] = []
        self.register_buffer("alignment_index", None, persistent=False)  # the same, on the device
        self.register_buffer("q_cache", None, persistent=False)  # [n_rows, n_heads, n_text_ctx, D]

    def fill_cache(self, audio_features: Tensor, rows: slice) -> None:
        """Compute keys and values of audio_features [B, n_audio_ctx, dim] once for a window."""
        k, v = (split_heads(t, self.n_head) for t in self.wkv(audio_features).chunk(2, dim=-1))
        self.kv_cache.write(rows, k, v)

    def forward(self, x: Tensor, input_pos: Tensor, rows: slice = ALL_ROWS) -> Tensor:
        q = split_heads(self.wq(x), self.n_head)  # [B, H, S, D]
        if self.q_cache is not None:
            write_at(self.q_cache[rows], input_pos, q[:, self.alignment_index])
        return self.wo(merge_heads(self.kv_cache.attend(rows, q)))


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.fc1 = nn.Linear(args.dim, 4 * args.dim)
        self.fc2 = nn.Linear(4 * args.dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attn_norm = nn.LayerNorm(args.dim)
        self.attn = SelfAttention(args)
        self.mlp_norm = nn.LayerNorm(args.dim)
        self.mlp = MLP(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class DecoderBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attn_norm = nn.LayerNorm(args.dim)
        self.attn = SelfAttention(args)
        self.cross_attn_norm = nn.LayerNorm(args.dim)
        self.cross_attn = CrossAttention(args)
        self.mlp_norm = nn.LayerNorm(args.dim)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor, rows: slice) -> Tensor:
        x = x + self.attn(self.attn_norm(x), input_pos, mask, rows)
        x = x + self.cross_attn(self.cross_attn_norm(x), input_pos, rows)
        return x + self.mlp(self.mlp_norm(x))


class AudioEncoder(nn.Module):
    """mel [B, n_mels, 2 * n_audio_ctx] -> audio_features [B, n_audio_ctx, dim]."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.conv1 = nn.Conv1d(args.n_mels, args.dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(args.dim, args.dim, kernel_size=3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.empty(args.n_audio_ctx, args.dim))
        self.layers = nn.ModuleList(EncoderBlock(args) for _ in range(args.n_audio_layer))
        self.norm = nn.LayerNorm(args.dim)

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.conv1(mel))  # [B, dim, 2 * n_audio_ctx]
        x = F.gelu(self.conv2(x)).transpose(1, 2).contiguous()  # [B, n_audio_ctx, dim]
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class TextDecoder(nn.Module):
    """tokens [B, S] at input_pos [B, S] -> hidden [B, S, dim]; `logits` makes [B, S, n_vocab].

    Rows may stand at different positions, so a row that is done can start another window while
    the rest go on. `start_window` is the only way to a row's audio: it fills the cross-attention
    caches, so no row can read the window before.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        # Without values: drawing them on `meta` imports the compiler, 1.1 s and 150 MB of a start.
        table = torch.empty(args.n_vocab, args.dim)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.positions = nn.Parameter(torch.empty(args.n_text_ctx, args.dim))
        self.layers = nn.ModuleList(DecoderBlock(args) for _ in range(args.n_text_layer))
        self.norm = nn.LayerNorm(args.dim)
        # hidden -> logits; None: the head is the embedding, as trained
        self.output: Callable[[Tensor], Tensor] | None = None

    def start_window(self, audio_features: Tensor, rows: slice = ALL_ROWS) -> None:
        """Give `rows` a new window: cross-attention keys and values of [B, n_audio_ctx, dim]."""
        for layer in self.layers:
            layer.cross_attn.fill_cache(audio_features, rows)

    def forward(self, tokens: Tensor, input_pos: Tensor, rows: slice = ALL_ROWS) -> Tensor:
        x = self.embedding(tokens) + self.positions[input_pos]  # [B, S, dim]
        context = torch.arange(self.positions.shape[0], device=tokens.device)
        mask = context <= input_pos[:, None, :, None]  # [B, 1, S, n_text_ctx]
        for layer in self.layers:
            x = layer(x, input_pos, mask, rows)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token after `hidden` [B, S, dim] -> [B, S, n_vocab] float32."""
        if self.output is not None:
            return self.output(hidden).float()
        return F.linear(hidden, self.embedding.weight).float()


class Whisper(nn.Module):
    """Encoder and decoder of one size. Call `setup_caches` before decoding."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.encoder = AudioEncoder(args)
        self.decoder = TextDecoder(args)
        self.n_rows = 0  # windows that the caches have room for
        self.make_cache: Callable[..., KVCache] = KVCache  # or another with its methods
        self.cache_dtype: torch.dtype | None = None  # of the caches; None: the weights' own
        self.decode_state: nn.Module | None = None  # what the decode loop carries, see decode.py
        self.chunk_s = 30  # seconds of audio that a window should hold at most
        self.suppress_tokens: tuple[int, ...] | None = None  # never sampled; None: the tokenizer's

    @property
    def device(self) -> torch.device:
        return self.encoder.positions.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.positions.dtype

    def setup_caches(self, n_rows: int) -> None:
        """Allocate self- and cross-attention caches for `n_rows` windows, with `make_cache`.

        Does nothing where that many rows are there already.
        """
        if self.n_rows == n_rows:
            return
        args, dtype = self.args, self.cache_dtype or self.dtype
        with torch.device(self.device):
            for layer in self.decoder.layers:
                for attn, n_ctx in (
                    (layer.attn, args.n_text_ctx),
                    (layer.cross_attn, args.n_audio_ctx),
                ):
                    attn.kv_cache = self.make_cache(
                        n_rows, n_ctx, args.n_head, args.head_dim, dtype
                    )
                if heads := layer.cross_attn.alignment_heads:
                    shape = (n_rows, len(heads), args.n_text_ctx, args.head_dim)
                    layer.cross_attn.alignment_index = torch.tensor(heads)
                    layer.cross_attn.q_cache = torch.zeros(shape, dtype=self.dtype)
        self.n_rows, self.decode_state = n_rows, None  # a state has as many rows as the caches

    def set_alignment_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """Keep the queries of these (layer, head) of the decoder's cross-attention."""
        for layer, head in heads:
            self.decoder.layers[layer].cross_attn.alignment_heads.append(head)


def write_at(cache: Tensor, input_pos: Tensor, x: Tensor) -> None:
    """cache [B, H, n_ctx, D] at positions [B, S] := x [B, H, S, D]."""
    row = torch.arange(len(input_pos), device=x.device)[:, None]  # [B, 1]
    cache[row, :, input_pos] = x.transpose(1, 2).to(cache.dtype)  # [B, S, H, D]


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """[B, S, dim] -> [B, H, S, D]."""
    B, S, dim = x.shape
    return x.view(B, S, n_head, dim // n_head).transpose(1, 2)  # [B, H, S, D]


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, dim]."""
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B, S, H * D)  # [B, S, dim]


def sinusoids(n_ctx: int, dim: int) -> Tensor:
    """The encoder's fixed position encodings [n_ctx, dim], float32.

    Source: Whisper's encoder: sines in the first half of the channels, cosines in the second,
    wavelengths from 2 pi to 10000 * 2 pi in a geometric series.
    """
    step = math.log(10000) / (dim // 2 - 1)
    frequency = torch.exp(-step * torch.arange(dim // 2, dtype=torch.float32))
    angle = torch.arange(n_ctx, dtype=torch.float32)[:, None] * frequency[None, :]
    return torch.cat((angle.sin(), angle.cos()), dim=1)  # [n_ctx, dim]
