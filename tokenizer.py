"""Turn text into Whisper token ids and back, with one SentencePiece file per model.

In:  a `tokenizer.model` file; text, or token ids.
Out: token ids, text, the special ids a decoder needs, and the `tokenizer.model` writer.

Whisper's vocabulary is GPT-2's byte-level BPE. It fits a SentencePiece BPE model without loss: one
piece per id, its bytes spelled in GPT-2's printable alphabet, scored so that merges happen in rank
order. Finding the weights and choosing the language are left to others.

Source: GPT-2 (Radford et al. 2019, section 2.2) for the byte alphabet and the split pattern;
Whisper (Radford et al. 2022, section 2.3) and openai/whisper `whisper/tokenizer.py` for special
tokens, languages and suppressed symbols.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Literal

import regex
import sentencepiece

# Official codes in the order of their ids; the first 99 exist in every model, `yue` since large-v3.
# fmt: off
LANGUAGES: dict[str, str] = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian",
    "ko": "korean", "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish",
    "pl": "polish", "ca": "catalan", "nl": "dutch", "ar": "arabic", "sv": "swedish",
    "it": "italian", "id": "indonesian", "hi": "hindi", "fi": "finnish", "vi": "vietnamese",
    "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay", "cs": "czech",
    "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian",
    "la": "latin", "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak",
    "te": "telugu", "fa": "persian", "lv": "latvian", "bn": "bengali", "sr": "serbian",
    "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian", "mk": "macedonian",
    "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian", "ne": "nepali",
    "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili",
    "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer",
    "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan",
    "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi", "gu": "gujarati",
    "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese",
    "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk", "mt": "maltese",
    "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog",
    "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala",
    "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}
# Other names people use, beside the official ones above.
LANGUAGE_ALIASES: dict[str, str] = {
    "burmese": "my", "castilian": "es", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb",
    "mandarin": "zh", "moldavian": "ro", "moldovan": "ro", "panjabi": "pa", "pushto": "ps",
    "sinhalese": "si", "valencian": "ca",
}
# fmt: on

N_TIMESTAMPS = 1501  # <|0.00|> ... <|30.00|> in steps of 20 ms
TIMESTAMPS_PER_SECOND = 50

# GPT-2 cuts text here before it merges bytes, so that no token spans a word boundary.
_SPLIT_PATTERN = regex.compile(
    r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
# GPT-2's printable alphabet: a byte that prints in Latin-1 stands for itself, the others take the
# code points from 256 on. The vocabularies of Whisper number their first 256 ids in this order too.
_PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
_BYTE_TO_CHAR = {byte: chr(byte) for byte in _PRINTABLE_BYTES} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHER_BYTES)
}
_CHAR_TO_BYTE = {char: byte for byte, char in _BYTE_TO_CHAR.items()}

_EOT = "<|endoftext|>"
_NO_SPEECH = "<|nospeech|>"
_NO_TIMESTAMPS = "<|notimestamps|>"
# Other names of the same tokens, from Hugging Face files.
_HF_NO_SPEECH = "<|nocaptions|>"
_HF_NAMES = {_HF_NO_SPEECH: _NO_SPEECH, "<|iw|>": "<|he|>"}
_TASKS = ("transcribe", "translate")

# Multilingual vocabularies end in an id without bytes, the English one does not. SentencePiece has
# no empty pieces, so this name takes the place; that also tells the two vocabularies apart.
_EMPTY_PIECE = "<empty>"
_UNKNOWN_PIECE = "<unk>"  # SentencePiece insists on one; it lies behind the last id of the model
_ENGLISH_N_TEXT_TOKENS = 50256

# Suppressed while sampling: they begin speaker tags and sound descriptions rather than speech.
_NON_SPEECH_SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"),
    *("[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
]
# These take several tokens; the first is shared with other symbols only (U+2640 to U+267F).
_MUSIC_SYMBOLS = "♩♪♫♬♭♮♯"


def language_code(text: str) -> str:
    """Return the official code for a language code, name or alias, in any letter case.

    Raises: ValueError for a language that Whisper does not know.
    """
    key = text.strip().lower()
    if key in LANGUAGES:
        return key
    codes = {name: code for code, name in LANGUAGES.items()} | LANGUAGE_ALIASES
    if key not in codes:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        aliases = ", ".join(LANGUAGE_ALIASES)
        raise ValueError(
            f"unknown language {text!r}; use a code or a name of: {known}; or an alias: {aliases}"
        )
    return codes[key]


def _to_piece(text_bytes: bytes) -> str:
    return "".join(map(_BYTE_TO_CHAR.__getitem__, text_bytes))


def _to_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_CHAR_TO_BYTE.__getitem__, piece))
    except KeyError as error:
        raise ValueError(
            f"piece {piece!r} has {error}, which is not in GPT-2's byte alphabet"
        ) from None


class Tokenizer:
    """Encode and decode with one `tokenizer.model`, and name its special ids.

    Special ids are looked up by piece name, so every official vocabulary and every fine-tune that
    only appends tokens works alike. Ordinary ids lie below `eot`, special ids from it on.

    Raises: FileNotFoundError without the file; ValueError where it is no Whisper tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._processor = _load_processor(self._path)
        self.n_vocab: int = self._processor.get_piece_size() - 1  # without the unknown piece
        self.is_multilingual: bool = self._find(_EMPTY_PIECE) is not None

        self.eot = self._id_of(_EOT)
        self.sot = self._id_of("<|startoftranscript|>")
        self.translate = self._id_of("<|translate|>")
        self.transcribe = self._id_of("<|transcribe|>")
        self.sot_prev = self._id_of("<|startofprev|>")
        self.no_speech = self._id_of(_NO_SPEECH, _HF_NO_SPEECH)
        self.no_timestamps = self._id_of(_NO_TIMESTAMPS)
        # Both ends are inclusive; a fine-tune may have added tokens behind the last timestamp.
        self.timestamp_begin = self._id_of("<|0.00|>")
        self.timestamp_end = self._id_of("<|30.00|>")
        if self.timestamp_end - self.timestamp_begin != N_TIMESTAMPS - 1:
            raise ValueError(f"{path}: <|0.00|> ... <|30.00|> are not {N_TIMESTAMPS} ids in a row")

        is_control = self._processor.is_control
        self.special_ids: tuple[int, ...] = tuple(filter(is_control, range(self.n_vocab)))
        if self.special_ids != tuple(range(self.eot, self.n_vocab)):
            raise ValueError(f"{path}: the special tokens are not exactly the ids from {_EOT} on")
        found = {code: self._find(f"<|{code}|>") for code in LANGUAGES}
        present = sorted((i, code) for code, i in found.items() if i is not None)
        self.language_ids: dict[str, int] = {code: i for i, code in present}

    def _find(self, name: str) -> int | None:
        token = self._processor.piece_to_id(name)
        return None if token == self._processor.unk_id() else token

    def _id_of(self, *names: str) -> int:
        for name in names:
            token = self._find(name)
            if token is not None:
                return token
        raise ValueError(
            f"{self._path} is not a Whisper tokenizer: it has no {' or '.join(names)}; "
            "convert the checkpoint again with convert_hf_checkpoint.py"
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; a special token's name counts as plain text.

        Raises: UnicodeEncodeError (a ValueError) for unpaired surrogates.
        """
        # One call per part: the call that takes a list starts a thread pool, 150 us even for one.
        parts = (_to_piece(part.encode()) for part in _SPLIT_PATTERN.findall(text))
        return [token for part in parts for token in self._processor.encode(part)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ordinary ids, without special and timestamp ids.

        A character may be spread over several tokens, so bytes are joined before they are read as
        UTF-8; what is no UTF-8 becomes U+FFFD.

        Raises: ValueError for an id outside `0 <= id < n_vocab`.
        """
        text_bytes = b"".join(self._token_bytes(token) for token in tokens)
        return text_bytes.decode("utf-8", errors="replace")

    def _token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token id {token} is outside 0 <= id < {self.n_vocab}")
        if token >= self.eot or self._processor.is_unused(token):
            return b""
        return _to_bytes(self._processor.id_to_piece(token))

    def sot_sequence(
        self, language: str | None, task: Literal["transcribe", "translate"], timestamps: bool
    ) -> tuple[int, ...]:
        """Return the ids that start a transcript.

        `language` is anything `language_code` takes. English-only models were trained without
        language and task tokens, so both are left out there.

        Raises: ValueError for an unknown task, and for a multilingual model with no language or one
        that it does not know.
        """
        if task not in _TASKS:
            raise ValueError(f"unknown task {task!r}; use one of: {', '.join(_TASKS)}")
        sequence = [self.sot]
        if self.is_multilingual:
            sequence += [
                self._language_id(language),
                self.translate if task == "translate" else self.transcribe,
            ]
        if not timestamps:
            sequence.append(self.no_timestamps)
        return tuple(sequence)

    def _language_id(self, language: str | None) -> int:
        if language is None:
            raise ValueError("a multilingual model needs a language; detect it or name it")
        code = language_code(language)
        if code not in self.language_ids:
            raise ValueError(
                f"this model has no language {language!r}; it knows {', '.join(self.language_ids)}"
            )
        return self.language_ids[code]

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Return, sorted, the ids to suppress so that only spoken words are sampled.

        Source: openai/whisper `whisper/tokenizer.py`, `non_speech_tokens`.
        """
        # A hyphen or an apostrophe belongs inside a word; only at the start of one is it dropped.
        suppressed = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in _NON_SPEECH_SYMBOLS:
            spellings = (self.encode(symbol), self.encode(" " + symbol))
            suppressed.update(tokens[0] for tokens in spellings if len(tokens) == 1)
        for symbol in _MUSIC_SYMBOLS:
            suppressed.update((self.encode(symbol)[0], self.encode(" " + symbol)[0]))
        return tuple(sorted(suppressed))


def _load_processor(path: Path) -> sentencepiece.SentencePieceProcessor:
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer file {path}; convert_hf_checkpoint.py writes it beside the weights"
        )
    processor = sentencepiece.SentencePieceProcessor()
    remedy = "convert the checkpoint again with convert_hf_checkpoint.py"
    try:
        processor.load_from_serialized_proto(path.read_bytes())
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model ({error}); {remedy}") from error
    if processor.unk_id() != processor.get_piece_size() - 1:
        raise ValueError(
            f"{path} is not a Whisper tokenizer: no unknown piece at its end; {remedy}"
        )
    return processor


def write_tokenizer(path: str | Path, ranks: list[bytes], special_tokens: list[str]) -> None:
    """Write the `tokenizer.model` that `Tokenizer` opens.

    `ranks[i]` holds the bytes of id `i`; `special_tokens` follow, from `<|endoftext|>` to the last
    id of the model.

    Raises: ValueError where a byte has no id of its own, or two ids would have one name.
    """
    # Imported here because protobuf costs every start of the program and only conversion needs it.
    from sentencepiece import sentencepiece_model_pb2

    missing = {bytes([byte]) for byte in range(256)} - set(ranks)
    if missing:
        raise ValueError(f"the vocabulary has no id for {len(missing)} single bytes: {missing}")
    piece_type = sentencepiece_model_pb2.ModelProto.SentencePiece
    # SentencePiece merges the pair whose piece scores highest, then the leftmost; BPE wants the
    # lowest rank, then the leftmost. Single bytes are never made by a merge.
    rows = [
        (_to_piece(text_bytes), 0.0 if len(text_bytes) == 1 else -float(rank), piece_type.NORMAL)
        if text_bytes
        else (_EMPTY_PIECE, 0.0, piece_type.UNUSED)
        for rank, text_bytes in enumerate(ranks)
    ]
    rows += [(name, 0.0, piece_type.CONTROL) for name in special_tokens]
    rows.append((_UNKNOWN_PIECE, 0.0, piece_type.UNKNOWN))
    repeated = [name for name, count in Counter(name for name, _, _ in rows).items() if count > 1]
    if repeated:
        raise ValueError(f"more than one id is named {', '.join(map(repr, repeated[:5]))}")

    model = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in rows:
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(rows)
    model.trainer_spec.unk_id = len(rows) - 1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = False
    Path(path).write_bytes(model.SerializeToString())


def ranks_from_tiktoken(path: str | Path) -> list[bytes]:
    """Read a `.tiktoken` file: one line per id, base64 bytes and rank.

    Raises: FileNotFoundError; ValueError where a line is malformed or ranks are not 0, 1, 2, ...
    """
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(_read_text(Path(path)).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            pieces[int(rank)] = base64.b64decode(encoded)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not 'base64 rank' ({error})") from error
    if sorted(pieces) != list(range(len(pieces))):
        raise ValueError(f"{path}: the ranks are not 0 to {len(pieces) - 1}, each once")
    return [pieces[rank] for rank in range(len(pieces))]


def ranks_from_hf(folder: str | Path) -> tuple[list[bytes], dict[str, int]]:
    """Read a Hugging Face tokenizer folder into byte ranks and `{added token: id}`.

    Uses `tokenizer.json`, or `vocab.json` with `merges.txt`; and `added_tokens.json` beside either.
    Everything from `<|endoftext|>` on counts as added.

    Raises: FileNotFoundError; ValueError where the files are not Whisper's byte-level BPE.
    """
    folder = Path(folder)
    vocab, merges, added = _read_hf_files(folder)
    ids = vocab | added
    if _EOT not in ids:
        raise ValueError(f"{folder}: the tokenizer has no {_EOT}, so it is not Whisper's")
    eot = ids[_EOT]
    pieces = {i: piece for piece, i in ids.items() if i < eot}
    if len(pieces) != eot:
        missing = sorted(set(range(eot)) - set(pieces))
        raise ValueError(f"{folder}: no piece for {len(missing)} ids below {_EOT}: {missing[:5]}")
    _check_merge_order(folder, vocab, merges)
    ranks = [_to_bytes(pieces[i]) for i in range(eot)]
    return ranks, {name: i for name, i in ids.items() if i >= eot}


def _read_hf_files(folder: Path) -> tuple[dict[str, int], list, dict[str, int]]:
    added: dict[str, int] = {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
        try:
            vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
        except (KeyError, TypeError):
            raise ValueError(f"{folder / 'tokenizer.json'} does not hold a BPE model") from None
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    elif (folder / "vocab.json").is_file():
        vocab = _read_json(folder / "vocab.json")
        lines = _read_text(folder / "merges.txt").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
    else:
        raise FileNotFoundError(
            f"no tokenizer in {folder}: it needs tokenizer.json, or vocab.json with merges.txt"
        )
    if (folder / "added_tokens.json").is_file():
        added |= _read_json(folder / "added_tokens.json")
    return vocab, merges, added


def _check_merge_order(folder: Path, vocab: dict[str, int], merges: list) -> None:
    # Ranks are the ids; that is right only if earlier merges make smaller ids. It holds for both of
    # OpenAI's vocabularies: bytes are 0 to 255, merge k makes id 256 + k. The merges cannot be the
    # ranks: some multilingual files lack the first, "Ġ t" (a reader took it for the header line),
    # though its piece is in the vocabulary and " the" cannot be made without it.
    joined = (m.replace(" ", "") if isinstance(m, str) else "".join(m) for m in merges)
    made = [vocab.get(piece, -1) for piece in joined]
    if any(later <= earlier for earlier, later in zip([255, *made], made, strict=False)):
        raise ValueError(f"{folder}: the merges are not in the order of their ids; ranks unknown")


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no vocabulary file {path}")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(_read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error


def official_special_tokens(
    n_vocab: int, n_text_tokens: int, added: dict[str, int] | None = None
) -> list[str]:
    """List the special tokens of a model, from `<|endoftext|>` to its last id.

    OpenAI's layout comes first, then what a fine-tune appended: named as in `added` (name to id,
    from the checkpoint's own tokenizer), otherwise `<|extra_0|>`, `<|extra_1|>`, ...

    Raises: ValueError where the vocabulary is too small, fits more than one layout, or `added`
    contradicts the layout.
    """
    added = added or {}
    n_languages = _count_languages(n_vocab, n_text_tokens, added)
    names = [_EOT, "<|startoftranscript|>"]
    names += [f"<|{code}|>" for code in list(LANGUAGES)[:n_languages]]
    names += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    names += [_NO_SPEECH, _NO_TIMESTAMPS]
    names += [f"<|{i / TIMESTAMPS_PER_SECOND:.2f}|>" for i in range(N_TIMESTAMPS)]
    first_extra = n_text_tokens + len(names)
    if n_vocab < first_extra:
        raise ValueError(
            f"{n_vocab} ids with {n_text_tokens} text tokens are too few for {len(names)} special "
            "tokens; Whisper models have 51864 (English), 51865 or 51866 ids, fine-tunes more"
        )
    added_names = {i: name for name, i in added.items()}
    names += [
        added_names.get(i, f"<|extra_{i - first_extra}|>") for i in range(first_extra, n_vocab)
    ]
    for name, i in added.items():
        expected = names[i - n_text_tokens] if n_text_tokens <= i < n_vocab else "no special token"
        if expected != _HF_NAMES.get(name, name):
            raise ValueError(
                f"the checkpoint's tokenizer puts {name} at id {i}, expected {expected}"
            )
    return names


def _count_languages(n_vocab: int, n_text_tokens: int, added: dict[str, int]) -> int:
    if _NO_TIMESTAMPS in added:
        n_languages = added[_NO_TIMESTAMPS] - n_text_tokens - 7  # the other tokens before it
        if n_languages not in (99, 100):
            raise ValueError(
                f"{_NO_TIMESTAMPS} at id {added[_NO_TIMESTAMPS]} leaves room for {n_languages} "
                "languages; Whisper models have 99 or 100"
            )
        return n_languages
    n_beyond_99 = n_vocab - n_text_tokens - (99 + 8 + N_TIMESTAMPS)
    if n_text_tokens == _ENGLISH_N_TEXT_TOKENS or n_beyond_99 <= 0:
        return 99  # English-only models never got a hundredth language
    if n_beyond_99 == 1:
        return 100
    raise ValueError(
        f"{n_vocab} ids fit 99 and 100 languages; "
        f"give the ids of the added tokens, {_NO_TIMESTAMPS} among them"
    )
