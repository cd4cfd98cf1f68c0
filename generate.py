"""Audio files -> text: load a model and transcribe files from the command line.

What happens to a file is in `long_audio.py`, to a window of it in `decode.py`.

    python generate.py --audio samples/short.wav --compile
"""

import argparse
import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from chunk_audio import WINDOW_S
from compile_step import compile_decode_step
from convert_hf_checkpoint import CHECKPOINTS, convert, load_checkpoint
from decode import DecodeStep, Stats, decode_one_token
from host_memory import peak_host_memory_gb
from kv_cache import make_cache
from long_audio import GenerateOptions, transcribe
from model import CHUNK_S, MODEL_SIZES, ModelArgs, Whisper
from quantize import prepare_for_device, swap_modules
from tokenizer import Tokenizer

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHE_DTYPES = PRECISIONS | {"int8": torch.int8}


def load_model(
    name_or_path: str | Path = "base",
    device: str | torch.device = "cpu",
    precision: str | None = None,
    cache_dtype: str | None = None,
) -> tuple[Whisper, Tokenizer]:
    """Load a checkpoint: a path to a .safetensors, or a model name, converted on first use.

    precision is fp32, fp16 or bf16 (of what is not quantized): by default fp32 on a CPU, fp16
    elsewhere. cache_dtype may also be int8: the default where the weights are quantized and run
    on a CPU, else the precision.
    Raises: FileNotFoundError, ValueError for what is missing, unknown or broken.
    """
    device = _usable_device(device)
    path = _checkpoint_path(name_or_path)
    state_dict, metadata = load_checkpoint(path)
    how = (metadata.model_args, metadata.quantization, device, precision, cache_dtype)
    model = build_model(state_dict, *how)
    model.set_alignment_heads(metadata.alignment_heads)
    model.suppress_tokens = metadata.suppress_tokens
    model.chunk_s = CHUNK_S.get(metadata.name.rpartition("/")[2], WINDOW_S)
    tokenizer = Tokenizer(path.parent / "tokenizer.model")
    if tokenizer.n_vocab != model.args.n_vocab:
        raise ValueError(
            f"{path} has {model.args.n_vocab} ids and tokenizer.model beside it "
            f"{tokenizer.n_vocab}: one of them is another model's; convert again"
        )
    return model, tokenizer


def build_model(
    state_dict: dict[str, Tensor], model_args: ModelArgs, quantization: dict | None,
    device: torch.device, precision: str | None = None, cache_dtype: str | None = None,
) -> Whisper:  # fmt: skip
    """A network with these weights, on a device and packed for it; the rest as in `load_model`."""
    dtype = _dtype(precision or ("fp32" if device.type == "cpu" else "fp16"), PRECISIONS)
    with torch.device("meta"):
        model = Whisper(model_args)
        if quantization:
            swap_modules(model, quantization)
            model.make_cache = make_cache
    model.load_state_dict(state_dict, strict=True, assign=True)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    prepare_for_device(model)
    if cache_dtype is None and quantization and device.type == "cpu":
        cache_dtype = "int8"
    if cache_dtype is not None:
        model.make_cache, model.cache_dtype = make_cache, _dtype(cache_dtype, CACHE_DTYPES)
    return model


def _dtype(name: str, allowed: dict[str, torch.dtype]) -> torch.dtype:
    if name not in allowed:
        raise ValueError(f"{name!r} is no precision; allowed: {', '.join(allowed)}")
    return allowed[name]


def _checkpoint_path(name_or_path: str | Path) -> Path:
    """The file of a model name, made on first use, or the path itself."""
    path = Path(name_or_path)
    if path.suffix == ".safetensors":
        return path
    if (path / "model.safetensors").exists() and (path / "tokenizer.model").exists():
        return path / "model.safetensors"
    if isinstance(name_or_path, Path) and not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.exists() and name_or_path not in MODEL_SIZES:
        raise ValueError(f"{path} is not converted; run convert_hf_checkpoint.py {path} first")
    path = CHECKPOINTS / name_or_path / "model.safetensors"
    if not path.exists():
        convert(str(name_or_path), path.parent, name=str(name_or_path))
        print(f"converted {name_or_path} into {path.parent}, once", file=sys.stderr)
    return path


