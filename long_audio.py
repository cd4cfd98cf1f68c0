"""One file, of any length, to text: plan chunks, decode, judge, decode again, stitch.

waveform [n_samples] -> Transcript. What a window says is `decode.py`'s work, whether to believe it
`quality.py`'s, how words of overlapping windows join `stitch.py`'s; this file drives them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from chunk_audio import SAMPLE_RATE, Chunk, Recording, frame_energy_db, open_audio, plan_chunks
from compile_step import compile_decode_step, warm_up
from decode import (
    DecodeOptions,
    DecodeStep,
    NextTemperature,
    Slots,
    Stats,
    Window,
    WindowResult,
    decode_one_token,
    decode_windows,
    encode_chunks,
    language_probs,
    setup_decoding,
)
from model import Whisper
from quality import Verdict, gap_windows, halves, is_sure, judge, voiced_frames, voiced_s
from stitch import Piece, Segment, Word, insert, split_segments, stitch, tighten, uncovered
from tokenizer import Tokenizer

# Temperatures of a row that failed; few, since windows are also cut anew and openai's six steps
# cost six decodings of what is mostly noise.
FALLBACK = (0.4, 0.8)

SURE_LANGUAGE = 0.5  # probability from which a detected language is not called a guess

# s of audio from which a CPU compiles by itself: 35 s once, of which each hour saves 8 to 15
COMPILE_FROM_S = 3600


@dataclass(frozen=True)
class GenerateOptions(DecodeOptions):
    """How to transcribe. Raises: ValueError for a value that is not allowed, naming it."""

    language: str = "auto"  # as before, or "auto": detect it in the first chunks
    batch_size: int = 8  # chunks decoded at once
    fallback: bool = True  # decode again what failed or is missing

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; allowed: 1 and above")


@dataclass(frozen=True)
class Transcript:
    """The text of one file, whole, in sentences with times, and how it came about."""

    text: str
    segments: list[Segment]
    language: str  # code
    warnings: list[str]  # where text was given up, with times
    stats: Stats


@torch.no_grad()
def transcribe(
    model: Whisper,
    tokenizer: Tokenizer,
    audio: str | Path | Tensor | np.ndarray,
    options: GenerateOptions | None = None,
    decode_step: DecodeStep | None = None,
    show_progress: bool = False,
) -> Transcript:
    """Transcribe a file, or a mono 16 kHz waveform [n_samples], of any length.

    `decode_step` is `decode_one_token` or what `compile_decode_step` makes of it; None takes the
    latter for an hour of audio and more on a CPU, where the compiled step stays on disk.
    Raises: FileNotFoundError, IsADirectoryError, AudioError for a file that cannot be read;
    ValueError for a waveform of another shape or of integers, or a language that the model does
    not know.
    """
    options, stats = options or GenerateOptions(), Stats()
    if options.language not in ("auto", "each"):
        tokenizer.sot_sequence(options.language, options.task, False)  # raises where it is unknown
    with stats.timed("load audio", model.device):
        if isinstance(audio, (str, Path)):
            waveform = open_audio(audio)
        else:
            waveform = _checked(audio)
    stats.audio_s = len(waveform) / SAMPLE_RATE
    if decode_step is None:
        is_long = model.device.type == "cpu" and stats.audio_s >= COMPILE_FROM_S
        decode_step = compile_decode_step(model.device) if is_long else decode_one_token
    job = LongAudio(model, tokenizer, waveform, options, decode_step, stats)
    with tqdm(unit="s", disable=not show_progress, leave=False) as progress:
        words = job.run(progress)
    stats.settle()
    segments = split_segments(tighten(words, job.is_voiced), job.energy_db)
    text = "".join(word.text for word in words).strip()
    return Transcript(text, segments, job.language, job.warnings, stats)


class LongAudio:
    """One file on its way to words: decode all chunks, judge, decode again where it matters.

    First every voiced chunk; then halves of the chunks that looped or said next to nothing; then
    stretches of speech that no word covers. Each round is one batch through the same rows and the
    same compiled step; a row of a later round that fails is drawn again at the temperatures of
    FALLBACK, from the cross-attention cache it has.
    """

    def __init__(
        self, model: Whisper, tokenizer: Tokenizer, waveform: Tensor | Recording,
        options: GenerateOptions, decode_step: DecodeStep, stats: Stats,
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
        if is_compiled and rows < self.model.n_rows <= self.options.batch_size:
            rows = self.model.n_rows  # compiled already
        setup_decoding(self.model, self.tokenizer, rows, self.options.timestamps)
        if is_compiled:
            with self.stats.timed("compile", self.model.device):
                warm_up(self.model, self.decode_step, self.options.top_k)
        windows = encode_chunks(self.model, self.waveform, chunks, self.stats)
        self.language, prob, windows = _choose_language(
            self.model, self.tokenizer, windows, self.options.language, self.stats
        )
        progress.total = round(chunks[-1].end_s)
        self.n_extra_left = len(chunks) + 2  # no more than doubles the cost
        pieces = self._first_pass(self._decode(windows, lambda result: None, progress))
        words = stitch(pieces, self.energy_db)
        if self.warnings and self.options.language == "auto" and prob < SURE_LANGUAGE:
            self.warnings.append(f"the language, {self.language}, is a guess; name the right one")
        if not self.options.fallback:
            return words
        if self.options.max_new_tokens is None:  # else what was cut on purpose would come back
            words = self._recover(words)
        self._name_gaps(words)
        return words

    def _decode(
        self, windows: Iterator[Window], next_temperature: NextTemperature,
        progress: tqdm | None = None,
    ) -> list[WindowResult]:  # fmt: skip
        """The best result of each window, in order of their starts."""
        options = self.options
        if options.language != "each":
            options = replace(options, language=self.language)
        slots = Slots(self.model, self.tokenizer, options, self.stats, next_temperature)
        results = []
        for attempts in decode_windows(slots, windows, self.decode_step):
            results.append(max(attempts, key=self._worth))
            if progress is not None:
                progress.update(max(0, round(results[-1].chunk.end_s) - progress.n))
        return sorted(results, key=lambda result: result.chunk.start)

    def _judge(self, result: WindowResult) -> Verdict:
        voiced = voiced_s(self.is_voiced, result.chunk)
        sure = (result.avg_logprob, result.no_speech_prob)
        return judge(result.text, len(result.words), *sure, result.is_complete, voiced)

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
        pieces, thin, failed = [], [], []
        for result in results:
            verdict = self._judge(result)
            if verdict == "drop":
                self._mask(result)
            elif verdict == "ok" or not self.options.fallback:
                pieces.append(_piece(result))
            else:
                failed += halves(result.chunk, self.energy_db)
                thin += [result] if verdict == "thin" and result.avg_logprob > -1.0 else []
        for result in self._decode_again(failed):
            verdict = self._judge(result)
            if is_sure(result.text, result.avg_logprob, verdict):
                pieces.append(_piece(result))
            elif verdict != "thin":
                self._mask(result)
        for result in thin:  # little, but what there is was sure
            if not any(_is_inside(piece, result.chunk) for piece in pieces):
                pieces.append(_piece(result))
        return pieces

    def _mask(self, result: WindowResult) -> None:
        """Give a window up; say so unless the decoder took it for silence."""
        self.masked.append((result.chunk.start_s, result.chunk.end_s))
        if self._judge(result) == "loop":
            self._warn("text that repeated itself was left out", result.chunk)
        elif result.no_speech_prob < 0.6:
            self._warn("text that could not be believed was left out", result.chunk)

    def _decode_again(self, chunks: list[Chunk]) -> list[WindowResult]:
        """Decode more windows, as long as they are no more than the first pass had."""
        chunks = chunks[: self.n_extra_left]
        self.n_extra_left -= len(chunks)
        self.stats.n_retries += len(chunks)
        windows = encode_chunks(self.model, self.waveform, chunks, self.stats)
        return self._decode(windows, self._fallback_temperature)

    def _recover(self, words: list[Word]) -> list[Word]:
        """Decode stretches of speech that no word covers, in rounds, each time in another way."""
        tried: list[tuple[float, float]] = []
        while True:
            gaps: dict[Chunk, tuple[float, float]] = {}
            for gap in uncovered(words, self.is_voiced, self.masked):
                n_tried = sum(abs(gap[0] - a) < 0.4 and abs(gap[1] - b) < 0.4 for a, b in tried)
                windows = gap_windows(gap, n_tried, self.energy_db, len(self.waveform))
                tried.append(gap)
                gaps |= dict.fromkeys(windows, gap)
            results = self._decode_again(list(gaps))
            if not results:
                break
            for result in results:
                if is_sure(result.text, result.avg_logprob, self._judge(result)):
                    (start_s, end_s), piece = gaps[result.chunk], _piece(result)
                    heard = (max(start_s, piece.start_s), min(end_s, piece.end_s))
                    words = insert(words, heard, piece, self.energy_db)
        return words

    def _name_gaps(self, words: list[Word]) -> None:
        """Warn of speech that is left without words."""
        for start_s, end_s in uncovered(words, self.is_voiced, self.masked):
            if end_s - start_s >= 2.0:
                self.warnings.append(f"{start_s:.1f}-{end_s:.1f} s: sound without text")

    def _warn(self, message: str, chunk: Chunk) -> None:
        self.warnings.append(f"{chunk.start_s:.1f}-{chunk.end_s:.1f} s: {message}")


def _checked(waveform: Tensor | np.ndarray) -> Tensor:
    """A waveform as float32, with zeros for what is not finite. Raises: ValueError."""
    if isinstance(waveform, np.ndarray):  # torch takes no reversed ones and no foreign byte order
        waveform = waveform.astype(waveform.dtype.newbyteorder("="), order="C")
    waveform = torch.as_tensor(waveform, device="cpu")
    if waveform.dim() != 1 or not waveform.is_floating_point():
        given = f"{list(waveform.shape)} of {waveform.dtype}"
        raise ValueError(f"the waveform is {given}; allowed: [n_samples] of floats from -1 to 1")
    return waveform.float().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)


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


def _is_inside(piece: Piece, chunk: Chunk) -> bool:
    return chunk.start_s <= piece.start_s and piece.end_s <= chunk.end_s


def _piece(result: WindowResult) -> Piece:
    return Piece(result.chunk.start_s, result.chunk.end_s, tuple(result.words))


def batch_rows(n_chunks: int, batch_size: int, is_compiled: bool) -> int:
    """Rows to allocate for so many chunks.

    Compiled steps have a power of two or `batch_size`, so that few sizes are ever compiled.
    """
    return min(batch_size, 1 << (n_chunks - 1).bit_length() if is_compiled else n_chunks)


def _choose_language(
    model: Whisper, tokenizer: Tokenizer, windows: Iterator[Window], language: str, stats: Stats
) -> tuple[str, float, Iterator[Window]]:
    """The language, its probability, and the windows, of which four are read to detect it."""
    if not tokenizer.is_multilingual:
        return "en", 1.0, windows
    if language not in ("auto", "each"):
        return language, 1.0, windows
    first = list(itertools.islice(windows, 4))
    totals = dict.fromkeys(tokenizer.language_ids, 0.0)
    with stats.timed("language", model.device):
        for window in first:
            model.decoder.start_window(window.audio_features, slice(0, 1))
            for code, prob in language_probs(model, tokenizer, 0).items():
                totals[code] += prob
    likeliest = max(totals, key=totals.get)
    return likeliest, totals[likeliest] / len(first), itertools.chain(first, windows)
