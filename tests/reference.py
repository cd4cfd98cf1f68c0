"""Rebuild reference models from one of our model.safetensors, for tests that compare with them.

In:  the path of a checkpoint that is not quantized.
Out: openai/whisper's network with the same weights, or state dicts under others' names.

The names are spelled here a second time, apart from the converter's tables, so that a mistake in
one of the two shows.
"""

import re
from pathlib import Path

import torch
import whisper
from torch import Tensor

from convert_hf_checkpoint import Metadata, load_checkpoint
from model import ModelArgs

# Applied in this order to our names, once q, k and v are apart.
_TO_OPENAI = (
    (r"\.positions$", ".positional_embedding"),
    (r"embedding\.weight$", "token_embedding.weight"),
    (r"^encoder\.norm", "encoder.ln_post"),
    (r"^decoder\.norm", "decoder.ln"),
    (r"\.layers\.", ".blocks."),
    (r"(attn|mlp)_norm", r"\1_ln"),
    (r"\.wq\.", ".query."),
    (r"\.wk\.", ".key."),
    (r"\.wv\.", ".value."),
    (r"\.wo\.", ".out."),
    (r"\.fc1\.", ".0."),
    (r"\.fc2\.", ".2."),
)
_TO_HF = (
    (r"\.positions$", ".embed_positions.weight"),
    (r"\.embedding\.", ".embed_tokens."),
    (r"coder\.norm", "coder.layer_norm"),
    (r"cross_attn", "encoder_attn"),
    (r"\.attn", ".self_attn"),
    (r"attn_norm", "attn_layer_norm"),
    (r"mlp_norm", "final_layer_norm"),
    (r"\.mlp\.", "."),
    (r"\.w([qkv])\.", r".\1_proj."),
    (r"\.wo\.", ".out_proj."),
    (r"^", "model."),
)


def _split(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict with q, k and v apart, without the zero bias of k."""
    parts = {}
    for name, tensor in state_dict.items():
        fused = re.search(r"\.w(qkv|kv)\.", name)
        letters = fused[1] if fused else ""
        for letter, part in zip(letters, tensor.chunk(len(letters) or 1), strict=False):
            parts[name.replace(f".w{letters}.", f".w{letter}.")] = part.clone()
        if not fused:
            parts[name] = tensor
    return {name: tensor for name, tensor in parts.items() if not name.endswith(".wk.bias")}


def _rename(state_dict: dict[str, Tensor], rules: tuple) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in _split(state_dict).items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def openai_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under openai/whisper's names."""
    return _rename(state_dict, _TO_OPENAI)


def hf_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of transformers' WhisperForConditionalGeneration."""
    return _rename(state_dict, _TO_HF)


def openai_dims(args: ModelArgs) -> whisper.model.ModelDimensions:
    return whisper.model.ModelDimensions(
        n_mels=args.n_mels,
        n_audio_ctx=args.n_audio_ctx,
        n_audio_state=args.dim,
        n_audio_head=args.n_head,
        n_audio_layer=args.n_audio_layer,
        n_vocab=args.n_vocab,
        n_text_ctx=args.n_text_ctx,
        n_text_state=args.dim,
        n_text_head=args.n_head,
        n_text_layer=args.n_text_layer,
    )


def openai_model(checkpoint_path: str | Path) -> whisper.model.Whisper:
    """Return openai/whisper's network with the weights of our checkpoint, float32, for inference.

    Raises: ValueError for a quantized checkpoint.
    """
    state_dict, metadata = load_checkpoint(checkpoint_path)
    if metadata.quantization is not None:
        raise ValueError(f"{checkpoint_path} is quantized; the reference needs the plain weights")
    reference = whisper.model.Whisper(openai_dims(metadata.model_args))
    reference.load_state_dict(openai_state_dict(state_dict), strict=True)
    reference.register_buffer("alignment_heads", _head_mask(metadata).to_sparse(), persistent=False)
    return reference.float().eval().requires_grad_(False)


def _head_mask(metadata: Metadata) -> Tensor:
    """[n_text_layer, n_head] bool, True for an alignment head."""
    mask = torch.zeros(metadata.model_args.n_text_layer, metadata.model_args.n_head).bool()
    for layer, head in metadata.alignment_heads:
        mask[layer, head] = True
    return mask
