"""Audio file -> mono 16 kHz waveform -> overlapping chunks of up to 30 s -> log-mel.

`load_audio` reads any container to [n_samples] float32, `Recording` holds one of any length;
`plan_chunks` cuts it at pauses into chunks that overlap; `log_mel` makes the encoder's input
[B, n_mels, 3000]. No model: what the chunks say is other files' work.

Sources: log-mel scaling and padding as openai-whisper's `audio.py` (compared in the tests); mel
bands by Slaney's formula, as librosa's `filters.mel` (compared in the tests; computed here since
importing librosa costs every start 1.5 s); the cutting rules are from a measured study, see
`plan_chunks`.
"""

import functools
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soundfile
import soxr
import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 16_000  # samples a second, of all released models
N_FFT = 400  # samples in one spectrum, 25 ms
HOP_LENGTH = 160  # samples from one frame to the next, 10 ms
FRAME_RATE = SAMPLE_RATE // HOP_LENGTH  # frames a second
WINDOW_S = 30  # seconds of one encoder input
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE
SILENCE_DB = -90.0  # dBFS; 16-bit audio has nothing below

IN_MEMORY_S = 600  # s of a recording that stay in memory
_BLOCK = 1 << 18  # samples read at a time, so that a long file at a high rate stays small in memory


class AudioError(ValueError):
    """A file that holds no readable audio; the message names the file and the reason."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a waveform, in samples; `end` is not part of it."""

    start: int
    end: int

    @property
    def start_s(self) -> float:
        return self.start / SAMPLE_RATE

    @property
    def end_s(self) -> float:
        return self.end / SAMPLE_RATE


# ---- reading ---------------------------------------------------------------------------------


class Recording:
    """A mono waveform [n_samples], float32, 16 kHz, of any length; slices are tensors.

    In memory up to IN_MEMORY_S, in a temporary file beyond, so that hours need no more memory
    than minutes.
    """

    def __init__(self, blocks: Iterable[np.ndarray]):
        """Keep the samples of `blocks`, float32 [n] each."""
        self._n_samples = 0
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_S * SAMPLE_RATE * 4)
        for block in blocks:
            self._file.write(np.ascontiguousarray(block, dtype=np.float32).tobytes())
            self._n_samples += len(block)

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(len(self))
        if stop <= start:
            return torch.zeros(0)
        self._file.seek(4 * start)
        return torch.frombuffer(bytearray(self._file.read(4 * (stop - start))), dtype=torch.float32)


def load_audio(path: str | Path) -> Tensor:
    """Read a whole file as a waveform [n_samples]; see `open_audio`."""
    return open_audio(path)[:]


