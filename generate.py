"""Audio files -> text: load a model, decode chunks in a batch over static caches, command line.

Every chunk gets a row of the batch ("slot"): its window goes through the encoder once, its
cross-attention keys and values are stored once, its prompt is read in one pass, and then
`decode_one_token`, eager or compiled, makes one token for all rows a call. A row that ends takes
the next chunk at once, so no row waits for the slowest.

Leaves reading and cutting audio to `chunk_audio.py`, joining the chunks' texts to `stitch.py`.

    python generate.py --audio samples/short.wav --compile
"""

import argparse
import dataclasses
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from chunk_audio import (
    SAMPLE_RATE,
    AudioError,
    Chunk,
    load_audio,
    log_mel,
    pad_or_trim,
    plan_chunks,
)
from convert_hf_checkpoint import convert, load_checkpoint
from model import MODEL_SIZES, Whisper
from tokenizer import Tokenizer, language_code

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class GenerateOptions:
    """How to transcribe. Raises: ValueError for a value that is not allowed, naming it."""

    language: str = "auto"  # code or English name, or "auto": detect in the first chunks
    task: str = "transcribe"  # or "translate": any language to English
    temperature: float = 0.0  # 0 takes the likeliest token; above, tokens are drawn
    top_k: int | None = None  # draw among the k likeliest tokens only
    seed: int = 0  # of the draws; a chunk's draws do not depend on its batch
    batch_size: int = 8  # chunks decoded at once
    max_new_tokens: int | None = None  # of one chunk; None: as many as fit

    def __post_init__(self):
        if self.language != "auto":
            object.__setattr__(self, "language", language_code(self.language))
        if self.task not in ("transcribe", "translate"):
            raise ValueError(f"task is {self.task!r}; allowed: transcribe, translate")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 and above")
        for name in ("top_k", "batch_size", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 and above")


@dataclass
class Stats:
    """Where the time went, in seconds, and how much was done."""

    seconds: dict[str, float] = field(default_factory=dict)
    audio_s: float = 0.0
    n_windows: int = 0
    n_tokens: int = 0  # sampled, of all rows, end of text included
    n_steps: int = 0  # calls of decode_one_token

    @contextmanager
    def timed(self, stage: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class ChunkResult:
    """What the decoder said about one chunk."""

    chunk: Chunk
    tokens: list[int]  # sampled ids without end of text
    text: str
    avg_logprob: float  # mean log-probability of the sampled tokens, end of text included
    no_speech_prob: float  # probability of the no-speech token at the start
    temperature: float
    language: str


@dataclass(frozen=True)
class Transcript:
    text: str
    language: str
    chunks: list[ChunkResult]
    stats: Stats


# ---- one step --------------------------------------------------------------------------------


class DecodeState(nn.Module):
    """All that `decode_one_token` carries from step to step, as buffers of fixed shape.

    Buffers, since CUDA graphs and the compiler treat them as static memory that may be written.
    """

    def __init__(self, n_rows: int, n_text_ctx: int, tokenizer: Tokenizer, suppress: Iterable[int]):
        super().__init__()
        self.eot = tokenizer.eot

        def buffer(name: str, value: Tensor) -> None:
            self.register_buffer(name, value, persistent=False)

        buffer("tokens", torch.zeros(n_rows, n_text_ctx, dtype=torch.long))  # prompt, then sampled
        buffer("input_pos", torch.zeros(n_rows, dtype=torch.long))  # of the token to read next
        buffer("sample_begin", torch.ones(n_rows, dtype=torch.long))  # index of the first sample
        buffer("sample_end", torch.ones(n_rows, dtype=torch.long))  # index that must not be used
        buffer("finished", torch.ones(n_rows, dtype=torch.bool))
        buffer("sum_logprobs", torch.zeros(n_rows))
        buffer("inv_temperature", torch.ones(n_rows))
        buffer("gumbel", torch.zeros(n_rows, tokenizer.n_vocab))  # noise of rows that are drawn
        mask = torch.zeros(2, tokenizer.n_vocab)  # added to the logits: always; at the first token
        mask[:, list(suppress)] = -torch.inf
        mask[1, [*tokenizer.encode(" "), tokenizer.eot]] = -torch.inf
        buffer("suppress_mask", mask)

    def start_row(self, row: int, prompt: Tensor, sample_end: int, temperature: float) -> None:
        """Make `row` ready to sample after `prompt` [S]; its temperature 0 means the likeliest."""
        self.tokens[row] = self.eot
        self.tokens[row, : len(prompt)] = prompt
        self.input_pos[row] = len(prompt) - 1
        self.sample_begin[row] = len(prompt)
        self.sample_end[row] = sample_end
        self.finished[row] = False
        self.sum_logprobs[row] = 0.0
        self.inv_temperature[row] = 1.0 / temperature if temperature > 0 else 1.0
        self.gumbel[row] = 0.0


def decode_one_token(model: Whisper, state: DecodeState, top_k: int | None = None) -> None:
    """Read one token of every row, choose the next, and write it into `state`.

    A row is drawn by adding Gumbel noise to its logits and taking the largest: the same
    distribution as softmax sampling, without a host sync and without a random generator inside
    the graph (`refill_noise` writes the noise; it is zero for greedy rows).
    """
    pos = state.input_pos[:, None]  # [B, 1]
    hidden = model.decoder(state.tokens.gather(1, pos), pos)  # [B, 1, dim]
    logits = model.decoder.logits(hidden)[:, 0]  # [B, n_vocab]
    is_first = (state.input_pos + 1 == state.sample_begin).long()  # [B]
    logits = logits + state.suppress_mask[is_first]
    scores = logits * state.inv_temperature[:, None] + state.gumbel  # [B, n_vocab]
    if top_k is not None:
        kth = torch.topk(logits, top_k).values[:, -1:]  # [B, 1]
        scores = scores.masked_fill(logits < kth, -torch.inf)
    sampled = scores.argmax(dim=-1)  # [B]
    logprobs = logits.gather(1, sampled[:, None])[:, 0] - logits.logsumexp(dim=-1)  # [B]

    active = ~state.finished
    next_pos = torch.where(active, state.input_pos + 1, state.input_pos)  # [B]
    old = state.tokens.gather(1, next_pos[:, None])[:, 0]  # [B]
    state.tokens.scatter_(1, next_pos[:, None], torch.where(active, sampled, old)[:, None])
    state.sum_logprobs.add_(torch.where(active, logprobs, 0.0))
    state.finished.logical_or_((sampled == state.eot) | (next_pos + 1 >= state.sample_end))
    state.input_pos.copy_(next_pos)


DecodeStep = Callable[[Whisper, DecodeState, int | None], None]


def compile_decode_step(device: torch.device) -> DecodeStep:
    """`decode_one_token` compiled: one graph for all steps, files and prompts of a batch size."""
    mode = "reduce-overhead" if device.type == "cuda" else None  # CUDA graphs
    return torch.compile(decode_one_token, mode=mode, fullgraph=True, dynamic=False)


def refill_noise(state: DecodeState, generators: dict[int, torch.Generator]) -> None:
    """Fresh Gumbel noise, -log(Exponential(1)), for each row that is drawn.

    A generator per row, so that a chunk's draws do not depend on which chunks share its batch.
    """
    for row, generator in generators.items():
        state.gumbel[row].exponential_(generator=generator).log_().neg_()


# ---- windows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A chunk with its encoder output, ready for a row of the batch."""

    index: int
    chunk: Chunk
    audio_features: Tensor  # [1, n_audio_ctx, dim]


def encode_windows(
    model: Whisper, waveform: Tensor, chunks: list[Chunk], stats: Stats
) -> Iterator[Window]:
    """Run the encoder over each chunk once, padded to 30 s, in order, when asked for it."""
    for index, chunk in enumerate(chunks):
        with stats.timed("mel", model.device):
            samples = pad_or_trim(waveform[chunk.start : chunk.end].to(model.device))
            mel = log_mel(samples[None], model.args.n_mels).to(model.dtype)  # [1, n_mels, 3000]
        with stats.timed("encoder", model.device):
            audio_features = model.encoder(mel)  # [1, n_audio_ctx, dim]
        stats.n_windows += 1
        yield Window(index, chunk, audio_features)


def detect_language(model: Whisper, tokenizer: Tokenizer, window: Window) -> dict[str, float]:
    """Probability of each language in one window, by the token after start-of-transcript.

    Uses row 0 of the caches, which must be free.
    """
    ids = list(tokenizer.language_ids.values())
    logits = _read_prompt(model, window, slice(0, 1), [tokenizer.sot])[0, 0]  # [n_vocab]
    probs = logits[ids].softmax(dim=-1)
    return dict(zip(tokenizer.language_ids, probs.tolist(), strict=True))


def _read_prompt(model: Whisper, window: Window, rows: slice, prompt: list[int]) -> Tensor:
    """Give one row a window and its prompt -> logits [1, S, n_vocab] after each prompt token."""
    model.decoder.start_window(window.audio_features, rows)
    tokens = torch.tensor([prompt], device=model.device)  # [1, S]
    input_pos = torch.arange(len(prompt), device=model.device)[None]  # [1, S]
    return model.decoder.logits(model.decoder(tokens, input_pos, rows))


class Slots:
    """The rows of the batch and the chunks they are at work on."""

    def __init__(
        self, model: Whisper, tokenizer: Tokenizer, options: GenerateOptions, language: str,
        stats: Stats,
    ):  # fmt: skip
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.language, self.stats = language, stats
        self.state = model.decode_state
        self.windows: list[Window | None] = [None] * model.n_rows
        self.no_speech_prob = [0.0] * model.n_rows
        self.generators: dict[int, torch.Generator] = {}

    def start(self, row: int, window: Window) -> None:
        """Put a window into a free row and read its prompt."""
        options, tokenizer = self.options, self.tokenizer
        prompt = tokenizer.sot_sequence(self.language, options.task, timestamps=False)
        n_ctx = self.model.args.n_text_ctx
        sample_end = min(n_ctx, len(prompt) + (options.max_new_tokens or n_ctx))
        with self.stats.timed("prefill", self.model.device):
            logits = _read_prompt(self.model, window, slice(row, row + 1), list(prompt))
            probs = logits[0, prompt.index(tokenizer.sot)].softmax(dim=-1)
            self.no_speech_prob[row] = probs[tokenizer.no_speech].item()
            tokens = torch.tensor(prompt, device=self.model.device)
            self.state.start_row(row, tokens, sample_end, options.temperature)
        if options.temperature > 0:
            generator = torch.Generator(self.model.device)
            self.generators[row] = generator.manual_seed(options.seed * 1_000_003 + window.index)
        self.windows[row] = window

    def free_rows(self) -> list[int]:
        return [row for row, window in enumerate(self.windows) if window is None]

    def take_finished(self) -> Iterator[tuple[int, ChunkResult]]:
        """Results of rows that have ended, which become free. The one host sync of the loop."""
        finished = self.state.finished.tolist()
        for row, window in enumerate(self.windows):
            if window is not None and finished[row]:
                yield window.index, self._result(row, window)
                self.windows[row] = None
                self.generators.pop(row, None)

    def _result(self, row: int, window: Window) -> ChunkResult:
        state, tokenizer = self.state, self.tokenizer
        begin, last = int(state.sample_begin[row]), int(state.input_pos[row])
        tokens = state.tokens[row, begin : last + 1].tolist()
        self.stats.n_tokens += len(tokens)
        avg_logprob = float(state.sum_logprobs[row]) / len(tokens)
        if tokens[-1] == tokenizer.eot:
            tokens.pop()
        return ChunkResult(
            chunk=window.chunk,
            tokens=tokens,
            text=tokenizer.decode(tokens).strip(),
            avg_logprob=avg_logprob,
            no_speech_prob=self.no_speech_prob[row],
            temperature=self.options.temperature,
            language=self.language,
        )


def decode_windows(
    slots: Slots, windows: Iterator[Window], decode_step: DecodeStep
) -> Iterator[tuple[int, ChunkResult]]:
    """Decode windows, as many at once as there are rows; yield (index, result) as they end."""
    device = slots.model.device
    steps_per_check = 8 if device.type == "cuda" else 1  # each check waits for the device
    while True:
        for row in slots.free_rows():
            window = next(windows, None)
            if window is None:
                break
            slots.start(row, window)
        if not any(slots.windows):
            return
        with slots.stats.timed("decode", device):
            for _ in range(steps_per_check):
                refill_noise(slots.state, slots.generators)
                decode_step(slots.model, slots.state, slots.options.top_k)
        slots.stats.n_steps += steps_per_check
        yield from slots.take_finished()


# ---- the whole job ---------------------------------------------------------------------------


def load_model(
    name_or_path: str = "base", device: str | torch.device = "cpu", precision: str | None = None
) -> tuple[Whisper, Tokenizer]:
    """Load a checkpoint: a path to model.safetensors, or a model name, converted on first use.

    precision is fp32, fp16 or bf16; by default fp32 on a CPU and fp16 elsewhere.
    Raises: FileNotFoundError, ValueError for what is missing, unknown or broken.
    """
    device = torch.device(device)
    path = Path(name_or_path)
    if path.suffix != ".safetensors":
        path = CHECKPOINTS / name_or_path / "model.safetensors"
        if not path.exists():
            print(f"converting {name_or_path} into {path.parent}, once", file=sys.stderr)
            convert(name_or_path, path.parent, name=name_or_path)
    state_dict, metadata = load_checkpoint(path)
    dtype = PRECISIONS[precision or ("fp32" if device.type == "cpu" else "fp16")]
    with torch.device("meta"):
        model = Whisper(metadata.model_args)
    model.load_state_dict(state_dict, strict=True, assign=True)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    model.alignment_heads = metadata.alignment_heads
    model.suppress_tokens = metadata.suppress_tokens
    return model, Tokenizer(path.parent / "tokenizer.model")


def batch_rows(n_chunks: int, batch_size: int) -> int:
    """Rows to allocate for so many chunks: a power of two or `batch_size`, so that few batch
    sizes are ever compiled."""
    return min(batch_size, 1 << max(0, n_chunks - 1).bit_length())


def setup_decoding(model: Whisper, tokenizer: Tokenizer, n_rows: int) -> None:
    """Make caches and decoding state for `n_rows` windows, unless the model holds them already."""
    if model.n_rows != n_rows or model.decode_state is None:
        model.setup_caches(n_rows)
        suppress = model.suppress_tokens
        suppress = tokenizer.non_speech_tokens if suppress is None else suppress
        special = [token for token in tokenizer.special_ids if token != tokenizer.eot]
        state = DecodeState(n_rows, model.args.n_text_ctx, tokenizer, {*suppress, *special})
        model.decode_state = state.to(model.device)


def warm_up(model: Whisper, tokenizer: Tokenizer, n_rows: int, decode_step: DecodeStep,
            top_k: int | None) -> None:  # fmt: skip
    """Compile a step for `n_rows` rows by running it on idle ones, before anything is timed."""
    setup_decoding(model, tokenizer, n_rows)
    for _ in range(3):  # CUDA graphs are recorded in the second call and played from the third
        decode_step(model, model.decode_state, top_k)


def _choose_language(
    model: Whisper, tokenizer: Tokenizer, windows: Iterator[Window], language: str
) -> tuple[str, Iterator[Window]]:
    """The language to use, and the windows, of which the first four are read to detect it."""
    if not tokenizer.is_multilingual:
        return "en", windows
    if language != "auto":
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
        chunks = plan_chunks(waveform)
    stats.audio_s = len(waveform) / SAMPLE_RATE
    setup_decoding(model, tokenizer, batch_rows(len(chunks), options.batch_size))
    windows = encode_windows(model, waveform, chunks, stats)
    language, windows = _choose_language(model, tokenizer, windows, options.language)
    slots = Slots(model, tokenizer, options, language, stats)
    results: dict[int, ChunkResult] = {}
    with tqdm(total=len(chunks), unit="chunk", disable=not show_progress, leave=False) as progress:
        for index, result in decode_windows(slots, windows, decode_step):
            results[index] = result
            progress.update()
    ordered = [results[index] for index in range(len(chunks))]
    text = " ".join(result.text for result in ordered if result.text)
    return Transcript(text, language, ordered, stats)


# ---- command line ----------------------------------------------------------------------------


def report(stats: Stats, model: Whisper, total_s: float) -> str:
    """A few lines on where the time went; tok/s and GB/s are of the decode steps alone."""
    stages = " | ".join(f"{stage} {seconds:.2f}" for stage, seconds in stats.seconds.items())
    decode_s = max(stats.seconds.get("decode", 0.0), 1e-9)
    weights = sum(p.nbytes for p in model.decoder.parameters())
    caches = sum(b.nbytes for layer in model.decoder.layers for b in layer.buffers())
    gb_s = stats.n_steps * (weights + caches) / decode_s / 1e9
    return (
        f"seconds: {stages}\n"
        f"{stats.n_windows} windows, {stats.n_tokens} tokens, {stats.n_steps} steps of "
        f"{model.n_rows} rows: {stats.n_tokens / decode_s:.1f} tok/s, {gb_s:.1f} GB/s\n"
        f"{stats.audio_s:.1f} s of audio in {total_s:.2f} s: "
        f"{stats.audio_s / max(total_s, 1e-9):.1f} x real time, "
        f"peak memory {_peak_memory_gb(model.device):.2f} GB"
    )


def _peak_memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in KB


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    default = GenerateOptions()
    parser = argparse.ArgumentParser(description="Transcribe audio files with Whisper.")
    add = parser.add_argument
    add("--audio", nargs="+", required=True, type=Path, help="audio or video files")
    add("--model", default="base", help=f"one of {', '.join(MODEL_SIZES)}, or a hub id")
    add("--checkpoint_path", type=Path, help="a converted model.safetensors, instead of --model")
    add("--compile", action="store_true", help="compile the decode step (first run: a minute)")
    add("--device", default=default_device(), help="cpu, cuda, cuda:1, mps")
    add("--precision", choices=PRECISIONS, help="default: fp32 on a CPU, fp16 elsewhere")
    add("--language", default=default.language, help="code or name; auto detects (default)")
    add("--task", default=default.task, choices=("transcribe", "translate"))
    add("--temperature", type=float, default=default.temperature, help="0: likeliest token")
    add("--top_k", type=int, default=default.top_k, help="draw among the k likeliest tokens")
    add("--seed", type=int, default=default.seed, help="of the draws")
    add("--batch_size", type=int, default=default.batch_size, help="chunks decoded at once")
    add("--max_new_tokens", type=int, default=default.max_new_tokens, help="of one chunk")
    add("--profile", type=Path, help="write a Chrome trace of the run to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    names = {name.name for name in dataclasses.fields(GenerateOptions)}
    try:
        options = GenerateOptions(**{k: v for k, v in vars(args).items() if k in names})
        start = time.perf_counter()
        model, tokenizer = load_model(
            args.checkpoint_path or args.model, args.device, args.precision
        )
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
