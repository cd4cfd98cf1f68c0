"""Decoding: real weights against openai-whisper, and the loop's own promises."""

import subprocess
import sys

import pytest
import torch
import whisper
from conftest import ROOT, decode_chunks, random_model
from reference import openai_model
from torch._dynamo.testing import CompileCounter

from chunk_audio import Chunk, frame_energy_db, load_audio, plan_chunks
from decode import (
    DecodeOptions,
    DecodeState,
    Slots,
    Stats,
    WindowResult,
    decode_one_token,
    decode_windows,
    encode_chunks,
    refill_noise,
    setup_decoding,
)
from generate import CHECKPOINTS, GenerateOptions, load_model, step_bytes, transcribe
from long_audio import batch_rows
from model import Whisper

ENGLISH = GenerateOptions(language="en")


def openai_results(model, waveforms: list[torch.Tensor]) -> list[whisper.DecodingResult]:
    mels = [whisper.log_mel_spectrogram(whisper.pad_or_trim(waveform)) for waveform in waveforms]
    special = whisper.tokenizer.get_tokenizer(model.is_multilingual).special_tokens.values()
    suppress = [-1, *sorted(special)[1:]]  # ours never samples a special token but end of text
    options = whisper.DecodingOptions(
        language="en", without_timestamps=True, fp16=False, suppress_tokens=suppress
    )
    return whisper.decode(model, torch.stack(mels), options)


def our_results(model, tokenizer, waveforms: list[torch.Tensor]) -> list[WindowResult]:
    """Several short waveforms as the chunks of one batch."""
    ends = torch.tensor([len(waveform) for waveform in waveforms]).cumsum(0).tolist()
    chunks = [Chunk(end - len(w), end) for end, w in zip(ends, waveforms, strict=True)]
    whole = torch.cat(waveforms)
    return [a[0] for a in decode_chunks(model, tokenizer, whole, chunks, len(waveforms))]


