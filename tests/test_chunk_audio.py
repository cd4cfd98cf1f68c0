"""Hold chunk_audio.py to its references: openai's log-mel, librosa's mel bands and resampling.

Reading is tried on files written here (soundfile, PyAV) from the bundled sample, and, where it
lies beside the checkout, on the shared corpus of difficult files.
"""

import json
import math
import os
import struct
from pathlib import Path

import av
import librosa
import numpy as np
import pytest
import soundfile
import torch
import whisper.audio as reference
from torch import Tensor

import chunk_audio
from chunk_audio import (
    FRAME_RATE,
    HOP_LENGTH,
    N_FFT,
    SAMPLE_RATE,
    WINDOW_S,
    WINDOW_SAMPLES,
    AudioError,
    Chunk,
    Recording,
    best_pause,
    frame_energy_db,
    load_audio,
    log_mel,
    mel_filters,
    pad_or_trim,
    plan_chunks,
)

ROOT = Path(__file__).resolve().parents[1]
SHORT = ROOT / "samples" / "short.wav"
CORPUS = ROOT.parent / "shared" / "corpus"


# ---- log-mel -----------------------------------------------------------------------------------


def make_signal(name: str, n_samples: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    if name == "noise":
        return torch.randn(n_samples, generator=rng) * 0.1
    if name == "quiet noise":
        return torch.randn(n_samples, generator=rng) * 1e-4
    if name == "tone":
        return 0.5 * torch.sin(torch.arange(n_samples) * (2 * math.pi * 1000 / SAMPLE_RATE))
    if name == "impulse":
        return torch.nn.functional.one_hot(torch.tensor(n_samples // 2), n_samples).float()
    if name == "silence":
        return torch.zeros(n_samples)
    if name == "clipped":
        return (torch.randn(n_samples, generator=rng) * 3).clamp(-1, 1)
    return pad_or_trim(torch.from_numpy(soundfile.read(SHORT, dtype="float32")[0]), n_samples)


SIGNALS = ["noise", "quiet noise", "tone", "impulse", "silence", "clipped", "speech"]


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("name", SIGNALS)
def test_log_mel_equals_openai(name, n_mels):
    for n_samples in (WINDOW_SAMPLES, 16_123):  # a whole window; no multiple of the hop
        waveform = make_signal(name, n_samples)
        expected = reference.log_mel_spectrogram(waveform, n_mels)
        got = log_mel(waveform[None], n_mels)
        assert got.shape == (1, n_mels, n_samples // HOP_LENGTH) and got.dtype == torch.float32
        # Both are fp32 with the sums in the same order up to the filters' last bit.
        torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-5)


def test_log_mel_of_a_batch_equals_its_rows_alone():
    """The floor of 8 below the maximum is each row's own, so loud rows leave quiet ones alone."""
    waveforms = torch.stack([make_signal(name, 80_000) for name in SIGNALS])
    batch = log_mel(waveforms, 80)
    for row, waveform in enumerate(waveforms):
        torch.testing.assert_close(batch[row], log_mel(waveform[None], 80)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_mel_filters_equal_librosa(n_mels):
    expected = librosa.filters.mel(sr=SAMPLE_RATE, n_fft=N_FFT, n_mels=n_mels)
    got = mel_filters(n_mels)
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert np.abs(got.numpy() - expected).max() <= 1e-7  # fp64 rounded once


def test_pad_or_trim():
    waveform = torch.arange(1, 11, dtype=torch.float32)
    assert pad_or_trim(waveform, 4).tolist() == [1, 2, 3, 4]
    assert pad_or_trim(waveform, 12).tolist() == [*range(1, 11), 0, 0]
    assert pad_or_trim(waveform, 10).tolist() == waveform.tolist()
    assert pad_or_trim(torch.ones(0), 3).tolist() == [0, 0, 0]
    assert pad_or_trim(torch.ones(2, 5), 7).sum(dim=1).tolist() == [5, 5]
    assert len(pad_or_trim(waveform)) == WINDOW_SAMPLES == 480_000


# ---- chunks ------------------------------------------------------------------------------------


def speech_like(n_samples: int, seed: int) -> Tensor:
    """Bursts of noise of 0.3-4 s with pauses of 0.05-0.8 s, over a quiet floor."""
    rng = np.random.default_rng(seed)
    samples = rng.normal(0, 1e-4, n_samples)
    pos = 0
    while pos < n_samples:
        burst = samples[pos : pos + int(rng.uniform(0.3, 4) * SAMPLE_RATE)]
        burst += rng.normal(0, 0.1, len(burst))
        pos += len(burst) + int(rng.uniform(0.05, 0.8) * SAMPLE_RATE)
    return torch.from_numpy(samples.astype(np.float32))


def plan(waveform: Tensor, max_s: float = WINDOW_S) -> list[Chunk]:
    return plan_chunks(waveform, frame_energy_db(waveform), max_s)


def check_plan(waveform: Tensor, max_s: float = WINDOW_S) -> list[Chunk]:
    """The properties that every plan has; returns the plan."""
    chunks, n_samples = plan(waveform, max_s), len(waveform)
    if n_samples == 0:
        assert chunks == []
        return chunks
    assert chunks[0].start == 0 and chunks[-1].end == n_samples, chunks
    for chunk in chunks:
        assert 0 < chunk.end - chunk.start <= max_s * SAMPLE_RATE, chunk
        assert chunk.start_s == chunk.start / SAMPLE_RATE
        assert chunk.end_s == chunk.end / SAMPLE_RATE
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert before.start < after.start < before.end < after.end, (before, after)
    # A step advances by max_s less the 8 s in which it may end and the 3 s of overlap.
    assert len(chunks) <= 1 + math.ceil(n_samples / SAMPLE_RATE / (max_s - 11))
    return chunks


SWEEP = [*range(290, 311), *range(540, 561), *range(840, 901)]  # tenths of a second


@pytest.mark.parametrize("seed", range(3))
def test_plan_covers_all_lengths_near_the_window_borders(seed):
    """transformers issue 21568: a stride is wrong where audio ends in an overlap."""
    waveform = speech_like(90 * SAMPLE_RATE, seed)
    for tenths in SWEEP:
        chunks = check_plan(waveform[: tenths * SAMPLE_RATE // 10])
        assert (len(chunks) == 1) == (tenths <= 300)


@pytest.mark.parametrize(
    ("n_samples", "n_chunks"),
    [(0, 0), (1, 1), (479_840, 1), (480_000, 1), (480_001, 2), (1_385_995, None)],
)
@pytest.mark.parametrize("kind", ["speech", "silence", "loud"])
def test_plan_of_special_lengths(kind, n_samples, n_chunks):
    make = {"speech": lambda n: speech_like(n, 1), "silence": torch.zeros, "loud": torch.ones}[kind]
    chunks = check_plan(make(n_samples))
    assert n_chunks is None or len(chunks) == n_chunks


@pytest.mark.parametrize("max_s", [15, 25, 30])
@pytest.mark.parametrize("kind", ["silence", "noise", "tone", "speech"])
def test_plan_without_pauses_and_with_other_chunk_lengths(kind, max_s):
    n_samples = 100 * SAMPLE_RATE
    waveform = speech_like(n_samples, 2) if kind == "speech" else make_signal(kind, n_samples)
    assert len(check_plan(waveform, max_s)) >= 100 / max_s


def bursts_with_pauses(pauses_s: list[tuple[float, float]], n_s: float) -> Tensor:
    waveform = torch.randn(int(n_s * SAMPLE_RATE), generator=torch.Generator().manual_seed(3)) * 0.1
    for begin, end in pauses_s:
        waveform[int(begin * SAMPLE_RATE) : int(end * SAMPLE_RATE)] *= 1e-3
    return waveform


@pytest.mark.parametrize("width_s", [0.15, 0.3, 0.5, 0.8])
def test_cuts_fall_into_pauses(width_s):
    pauses = [(at, at + width_s) for at in np.arange(1.7, 99, 1.3)]
    chunks = check_plan(bursts_with_pauses(pauses, 100))
    cuts = [chunk.end_s for chunk in chunks[:-1]] + [chunk.start_s for chunk in chunks[1:]]
    assert len(cuts) >= 6
    for cut in cuts:
        assert any(begin <= cut <= end for begin, end in pauses), cut


@pytest.mark.parametrize("begin_s", [29.85, 29.9, 29.95, 30.0])
def test_a_pause_across_the_limit_is_no_reason_to_pass_it(begin_s):
    chunks = check_plan(bursts_with_pauses([(begin_s, begin_s + 0.2)], 60))
    assert chunks[0].end <= WINDOW_SAMPLES


def test_a_long_pause_beats_a_short_later_one():
    chunks = plan(bursts_with_pauses([(25.5, 26.2), (29.0, 29.15)], 40))
    assert 25.5 <= chunks[0].end_s <= 26.2


def test_of_equal_pauses_the_later_one_is_taken():
    """So that windows are well filled."""
    chunks = plan(bursts_with_pauses([(23.0, 23.4), (28.5, 28.9)], 40))
    assert 28.5 <= chunks[0].end_s <= 28.9


def test_best_pause_equals_a_naive_search():
    rng = np.random.default_rng(4)
    for _ in range(50):
        energy_db = rng.uniform(-80, -10, 400).astype(np.float32)
        low = int(rng.integers(0, 200))
        high = low + int(rng.integers(12, 200))
        scores = []
        for width, bonus_db in ((60, 12), (40, 8), (25, 4), (12, 0)):
            for begin in range(low, high - width + 1):
                frame = begin + width // 2
                mean = energy_db[begin : begin + width].astype(np.float64).mean()
                scores.append((mean - bonus_db - 2 * (frame - low) / (high - low), frame))
        assert best_pause(energy_db, low, high) == min(scores)[1]


@pytest.mark.parametrize("n_samples", [0, 1, 159, 160, 161, 399, 400, 401, 5000])
def test_frame_energy_equals_a_naive_loop(n_samples):
    for waveform in (speech_like(n_samples, 5), torch.zeros(n_samples), torch.ones(n_samples)):
        expected = []
        for start in range(0, n_samples, HOP_LENGTH):
            frame = waveform[start : start + N_FFT].double()
            expected.append(10 * math.log10(max(float((frame * frame).mean()), 1e-9)))
        got = frame_energy_db(waveform)
        assert got.dtype == np.float32 and len(got) == len(expected)
        np.testing.assert_allclose(got, expected, atol=1e-3)


def test_frame_energy_of_silence_after_hours_of_speech():
    """The running sum must be double. 100 s at full scale sum up to 3 hours at -20 dBFS."""
    loud = torch.ones(100 * SAMPLE_RATE)
    quiet = torch.full((FRAME_RATE * HOP_LENGTH,), 1e-4)
    got = frame_energy_db(torch.cat([loud, quiet]))
    np.testing.assert_allclose(got[-50:], -80, atol=0.1)  # fp64 keeps 1 % of each 1e-8 here


# ---- reading -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return soundfile.read(SHORT, dtype="float32")[0]


def resample(samples: np.ndarray, old_rate: int, new_rate: int) -> np.ndarray:
    return librosa.resample(samples, orig_sr=old_rate, target_sr=new_rate, res_type="soxr_hq")


def write_av(path: Path, codec: str, samples: np.ndarray, rate: int, layout: str = "mono") -> Path:
    """Encode 16 kHz `samples` with PyAV, at another rate and with all channels alike."""
    samples = resample(samples, SAMPLE_RATE, rate).astype(np.float32)
    n_channels = {"mono": 1, "stereo": 2}[layout]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(stream.format.name, layout, rate)
        n_per_frame = stream.frame_size or 1024
        for begin in range(0, len(samples), n_per_frame):
            block = np.tile(samples[begin : begin + n_per_frame], (n_channels, 1))
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, begin
            for converted in resampler.resample(frame):
                container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return path


def write_video(path: Path, with_audio: bool) -> Path:
    """A second of grey pictures, with a second of tone where wanted."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        audio = container.add_stream("aac", rate=48_000, layout="mono") if with_audio else None
        for _ in range(10):
            picture = np.full((64, 64, 3), 128, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode(None))
        for begin in range(0, 48_000 if audio else 0, 1000):
            tone = np.sin(np.arange(begin, begin + 1000) * 0.1)[None].astype(np.float32)
            frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48_000, begin
            container.mux(audio.encode(frame))
        if audio:
            container.mux(audio.encode(None))
    return path


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Largest correlation of two signals that may be shifted by up to 0.1 s."""
    n_fft = 1 << (len(a) + len(b)).bit_length()
    product = np.fft.irfft(np.fft.rfft(a, n_fft) * np.fft.rfft(b, n_fft).conj(), n_fft)
    shifts = np.concatenate([product[:1600], product[-1600:]])
    return float(shifts.max() / np.sqrt((a * a).sum() * (b * b).sum() + 1e-20))


def check_same_speech(got: Tensor, speech: np.ndarray, min_similarity: float = 0.97) -> None:
    assert got.dtype == torch.float32 and got.ndim == 1 and bool(got.isfinite().all())
    assert abs(len(got) - len(speech)) <= 0.1 * SAMPLE_RATE  # codecs pad the ends
    assert similarity(got.numpy(), speech) >= min_similarity


@pytest.mark.parametrize(
    ("extension", "subtype"),
    [("wav", "PCM_16"), ("wav", "PCM_24"), ("wav", "FLOAT"), ("wav", "DOUBLE"), ("flac", "PCM_24")],
)
def test_reads_lossless_files_exactly(tmp_path, speech, extension, subtype):
    path = tmp_path / f"a.{extension}"
    soundfile.write(path, speech, SAMPLE_RATE, subtype=subtype)
    got = load_audio(path)
    np.testing.assert_allclose(got.numpy(), speech, atol=1e-6)  # the sample is 16-bit
    assert torch.equal(load_audio(str(path)), got)


@pytest.mark.parametrize("extension", ["ogg", "mp3"])
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_reads_lossy_files_of_soundfile(tmp_path, speech, extension, rate):
    path = tmp_path / f"a.{extension}"
    soundfile.write(path, resample(speech, SAMPLE_RATE, rate), rate)
    check_same_speech(load_audio(path), speech)


@pytest.mark.parametrize("layout", ["mono", "stereo"])
@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("a.m4a", "aac", 44_100),
        ("a.mp4", "aac", 16_000),
        ("a.webm", "libopus", 48_000),
        ("a.mkv", "pcm_s16le", 48_000),
        ("a.wv", "wavpack", 16_000),
        ("a.aac", "aac", 32_000),
    ],
)
def test_reads_other_containers(tmp_path, speech, name, codec, rate, layout):
    got = load_audio(write_av(tmp_path / name, codec, speech, rate, layout))
    check_same_speech(got, speech)
    level = float(got.std() / speech.std())  # of all channels alike, the average is the original
    assert 0.95 <= level <= 1.05, level


def test_reads_the_audio_of_a_video(tmp_path):
    got = load_audio(write_video(tmp_path / "a.mp4", with_audio=True))
    assert abs(len(got) - SAMPLE_RATE) <= 0.1 * SAMPLE_RATE and got.std() > 0.5


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 96_000])
def test_resampling_equals_librosa(tmp_path, speech, rate):
    """1e-4: both are soxr HQ, ours in blocks, whose borders may round otherwise."""
    samples = resample(speech, SAMPLE_RATE, rate)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    got = load_audio(tmp_path / "a.wav").numpy()
    expected = resample(samples, rate, SAMPLE_RATE)
    assert abs(len(got) - len(expected)) <= 1
    n_samples = min(len(got), len(expected))
    np.testing.assert_allclose(got[:n_samples], expected[:n_samples], atol=1e-4)


def test_channels_are_averaged(tmp_path, speech):
    channels = np.stack([speech, 0.5 * speech[::-1], 0.25 * speech], axis=1)
    for n_channels in (2, 3):
        part = channels[:, :n_channels]
        soundfile.write(tmp_path / "a.wav", part, SAMPLE_RATE, subtype="FLOAT")
        np.testing.assert_allclose(load_audio(tmp_path / "a.wav"), part.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_samples_stay_bad_samples(tmp_path, speech, rate, bad):
    """A NaN that reaches the resampler makes 0.1-0.3 s of NaN, so it must be replaced before."""
    samples = resample(speech, SAMPLE_RATE, rate)
    places_s = (2.0, 5.5)
    damaged = np.stack([samples, samples], axis=1)
    for place_s in places_s:
        damaged[int(place_s * rate), 0] = bad
    soundfile.write(tmp_path / "good.wav", samples, rate, subtype="FLOAT")
    soundfile.write(tmp_path / "bad.wav", damaged, rate, subtype="FLOAT")
    good, got = load_audio(tmp_path / "good.wav"), load_audio(tmp_path / "bad.wav")
    assert bool(got.isfinite().all()) and got.abs().max() <= 2
    seconds = torch.arange(len(got)) / SAMPLE_RATE
    is_far = torch.stack([(seconds - place_s).abs() > 0.02 for place_s in places_s]).all(dim=0)
    assert (got - good).abs()[is_far].max() <= 0.01


NAMES = [
    'it\'s a "test" -x',
    "-dash",
    "--audio",
    "two  spaces ",
    "10:30 talk",
    "file:x",
    "100%d",
    "a;b&c|d$e`f",
    "漢字 ü",
]


@pytest.mark.parametrize("name", NAMES)
def test_reads_files_with_odd_names(tmp_path, monkeypatch, speech, name):
    """Relative, so that a leading dash, or a colon that looks like a protocol, is in front."""
    monkeypatch.chdir(tmp_path)
    soundfile.write(tmp_path / "plain.wav", speech, SAMPLE_RATE)
    (tmp_path / "plain.wav").rename(tmp_path / f"{name}.wav")
    write_av(tmp_path / "plain.m4a", "aac", speech, SAMPLE_RATE).rename(tmp_path / f"{name}.m4a")
    check_same_speech(load_audio(f"{name}.wav"), speech)
    check_same_speech(load_audio(f"{name}.m4a"), speech)


@pytest.mark.parametrize("wrong_name", ["a.mp3", "a.wav", "a.flac", "a.m4a", "a.txt", "a"])
def test_the_extension_does_not_matter(tmp_path, speech, wrong_name):
    for number, extension in enumerate(("wav", "mp3", "flac", "ogg", "m4a")):
        path = tmp_path / f"right.{extension}"
        if extension == "m4a":
            write_av(path, "aac", speech, SAMPLE_RATE)
        else:
            soundfile.write(path, speech, SAMPLE_RATE)
        folder = tmp_path / str(number)
        folder.mkdir()
        check_same_speech(load_audio(path.rename(folder / wrong_name)), speech)


@pytest.mark.parametrize("seed", range(4))
def test_reads_around_the_damaged_middle_of_an_mp3(tmp_path, speech, seed):
    path = tmp_path / "a.mp3"
    soundfile.write(path, speech, SAMPLE_RATE)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 1500] = np.random.default_rng(seed).bytes(1500)
    path.write_bytes(data)
    got = load_audio(path)
    assert 0.85 * len(speech) <= len(got) <= 1.05 * len(speech)
    n_third = len(speech) // 3
    assert similarity(got[:n_third].numpy(), speech[:n_third]) >= 0.97
    assert got[-n_third:].std() >= 0.5 * speech[-n_third:].std()  # the end is there too


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("a.wav", None),
        ("a.flac", None),
        ("a.ogg", None),
        ("a.mp3", None),
        ("a.webm", "libopus"),
        ("a.mkv", "pcm_s16le"),
        ("a.aac", "aac"),
        ("a.wv", "wavpack"),
    ],
)
def test_a_truncated_file_gives_its_first_half(tmp_path, speech, name, codec):
    path = tmp_path / name
    if codec:
        write_av(path, codec, speech, 48_000 if codec == "libopus" else SAMPLE_RATE)
    else:
        soundfile.write(path, speech, SAMPLE_RATE)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 1])
    got = load_audio(path).numpy()
    assert 0.3 * len(speech) <= len(got) <= 0.7 * len(speech)  # the bit rate is not constant
    assert similarity(got, speech[: len(got)]) >= 0.95


