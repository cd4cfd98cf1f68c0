"""The decode loop: one compiled step for all rows of a batch over static caches.

mels of windows -> tokens, words with times, and quality measures of each window. Every window gets
a row of the batch ("slot"): it goes through the encoder once, its cross-attention keys and values
are stored once, its prompt is read in one pass, and then `decode_one_token`, eager or compiled,
makes one token for all rows a call. A row that ends takes the next window at once, so no row waits
for the slowest.

Which windows there are, and what becomes of their texts, is for `long_audio.py` to say.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from align import align_words
from chunk_audio import Chunk, Recording, log_mel, pad_or_trim
from model import Whisper
from stitch import Word
from tokenizer import Tokenizer, language_code

GPU_WINDOWS = 8  # that go through the encoder together; on a CPU one alone is as fast
MAX_INITIAL_TIMESTAMP = 50  # steps of 20 ms: speech starts in a window's first second (openai)


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one window. Raises: ValueError for a value that is not allowed, naming it."""

    language: str = "en"  # code or English name; "each": detect the language of every window
    task: str = "transcribe"  # or "translate": any language to English
    timestamps: bool = False  # have the model write timestamps; word times do not need them
    temperature: float = 0.0  # 0 takes the likeliest token; above, tokens are drawn
    top_k: int | None = None  # draw among the k likeliest tokens only
    seed: int = 0  # of the draws; a window's draws do not depend on its batch
    max_new_tokens: int | None = None  # of one window; None: as many as fit

    def __post_init__(self):
        if self.language not in ("auto", "each"):
            object.__setattr__(self, "language", language_code(self.language))
        if self.task not in ("transcribe", "translate"):
            raise ValueError(f"task is {self.task!r}; allowed: transcribe, translate")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 and above")
        for name in ("top_k", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 and above")


@dataclass
class Stats:
    """Where the time went, in seconds, and how much was done."""

    seconds: Counter[str] = field(default_factory=Counter)
    audio_s: float = 0.0
    n_windows: int = 0  # encoder runs
    n_retries: int = 0  # of them, and of rows decoded again: beyond the first pass
    n_tokens: int = 0  # sampled, of all rows, end of text included
    n_steps: int = 0  # calls of decode_one_token
    # stages on a GPU, with the events of their start and end, until `settle` waits for them
    pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str, device: torch.device) -> Iterator[None]:
        """Time what is inside; on CUDA by the GPU's own clock, so that nobody waits for it."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(stream)
            self.pending.append((stage, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self.seconds[stage] += time.perf_counter() - start_s

    def settle(self) -> None:
        """Wait for the stages that a GPU is still at, and count them."""
        for stage, start, end in self.pending:
            end.synchronize()
            self.seconds[stage] += start.elapsed_time(end) / 1e3
        self.pending.clear()


# ---- one step --------------------------------------------------------------------------------


class DecodeState(nn.Module):
    """All that `decode_one_token` carries from step to step, as buffers of fixed shape.

    Buffers, since CUDA graphs and the compiler treat them as static memory that may be written.
    `suppress` are ids never sampled. With `timestamps`, the rules of `apply_timestamp_rules` hold.
    """

    def __init__(
        self, n_rows: int, n_text_ctx: int, tokenizer: Tokenizer, suppress: Iterable[int],
        timestamps: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.eot, self.timestamps = tokenizer.eot, timestamps
        self.warm: tuple[DecodeStep, int | None] | None = None  # a compiled step, and its top_k
        self.timestamp_begin = tokenizer.timestamp_begin
        self.timestamp_end = tokenizer.timestamp_end

        def buffer(name: str, value: Tensor) -> None:
            self.register_buffer(name, value, persistent=False)

        buffer("tokens", torch.zeros(n_rows, n_text_ctx, dtype=torch.long))  # prompt, then sampled
        buffer("logprobs", torch.zeros(n_rows, n_text_ctx))  # of each sampled token
        buffer("input_pos", torch.zeros(n_rows, dtype=torch.long))  # of the token to read next
        buffer("sample_begin", torch.ones(n_rows, dtype=torch.long))  # index of the first sample
        buffer("sample_end", torch.ones(n_rows, dtype=torch.long))  # index that must not be used
        buffer("finished", torch.ones(n_rows, dtype=torch.bool))
        buffer("last_timestamp", torch.zeros(n_rows, dtype=torch.long))  # id; 0: none yet
        buffer("inv_temperature", torch.ones(n_rows))
        buffer("gumbel", torch.zeros(n_rows, tokenizer.n_vocab))  # noise of rows that are drawn
        mask = torch.zeros(2, tokenizer.n_vocab)  # added to the logits: always; at the first token
        mask[:, list(suppress)] = -torch.inf
        mask[1, [*tokenizer.encode(" "), tokenizer.eot]] = -torch.inf
        buffer("suppress_mask", mask)

    def start_row(self, row: int, prompt: Tensor, sample_end: int, temperature: float) -> None:
        """Make `row` ready to sample after `prompt` [S]; temperature 0 takes the likeliest."""
        self.tokens[row] = self.eot
        self.tokens[row, : len(prompt)] = prompt
        self.logprobs[row] = 0.0
        self.input_pos[row] = len(prompt) - 1
        self.sample_begin[row] = len(prompt)
        self.sample_end[row] = sample_end
        self.finished[row] = False
        self.last_timestamp[row] = 0
        self.inv_temperature[row] = 1.0 / temperature if temperature > 0 else 1.0
        self.gumbel[row] = 0.0


DecodeStep = Callable[[Whisper, DecodeState, int | None], None]


def decode_one_token(model: Whisper, state: DecodeState, top_k: int | None = None) -> None:
    """Read one token of every row, choose the next, and write it into `state`.

    A row is drawn by adding Gumbel noise to its logits and taking the largest: the same
    distribution as softmax sampling, without a host sync and without a random generator inside
    the graph (`refill_noise` writes the noise; it is zero for greedy rows).
    """
    pos = state.input_pos[:, None]  # [B, 1]
    hidden = model.decoder(state.tokens.gather(1, pos), pos)  # [B, 1, dim]
    logits = model.decoder.logits(hidden)[:, 0]  # [B, n_vocab] float32
    is_first = (state.input_pos + 1 == state.sample_begin).long()  # [B]
    logits = logits + state.suppress_mask[is_first]
    if state.timestamps:
        logits = apply_timestamp_rules(logits, state)
    scores = logits * state.inv_temperature[:, None] + state.gumbel  # [B, n_vocab]
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]  # [B, 1]
        scores = scores.masked_fill(logits < kth, -torch.inf)
    sampled = scores.argmax(dim=-1, keepdim=True)  # [B, 1]
    _append(state, sampled, logits.gather(1, sampled) - logits.logsumexp(dim=-1, keepdim=True))


def _append(state: DecodeState, sampled: Tensor, logprobs: Tensor) -> None:
    """Write sampled ids and their log-probabilities, [B, 1] each; rows that ended keep theirs."""
    active = ~state.finished[:, None]  # [B, 1]
    pos = state.input_pos[:, None] + active.long()  # [B, 1]
    sampled = torch.where(active, sampled, state.tokens.gather(1, pos))
    state.tokens.scatter_(1, pos, sampled)
    state.logprobs.scatter_(1, pos, torch.where(active, logprobs, state.logprobs.gather(1, pos)))
    is_timestamp = (sampled >= state.timestamp_begin) & (sampled <= state.timestamp_end)
    state.last_timestamp.copy_(torch.where(is_timestamp[:, 0], sampled[:, 0], state.last_timestamp))
    state.finished.logical_or_((sampled == state.eot)[:, 0] | (pos[:, 0] + 1 >= state.sample_end))
    state.input_pos.copy_(pos[:, 0])


def apply_timestamp_rules(logits: Tensor, state: DecodeState) -> Tensor:
    """Set logits [B, n_vocab] that break the grammar of timestamps to -inf.

    Timestamps come in pairs around text, never go back, and start within a window's first second;
    where they have more mass together than any other token has alone, one of them must come.
    Source: Whisper's decoding rules (openai-whisper, `ApplyTimestampRules`), but for the end.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)  # [n_vocab]
    is_timestamp = (ids >= state.timestamp_begin) & (ids <= state.timestamp_end)
    pos = state.input_pos[:, None]  # [B, 1]
    n_sampled = pos + 1 - state.sample_begin[:, None]  # [B, 1]

    def was_timestamp(back: int) -> Tensor:  # [B, 1]
        token = state.tokens.gather(1, (pos - back).clamp(min=0))
        return (token >= state.timestamp_begin) & (token <= state.timestamp_end)

    last = (n_sampled >= 1) & was_timestamp(0)
    closed = last & ((n_sampled < 2) | was_timestamp(1))  # a pair, or the opening one: text follows
    opened = last & ~closed  # text before it: its partner or the end follows
    banned = closed & is_timestamp
    banned |= opened & (ids < state.eot)
    # A pair at the end says that the window cuts a sentence, which openai-whisper reads again from
    # there. Windows here stay where they are: what there is of the sentence has to be written.
    banned |= closed & (n_sampled >= 2) & (ids == state.eot)
    # an opening timestamp may repeat the closing one; after text it must be later
    first_allowed = state.last_timestamp[:, None] + (~opened).long()
    banned |= is_timestamp & (state.last_timestamp[:, None] > 0) & (ids < first_allowed)
    is_first = n_sampled == 0
    banned |= is_first & (~is_timestamp | (ids > state.timestamp_begin + MAX_INITIAL_TIMESTAMP))
    logits = logits.masked_fill(banned, -torch.inf)
    mass = logits.masked_fill(~is_timestamp, -torch.inf).logsumexp(dim=-1, keepdim=True)  # [B, 1]
    best_other = logits.masked_fill(is_timestamp, -torch.inf).amax(dim=-1, keepdim=True)
    return logits.masked_fill((mass > best_other) & ~is_timestamp, -torch.inf)