@pytest.mark.parametrize(
    "name, count",
    [
        ("tiny.en", 24),
        ("base", 12),
        pytest.param("tiny.en", None, marks=pytest.mark.slow),
        pytest.param("base", 40, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_openai_on_real_speech(name, count, corpus, request):
    """The first short English utterances; with `-m slow` all of them for tiny.en, 40 for base.

    Tolerance of the probabilities: fp32 sums in another order.
    """
    model, tokenizer = request.getfixturevalue(name.replace(".", "_"))
    reference = openai_model(CHECKPOINTS / name / "model.safetensors")
    rows = [row for row in corpus if row["kind"] == "short" and row["language"] == "en"][:count]
    assert len(rows) == (count or 92)
    for begin in range(0, len(rows), 12):
        batch = rows[begin : begin + 12]
        waveforms = [load_audio(row["path"]) for row in batch]
        expected = openai_results(reference, waveforms)
        ours = our_results(model, tokenizer, waveforms)
        for row, theirs, result in zip(batch, expected, ours, strict=True):
            assert result.tokens == theirs.tokens, row["audio"]
            assert result.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-4)
            assert result.no_speech_prob == pytest.approx(theirs.no_speech_prob, abs=1e-4)


def test_language_probabilities_equal_openai(base, corpus):
    model, tokenizer = base
    reference = openai_model(CHECKPOINTS / "base" / "model.safetensors")
    codes = ("de", "es", "fr", "ja", "ru", "zh")
    rows = {row["language"]: row for row in corpus if row["kind"] == "short"}
    for code in codes:
        waveform = load_audio(rows[code]["path"])
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(waveform))
        _, expected = reference.detect_language(mel)
        result = transcribe(model, tokenizer, waveform)
        assert result.language == max(expected, key=expected.get)


# ---- batches, order, reuse -------------------------------------------------------------------


@pytest.fixture(scope="module")
def utterances(samples) -> list[torch.Tensor]:
    """Windows of unequal length and content."""
    long = load_audio(samples / "long.flac")
    short = load_audio(samples / "short.wav")
    return [long[:400_000], short, long[500_000:600_000], short[:60_000], long[700_000:]]


def token_lists(model, tokenizer, waveform, step=decode_one_token, **options) -> list[list[int]]:
    """Tokens of each chunk of a waveform, as the first pass of `transcribe` decodes them."""
    batch_size = options.pop("batch_size", 8)
    chunks = plan_chunks(waveform, frame_energy_db(waveform))
    n_rows = min(len(chunks), batch_size)
    attempts = decode_chunks(model, tokenizer, waveform, chunks, n_rows, step, **options)
    return [results[0].tokens for results in attempts]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_batch_equals_each_window_alone(tiny_en, samples, temperature):
    """Four rows, then two with rows that take the next window, equal one at a time (fp32)."""
    model, tokenizer = tiny_en
    waveform = load_audio(samples / "long.flac")
    alone = token_lists(model, tokenizer, waveform, batch_size=1, temperature=temperature)
    assert len(alone) >= 3
    for batch_size in (2, 4):
        batch = token_lists(
            model, tokenizer, waveform, batch_size=batch_size, temperature=temperature
        )
        assert batch == alone


def test_a_failed_row_is_drawn_again_beside_others(tiny_en, samples):
    """Fallback works in a batch: a refused row goes on from its cache, its mates notice nothing."""
    model, tokenizer = tiny_en
    waveform = load_audio(samples / "long.flac")
    chunks = plan_chunks(waveform, frame_energy_db(waveform))
    ladder, tried = {0.0: 0.4, 0.4: 0.8}, []
    for n_rows in (1, len(chunks)):
        attempts = decode_chunks(
            model, tokenizer, waveform, chunks, n_rows,
            next_temperature=lambda result: (
                ladder.get(result.temperature) if result.chunk == chunks[1] else None
            ),
        )  # fmt: skip
        assert [len(results) for results in attempts] == [1, 3] + [1] * (len(chunks) - 2)
        assert [result.temperature for result in attempts[1]] == [0.0, 0.4, 0.8]
        tried.append([[result.tokens for result in results] for results in attempts])
    assert tried[0] == tried[1]
    assert [results[0] for results in tried[0]] == token_lists(model, tokenizer, waveform)


def test_files_a_b_a_and_a_fresh_process(tiny_en, samples, utterances):
    """Neither cache may remember another file."""
    model, tokenizer = tiny_en
    a, b = utterances[0], samples / "short.wav"
    first = token_lists(model, tokenizer, a)
    text_b = transcribe(model, tokenizer, b, ENGLISH).text
    assert token_lists(model, tokenizer, a) == first
    command = [sys.executable, "generate.py", "--model", "tiny.en", "--audio", str(b)]
    fresh = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == text_b


@torch.no_grad()
def test_compiled_equals_eager_in_one_frame(tiny_en, utterances):
    """Many steps, five files, prompts of two lengths: one graph, the eager tokens.

    The counting backend runs the captured graph as it is, so this needs no C++ compiler.
    """
    model, tokenizer = tiny_en
    counter = CompileCounter()
    step = torch.compile(decode_one_token, backend=counter, fullgraph=True, dynamic=False)
    for waveform in utterances:
        eager = token_lists(model, tokenizer, waveform)
        assert token_lists(model, tokenizer, waveform, step) == eager
    slots = Slots(model, tokenizer, DecodeOptions("en"), Stats())
    window = next(encode_chunks(model, utterances[1], [Chunk(0, 188_720)], Stats()))
    slots.start(0, window)
    long_prompt = torch.tensor([tokenizer.sot_prev, *tokenizer.encode(" a" * 50), tokenizer.sot])
    slots.state.start_row(0, long_prompt, 448, 0.0)
    step(model, slots.state, None)
    assert counter.frame_count == 1


# ---- the step itself, with scripted logits ---------------------------------------------------


class Scripted(torch.nn.Module):
    """Stands in for a network: the logits after each position are given."""

    def __init__(self, script: torch.Tensor):
        super().__init__()
        self.script = script  # [B, n_text_ctx, n_vocab]
        self.decoder = self

    def forward(self, tokens, input_pos):
        rows = torch.arange(len(tokens))[:, None]
        return self.script[rows, input_pos]  # [B, 1, n_vocab]

    def logits(self, hidden):
        return hidden


def scripted_state(tokenizer, n_rows: int, **start) -> DecodeState:
    state = DecodeState(n_rows, 448, tokenizer, [tokenizer.no_speech])
    for row in range(n_rows):
        state.start_row(
            row,
            torch.tensor([tokenizer.sot]),
            **{"sample_end": 448, **start},
            **({} if "temperature" in start else {"temperature": 0.0}),
        )
    return state


def script_of(tokenizer, *rows: list[int]) -> torch.Tensor:
    script = torch.zeros(len(rows), 448, tokenizer.n_vocab)
    for row, tokens in enumerate(rows):
        for pos, token in enumerate(tokens):
            script[row, pos, token] = 10.0
    return script


def test_each_row_stops_at_its_own_end_of_text(tiny_en):
    _, tokenizer = tiny_en
    script = script_of(tokenizer, [11, 12, tokenizer.eot, 99], [21, 22, 23, 24, tokenizer.eot])
    state = scripted_state(tokenizer, 2)
    for _ in range(6):
        decode_one_token(Scripted(script), state)
    assert state.tokens[0, :5].tolist() == [tokenizer.sot, 11, 12, *[tokenizer.eot] * 2]
    assert state.tokens[1, :6].tolist() == [tokenizer.sot, 21, 22, 23, 24, tokenizer.eot]
    assert state.input_pos.tolist() == [3, 5]
    allowed = script[0, 1] + state.suppress_mask[0]
    assert state.logprobs[0, 2] == pytest.approx(allowed.log_softmax(-1)[12].item(), abs=1e-5)
    assert (state.logprobs[0, 1:4] < 0).all() and (state.logprobs[0, 4:] == 0).all()


def test_stops_at_the_limit_and_at_the_context(tiny_en):
    _, tokenizer = tiny_en
    script = script_of(tokenizer, list(range(1000, 1448)))
    for limit in (4, 448):
        state = scripted_state(tokenizer, 1, sample_end=limit)
        for _ in range(460):
            decode_one_token(Scripted(script), state)
        assert state.finished.all()
        assert state.tokens[0, 1:limit].tolist() == list(range(1000, 1000 + limit - 1))
        assert state.input_pos.item() == limit - 1


def test_suppressed_tokens_and_blank_at_the_start(tiny_en):
    _, tokenizer = tiny_en
    script = torch.zeros(1, 448, tokenizer.n_vocab)
    script[0, :, tokenizer.no_speech] = 30.0  # never
    script[0, :, tokenizer.eot] = 20.0  # not first
    script[0, :, tokenizer.encode(" ")[0]] = 15.0  # not first
    script[0, :, 500] = 10.0
    state = scripted_state(tokenizer, 1)
    for _ in range(2):
        decode_one_token(Scripted(script), state)
    assert state.tokens[0, 1:3].tolist() == [500, tokenizer.eot]


def draws(tokenizer, logits, temperature, top_k=None, n=4000) -> torch.Tensor:
    """How often each of five tokens is drawn from `logits` [5]."""
    script = torch.full((1, 448, tokenizer.n_vocab), -torch.inf)
    script[0, :, 100:105] = logits
    state, counts = scripted_state(tokenizer, 1, temperature=temperature), torch.zeros(5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        state.start_row(0, torch.tensor([tokenizer.sot]), 448, temperature)
        refill_noise(state, {0: generator})
        decode_one_token(Scripted(script), state, top_k)
        counts[state.tokens[0, 1] - 100] += 1
    return counts / n


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (1.0, 2)])
def test_draws_follow_the_softmax(tiny_en, temperature, top_k):
    """Bound: 4 standard deviations of a frequency over 4,000 draws are at most 0.032."""
    _, tokenizer = tiny_en
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    kept = logits if top_k is None else logits.masked_fill(logits < 1.0, -torch.inf)
    expected = (kept / temperature).softmax(-1)
    got = draws(tokenizer, logits, temperature, top_k)
    assert (got - expected).abs().max() < 0.032
    assert (got[expected == 0] == 0).all()


