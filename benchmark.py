"""Speed: the machine's ceilings, each stage of ours, and rivals on the same file in the same run.

Out: tables on stderr, then one JSON line on stdout with the same figures.

A decode step reads all decoder weights and each row's caches once, so its ceiling is the memory's
read speed; an encoder window is arithmetic, so its ceiling is the matrix product's. Both are
measured first, by their best run. Other times are medians of --runs runs after warm-up, those of
steps and files with the quickest and the slowest beside them; whole files alternate between the
systems, so that a drift of the machine hits all of them.

    python benchmark.py --audio talk.flac --reference talk.txt --language en --compile
    python benchmark.py --random large-v3 --quantize int8 --device cuda --compile
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from chunk_audio import SAMPLE_RATE, load_audio, log_mel, pad_or_trim
from compile_step import warm_up
from decode import DecodeState, DecodeStep, decode_one_token, setup_decoding
from eval import count_errors, normalise, our_system
from generate import (
    add_options,
    build_model,
    decode_step_from_args,
    load_from_args,
    options_from_args,
    peak_memory_gb,
    step_bytes,
)
from model import ModelArgs, Whisper
from quantize import MODES, QuantizeOptions, quantize_state_dict
from rivals import RIVALS, RivalProcess, System, add_rival_options

N_STEPS = 40  # decode steps of one measurement
READ_BYTES = 1 << 29  # of the memory ceiling: far more than any cache holds


def seconds(run: Callable[[], object], device: torch.device, n_runs: int) -> list[float]:
    """Sorted times, s, of `n_runs` calls after one to warm up."""
    times = []
    for _ in range(n_runs + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])


def ceilings(device: torch.device, dtype: torch.dtype, n_runs: int) -> dict[str, float]:
    """Read speed of memory, GB/s, and speed of a square matrix product, GFLOP/s."""
    source = torch.ones(READ_BYTES // 4, device=device)
    read_s = seconds(lambda: source.sum(), device, n_runs)[0]
    n = 8192 if device.type == "cuda" else 1536
    a = torch.randn(n, n, device=device, dtype=dtype)
    product_s = seconds(lambda: a @ a, device, n_runs)[0]
    return {"read_gb_s": READ_BYTES / read_s / 1e9, "matmul_gflop_s": 2 * n**3 / product_s / 1e9}


def encoder_gflop(args: ModelArgs) -> float:
    """Arithmetic of one window: linears, attention and convolutions, multiply and add apart."""
    S, dim = args.n_audio_ctx, args.dim
    layer = 2 * S * 12 * dim * dim + 4 * S * S * dim
    convolutions = 2 * 3 * dim * (2 * S * args.n_mels + S * dim)
    return (args.n_audio_layer * layer + convolutions) / 1e9


def bench_stages(model: Whisper, waveform: Tensor, n_runs: int) -> dict[str, float]:
    """Median seconds of the stages of one window, and the encoder's GFLOP/s."""
    device = model.device
    samples = pad_or_trim(waveform).to(device)[None]
    mel = log_mel(samples, model.args.n_mels).to(model.dtype)
    audio_features = model.encoder(mel)
    model.setup_caches(1)
    stages = {
        "mel_s": lambda: log_mel(samples, model.args.n_mels),
        "encoder_s": lambda: model.encoder(mel),
        "prefill_s": lambda: model.decoder.start_window(audio_features),
    }
    out = {name: statistics.median(seconds(run, device, n_runs)) for name, run in stages.items()}
    out["encoder_gflop_s"] = encoder_gflop(model.args) / out["encoder_s"]
    return out


def bench_steps(
    model: Whisper, tokenizer, n_rows: int, decode_step: DecodeStep, read_gb_s: float, n_runs: int
) -> dict[str, float]:
    """tok/s of `n_rows` rows that never end, standing at positions 4 to 44."""
    setup_decoding(model, tokenizer, n_rows)
    state: DecodeState = model.decode_state
    features = torch.randn(1, model.args.n_audio_ctx, model.args.dim)
    features = features.to(model.device, model.dtype)
    for row in range(n_rows):
        model.decoder.start_window(features, slice(row, row + 1))
    warm_up(model, decode_step, None)
    state.suppress_mask[:, tokenizer.eot] = -torch.inf
    prompt = torch.full((4,), tokenizer.sot, device=model.device)

    def run() -> None:
        for row in range(n_rows):
            state.start_row(row, prompt, model.args.n_text_ctx, 0.0)
        for _ in range(N_STEPS):
            decode_step(model, state, None)

    times = seconds(run, model.device, n_runs)
    model.decode_state = None  # its end of text is suppressed
    step_s = statistics.median(times) / N_STEPS
    gb_s = step_bytes(model) / step_s / 1e9
    return {
        "rows": n_rows,
        "ms_per_step": 1e3 * step_s,
        "tok_s": n_rows / step_s,
        "tok_s_spread": [n_rows * N_STEPS / times[-1], n_rows * N_STEPS / times[0]],
        "gb_s": gb_s,
        "share_of_read": gb_s / read_gb_s,
    }