def _usable_device(name: str | torch.device) -> torch.device:
    """The device, if this machine has it. Raises: ValueError."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by device
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(name)!r} cannot be used here: {reason}") from None
    return torch.device(name)


# ---- command line ----------------------------------------------------------------------------


def report(stats: Stats, model: Whisper, total_s: float) -> str:
    """A few lines on where the time went; tok/s and GB/s are of the decode steps alone."""
    stages = " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in stats.seconds.items())
    decode_s = max(stats.seconds.get("decode", 0.0), 1e-9)
    gb_s = stats.n_steps * step_bytes(model) / decode_s / 1e9
    return (
        f"seconds: {stages}\n"
        f"{stats.n_windows} windows, {stats.n_tokens} tokens, {stats.n_steps} steps of "
        f"{model.n_rows} rows, {stats.n_retries} retries: "
        f"{stats.n_tokens / decode_s:.1f} tok/s, {gb_s:.1f} GB/s\n"
        f"{stats.audio_s:.1f} s of audio in {total_s:.2f} s: "
        f"{stats.audio_s / max(total_s, 1e-9):.1f} x real time, "
        f"peak memory {peak_memory_gb(model.device):.2f} GB"
    )


def step_bytes(model: Whisper) -> int:
    """Bytes of the decoder's weights and of the cross-attention caches, which each step reads.

    `wkv` fills those caches and is not among them, nor is a lookup table beside the packed head.
    """
    unread = r"[^_]attn\.kv_cache\.|\.q_cache$|\.wkv\."
    tensors = dict(itertools.chain(model.decoder.named_parameters(), model.decoder.named_buffers()))
    if "embedding.scales_and_zeros" in tensors:
        unread += r"|^embedding\.(weight|scales|zeros)$"
    return sum(tensor.nbytes for name, tensor in tensors.items() if not re.search(unread, name))


def peak_memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return peak_host_memory_gb()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model's and the decoder's flags, shared by the scripts that transcribe."""
    default = GenerateOptions()
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--model", default="base", help=f"one of {', '.join(MODEL_SIZES)}, or a hub id")
    add("--checkpoint_path", type=Path, help="a converted model.safetensors, instead of --model")
    add("--compile", action=flag, help="compile the step (default: on a CPU, from an hour on)")
    add("--device", default=default_device(), help="cpu, cuda, cuda:1, mps")
    add("--precision", choices=PRECISIONS, help="default: fp32 on a CPU, fp16 elsewhere")
    add("--cache_dtype", choices=CACHE_DTYPES, help="of keys and values; default: see load_model")
    add("--language", default=default.language, help="code, name, auto (default), or each chunk")
    add("--task", default=default.task, choices=("transcribe", "translate"))
    add("--temperature", type=float, default=default.temperature, help="0: likeliest token")
    add("--top_k", type=int, default=default.top_k, help="draw among the k likeliest tokens")
    add("--seed", type=int, default=default.seed, help="of the draws")
    add("--batch_size", type=int, default=default.batch_size, help="chunks decoded at once")
    add("--max_new_tokens", type=int, default=default.max_new_tokens, help="of one chunk")
    add("--timestamps", action=flag, default=default.timestamps, help="timestamp tokens")
    add("--fallback", action=flag, default=default.fallback, help="decode again what failed")


def options_from_args(args: argparse.Namespace) -> GenerateOptions:
    names = {option.name for option in dataclasses.fields(GenerateOptions)}
    return GenerateOptions(**{k: v for k, v in vars(args).items() if k in names})


def load_from_args(args: argparse.Namespace) -> tuple[Whisper, Tokenizer]:
    name = args.checkpoint_path or args.model
    return load_model(name, args.device, args.precision, args.cache_dtype)


def decode_step_from_args(args: argparse.Namespace) -> DecodeStep | None:
    """What --compile or --no-compile asks for; None leaves it to the length of the audio."""
    if args.compile is None:
        return None
    return compile_decode_step(torch.device(args.device)) if args.compile else decode_one_token


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Transcribe audio files with Whisper.")
    add = parser.add_argument
    add("--audio", nargs="+", required=True, type=Path, help="audio or video files")
    add_options(parser)
    add("--profile", type=Path, help="write a Chrome trace of the run to this file")
    args = parser.parse_args(argv)
    if args.profile and not args.profile.resolve().parent.is_dir():
        parser.error(f"--profile {args.profile}: its folder does not exist")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        options = options_from_args(args)
        start = time.perf_counter()
        model, tokenizer = load_from_args(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    print(f"loaded in {time.perf_counter() - start:.2f} s", file=sys.stderr)
    with _profiler(args.profile):
        step = decode_step_from_args(args)
        return _transcribe_files(model, tokenizer, args.audio, options, step)


def _transcribe_files(
    model: Whisper, tokenizer: Tokenizer, paths: list[Path], options: GenerateOptions,
    decode_step: DecodeStep | None,
) -> int:  # fmt: skip
    """Print each file's text; a file that cannot be read is named and the rest are done."""
    n_failed = 0
    for path in paths:
        start = time.perf_counter()
        try:
            result = transcribe(model, tokenizer, path, options, decode_step, show_progress=True)
        except (ValueError, OSError) as error:
            print(f"generate.py: {error}", file=sys.stderr)
            n_failed += 1
            continue
        print(f"{path}: {result.text}" if len(paths) > 1 else result.text, flush=True)
        for warning in result.warnings:
            print(f"generate.py: {path}: {warning}", file=sys.stderr)
        print(report(result.stats, model, time.perf_counter() - start), file=sys.stderr)
    return 1 if n_failed else 0


@contextmanager
def _profiler(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    profile.export_chrome_trace(str(path))
    print(f"trace written to {path}", file=sys.stderr)


def _run_program() -> int:
    """`main` as a shell expects it: the exit code says who ended it, and nothing is a traceback."""
    sys.stdout.reconfigure(errors="backslashreplace")  # where its encoding lacks a character
    try:
        code = main()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("generate.py: stopped", file=sys.stderr)
        return 130
    except OSError as error:  # of stdout: its reader has gone, or its disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more
        if not isinstance(error, BrokenPipeError):
            print(f"generate.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_run_program())