def refill_noise(state: DecodeState, generators: dict[int, torch.Generator]) -> None:
    """Fresh Gumbel noise, -log(Exponential(1)), for each row that is drawn.

    A generator per row, so that a window's draws do not depend on which windows share its batch.
    """
    for row, generator in generators.items():
        state.gumbel[row].exponential_(generator=generator).clamp_(min=1e-9).log_().neg_()


def setup_decoding(
    model: Whisper, tokenizer: Tokenizer, n_rows: int, timestamps: bool = False
) -> None:
    """Make caches and decoding state for `n_rows` windows, unless the model has them already."""
    state = model.decode_state
    if state is not None and model.n_rows == n_rows and state.timestamps == timestamps:
        return
    model.setup_caches(n_rows)
    allowed = {tokenizer.eot}
    if timestamps:
        allowed.update(range(tokenizer.timestamp_begin, tokenizer.timestamp_end + 1))
    suppress = model.suppress_tokens
    suppress = set(tokenizer.non_speech_tokens if suppress is None else suppress)
    suppress |= set(tokenizer.special_ids) - allowed
    state = DecodeState(n_rows, model.args.n_text_ctx, tokenizer, suppress, timestamps)
    model.decode_state = state.to(model.device)


# ---- windows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A chunk with its encoder output, ready for a row of the batch."""

    chunk: Chunk
    audio_features: Tensor  # [1, n_audio_ctx, dim]