def bench_files(
    systems: dict[str, System], args: argparse.Namespace, audio_s: float, device: torch.device
) -> dict[str, dict]:
    """A whole file, the systems taking turns: median seconds, x real time, peak memory, WER."""
    path, language = args.audio, options_from_args(args).language
    reference = args.reference.read_text(encoding="utf-8") if args.reference else None
    times: dict[str, list[float]] = {name: [] for name in systems}
    texts = {name: system(path, language)[0] for name, system in systems.items()}  # warm-up
    for _ in range(args.runs):
        for name, system in systems.items():
            start = time.perf_counter()
            texts[name], *_ = system(path, language)
            times[name].append(time.perf_counter() - start)
    out = {}
    for name in systems:
        median_s = statistics.median(times[name])
        out[name] = {
            "seconds": median_s,
            "spread": [min(times[name]), max(times[name])],
            "x_realtime": audio_s / median_s,
        }
        is_rival = isinstance(systems[name], RivalProcess)
        memory_gb = systems[name].memory_gb if is_rival else peak_memory_gb(device)
        out[name]["peak_memory_gb"] = memory_gb
        if reference is not None:
            words = normalise(reference, language)
            errors = count_errors(words, normalise(texts[name], language))
            out[name]["wer"] = 100 * sum(errors) / len(words)
            out[name]["sub_del_ins"] = list(errors)
    first = next(iter(systems))
    for name in systems:
        out[name]["ratio_to_ours"] = out[name]["seconds"] / out[first]["seconds"]
    return out


# ---- command line ----------------------------------------------------------------------------


def random_model(args: argparse.Namespace) -> tuple[Whisper, SimpleNamespace]:
    """A network of random weights: speed does not depend on their values."""
    model_args, device = ModelArgs.from_name(args.random), torch.device(args.device)
    with torch.device("meta"):
        shapes = Whisper(model_args).state_dict()
    weights = {k: torch.randn(t.shape, device=device).mul_(0.02) for k, t in shapes.items()}
    settings = None
    if args.quantize:
        options = QuantizeOptions(args.quantize, scheme="rtn")  # which is quick
        weights, settings, _ = quantize_state_dict(weights, model_args, options)
    precision = (args.precision, args.cache_dtype)
    model = build_model(weights, model_args, settings, device, *precision)
    special = range(model_args.n_vocab - 1501, model_args.n_vocab)
    tokenizer = SimpleNamespace(
        n_vocab=model_args.n_vocab, eot=50257, sot=50258, timestamp_begin=special[0],
        timestamp_end=special[-1], encode=lambda text: [220], non_speech_tokens=(),
        special_ids=special,
    )  # fmt: skip
    return model, tokenizer


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure ceilings, stages, steps and whole files.")
    add_options(parser)
    add = parser.add_argument
    add("--audio", type=Path, help="file for the whole-file comparison")
    add("--reference", type=Path, help="its text, for the word error rate")
    add("--random", help="measure stages and steps of this size with random weights")
    add("--quantize", choices=MODES, help="the random weights")
    add("--batch_sizes", nargs="*", type=int, default=[1, 4, 8, 16], help="rows of the steps")
    add("--peers", nargs="+", default=[], choices=RIVALS, help="rivals for the comparison")
    add("--only", nargs="+", help="of ours (whisper-fast) and the rivals, run only these")
    add("--runs", type=int, default=5, help="measured runs of everything")
    add_rival_options(parser)
    args = parser.parse_args(argv)
    if args.random and args.audio:
        parser.error("--random has no words to transcribe; leave --audio out")
    if args.language in ("auto", "each") and (args.reference or args.peers):
        parser.error("--reference and --peers need the --language of the audio")
    if args.runs < 1 or min(args.batch_sizes, default=1) < 1:
        parser.error("--runs and --batch_sizes: allowed: 1 and above")
    if args.quantize and not args.random:
        parser.error("--quantize is for --random; give a quantized --checkpoint_path")
    return args


def load_systems(args: argparse.Namespace, model: Whisper, tokenizer) -> dict[str, System]:
    """Ours first; a rival that is not installed or has no weights is named and left out."""
    systems = {"whisper-fast": our_system(args, model, tokenizer)}
    for name in args.peers:
        try:
            systems[name] = RivalProcess(name, args)
        except (ImportError, ValueError, OSError, RuntimeError) as error:
            print(f"benchmark.py: without {name}: {error}", file=sys.stderr)
    chosen = {name: run for name, run in systems.items() if name in (args.only or systems)}
    if not chosen:
        raise ValueError(f"--only {args.only}: none of {', '.join(systems)}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 1


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    model, tokenizer = random_model(args) if args.random else load_from_args(args)
    out = {
        "torch": torch.__version__, "device": str(model.device), "dtype": str(model.dtype),
        "threads": torch.get_num_threads(), "compile": bool(args.compile),
    }  # fmt: skip
    waveform = load_audio(args.audio) if args.audio else torch.zeros(SAMPLE_RATE)
    if args.audio:  # first, as the ceilings take memory of their own
        systems, audio_s = load_systems(args, model, tokenizer), len(waveform) / SAMPLE_RATE
        out["files"] = bench_files(systems, args, audio_s, model.device)
        print(f"files: {json.dumps(out['files'])}", file=sys.stderr)
    out["ceilings"] = ceilings(model.device, model.dtype, args.runs)
    step = decode_step_from_args(args) or decode_one_token
    read_gb_s = out["ceilings"]["read_gb_s"]
    out["steps"] = []
    for n_rows in args.batch_sizes:
        out["steps"].append(bench_steps(model, tokenizer, n_rows, step, read_gb_s, args.runs))
        print(json.dumps(out["steps"][-1]), file=sys.stderr)
    out["stages"] = bench_stages(model, waveform, args.runs)  # last: with a compiled encoder
    for name in ("ceilings", "stages"):
        print(f"{name}: {json.dumps(out[name])}", file=sys.stderr)
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
