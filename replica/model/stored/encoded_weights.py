"""Weights that are stored as codes and scales, and decoded while they are read.

```
 file ──read──▶ codes [n, k] 8 bits, or 4 bits packed ──decode, 1024 rows at a time──▶ weight in the served dtype
                scales
```

The codes of one tensor at a time are in memory, next to the model's tensors. Decoding multiplies in float32 and rounds
once to the served dtype, so results equal those of transformers' own dequantisation. Products of MXFP4's values and
powers of two are exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.checkpoint.weight_scheme import WeightScheme
from quire.replica.model.stored.weights import StoredTensor

CODES = (torch.float8_e4m3fn, torch.int8)
_ROWS = 1024  # rows decoded at a time, which bounds the memory of the float32 temporary
_GROUP = 32  # numbers of MXFP4 with one scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX_E8M0 = 254  # 255 is NaN


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """A weight of the model, and the two stored tensors from which it is computed."""

    codes: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]  # of the weight
    block: tuple[int, int] | None = None  # rows and columns with one scale; None: MXFP4

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Decode into `out`, of the weight's shape, on the device of the codes.

        Raises
        ------
        CheckpointError
            A scale is not a positive finite number.
        """
        if self.block is None:
            self._decode_mxfp4(codes, scales, out)
            return
        if scales.dtype == torch.uint8:  # exponents, E8M0
            self._check_exponents(scales)
            scales = torch.exp2(scales.float() - 127.0)
        scales = scales.float()
        if not (torch.isfinite(scales) & (scales > 0)).all():
            raise CheckpointError(
                f"{self.scales.file}: {self.scales.name!r} must be finite and positive, is between {scales.min()} "
                f"and {scales.max()}"
            )
        rows_per, columns_per = self.block
        num_rows, depth = self.shape
        scales = scales.reshape(-(-num_rows // rows_per), -(-depth // columns_per))
        scales = scales.repeat_interleave(columns_per, 1)[:, :depth].to(out.device)
        for begin in range(0, num_rows, _ROWS):
            part = codes[begin : begin + _ROWS].float()
            rows = torch.arange(begin, begin + len(part), device=out.device) // rows_per
            out[begin : begin + _ROWS] = part.mul_(scales[rows])

    def _decode_mxfp4(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        self._check_exponents(scales)
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=out.device)
        largest = 6.0 * 2.0 ** (int(scales.max()) - 127)
        if largest > torch.finfo(out.dtype).max:
            raise CheckpointError(
                f"{self.scales.file}: {self.scales.name!r} has {int(scales.max())}, numbers up to {largest:g} that "
                f"{out.dtype} does not hold; use dtype bfloat16"
            )
        exponents = scales.to(out.device).int() - 127
        for expert, expert_codes in enumerate(codes):
            for begin in range(0, len(expert_codes), _ROWS):
                rows = slice(begin, begin + _ROWS)
                part = expert_codes[rows].int()  # [rows, groups, 16]
                pairs = torch.stack([values[part & 15], values[part >> 4]], -1)
                numbers = torch.ldexp(pairs.flatten(2), exponents[expert, rows, :, None])
                out[expert, :, rows] = numbers.flatten(1).t()

    def _check_exponents(self, scales: torch.Tensor) -> None:
        if int(scales.max()) > _MAX_E8M0:
            raise CheckpointError(
                f"{self.scales.file}: {self.scales.name!r} has {int(scales.max())}, must be at most {_MAX_E8M0}: "
                "exponents of E8M0"
            )


def pair_encoded(
    stored: Mapping[str, StoredTensor], scheme: WeightScheme, kept: Collection[str]
) -> tuple[dict[str, StoredTensor], dict[str, EncodedWeight]]:
    """Pair codes with their scales.

    Parameters
    ----------
    stored
        The checkpoint's tensors.
    scheme
        How the checkpoint says that they are stored.
    kept
        Names of weights that stay codes; they and their scales are not paired.

    Returns
    -------
    The tensors without codes and scales, but with a tensor for each decoded weight, in storage order; and the weights
    by name.

    Raises
    ------
    CheckpointError
        Codes and scales have shapes that do not fit.
    """
    encoded: dict[str, EncodedWeight] = {}
    for name, tensor in stored.items():
        if scheme.code == "mxfp4" and name.endswith("_blocks"):
            weight = _mxfp4(tensor, stored.get(name.removesuffix("_blocks") + "_scales"))
            encoded[name.removesuffix("_blocks")] = weight
        elif tensor.dtype in CODES and name.endswith(".weight") and name not in kept:
            scales = stored.get(f"{name}_scale_inv") or stored.get(f"{name}_scale")
            if scales is not None:  # codes without scales are refused where they are mapped
                encoded[name] = _blocks(tensor, scales, scheme)
    used = {weight.scales.name for weight in encoded.values()}
    of_codes = {weight.codes.name: name for name, weight in encoded.items()}
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name in of_codes:
            own = of_codes[name]
            found[own] = replace(tensor, name=own, shape=encoded[own].shape, dtype=torch.float32)
        elif name not in used:
            found[name] = tensor
    return found, encoded


def _mxfp4(codes: StoredTensor, scales: StoredTensor | None) -> EncodedWeight:
    shape = codes.shape
    if len(shape) != 4 or shape[3] * 2 != _GROUP or codes.dtype != torch.uint8:
        raise CheckpointError(
            f"{codes.file}: {codes.name!r} must be uint8 [experts, n, k / {_GROUP}, {_GROUP // 2}], is {codes.dtype} "
            f"{list(shape)}"
        )
    if scales is None or scales.shape != shape[:3] or scales.dtype != torch.uint8:
        found = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{codes.file}: the scales of {codes.name!r} must be uint8 {list(shape[:3])}, are {found}"
        )
    return EncodedWeight(codes, scales, (shape[0], shape[2] * _GROUP, shape[1]))


def _blocks(codes: StoredTensor, scales: StoredTensor, scheme: WeightScheme) -> EncodedWeight:
    """Return the weight with the blocks that the shape of its scales means."""
    if len(codes.shape) != 2:
        raise CheckpointError(
            f"{codes.file}: {codes.name!r} must be a matrix, is {list(codes.shape)}"
        )
    rows, depth = codes.shape
    kinds = [((), (rows, depth)), ((1,), (rows, depth)), ((1, 1), (rows, depth))]
    kinds += [((rows, 1), (1, depth)), ((rows,), (1, depth))]
    if scheme.block is not None:
        height, width = scheme.block
        kinds.insert(0, ((-(-rows // height), -(-depth // width)), scheme.block))
    for shape, block in kinds:
        if scales.shape == shape and scales.dtype is not None:
            return EncodedWeight(codes, scales, codes.shape, block)
    raise CheckpointError(
        f"{scales.file}: {scales.name!r} must be {' or '.join(str(list(shape)) for shape, _ in kinds)} for a weight "
        f"{list(codes.shape)}, is {list(scales.shape)}"
    )
