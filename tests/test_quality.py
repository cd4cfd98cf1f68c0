"""Judgements of windows, voice detection, windows to decode again."""

import numpy as np
import pytest
import torch

from chunk_audio import SAMPLE_RATE, Chunk, frame_energy_db, load_audio
from quality import compression_ratio, gap_windows, halves, is_sure, judge, voiced_frames, voiced_s

SPEECH = "It was the first great sorrow of his life, not so much the loss of the cotton."
LOOP = "I think I think " * 110


@pytest.mark.parametrize(
    "text, avg_logprob, no_speech_prob, is_complete, voiced, expected",
    [
        (SPEECH, -0.3, 0.01, True, 6.0, "ok"),
        (SPEECH, -0.3, 0.9, True, 6.0, "ok"),  # silence needs a low log-probability as well
        (SPEECH, -1.2, 0.9, True, 6.0, "drop"),
        (SPEECH, -1.14, 0.1, True, 6.0, "ok"),  # noisy speech: plausible length, speech expected
        (SPEECH, -1.6, 0.1, True, 6.0, "drop"),
        ("Thank you.", -0.5, 0.8, True, 5.0, "drop"),
        ("you", -0.9, 0.7, True, 20.0, "drop"),
        (LOOP, -0.1, 0.1, False, 25.0, "loop"),
        (f"{SPEECH} " * 3, -0.1, 0.1, True, 25.0, "ok"),  # genuine repetition
        (SPEECH * 10, -0.2, 0.1, True, 5.0, "loop"),  # more than can be said
        ("And then", -0.3, 0.1, True, 25.0, "thin"),
        ("And then", -0.3, 0.1, True, 2.0, "ok"),
        ("the", -2.1, 0.15, True, 13.0, "thin"),  # half a file was lost as "drop"
        ("", -0.3, 0.9, True, 13.0, "ok"),
        ("", -0.3, 0.1, True, 3.0, "ok"),
        ("今天我们要讨论的是关于中国经济发展的问题", -0.5, 0.65, True, 5.0, "ok"),  # 20 units
    ],
)
def test_verdicts(text, avg_logprob, no_speech_prob, is_complete, voiced, expected):
    n_words = len(text.split()) if text.isascii() else len(text)
    verdict = judge(text, n_words, avg_logprob, no_speech_prob, is_complete, voiced)
    assert verdict == expected


def test_compression_ratio_of_repetition():
    assert compression_ratio("") == 0.0
    assert compression_ratio(SPEECH) < 1.5 < 2.4 < compression_ratio(LOOP)


def test_a_second_decoding_has_to_be_surer():
    assert is_sure(SPEECH, -0.5, "ok")
    assert not is_sure(SPEECH, -0.8, "ok")
    assert not is_sure(LOOP, -0.1, "ok")
    assert not is_sure(SPEECH, -0.1, "thin")


def bursts(*parts: tuple[float, float]) -> torch.Tensor:
    """Noise of (seconds, amplitude) one after another."""
    generator = torch.Generator().manual_seed(0)
    return torch.cat([
        amplitude * torch.randn(round(seconds * SAMPLE_RATE), generator=generator)
        for seconds, amplitude in parts
    ])  # fmt: skip


def voiced_of(waveform: torch.Tensor) -> np.ndarray:
    return voiced_frames(frame_energy_db(waveform))


def test_voice_is_louder_than_the_background():
    is_voiced = voiced_of(bursts((2, 0.001), (3, 0.1), (2, 0.001), (3, 0.05), (2, 0.001)))
    assert is_voiced[210:490].all() and is_voiced[710:990].all()
    assert not is_voiced[10:190].any() and not is_voiced[510:690].any()


@pytest.mark.parametrize("gain_db", [0, -50, -70])
def test_quiet_speech_is_voiced(samples, gain_db):
    """Another program took speech at -50 dB for silence by an absolute level."""
    waveform = load_audio(samples / "short.wav") * 10 ** (gain_db / 20)
    waveform = (waveform * 32768).round() / 32768
    chunk = Chunk(0, len(waveform))
    assert voiced_s(voiced_of(waveform), chunk) > 6


def test_digital_silence_is_not_voiced_and_short_holes_are_closed():
    assert not voiced_of(torch.zeros(SAMPLE_RATE)).any()
    assert voiced_frames(np.zeros(0, np.float32)).shape == (0,)
    is_voiced = voiced_of(bursts((2, 0.0005), (1, 0.1), (0.12, 0.0005), (1, 0.1), (2, 0.0005)))
    assert is_voiced[205:405].all()
    assert not voiced_of(bursts((2, 0.0005), (0.02, 0.1), (2, 0.0005), (2, 0.1)))[195:215].any()


def test_halves_cover_the_chunk_and_meet_in_its_pause():
    waveform = bursts((11, 0.1), (0.8, 0.0005), (15, 0.1))
    chunk = Chunk(0, len(waveform))
    first, second = halves(chunk, frame_energy_db(waveform))
    assert (first.start, second.end) == (chunk.start, chunk.end)
    assert second.start < first.end
    assert 11.0 <= (first.end_s + second.start_s) / 2 <= 11.8


@pytest.mark.parametrize("n_tried", [0, 1, 2])
def test_windows_of_a_gap_hold_it_and_fit(n_tried):
    waveform = bursts((5, 0.1), (0.5, 0.0005), (70, 0.1), (0.5, 0.0005), (5, 0.1))
    energy_db = frame_energy_db(waveform)
    for gap in ((10.0, 12.0), (6.0, 70.0), (0.0, 1.0), (80.0, 81.0), (30.0, 36.0)):
        chunks = gap_windows(gap, n_tried, energy_db, len(waveform))
        if gap[1] - gap[0] < (0, 1.5, 4.0)[n_tried]:
            assert chunks == []
            continue
        assert chunks[0].start_s <= gap[0] and chunks[-1].end_s >= min(gap[1], 81.0)
        assert all(0 < chunk.end_s - chunk.start_s <= 30 for chunk in chunks)
        assert all(a.end >= b.start for a, b in zip(chunks, chunks[1:], strict=False))
        assert len(chunks) > 1 or n_tried < 2
    assert gap_windows((6.0, 70.0), 3, energy_db, len(waveform)) == []