def test_seed_repeats_and_matters(tiny_en, utterances):
    model, tokenizer = tiny_en
    runs = [
        token_lists(model, tokenizer, utterances[1], temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


# ---- options, limits, edges ------------------------------------------------------------------


def test_max_new_tokens_of_a_chunk(tiny_en, utterances):
    model, tokenizer = tiny_en
    full = token_lists(model, tokenizer, utterances[1])[0]
    assert token_lists(model, tokenizer, utterances[1], max_new_tokens=5)[0] == full[:5]


def test_translate_asks_for_translation(base):
    model, tokenizer = base
    setup_decoding(model, tokenizer, 1)
    slots = Slots(model, tokenizer, DecodeOptions("de", task="translate"), Stats())
    windows = encode_chunks(model, torch.zeros(16_000), [Chunk(0, 16_000)], Stats())
    next(decode_windows(slots, windows, decode_one_token))
    prompt = model.decode_state.tokens[0, :4].tolist()
    names = [tokenizer.sot, tokenizer.language_ids["de"], tokenizer.translate]
    assert prompt == [*names, tokenizer.no_timestamps]


def test_a_translation_has_english_words(base, samples):
    """Its words were split as the language of the audio is, into single tokens for Japanese."""
    waveform = load_audio(samples / "short.wav")
    chunk, how = Chunk(0, len(waveform)), {"language": "ja", "task": "translate"}
    (result,) = decode_chunks(*base, waveform, [chunk], 1, **how)[0]
    assert len(result.text.split()) > 20
    assert [word.text.strip() for word in result.words] == result.text.split()


@pytest.mark.parametrize(
    "waveform", [torch.zeros(2, 16_000), torch.zeros(16_000, dtype=torch.int16)]
)
def test_waveforms_that_are_none(tiny_en, waveform):
    """Integers were taken for samples of up to 32,767 times full scale, and gave no text."""
    with pytest.raises(ValueError, match="allowed: .n_samples. of floats"):
        transcribe(*tiny_en, waveform, ENGLISH)


def test_one_bad_sample_costs_no_text(tiny_en, samples):
    """One that was not a number made every level, and so the whole text, vanish."""
    waveform = load_audio(samples / "short.wav")
    expected = transcribe(*tiny_en, waveform, ENGLISH).text
    waveform[100] = float("nan")
    assert transcribe(*tiny_en, waveform, ENGLISH).text == expected
    for kind in ("f8", ">f4"):
        backwards = waveform.numpy()[::-1].astype(kind)
        assert transcribe(*tiny_en, backwards[::-1], ENGLISH).text == expected


@pytest.mark.parametrize("n_samples", [0, 1, 4_800])
def test_hardly_any_audio(tiny_en, n_samples):
    model, tokenizer = tiny_en
    result = transcribe(model, tokenizer, torch.zeros(n_samples), ENGLISH)
    assert (result.text, result.segments) == ("", [])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"language": "klingon"}, "klingon"),
        ({"task": "summarize"}, "transcribe, translate"),
        ({"temperature": -1.0}, "0 and above"),
        ({"temperature": float("nan")}, "0 and above"),
        ({"top_k": 0}, "1 and above"),
        ({"batch_size": 0}, "1 and above"),
        ({"max_new_tokens": 0}, "1 and above"),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        GenerateOptions(**options)


