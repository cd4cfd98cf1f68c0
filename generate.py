"""Audio files -> text: load a model, transcribe audio of any length, command line.

Reading and cutting audio is `chunk_audio.py`'s work, decoding windows `decode.py`'s, joining their
words `stitch.py`'s; this file puts them together.

    python generate.py --audio samples/short.wav --compile
"""

import argparse
import dataclasses
import itertools
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from chunk_audio import (
    SAMPLE_RATE,
    WINDOW_S,
    AudioError,
    Chunk,
    frame_energy_db,
    load_audio,
    plan_chunks,
)
from convert_hf_checkpoint import convert, load_checkpoint
from decode import (
    DecodeOptions,
    DecodeStep,
    NextTemperature,
    Slots,
    Stats,
    Window,
    WindowResult,
    compile_decode_step,
    decode_one_token,
    decode_windows,
    detect_language,
    encode_chunks,
    setup_decoding,
    warm_up,
)
from model import CHUNK_S, MODEL_SIZES, KVCache, Whisper
from quality import Verdict, gap_windows, halves, is_sure, judge, voiced_frames, voiced_s
from quantize import make_cache, prepare_for_device, swap_modules
from stitch import Piece, Segment, Word, insert, split_segments, stitch, tighten, uncovered
from tokenizer import Tokenizer, language_code

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHE_DTYPES = PRECISIONS | {"int8": torch.int8}

# Temperatures of a row that failed; few, since windows are also cut anew and openai's six steps
# cost six decodings of what is mostly noise.
FALLBACK = (0.4, 0.8)


