"""Read the variables of a CTranslate2 Whisper file, `model.bin`.

bytes -> {variable name: tensor}, aliases included. What the variables mean is for
`convert_hf_checkpoint.py` to say.

Source: binary version 6 of CTranslate2's `python/ctranslate2/specs/model_spec.py`: little endian;
u32 version, spec name, u32 spec revision; then u32 count of variables, each of name, u8 rank, u32
dimensions, u8 dtype, u32 byte count, data; then u32 count of aliases, two names each. A name is a
u16 length and that many bytes, the last of them zero.
"""

import struct
from math import prod

import torch
from torch import Tensor

_DTYPES = (
    torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16,
)  # fmt: skip


def read_model_bin(data: Tensor) -> dict[str, Tensor]:
    """Variables of a model.bin, given as bytes [n] uint8.

    Raises: struct.error where it ends early; ValueError for another version, quantized weights or
    damage.
    """
    view, position = memoryview(data.numpy()), 0

    def read(code: str):
        nonlocal position
        (value,) = struct.unpack_from(f"<{code}", view, position)
        position += struct.calcsize(f"<{code}")
        return value

    def read_string() -> str:
        return read(f"{read('H')}s").rstrip(b"\0").decode()

    if (version := read("I")) != 6:
        raise ValueError(f"CTranslate2 binary version {version}; only 6 is supported")
    if (spec := (read_string(), read("I"))) != ("WhisperSpec", 3):
        raise ValueError(f"holds {spec}, expected WhisperSpec of revision 3")
    variables = {}
    for _ in range(read("I")):
        name, shape = read_string(), [read("I") for _ in range(read("B"))]
        dtype_id, n_bytes = read("B"), read("I")
        dtype = _DTYPES[dtype_id] if dtype_id < len(_DTYPES) else torch.uint8
        if shape and not dtype.is_floating_point:
            raise ValueError(
                f"quantized weights ({name} is {dtype}); convert the float16 or "
                "float32 model, then quantize it with quantize.py"
            )
        if n_bytes != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has {n_bytes} bytes for {shape} of {dtype}")
        # Cloned because tensors begin at odd places in the file.
        tensor, position = data[position : position + n_bytes].clone(), position + n_bytes
        read("0s")  # the tensor must end within the file
        variables[name] = tensor.view(dtype).view(shape)
    aliases = {read_string(): read_string() for _ in range(read("I"))}
    if position != len(data) or not set(aliases.values()) <= set(variables):
        raise ValueError(f"damaged: bytes left over, or unknown targets in the aliases {aliases}")
    return variables | {alias: variables[target] for alias, target in aliases.items()}