def open_audio(path: str | Path) -> Recording:
    """Read a file as a mono waveform [n_samples], float32, 16 kHz, finite.

    Channels are averaged. Wav, flac, ogg and mp3 go through soundfile, all else through PyAV
    (the first audio stream). A file that ends early gives what could be read.

    Raises: FileNotFoundError; IsADirectoryError; AudioError for a file without readable audio.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give an audio file")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise AudioError(f"{path} is no regular file; write what it gives into one first")
    if path.stat().st_size == 0:
        raise AudioError(f"{path} is empty (0 bytes)")
    try:
        return Recording(_resampled(*_read_soundfile(path)))
    # TypeError: named .raw; UnicodeError: a name that is no text, which PyAV's error names
    except (soundfile.LibsndfileError, EOFError, TypeError, UnicodeError):
        return Recording(_resampled(*_read_av(path)))


def _read_soundfile(path: Path) -> tuple[int, Iterator[np.ndarray]]:
    """Sample rate and mono blocks; raises LibsndfileError where libsndfile knows no way."""
    file = soundfile.SoundFile(path)
    return file.samplerate, _soundfile_blocks(file)


def _soundfile_blocks(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    n_read, n_frames = 0, file.frames
    with file:
        while True:
            block = file.read(_BLOCK, dtype="float32", always_2d=True)  # [n, channels]
            if not len(block):
                break
            n_read += len(block)
            yield _mono(block)
    # A damaged frame ends libsndfile's reading, a header may say 0: FFmpeg reads on.
    if n_read < max(1, n_frames):
        raise EOFError


def _mono(block: np.ndarray) -> np.ndarray:
    """Average of the channels of [n, channels], or the first where they cancel each other out.

    Comes before resampling, which would spread a NaN.
    """
    block = np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0)
    mix = block.mean(axis=1)
    cancels = np.square(mix).sum() < 0.01 * np.square(block).mean(axis=1).sum()
    return block[:, 0] if cancels else mix


def _read_av(path: Path) -> tuple[int, Iterator[np.ndarray]]:
    """Sample rate and mono blocks of the first audio stream.

    Raises: AudioError with one line of reason.
    """
    try:
        container = av.open(f"file:{path}", metadata_errors="replace")
    except (av.error.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AudioError(f"{path} is no audio file that can be read ({reason})") from None
    if not container.streams.audio:
        container.close()
        raise AudioError(f"{path} has no audio stream")
    stream = container.streams.audio[0]
    if stream.codec_context is None or not stream.rate:
        container.close()
        raise AudioError(f"{path} has audio in an unknown codec")
    return stream.rate, _av_blocks(container, stream)


def _av_blocks(container, stream) -> Iterator[np.ndarray]:
    resamplers: dict[tuple, av.AudioResampler] = {}  # a stream may change its channels or its rate
    with container:
        for frame in _av_frames(container, stream):
            key = (frame.format.name, frame.layout.name, frame.sample_rate)
            if key not in resamplers:
                # "flt" has one plane; PyAV crashes reading a frame of 8 planes.
                resamplers[key] = av.AudioResampler("flt", rate=stream.rate)
            for packed in resamplers[key].resample(frame):
                yield _mono(packed.to_ndarray().reshape(-1, packed.layout.nb_channels))


def _av_frames(container, stream) -> Iterator[av.AudioFrame]:
    """All frames that can be decoded; a damaged packet is left out, a damaged container ends."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except (StopIteration, av.error.FFmpegError):
            return
        try:
            frames = packet.decode()
        except av.error.FFmpegError:
            continue  # a damaged packet is left out, the rest of the file is read
        yield from frames


