"""A head as a folder: model.safetensors with its weights in fp16 and the draft vocabulary, and config.json."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.errors import ConfigError, ModelError
from backend.layers.linear import Linear
from backend.layers.ops import REFERENCE_OPS, LayerOps
from backend.models.model_config import DecoderConfig
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.head_config import HeadConfig, read_head_config
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.unroll import DraftHead

_WEIGHTS_NAME = "model.safetensors"
_VOCABULARY = "draft_token_ids"
_STORED = torch.float16  # ten bits of mantissa at the weights' own scale, where bfloat16 has seven


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """
    Attributes:
        draft_token_ids: int64 [draft_vocab_size], ascending: the target's ids that the head's logits belong to.
        num_parameters: of the head itself.
    """

    head: DraftHead
    config: HeadConfig
    draft_token_ids: Tensor
    num_parameters: int


def build_head(
    config: HeadConfig,
    target: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: LayerOps = REFERENCE_OPS,
) -> DraftHead:
    """With uninitialised parameters."""
    if config.kind == "medusa":
        return MedusaHeads(target.hidden_size, config.num_speculative_tokens, dtype=dtype, device=device)
    return EagleHead(target, len(config.feature_layers), ops=ops, dtype=dtype, device=device)


def save_head(folder: Path, head: DraftHead, config: HeadConfig, draft_token_ids: Tensor) -> int:
    """Write both files, over a head that is there; the bytes of the weights.

    Raises `ModelError` where the folder cannot be written.
    """
    tensors = {name: value.detach().to("cpu", _STORED) for name, value in head.named_parameters()}
    tensors[_VOCABULARY] = draft_token_ids.to("cpu", torch.int32)
    unfinished = folder / f"{_WEIGHTS_NAME}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata={"format": "pt"})
        os.chmod(unfinished, 0o644)  # the library makes it the owner's alone
        os.replace(unfinished, folder / _WEIGHTS_NAME)
        config.write(folder)
        return (folder / _WEIGHTS_NAME).stat().st_size
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def load_head(
    folder: Path,
    target: DecoderConfig,
    fingerprint: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: LayerOps = REFERENCE_OPS,
) -> LoadedHead:
    """The head of `folder` with its weights in `dtype`, for a target of that config, laid out for the device.

    Args:
        fingerprint: the target's, of `target_fingerprint`.
    Raises:
        ConfigError: the head was trained for another target.
        ModelError: a file is missing or damaged, or the files disagree.
    """
    config = read_head_config(folder)
    if config.target_fingerprint != fingerprint:
        raise ConfigError(
            f"{folder} was trained for {config.target}, whose weights are not those of this target; "
            "train one for it with: servelab heads train"
        )
    path = folder / _WEIGHTS_NAME
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    token_ids = tensors.pop(_VOCABULARY, torch.empty(0)).long()
    _check_vocabulary(path, token_ids, config, target)
    head = build_head(config, target, dtype=dtype, device=device, ops=ops)
    parameters = dict(head.named_parameters())
    if parameters.keys() != tensors.keys():
        raise ModelError(f"{path}: has other tensors than an {config.kind} head of {config.target}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ModelError(
                f"{path}: {name} has shape {list(tensors[name].shape)}, and the target asks for {list(parameter.shape)}"
            )
        if not tensors[name].isfinite().all():
            raise ModelError(f"{path}: {name} has values that are NaN or infinite; train the head anew")
        parameter.data.copy_(tensors[name])
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    for module in head.modules():
        if isinstance(module, Linear):
            module.prepare()
    return LoadedHead(head.eval(), config, token_ids.to(device), num_parameters)


def _check_vocabulary(path: Path, token_ids: Tensor, config: HeadConfig, target: DecoderConfig) -> None:
    is_list = token_ids.ndim == 1 and len(token_ids) == config.draft_vocab_size
    if not is_list or not (token_ids[1:] > token_ids[:-1]).all():
        raise ModelError(f"{path}: {_VOCABULARY} is not an ascending list of {config.draft_vocab_size:,} ids")
    if token_ids[0] < 0 or token_ids[-1] >= target.vocab_size:
        raise ModelError(f"{path}: {_VOCABULARY} has ids outside the target's vocabulary of {target.vocab_size:,}")
    if config.feature_layers and config.feature_layers[-1] > target.num_layers:
        raise ModelError(
            f"{path.parent}: feature layer {config.feature_layers[-1]} is above the target's {target.num_layers}"
        )