@dataclass(frozen=True)
class GenerateOptions:
    """How to transcribe. Raises: ValueError for a value that is not allowed, naming it."""

    # code or English name; "auto": detect in the first chunks; "each": detect in every chunk
    language: str = "auto"
    task: str = "transcribe"  # or "translate": any language to English
    temperature: float = 0.0  # 0 takes the likeliest token; above, tokens are drawn
    top_k: int | None = None  # draw among the k likeliest tokens only
    seed: int = 0  # of the draws; a chunk's draws do not depend on its batch
    batch_size: int = 8  # chunks decoded at once
    timestamps: bool = False  # have the model write timestamps; word times do not need them
    fallback: bool = True  # decode again what failed or is missing
    max_new_tokens: int | None = None  # of one chunk; None: as many as fit

    def __post_init__(self):
        if self.language not in ("auto", "each"):
            object.__setattr__(self, "language", language_code(self.language))
        if self.task not in ("transcribe", "translate"):
            raise ValueError(f"task is {self.task!r}; allowed: transcribe, translate")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 and above")
        for name in ("top_k", "batch_size", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 and above")

    def decode_options(self, language: str) -> DecodeOptions:
        return DecodeOptions(
            language=language,
            detect_each=self.language == "each",
            task=self.task,
            timestamps=self.timestamps,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
        )


@dataclass(frozen=True)
class Transcript:
    """The text of one file, whole, in sentences with times, and how it came about."""

    text: str
    segments: list[Segment]
    language: str  # code
    warnings: list[str]  # where text was given up, with times
    stats: Stats


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
    dtype = PRECISIONS[precision or ("fp32" if device.type == "cpu" else "fp16")]
    with torch.device("meta"):
        model = Whisper(metadata.model_args)
        if metadata.quantization:
            swap_modules(model, metadata.quantization)
            model.make_cache = make_cache
    model.load_state_dict(state_dict, strict=True, assign=True)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    prepare_for_device(model)
    if cache_dtype is None and metadata.quantization and device.type == "cpu":
        cache_dtype = "int8"
    if cache_dtype is not None:
        model.make_cache, model.cache_dtype = make_cache, CACHE_DTYPES[cache_dtype]
    model.set_alignment_heads(metadata.alignment_heads)
    model.suppress_tokens = metadata.suppress_tokens
    model.chunk_s = CHUNK_S.get(metadata.name, WINDOW_S)
    return model, Tokenizer(path.parent / "tokenizer.model")


def _checkpoint_path(name_or_path: str | Path) -> Path:
    """The file of a model name, made on first use, or the path itself."""
    path = Path(name_or_path)
    if path.suffix == ".safetensors":
        return path
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


def batch_rows(n_chunks: int, batch_size: int, is_compiled: bool) -> int:
    """Rows to allocate for so many chunks.

    Compiled steps have a power of two or `batch_size`, so that few sizes are ever compiled.
    """
    return min(batch_size, 1 << (n_chunks - 1).bit_length() if is_compiled else n_chunks)


def _choose_language(
    model: Whisper, tokenizer: Tokenizer, windows: Iterator[Window], language: str
) -> tuple[str, Iterator[Window]]:
    """The language to use, and the windows, of which the first four are read to detect it."""
    if not tokenizer.is_multilingual:
        return "en", windows
    if language not in ("auto", "each"):
        return language, windows
    first = list(itertools.islice(windows, 4))
    totals = dict.fromkeys(tokenizer.language_ids, 0.0)
    for window in first:
        for code, prob in detect_language(model, tokenizer, window).items():
            totals[code] += prob
    return max(totals, key=totals.get), itertools.chain(first, windows)


@torch.no_grad()
def transcribe(
    model: Whisper,
    tokenizer: Tokenizer,
    audio: str | Path | Tensor,
    options: GenerateOptions | None = None,
    decode_step: DecodeStep = decode_one_token,
    show_progress: bool = False,
) -> Transcript:
    """Transcribe a file, or a mono 16 kHz waveform [n_samples], of any length.

    Raises: FileNotFoundError, IsADirectoryError, AudioError for a file that cannot be read.
    """
    options, stats = options or GenerateOptions(), Stats()
    with stats.timed("load audio", model.device):
        waveform = audio if isinstance(audio, Tensor) else load_audio(audio)
    stats.audio_s = len(waveform) / SAMPLE_RATE
    job = LongAudio(model, tokenizer, waveform, options, decode_step, stats)
    with tqdm(unit="s", disable=not show_progress, leave=False) as progress:
        words = job.run(progress)
    segments = split_segments(tighten(words, job.is_voiced), job.energy_db)
    text = "".join(word.text for word in words).strip()
    return Transcript(text, segments, job.language, job.warnings, stats)


class LongAudio:
    """One file on its way to words: decode all chunks, judge, decode again where it matters.

    First every voiced chunk; then halves of the chunks that looped or said next to nothing; then
    stretches of speech that no word covers. Each round is one batch through the same rows and the
    same compiled step; a row that fails is drawn again at the temperatures of FALLBACK.
    """

    def __init__(
        self, model: Whisper, tokenizer: Tokenizer, waveform: Tensor, options: GenerateOptions,
        decode_step: DecodeStep, stats: Stats,
    ):  # fmt: skip
        self.model, self.tokenizer, self.waveform = model, tokenizer, waveform
        self.options, self.decode_step, self.stats = options, decode_step, stats
        self.energy_db = frame_energy_db(waveform)
        self.is_voiced = voiced_frames(self.energy_db)
        self.language = "en" if options.language in ("auto", "each") else options.language
        self.masked: list[tuple[float, float]] = []  # s, judged to hold no speech
        self.warnings: list[str] = _ignored_options(tokenizer, options)
        self.n_extra_left = 0  # windows that may still be encoded beyond the first pass

    def run(self, progress: tqdm) -> list[Word]:
        plan = plan_chunks(self.waveform, self.energy_db, self.model.chunk_s)
        chunks = [chunk for chunk in plan if voiced_s(self.is_voiced, chunk) > 0]
        if not chunks:
            return []
        is_compiled = self.decode_step is not decode_one_token
        rows = batch_rows(len(chunks), self.options.batch_size, is_compiled)
        is_new = setup_decoding(self.model, self.tokenizer, rows, self.options.timestamps)
        if is_new and is_compiled:
            with self.stats.timed("compile", self.model.device):
                warm_up(self.model, self.decode_step, self.options.top_k)
        windows = encode_chunks(self.model, self.waveform, chunks, self.stats)
        self.language, windows = _choose_language(
            self.model, self.tokenizer, windows, self.options.language
        )
        progress.total = round(chunks[-1].end_s)
        self.n_extra_left = len(chunks) + 2  # no more than doubles the cost
        pieces = self._first_pass(self._decode(windows, lambda result: None, progress))
        words = stitch(pieces, self.energy_db)
        return self._recover(words) if self.options.fallback else words

    def _decode(
        self, windows: Iterator[Window], next_temperature: NextTemperature,
        progress: tqdm | None = None,
    ) -> list[WindowResult]:  # fmt: skip
        """The best result of each window, in order of their starts."""
        options = self.options.decode_options(self.language)
        slots = Slots(self.model, self.tokenizer, options, self.stats, next_temperature)
        results = []
        for attempts in decode_windows(slots, windows, self.decode_step):
            results.append(max(attempts, key=self._worth))
            if progress is not None:
                progress.update(max(0, round(results[-1].chunk.end_s) - progress.n))
        return sorted(results, key=lambda result: result.chunk.start)

    def _judge(self, result: WindowResult) -> Verdict:
        return judge(
            result.text, result.avg_logprob, result.no_speech_prob, result.is_complete,
            voiced_s(self.is_voiced, result.chunk),
        )  # fmt: skip

    def _worth(self, result: WindowResult) -> tuple[bool, float]:
        """Order of attempts at one window: those to be believed first, then the likelier."""
        return self._judge(result) == "ok", result.avg_logprob

    def _fallback_temperature(self, result: WindowResult) -> float | None:
        """The next temperature for a row that repeats itself or cannot be believed."""
        if self._judge(result) not in ("loop", "drop"):
            return None
        return next((t for t in FALLBACK if t > result.temperature), None)

    def _first_pass(self, results: list[WindowResult]) -> list[Piece]:
        """Pieces of the chunks that can be believed, and of the halves of those that cannot."""
        pieces, failed = [], []
        for result in results:
            verdict = self._judge(result)
            if verdict == "drop":
                self.masked.append((result.chunk.start_s, result.chunk.end_s))
            elif verdict == "ok" or not self.options.fallback:
                pieces.append(_piece(result))
            else:
                failed += halves(result.chunk, self.energy_db)
        for result in self._decode_again(failed):
            verdict = self._judge(result)
            if is_sure(result.text, result.avg_logprob, verdict):
                pieces.append(_piece(result))
            elif verdict != "thin":
                self.masked.append((result.chunk.start_s, result.chunk.end_s))
                if verdict == "loop":
                    self._warn("text that repeated itself was left out", result.chunk)
        return pieces

    def _decode_again(self, chunks: list[Chunk]) -> list[WindowResult]:
        """Decode more windows, as long as they are no more than the first pass had."""
        chunks = chunks[: self.n_extra_left]
        self.n_extra_left -= len(chunks)
        self.stats.n_retries += len(chunks)
        windows = encode_chunks(self.model, self.waveform, chunks, self.stats)
        return self._decode(windows, self._fallback_temperature)

    def _recover(self, words: list[Word]) -> list[Word]:
        """Decode stretches of speech that no word covers, in up to three rounds."""
        tried: list[tuple[float, float]] = []
        for _ in range(3):
            gaps: dict[Chunk, tuple[float, float]] = {}
            for gap in uncovered(words, self.is_voiced, self.masked):
                context_s = self._context_s(gap, tried)
                if context_s is not None:
                    tried.append(gap)
                    windows = gap_windows(gap, context_s, self.energy_db, len(self.waveform))
                    gaps |= dict.fromkeys(windows, gap)
            for result in self._decode_again(list(gaps)):
                if is_sure(result.text, result.avg_logprob, self._judge(result)):
                    gap, piece = gaps[result.chunk], _piece(result)
                    words = insert(words, gap, piece, self.energy_db)
            if not gaps:
                break
        return words

    @staticmethod
    def _context_s(
        gap: tuple[float, float], tried: list[tuple[float, float]]
    ) -> tuple[float, float] | None:
        """Seconds of context before and after to decode a gap with; None if it has had its tries.

        A little at first, since the speech before may be what made the decoder stop; then more,
        since a long gap may need it to be understood.
        """
        n_tried = sum(all(abs(a - b) < 0.4 for a, b in zip(gap, t, strict=True)) for t in tried)
        if n_tried == 1 and gap[1] - gap[0] < 1.5:
            return None
        return ((1.5, 1.5), (7.0, 5.0), None)[min(n_tried, 2)]

    def _warn(self, message: str, chunk: Chunk) -> None:
        self.warnings.append(f"{chunk.start_s:.1f}-{chunk.end_s:.1f} s: {message}")


def _ignored_options(tokenizer: Tokenizer, options: GenerateOptions) -> list[str]:
    """What an English-only model cannot do."""
    if tokenizer.is_multilingual:
        return []
    asked = {"language": options.language, "task": options.task}
    usual = {"language": ("auto", "each", "en"), "task": ("transcribe",)}
    return [
        f"the model knows only English; {name} {value} was ignored"
        for name, value in asked.items()
        if value not in usual[name]
    ]


def _piece(result: WindowResult) -> Piece:
    return Piece(result.chunk.start_s, result.chunk.end_s, tuple(result.words))


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
    """Bytes of the decoder's weights and of the cross-attention caches, which each step reads."""
    caches = [m for m in model.decoder.modules() if isinstance(m, KVCache)]
    cached = sum(buffer.nbytes for cache in caches for buffer in cache.buffers())
    tensors = itertools.chain(model.decoder.parameters(), model.decoder.buffers())
    weights = sum(tensor.nbytes for tensor in tensors) - cached
    cross = [cache for cache in caches if cache.k_cache.shape[2] == model.args.n_audio_ctx]
    return weights + sum(buffer.nbytes for cache in cross for buffer in cache.buffers())


def peak_memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in KB


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model's and the decoder's flags, shared by the scripts that transcribe."""
    default = GenerateOptions()
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--model", default="base", help=f"one of {', '.join(MODEL_SIZES)}, or a hub id")
    add("--checkpoint_path", type=Path, help="a converted model.safetensors, instead of --model")
    add("--compile", action="store_true", help="compile the decode step (first run: a minute)")
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
        return _transcribe_files(model, tokenizer, args.audio, options, args.compile)


def _transcribe_files(
    model: Whisper, tokenizer: Tokenizer, paths: list[Path], options: GenerateOptions, compile: bool
) -> int:
    """Print each file's text; a file that cannot be read is named and the rest are done."""
    n_failed = 0
    decode_step = compile_decode_step(model.device) if compile else decode_one_token
    for path in paths:
        start = time.perf_counter()
        try:
            result = transcribe(model, tokenizer, path, options, decode_step, show_progress=True)
        except (AudioError, OSError) as error:
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


if __name__ == "__main__":
    sys.exit(main())