def _resampled(rate: int, blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The blocks at SAMPLE_RATE, through soxr's high-quality streaming resampler."""
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    stream = soxr.ResampleStream(rate, SAMPLE_RATE, num_channels=1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(np.ascontiguousarray(block, dtype=np.float32))
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


# ---- log-mel ---------------------------------------------------------------------------------


def pad_or_trim(waveform: Tensor, n_samples: int = WINDOW_SAMPLES) -> Tensor:
    """Exactly `n_samples` of the last dimension: cut, or filled up with zeros."""
    return F.pad(waveform[..., :n_samples], (0, max(0, n_samples - waveform.shape[-1])))


def log_mel(waveforms: Tensor, n_mels: int) -> Tensor:
    """Log-mel spectrograms [B, n_mels, n_frames] of waveforms [B, n_samples], float32.

    One frame each HOP_LENGTH samples (3000 of a 30 s window). Values are log10 of mel power, cut
    at 8 below each row's own maximum, then shifted and scaled to about [-1, 1] as in training.
    """
    fft_window = torch.hann_window(N_FFT, device=waveforms.device)
    stft = torch.stft(waveforms, N_FFT, HOP_LENGTH, window=fft_window, return_complex=True)
    power = stft[..., :-1].abs() ** 2  # [B, N_FFT // 2 + 1, n_frames]
    mel = mel_filters(n_mels).to(waveforms.device) @ power  # [B, n_mels, n_frames]
    log_power = mel.clamp(min=1e-10).log10()
    floor = log_power.amax(dim=(1, 2), keepdim=True) - 8.0
    return (torch.maximum(log_power, floor) + 4.0) / 4.0


@functools.cache
def mel_filters(n_mels: int) -> Tensor:
    """Triangular mel bands [n_mels, N_FFT // 2 + 1] up to 8 kHz, each of unit area.

    Source: Slaney, Auditory Toolbox, 1998: linear below 1 kHz (3 mel per 200 Hz), logarithmic
    above (27 mel per factor 6.4).
    """

    def to_hz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * math.log(6.4) / 27))

    top = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000) / math.log(6.4)
    edges = to_hz(np.linspace(0, top, n_mels + 2))  # Hz
    frequency = np.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    slope = edges[:, None] - frequency[None, :]  # [n_mels + 2, N_FFT // 2 + 1]
    width = np.diff(edges)[:, None]
    bands = np.maximum(0, np.minimum(-slope[:-2] / width[:-1], slope[2:] / width[1:]))
    bands *= (2 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(bands.astype(np.float32))


# ---- chunks ----------------------------------------------------------------------------------


def frame_energy_db(waveform: Tensor | Recording) -> np.ndarray:
    """Level of each 10 ms frame in dBFS over 25 ms of samples, [n_frames] float32."""
    n_frames = -(-len(waveform) // HOP_LENGTH)
    levels = [np.zeros(0, np.float32)]
    for first in range(0, n_frames, _BLOCK // HOP_LENGTH):  # in blocks: hours stay small in memory
        n = min(_BLOCK // HOP_LENGTH, n_frames - first)
        block = waveform[first * HOP_LENGTH : (first + n) * HOP_LENGTH + N_FFT].double().numpy()
        total = np.concatenate(([0.0], np.cumsum(block * block)))
        start = np.arange(n) * HOP_LENGTH
        end = np.minimum(start + N_FFT, len(block))
        power = (total[end] - total[start]) / np.maximum(end - start, 1)
        levels.append(10 * np.log10(np.maximum(power, 10 ** (SILENCE_DB / 10))))
    return np.concatenate(levels).astype(np.float32)


def best_pause(energy_db: np.ndarray, low: int, high: int) -> int:
    """The frame in [low, high] where a cut hurts least.

    Pauses of 0.6, 0.4, 0.25 and 0.12 s are compared by mean level, a longer one being worth 12,
    8 or 4 dB more than the shortest; a later place is worth up to 2 dB.
    """
    low, high = max(0, low), min(high, len(energy_db))
    if high - low < 2:
        return max(low, high)
    total = np.concatenate(([0.0], np.cumsum(energy_db[low:high], dtype=np.float64)))
    best_score, best_frame = math.inf, high
    for width, bonus_db in ((60, 12.0), (40, 8.0), (25, 4.0), (12, 0.0)):
        if high - low < width:
            continue
        mean = (total[width:] - total[:-width]) / width
        centre = np.arange(len(mean)) + width // 2
        score = mean - bonus_db - 2.0 * centre / (high - low)
        if score.min() < best_score:
            best_score, best_frame = score.min(), low + int(centre[score.argmin()])
    return best_frame


def plan_chunks(
    waveform: Tensor | Recording, energy_db: np.ndarray, max_s: float = WINDOW_S
) -> list[Chunk]:
    """Overlapping chunks of at most `max_s` seconds that cover the whole waveform.

    Each chunk ends in the best pause of its last 5 s, and the next starts in the best pause of
    the 2 s before that end (at least 0.3 s before it). The last one takes all that is left, so
    no chunk is made of overlap alone. Source: measured, see NOTES.md.

    Raises: ValueError for `max_s` outside 10..30.
    """
    if not 10 <= max_s <= WINDOW_S:
        raise ValueError(f"max_s is {max_s}; allowed: 10 to {WINDOW_S} s")
    n_samples, max_frames = len(waveform), round(max_s * FRAME_RATE)
    chunks, start = [], 0
    while n_samples - start * HOP_LENGTH > max_s * SAMPLE_RATE:
        end = best_pause(energy_db, start + max_frames - 500, start + max_frames - 5)
        chunks.append(Chunk(start * HOP_LENGTH, end * HOP_LENGTH))
        start = best_pause(energy_db, end - 200, end - 30)
    if n_samples:
        chunks.append(Chunk(start * HOP_LENGTH, n_samples))
    return chunks