@dataclass(frozen=True)
class WindowResult:
    """What the decoder said about one window, at one temperature."""

    chunk: Chunk
    language: str
    temperature: float
    tokens: list[int]  # sampled ids without end of text
    text: str
    words: list[Word]  # with times in the whole audio, in s
    avg_logprob: float  # mean log-probability of the sampled tokens, end of text included
    no_speech_prob: float  # probability of the no-speech token at the start
    is_complete: bool  # ended by itself, not at a limit


def encode_chunks(
    model: Whisper, waveform: Tensor | Recording, chunks: Iterable[Chunk], stats: Stats,
    n_at_once: int | None = None,
) -> Iterator[Window]:  # fmt: skip
    """Run the encoder over each chunk once, padded to 30 s, in order, when asked for it.

    Up to `n_at_once` chunks go through it together, by default one on a CPU and GPU_WINDOWS
    elsewhere, in groups of a power of two: a compiled encoder then has few shapes.
    """
    chunks = iter(chunks)
    n_at_once = n_at_once or (1 if model.device.type == "cpu" else GPU_WINDOWS)
    while batch := list(itertools.islice(chunks, n_at_once)):
        while batch:
            n = 1 << (len(batch).bit_length() - 1)
            group, batch = batch[:n], batch[n:]
            with stats.timed("mel", model.device):
                parts = [pad_or_trim(waveform[chunk.start : chunk.end]) for chunk in group]
                samples = _to_device(torch.stack(parts), model.device)  # [B, n_samples]
                mel = log_mel(samples, model.args.n_mels).to(model.dtype)  # [B, n_mels, 3000]
            with stats.timed("encoder", model.device):
                audio_features = model.encoder(mel)  # [B, n_audio_ctx, dim]
            stats.n_windows += n
            yield from map(Window, group, audio_features.split(1))


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy from the CPU that CUDA makes beside its other work, while the program goes on."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def language_probs(model: Whisper, tokenizer: Tokenizer, row: int) -> dict[str, float]:
    """Probability of each language in the window that `row` holds, after start-of-transcript."""
    prompt = torch.tensor([tokenizer.sot], device=model.device)
    logits = _read_prompt(model, row, prompt)[0]  # [n_vocab]
    probs = logits[list(tokenizer.language_ids.values())].softmax(dim=-1)
    return dict(zip(tokenizer.language_ids, probs.tolist(), strict=True))


