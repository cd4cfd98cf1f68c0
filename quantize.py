"""Quantize a checkpoint to int8 or int4, and the modules that run it.

In:  `model.safetensors` of convert_hf_checkpoint.py.
Out: beside it `model_int8.safetensors` or `model_int4_g64.safetensors`, with the settings in the
     header. Files are the same for all devices; weights are packed for one when they are loaded.

Every linear layer and the embedding table, which is also the output head, are quantized. int4
makes the encoder int8: it computes more than it reads, and int4 costs it accuracy for few bytes.
    int8: q [N, K] int8, scales [N]: weight = q * scale, one scale per output channel, after
          scale was moved from loud channels of the LayerNorm before it into the weight.
    int4: q [N, K / 2] uint8, two values a byte, scales and zeros [N, K / groupsize] fp16:
          weight = (q - zero) * scale. Rows of frequent and of special tokens in the table are int8.
On a CPU both run as int8 x int8 products with one scale per row of activations, so a row's result
does not depend on its batch. int4 is turned into int8 when loaded there: it makes the file small,
not the step fast. On a GPU weights are expanded on the fly (int8) or by torch's int4 kernel.

Leaves loading to `generate.py`, the CPU's operators to `cpu_kernels.py`, quantized
caches to `kv_cache.py`.
Sources: Badri and Shaji, "Half-Quadratic Quantization", 2023; Xiao et al., "SmoothQuant", 2022;
swapped modules: gpt-fast.

    python quantize.py --checkpoint_path checkpoints/base/model.safetensors --mode int8
"""

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from convert_hf_checkpoint import load_checkpoint, save_checkpoint
from cpu_kernels import attend_all_keys, load_kernels
from model import ModelArgs, Whisper

MODES, GROUP_SIZES, SCHEMES = ("int8", "int4"), (32, 64, 128, 256), ("hqq", "rtn")
LANES = 16  # outputs side by side in the CPU's packed weights, see int8_kernels.cpp
N_COMMON = 4096  # ids are numbered by merges: the first 4,096 are 77 % of tokens of English speech
N_TEXT = 50256  # ids of text; those above are special, end of text among them
INNER_K_TILES = 8  # of torch's int4 kernel for CUDA: it takes K in steps of 16 * 8