def test_a_change_of_channels_in_the_stream_is_no_crash(tmp_path, speech):
    """PyAV's resampler refuses a frame unlike its first one."""
    mono = write_av(tmp_path / "mono.aac", "aac", speech, SAMPLE_RATE).read_bytes()
    stereo = write_av(tmp_path / "stereo.aac", "aac", speech, SAMPLE_RATE, "stereo").read_bytes()
    (tmp_path / "both.aac").write_bytes(mono + stereo)
    got = load_audio(tmp_path / "both.aac")
    check_same_speech(got[: len(speech)], speech)


def test_an_empty_wav_has_no_samples(tmp_path):
    for rate in (16_000, 44_100):
        soundfile.write(tmp_path / "a.wav", np.zeros(0, np.float32), rate)
        got = load_audio(tmp_path / "a.wav")
        assert got.shape == (0,) and got.dtype == torch.float32


def test_a_wav_of_one_sample(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.array([0.5], np.float32), SAMPLE_RATE, subtype="FLOAT")
    assert load_audio(tmp_path / "a.wav").tolist() == [0.5]


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.wav"):
        load_audio(tmp_path / "nowhere.wav")
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(IsADirectoryError, match="folder.wav"):
        load_audio(tmp_path / "folder.wav")


def wav_header(format_tag: int) -> bytes:
    """A 16-bit mono wav of a second of noise, claiming the given codec."""
    data = np.random.default_rng(0).bytes(32_000)
    form = struct.pack("<HHIIHH", format_tag, 1, 16_000, 32_000, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", 32_000) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def write_unreadable(kind: str, path: Path, speech: np.ndarray) -> None:
    if kind == "video without audio":
        write_video(path, with_audio=False)
    elif kind == "m4a without its index":
        write_av(path, "aac", speech, SAMPLE_RATE)
        path.write_bytes(path.read_bytes()[:30_000])
    else:
        data = {
            "empty": b"",
            "text": b"This is a text, not a sound.\n" * 200,
            "html": b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>\n",
            "header of a webm": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\xf2\x81\x04" * 6,
            "random bytes": np.random.default_rng(1).bytes(50_000),
            "other random bytes": np.random.default_rng(2).bytes(500),
            "zeros": bytes(50_000),
            "one byte": b"R",
            "unknown codec": wav_header(0x7ABC),
        }
        path.write_bytes(data[kind])


UNREADABLE = [
    "empty", "text", "html", "header of a webm", "random bytes", "other random bytes", "zeros",
    "one byte", "unknown codec", "video without audio", "m4a without its index",
]  # fmt: skip


@pytest.mark.parametrize("extension", ["wav", "mp3", "mp4"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_files_are_named_in_one_line(tmp_path, speech, kind, extension):
    path = tmp_path / f"my recording.{extension}"
    write_unreadable(kind, tmp_path / "made.mp4", speech)
    (tmp_path / "made.mp4").rename(path)
    with pytest.raises(AudioError) as caught:
        load_audio(path)
    message = str(caught.value)
    assert path.name in message and len(message.splitlines()) == 1
    assert len(message) < 300 + 2 * len(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_called_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(AudioError, match="pipe.wav is no regular file"):
        load_audio(tmp_path / "pipe.wav")


@pytest.mark.skipif(os.name != "posix", reason="names are text here")
def test_a_name_that_is_no_text(tmp_path):
    """libsndfile's wrapper takes none, and its error named no file."""
    path = tmp_path / os.fsdecode(b"bad\xff.wav")
    try:
        path.write_bytes(SHORT.read_bytes())
    except OSError:
        pytest.skip("no such names on this file system")
    assert torch.allclose(load_audio(path), load_audio(SHORT), atol=1e-4)


def test_damaged_files_are_read_or_refused(tmp_path, speech):
    """Damage anywhere in any container: a waveform or an AudioError, nothing else."""
    originals = {}
    for name, codec in (("a.m4a", "aac"), ("a.webm", "libopus"), ("a.wv", "wavpack")):
        rate = 48_000 if codec == "libopus" else SAMPLE_RATE
        originals[name] = write_av(tmp_path / name, codec, speech[:32_000], rate).read_bytes()
    for name in ("a.wav", "a.mp3", "a.flac", "a.ogg"):
        soundfile.write(tmp_path / name, speech[:32_000], SAMPLE_RATE)
        originals[name] = (tmp_path / name).read_bytes()
    rng = np.random.default_rng(6)
    escaped: dict[str, str] = {}
    for _ in range(60):
        for name, original in originals.items():
            is_cut = rng.random() < 0.3
            data = bytearray(original[: rng.integers(1, len(original))] if is_cut else original)
            reach = rng.choice([64, 512, len(data)])  # headers break in more ways than sound does
            for place in rng.integers(0, min(reach, len(data)), rng.choice([0, 1, 4, 40])):
                data[place] = rng.integers(256)
            (tmp_path / name).write_bytes(data)
            try:
                assert bool(load_audio(tmp_path / name).isfinite().all())
            except AudioError as error:
                assert len(str(error).splitlines()) == 1
            except Exception as error:  # noqa: BLE001, what else escapes is the question here
                escaped[f"{name}: {type(error).__name__}"] = str(error)
    assert not escaped


def test_a_long_recording_lies_in_a_file_and_reads_the_same(monkeypatch):
    """Hours have to need no more memory than minutes."""
    rng = np.random.default_rng(0)
    blocks = [rng.standard_normal(n).astype(np.float32) for n in (40_000, 7, 0, 90_000)]
    whole = torch.from_numpy(np.concatenate(blocks))
    in_memory = Recording(blocks)
    monkeypatch.setattr(chunk_audio, "IN_MEMORY_S", 1)
    on_disk = Recording(blocks)
    assert not in_memory._file._rolled and on_disk._file._rolled
    for recording in (in_memory, on_disk):
        assert len(recording) == len(whole)
        for part in (slice(None), slice(5, 50_000), slice(-10, None), slice(9, 9), slice(10**9)):
            assert torch.equal(recording[part], whole[part])
        assert np.array_equal(frame_energy_db(recording), frame_energy_db(whole))
    assert torch.equal(Recording([])[:], torch.zeros(0))


# ---- corpus ------------------------------------------------------------------------------------

# The manifest has the length of the longest stream; that of the sound in these is 8.73 s.
SOUND_S = {"fmt-video.mp4", "fmt-video.mov", "fmt-video-vp8.webm", "fmt-twotracks.mkv"}
CORPUS_SETS = ("format", "extension", "header", "corrupt")


def corpus_rows() -> list:
    manifest = CORPUS / "manifest.jsonl"
    if not manifest.exists():
        skip = pytest.mark.skip(reason="shared/corpus is not beside this checkout")
        return [pytest.param(None, id="corpus", marks=skip)]
    rows = map(json.loads, manifest.read_text(encoding="utf-8").splitlines())
    return [
        pytest.param(row, id=row["audio"])
        for row in rows
        if row["set"] in CORPUS_SETS and row["audio"].startswith("hard/")
    ]


@pytest.mark.parametrize("row", corpus_rows())
def test_corpus_file(row):
    path, expect = CORPUS / row["audio"], row.get("expect", "")
    duration_s = 8.73 if path.name in SOUND_S else row.get("duration_s")
    if expect == "clean error":
        with pytest.raises(AudioError, match=path.name):
            load_audio(path)
        return
    try:
        waveform = load_audio(path)
    except AudioError as error:
        assert "error" in expect, error  # the manifest allows it for some
        return
    assert bool(waveform.isfinite().all())
    got_s = len(waveform) / SAMPLE_RATE
    if "empty" in expect:
        assert got_s <= 0.1
    elif path.name.startswith("bad-bitflips"):  # whole frames may be lost, most must be there
        assert 0.8 * duration_s <= got_s <= 1.05 * duration_s
    else:
        assert got_s == pytest.approx(duration_s, abs=0.2)
        assert waveform.abs().max() > 0.02