def _read_prompt(model: Whisper, row: int, prompt: Tensor) -> Tensor:
    """Read a prompt [S] in one pass -> logits [S, n_vocab] after each of its tokens."""
    input_pos = torch.arange(len(prompt), device=model.device)[None]  # [1, S]
    return model.decoder.logits(model.decoder(prompt[None], input_pos, slice(row, row + 1)))[0]


NextTemperature = Callable[[WindowResult], float | None]


@dataclass
class _Slot:
    """A row at work: its window's chunk and what earlier temperatures gave."""

    chunk: Chunk
    language: str
    temperature: float
    no_speech_prob: Tensor | None = None  # on the device: reading it would wait for the device
    attempts: list[WindowResult] = field(default_factory=list)


class Slots:
    """The rows of the batch and the windows they are at work on.

    `next_temperature` judges a result: None accepts it, a number has the row decoded again at that
    temperature, from the cross-attention cache it has.
    """

    def __init__(
        self, model: Whisper, tokenizer: Tokenizer, options: DecodeOptions, stats: Stats,
        next_temperature: NextTemperature = lambda result: None,
    ):  # fmt: skip
        self.model, self.tokenizer, self.options, self.stats = model, tokenizer, options, stats
        self.next_temperature = next_temperature
        self.state = model.decode_state
        self.slots: list[_Slot | None] = [None] * model.n_rows
        self.generators: dict[int, torch.Generator] = {}

    def start(self, row: int, window: Window) -> None:
        """Put a window into a free row and read its prompt."""
        with self.stats.timed("prefill", self.model.device):
            self.model.decoder.start_window(window.audio_features, slice(row, row + 1))
            slot = _Slot(window.chunk, self.options.language, self.options.temperature)
            if slot.language == "each" and self.tokenizer.is_multilingual:
                probs = language_probs(self.model, self.tokenizer, row)
                slot.language = max(probs, key=probs.get)
            self.slots[row] = slot
            self._read_prompt(row)

    def _read_prompt(self, row: int) -> None:
        """Make the row's window ready to be decoded from its beginning."""
        options, tokenizer, slot = self.options, self.tokenizer, self.slots[row]
        ids = tokenizer.sot_sequence(slot.language, options.task, options.timestamps)
        n_ctx = self.model.args.n_text_ctx
        sample_end = min(n_ctx, len(ids) + (options.max_new_tokens or n_ctx))
        prompt = _to_device(torch.tensor(ids), self.model.device)
        logits = _read_prompt(self.model, row, prompt)[ids.index(tokenizer.sot)]
        slot.no_speech_prob = logits.softmax(dim=-1)[tokenizer.no_speech]
        self.state.start_row(row, prompt, sample_end, slot.temperature)
        self.generators.pop(row, None)
        if slot.temperature > 0:
            seed = hash((options.seed, slot.chunk.start, slot.chunk.end, len(slot.attempts)))
            generator = torch.Generator(self.model.device)
            self.generators[row] = generator.manual_seed(seed & (2**63 - 1))

    def free_rows(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot is None]

    def take_finished(self) -> Iterator[list[WindowResult]]:
        """Attempts of rows that have ended, which become free. Waits for the device."""
        finished = self.state.finished.tolist()
        for row, slot in enumerate(self.slots):
            if slot is None or not finished[row]:
                continue
            with self.stats.timed("word times", self.model.device):
                slot.attempts.append(self._result(row, slot))
            temperature = self.next_temperature(slot.attempts[-1])
            if temperature is None:
                self.slots[row] = None
                self.generators.pop(row, None)
                yield slot.attempts
            else:
                self.stats.n_retries += 1
                slot.temperature = temperature
                with self.stats.timed("prefill", self.model.device):
                    self._read_prompt(row)

    def _result(self, row: int, slot: _Slot) -> WindowResult:
        state, tokenizer = self.state, self.tokenizer
        begin, end = int(state.sample_begin[row]), int(state.input_pos[row]) + 1
        tokens, logprobs = state.tokens[row, begin:end].tolist(), state.logprobs[row, begin:end]
        self.stats.n_tokens += len(tokens)
        is_complete = tokens[-1] == tokenizer.eot
        if is_complete:
            tokens.pop()
        written = "en" if self.options.task == "translate" else slot.language
        words = align_words(
            self.model, tokenizer, row, begin, tokens, logprobs.exp().tolist(), is_complete,
            slot.chunk.start_s, slot.chunk.end_s, written,
        )  # fmt: skip
        return WindowResult(
            chunk=slot.chunk,
            language=slot.language,
            temperature=slot.temperature,
            tokens=tokens,
            text=tokenizer.decode(tokens).strip(),
            words=words,
            avg_logprob=logprobs.mean().item(),
            no_speech_prob=slot.no_speech_prob.item(),
            is_complete=is_complete,
        )


def decode_windows(
    slots: Slots, windows: Iterator[Window], decode_step: DecodeStep
) -> Iterator[list[WindowResult]]:
    """Decode windows, as many at once as there are rows; yield the attempts at each as it ends."""
    device = slots.model.device
    steps_per_check = 8 if device.type == "cuda" else 1  # each check waits for the device
    while True:
        for row in slots.free_rows():
            window = next(windows, None)
            if window is None:
                break
            slots.start(row, window)
        if not any(slots.slots):
            return
        with slots.stats.timed("decode", device):
            for _ in range(steps_per_check):
                refill_noise(slots.state, slots.generators)
                decode_step(slots.model, slots.state, slots.options.top_k)
        slots.stats.n_steps += steps_per_check
        yield from slots.take_finished()