@dataclass(frozen=True)
class QuantizeOptions:
    """What to do to a checkpoint. Raises: ValueError for a value that is not allowed."""

    mode: str = "int8"  # or int4
    groupsize: int = 64  # input channels that share a scale and a zero (int4)
    scheme: str = "hqq"  # or rtn, round to nearest (int4)
    encoder: bool = True  # quantize the encoder's linear layers too

    def __post_init__(self):
        for name, allowed in (("mode", MODES), ("groupsize", GROUP_SIZES), ("scheme", SCHEMES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")


# ---- int8 ------------------------------------------------------------------------------------


def quantize_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 along the last dimension: [..., K] -> int8 [..., K], float32 scales [...].

    The error of a value is at most half a scale, which is the largest magnitude / 127.
    """
    values = values.float()
    scales = values.abs().amax(dim=-1).clamp(min=1e-20) / 127
    return (values / scales[..., None]).round().to(torch.int8), scales


class Int8Linear(nn.Module):
    """x [..., K] -> x @ (weight * scales).T + bias [..., N], in x's dtype."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(out_features))
        self.register_buffer("bias", torch.empty(out_features) if bias else None)
        self.register_buffer("packed", None, persistent=False)  # takes the place of `weight`

    @staticmethod
    def quantize(
        weight: Tensor, squares: Tensor | None, options: QuantizeOptions
    ) -> dict[str, Tensor]:
        q, scales = quantize_int8(weight)
        return {"weight": q, "scales": scales}

    def pack(self) -> None:
        """Lay the weights out for the CPU operator; elsewhere they stay as they are."""
        if self.weight.device.type != "cpu":
            return
        self.scales = self.scales.to(torch.float32, copy=True)  # or it keeps the whole file mapped
        self.bias = None if self.bias is None else self.bias.float()
        if load_kernels() and "AVX" in torch.backends.cpu.get_cpu_capability():
            N, K = self.weight.shape
            weight = F.pad(self.weight, (0, -K % 4, 0, -N % LANES))
            blocks = weight.view(-1, LANES, weight.shape[1] // 4, 4).transpose(1, 2)
            packed = blocks.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            # [N / 16, K / 4, 16, 4], each value + 128
            self.packed, self.weight = packed.bitwise_xor_(128), None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            y = torch.ops.whisper_fast.int8_linear(x, self.packed, self.scales, self.bias)
            return y.to(x.dtype)  # [..., N]
        if x.device.type != "cpu":
            return self.expand(x)
        q, x_scales = quantize_int8(x)
        y = torch._int_mm(q.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], -1)
        y = y * (x_scales[..., None] * self.scales)  # [..., N]
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def expand(self, x: Tensor) -> Tensor:
        """The product in x's dtype. Unscaled sums overflow float16: base has some of 150,000.

        The bias comes after: a product without one is what the compiler reads int8 in, for one row.
        """
        y = F.linear(x, self.weight.to(x.dtype) * self.scales[:, None])  # [..., N]
        return y if self.bias is None else y + self.bias


class Int8Embedding(Int8Linear):
    """The tied table: tokens [B, S] -> [B, S, dim], and `project` hidden states to logits."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias)
        self.register_buffer("lookup_scales", torch.ones(in_features))  # undo what `_smooth` did
        self.out_dtype = torch.get_default_dtype()

    def pack(self) -> None:
        self.out_dtype = self.scales.dtype
        super().pack()
        self.lookup_scales = self.lookup_scales.clone()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.packed is None:
            rows = self.weight[tokens]  # [B, S, dim]
        else:
            blocks = self.packed[tokens // LANES, :, tokens % LANES]  # [B, S, dim / 4, 4]
            rows = blocks.flatten(-2).to(torch.int16) - 128  # [B, S, dim]
        rows = rows * self.scales[tokens][..., None] * self.lookup_scales
        return rows.to(self.out_dtype)

    def project(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)  # [B, S, n_vocab]


# ---- int4 ------------------------------------------------------------------------------------


def quantize_int4(
    weight: Tensor, groupsize: int, scheme: str, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> q [N, K_padded / 2] uint8, scales and zeros [N, n_group] float16.

    K is padded with zeros to whole groups. The even input channel is in the high half of a byte.
    `importance` [K] weighs the errors of the input channels (hqq).
    """
    N, K = weight.shape
    w = F.pad(weight.float(), (0, -K % groupsize)).view(N, -1, groupsize)  # [N, n_group, groupsize]
    # The grid holds 0, so that zeros stay within 0 .. 15; scales stay above 0 as float16.
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6)
    zeros = -low / scales
    if scheme == "hqq":
        importance = torch.ones(K, device=w.device) if importance is None else importance.float()
        importance = F.pad(importance, (0, -K % groupsize)).view(-1, groupsize)
        zeros = _half_quadratic(w / scales, zeros, importance)
    scales, zeros = scales.half(), zeros.half()
    q = (w / scales + zeros).round().clamp(0, 15).to(torch.uint8).view(N, -1)
    return q[:, 0::2] << 4 | q[:, 1::2], scales.squeeze(-1), zeros.squeeze(-1)


def _half_quadratic(w: Tensor, zeros: Tensor, importance: Tensor) -> Tensor:
    """Better zeros for groups w [N, n_group, groupsize], in steps of their grids, without any data.

    Minimises sum importance * |residual|, which lets few large errors be and makes the many small.
    An auxiliary variable `outliers` splits it into two steps of closed form: a soft threshold of
    the residual, then the zero that fits what remains, while the penalty `beta` grows. Each group
    keeps the best zero that it saw. Scales stay as they are: fitted too, they shrink and clip the
    few large weights, which costs more than all others gain (NOTES.md).

    Source: the paper, which raises residuals to 0.7: here 1 did better. Counting in steps, so that
    one beta fits every layer, and the importance [n_group, groupsize] of input channels are ours.
    """
    beta, best, least = 10.0, zeros, torch.full_like(zeros, torch.inf)
    share = importance / importance.sum(-1, keepdim=True).clamp(min=1e-8)
    for _ in range(20):
        q = (w + zeros).round().clamp(0, 15)
        residual = w - (q - zeros)
        error = (residual.abs() * share).sum(-1, keepdim=True)
        best, least = torch.where(error < least, zeros, best), torch.minimum(error, least)
        outliers = F.softshrink(residual, 1 / beta)
        zeros = ((q - w + outliers) * share).sum(-1, keepdim=True)
        beta *= 1.1
    return best


class Int4Linear(nn.Module):
    """x [..., K] -> x @ dequantized weight.T + bias [..., N], in x's dtype."""

    max_groupsize = max(GROUP_SIZES)

    def __init__(self, in_features: int, out_features: int, bias: bool, groupsize: int):
        super().__init__()
        groupsize = min(groupsize, self.max_groupsize)
        self.in_features, self.out_features, self.groupsize = in_features, out_features, groupsize
        N, n_group = out_features, -(-in_features // groupsize)
        self.weight = nn.Buffer(torch.empty(N, n_group * groupsize // 2, dtype=torch.uint8))
        for name in ("scales", "zeros"):
            self.register_buffer(name, torch.empty(N, n_group, dtype=torch.float16))
        self.register_buffer("bias", torch.empty(N) if bias else None)
        for name in ("packed", "scales_and_zeros"):  # for CUDA
            self.register_buffer(name, None, persistent=False)

    @classmethod
    def quantize(
        cls, weight: Tensor, squares: Tensor | None, options: QuantizeOptions
    ) -> dict[str, Tensor]:
        how = (min(options.groupsize, cls.max_groupsize), options.scheme, squares)
        # A few rows at a time stay in the processor's cache, which is 3 times faster.
        parts = [quantize_int4(w, *how) for w in weight.split(2048)]
        q, scales, zeros = map(torch.cat, zip(*parts, strict=True))
        return {"weight": q, "scales": scales, "zeros": zeros}

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The weights of some outputs [..., K], in the dtype of the scales."""
        q, scales, zeros = self.weight[rows], self.scales[rows], self.zeros[rows]
        q = torch.stack((q >> 4, q & 15), dim=-1)  # [..., K_padded / 2, 2]
        q = q.reshape(*scales.shape, self.groupsize)  # [..., n_group, groupsize]
        weight = (q - zeros[..., None]) * scales[..., None]
        return weight.flatten(-2)[..., : self.in_features]  # [..., K]

    def as_int8(self) -> Int8Linear:
        """The same layer with one scale per output, for the CPU. Rounds once more."""
        kind = Int8Embedding if isinstance(self, Int4Embedding) else Int8Linear
        module = kind(self.in_features, self.out_features, self.bias is not None)
        module.weight, scales = quantize_int8(self.dequantize())
        module.scales, module.bias = scales.to(self.scales.dtype), self.bias
        return module

    def pack(self) -> None:
        """On CUDA, lay the weights out for torch's int4 kernel where GPU and shape allow it."""
        device, K_padded = self.weight.device, self.weight.shape[1] * 2
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return
        if K_padded % (16 * INNER_K_TILES):
            return
        pad = (0, 0, 0, -self.out_features % 8)  # the kernel makes whole eights of outputs
        weight = F.pad(self.weight, pad)
        self.packed = torch.ops.aten._convert_weight_to_int4pack(weight, INNER_K_TILES)
        # It reads (q - 8) * scale + zero.
        pairs = torch.stack((self.scales, (8 - self.zeros) * self.scales), dim=-1).bfloat16()
        pairs = F.pad(pairs, (0, 0, *pad))  # [N_padded, n_group, 2]
        self.scales_and_zeros = pairs.transpose(0, 1).contiguous()  # [n_group, N_padded, 2]
        if not isinstance(self, Int4Embedding):  # which looks rows up
            self.weight = self.scales = self.zeros = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.dequantize().to(x.dtype), self.bias)
        K_padded = len(self.scales_and_zeros) * self.groupsize
        rows = F.pad(x.flatten(0, -2), (0, K_padded - self.in_features)).bfloat16()
        int4_mm = torch.ops.aten._weight_int4pack_mm
        y = int4_mm(rows, self.packed, self.groupsize, self.scales_and_zeros)
        y = y[:, : self.out_features].to(x.dtype).view(*x.shape[:-1], -1)  # [..., N]
        return y if self.bias is None else y + self.bias


class Int4Embedding(Int4Linear):
    """The tied table: tokens [B, S] -> [B, S, dim], and `project` hidden states to logits.

    Of the divergence that int4 causes, the head alone made 60 %. So its groups are small, and the
    rows of the first N_COMMON ids and of the special ones, `int8_rows`, are int8 (NOTES.md).
    """

    max_groupsize = 32

    def __init__(self, in_features: int, out_features: int, bias: bool, groupsize: int):
        int4 = self.int4_ids(out_features)
        super().__init__(in_features, len(int4), bias, groupsize)
        self.first = int4.start
        self.int8_rows = Int8Linear(in_features, out_features - len(int4), False)

    @staticmethod
    def int4_ids(n_vocab: int) -> range:
        """The ids whose rows are int4."""
        return range(min(N_COMMON, n_vocab // 2), min(N_TEXT, n_vocab))

    @classmethod
    def quantize(
        cls, weight: Tensor, squares: Tensor | None, options: QuantizeOptions
    ) -> dict[str, Tensor]:
        ids = cls.int4_ids(len(weight))
        result = super().quantize(weight[ids.start : ids.stop], squares, options)
        others = torch.cat((weight[: ids.start], weight[ids.stop :]))
        parts = Int8Linear.quantize(others, squares, options)
        return result | {f"int8_rows.{name}": part for name, part in parts.items()}

    def as_int8(self) -> Int8Linear:
        module = super().as_int8()  # of the int4 rows
        for name in ("weight", "scales"):
            before, after = self._around(getattr(self.int8_rows, name), 0)
            setattr(module, name, torch.cat((before, getattr(module, name), after)))
        return module

    def _around(self, int8_part: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """What is int8, as what comes before the int4 rows and what comes after them."""
        return int8_part.split((self.first, int8_part.shape[dim] - self.first), dim)

    def forward(self, tokens: Tensor) -> Tensor:
        is_int4 = (tokens >= self.first) & (tokens < self.first + self.out_features)
        int4 = (tokens - self.first).clamp(0, self.out_features - 1)
        int8 = torch.where(tokens < self.first, tokens, tokens - self.out_features).clamp(0)
        int8 = self.int8_rows.weight[int8] * self.int8_rows.scales[int8][..., None]
        return torch.where(is_int4[..., None], self.dequantize(int4), int8)  # [B, S, dim]

    def project(self, hidden: Tensor) -> Tensor:
        before, after = self._around(self.int8_rows(hidden), -1)
        return torch.cat((before, super().forward(hidden), after), dim=-1)  # [B, S, n_vocab]


# ---- whole models ----------------------------------------------------------------------------

_QUANTIZED = {
    ("int8", nn.Linear): Int8Linear,
    ("int8", nn.Embedding): Int8Embedding,
    ("int4", nn.Linear): Int4Linear,
    ("int4", nn.Embedding): Int4Embedding,
}
_NORM_BEFORE = {
    "attn.wqkv": "attn_norm",
    "cross_attn.wq": "cross_attn_norm",
    "mlp.fc1": "mlp_norm",
    "decoder.embedding": "decoder.norm",
}


def quantize_state_dict(
    state_dict: dict[str, Tensor], model_args: ModelArgs, options: QuantizeOptions
) -> tuple[dict[str, Tensor], dict, list[tuple[str, str]]]:
    """-> quantized state dict, settings for its header, (name, reason) of all that was left.

    What is left in float32 becomes float16.
    """
    with torch.device("meta"):
        network = Whisper(model_args)
    modules, skipped, result = {}, [], dict(state_dict)
    for name, module in network.named_modules():
        if not hasattr(module, "weight") or isinstance(module, nn.LayerNorm):
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            skipped.append((name, f"{type(module).__name__} is small and runs once a window"))
        elif name.startswith("encoder.") and not options.encoder:
            skipped.append((name, "--no-encoder"))
        else:
            modules[name] = "int8" if name.startswith("encoder.") else options.mode
            kind = _QUANTIZED[modules[name], type(module)]
            weight, squares = result.pop(f"{name}.weight"), _mean_squares(name, state_dict)
            if modules[name] == "int8" and squares is not None:
                weight = _smooth(name, weight, squares, result)
            parts = kind.quantize(weight, squares, options)
            result |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    for name in state_dict.keys() & result.keys():
        if result[name].dtype == torch.float32:
            result[name] = result[name].half()
    return result, dataclasses.asdict(options) | {"modules": modules}, skipped


def _norm_before(name: str) -> str | None:
    """The LayerNorm whose output a layer reads, if it is the only reader."""
    ends = (end for end in _NORM_BEFORE if name.endswith(end))
    return next((name.removesuffix(end) + _NORM_BEFORE[end] for end in ends), None)


def _mean_squares(name: str, state_dict: dict[str, Tensor]) -> Tensor | None:
    """Mean squares [K] of a layer's input channels as far as the weights tell: after a LayerNorm.

    A normalised value has mean 0 and variance 1, so the norm's weight and bias give the square.
    """
    norm = _norm_before(name)
    if norm is None:
        return None
    return sum(state_dict[f"{norm}.{part}"].float() ** 2 for part in ("weight", "bias"))


def _smooth(name: str, weight: Tensor, squares: Tensor, result: dict[str, Tensor]) -> Tensor:
    """Move scale from loud input channels into the weights [N, K], which are returned.

    A row of int8 activations has one step for all channels, so that a few loud ones leave the rest
    hardly any values. The norm before the layer is divided by what the weights are multiplied by;
    the embedding's lookup undoes it. Source: Xiao et al., "SmoothQuant", 2022, at its strength of
    0.5; the channels' sizes come from the norm instead of calibration data.
    """
    largest = weight.float().abs().amax(dim=0).clamp(min=1e-5)
    factors = (squares.sqrt().clamp(min=1e-5) / largest).sqrt()
    factors /= factors.log().mean().exp()  # [K]
    norm = _norm_before(name)
    for part in ("weight", "bias"):
        result[f"{norm}.{part}"] = result[f"{norm}.{part}"].float() / factors
    if name == "decoder.embedding":
        result[f"{name}.lookup_scales"] = 1 / factors
    return weight.float() * factors


def swap_modules(model: Whisper, settings: dict) -> int:
    """Put quantized modules where a checkpoint's header says; returns how many.

    For a model on `meta` before its weights are loaded. The embedding table becomes the head too.
    Raises: ValueError for settings that this program does not know.
    """
    modules = settings.get("modules", {})
    try:
        options = QuantizeOptions(**{k: v for k, v in settings.items() if k != "modules"})
        for name, mode in modules.items():
            old = model.get_submodule(name)
            N, K = old.weight.shape
            kind, groupsize = _QUANTIZED[mode, type(old)], (options.groupsize,) * (mode == "int4")
            model.set_submodule(name, kind(K, N, hasattr(old, "bias"), *groupsize))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"unknown quantization in a checkpoint: {error!r}") from error
    _tie_head(model)
    return len(modules)


def _tie_head(model: Whisper) -> None:
    if not isinstance(model.decoder.embedding, nn.Embedding):
        model.decoder.output = model.decoder.embedding.project


def prepare_for_device(model: Whisper) -> None:
    """Pack quantized weights for the device that they are on. Call once, after loading."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Int4Linear) and module.weight.device.type == "cpu":
            module = module.as_int8()
            model.set_submodule(name, module)
        if isinstance(module, (Int8Linear, Int4Linear)):
            module.pack()
    _tie_head(model)
    if isinstance(model.encoder.layers[0].mlp.fc1, Int8Linear) and model.device.type == "cpu":
        for layer in model.encoder.layers:
            layer.attn.attend = attend_all_keys


# ---- command line ----------------------------------------------------------------------------


def output_path(checkpoint_path: Path, options: QuantizeOptions) -> Path:
    """Beside the checkpoint. The name is a label for people: programs read the header."""
    scheme = "" if options.scheme == "hqq" else f"_{options.scheme}"
    details = f"{scheme}_g{options.groupsize}" if options.mode == "int4" else ""
    details += "" if options.encoder else "_decoder"
    return checkpoint_path.with_name(f"{checkpoint_path.stem}_{options.mode}{details}.safetensors")


def quantize_checkpoint(checkpoint_path: Path, options: QuantizeOptions) -> Path:
    """Write the quantized file, report on stderr, return its path.

    `checkpoint_path` is a model.safetensors or its folder.
    Raises: FileNotFoundError; ValueError for a file that is no checkpoint or quantized already.
    """
    if checkpoint_path.is_dir():
        checkpoint_path = checkpoint_path / "model.safetensors"
    state_dict, metadata = load_checkpoint(checkpoint_path)
    if metadata.quantization is not None:
        raise ValueError(f"{checkpoint_path} is quantized already; give the one it was made from")
    float32_bytes = sum(4 * tensor.numel() for tensor in state_dict.values())
    state_dict, settings, skipped = quantize_state_dict(state_dict, metadata.model_args, options)
    for name, reason in skipped:
        print(f"left as it is: {name} ({reason})", file=sys.stderr)
    dtype, path = state_dict["encoder.positions"].dtype, output_path(checkpoint_path, options)
    metadata = dataclasses.replace(metadata, dtype=dtype, quantization=settings)
    save_checkpoint(path, state_dict, metadata)
    old_mb, new_mb = (file.stat().st_size / 1e6 for file in (checkpoint_path, path))
    print(
        f"{len(settings['modules'])} matrices to {options.mode}: {old_mb:.1f} -> {new_mb:.1f} MB, "
        f"{new_mb * 1e6 / float32_bytes:.3f} of float32",
        file=sys.stderr,
    )
    return path


def main(argv: list[str] | None = None) -> int:
    default = QuantizeOptions()
    parser = argparse.ArgumentParser(description="Make a Whisper checkpoint int8 or int4.")
    add = parser.add_argument
    add("--checkpoint_path", type=Path, required=True, help="model.safetensors, or its folder")
    add("--mode", choices=MODES, default=default.mode)
    add("--groupsize", type=int, choices=GROUP_SIZES, default=default.groupsize, help="int4 only")
    add("--scheme", choices=SCHEMES, default=default.scheme, help="int4 only; rtn: plain rounding")
    add("--encoder", action=argparse.BooleanOptionalAction, default=default.encoder,
        help="quantize the encoder too")  # fmt: skip
    args = vars(parser.parse_args(argv))
    try:
        print(quantize_checkpoint(args.pop("checkpoint_path"), QuantizeOptions(**args)))
    except (OSError, ValueError, SafetensorError) as error:
        print(f"quantize.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