def test_compiled_batches_have_few_sizes():
    assert {batch_rows(n, 8, is_compiled=True) for n in range(1, 200)} == {1, 2, 4, 8}
    assert all(batch_rows(n, 6, is_compiled=True) >= min(n, 6) for n in range(1, 20))
    assert [batch_rows(n, 8, is_compiled=False) for n in (1, 3, 20)] == [1, 3, 8]


def test_caches_are_kept_and_not_saved():
    model = random_model()
    assert isinstance(model, Whisper)
    names = set(model.state_dict())
    model.setup_caches(2)
    first = model.decoder.layers[0].attn.kv_cache
    model.setup_caches(2)
    assert model.decoder.layers[0].attn.kv_cache is first
    model.setup_caches(3)
    assert model.decoder.layers[0].attn.kv_cache.k_cache.shape[0] == 3
    assert set(model.state_dict()) == names


def test_waveforms_of_other_kinds_are_taken_or_refused(tiny_en, utterances):
    expected = transcribe(*tiny_en, utterances[1], ENGLISH).text
    assert transcribe(*tiny_en, utterances[1].double().numpy(), ENGLISH).text == expected
    with pytest.raises(ValueError, match=r"\[2, 8\]"):
        transcribe(*tiny_en, torch.zeros(2, 8), ENGLISH)


def test_a_language_that_the_model_lacks(base):
    with pytest.raises(ValueError, match="'yue'"):
        transcribe(*base, torch.zeros(16_000), GenerateOptions(language="cantonese"))


def test_loading_does_not_import_the_compiler(tiny_en):
    """It costs 1.1 s and 150 MB, and comes along when values are drawn on the meta device."""
    code = "import sys, generate; generate.load_model('tiny.en')"
    code += "; print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_unknown_precision_and_missing_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="float16.*fp16"):
        load_model("tiny.en", precision="float16")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


@torch.no_grad()
def test_windows_encoded_together_equal_each_alone(tiny_en, samples):
    """As on a GPU, where a batch of windows keeps it busy; here in float32 on a CPU."""
    model, _ = tiny_en
    waveform = load_audio(samples / "long.flac")
    chunks = plan_chunks(waveform, frame_energy_db(waveform))
    stats = Stats()
    alone = list(encode_chunks(model, waveform, chunks, stats))
    together = list(encode_chunks(model, waveform, chunks, stats, n_at_once=2))
    assert len(chunks) % 2 and stats.n_windows == 2 * len(chunks)  # the last batch is a part
    for a, b in zip(alone, together, strict=True):
        assert a.chunk == b.chunk
        # sums in another order: matrix products choose their blocks by the size of the batch
        assert torch.allclose(a.audio_features, b.audio_features, atol=1e-3)


def test_bytes_of_a_step_are_those_it_reads(tiny_en):
    """Not the encoder's, nor the weights that fill the cross-attention caches, nor their own."""
    model, tokenizer = random_model(), tiny_en[1]
    setup_decoding(model, tokenizer, 3)
    read = [p for name, p in model.decoder.named_parameters() if "wkv" not in name]
    cross = 2 * model.args.n_text_layer * 3 * 1500 * model.args.dim  # keys and values
    assert step_bytes(model) == 4 * (sum(p.numel() for p in read) + cross)
