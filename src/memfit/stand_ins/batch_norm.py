"""Batch norm by the statistics of the batch, its backward, and the ReLU next to it.

native/kernels/batch_norm.c, batch_norm_backward.c and batch_norm_rows.c say what torch does, and why it takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memfit.left_memory import let_go, new_empty
from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import BatchNorm, BatchNormBackward, Piece, has_samples, is_plain, num_threads_for

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_VECTOR = 16  # floats, at the most
_LEAST_MAP = 8  # elements

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of input, weight and bias."""

Normalised = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The result, the mean of each channel, and one over its deviation."""


def native_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    is_rectified: bool = False,
    made: Normalised | None = None,
    in_place: bool = False,
) -> Normalised:
    """Batch norm by the statistics of the batch; with the ReLU behind it in the same go, where that is asked.

    What was made before, with the concatenation in front of it, is returned as it is. In place: the result may take
    the place of the input, which nobody reads any more.
    """
    if made is not None:
        return made
    library = compiled.kernels()
    vectors = (weight, bias, running_mean, running_var)
    is_served = training and _has_maps(input) and (running_mean is None) == (running_var is None)
    if library is None or not is_served or not all(vector is None or is_plain(vector) for vector in vectors):
        let_go()
        plain: Normalised = torch.ops.aten.native_batch_norm.default(
            input, weight, bias, running_mean, running_var, training, momentum, eps
        )
        if is_rectified:
            plain[0].relu_()
        return plain
    num_channels = input.shape[1]
    out = input if in_place else new_empty(input.shape, input.stride(), input)
    mean, invstd = input.new_empty(num_channels), input.new_empty(num_channels)
    run = library.memfit_batch_norm_rows if has_channels_last(input) else library.memfit_batch_norm
    run(_batch_norm(input, vectors, (out, mean, invstd), momentum, eps, is_rectified), num_threads_for(input))
    return out, mean, invstd


def cat_and_normalise(
    pieces: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor | None],
    momentum: float,
    eps: float,
    is_rectified: bool,
    is_kept: bool,
) -> tuple[torch.Tensor | None, Normalised | None]:
    """A concatenation of channels and, in the same go, the batch norm of it, by the statistics of the batch.

    `vectors` are its weight, bias and running statistics. The concatenation itself is made if it is kept. Where there
    is no kernel for both, it is all that is made.
    """
    library = compiled.kernels()
    first = pieces[0]
    are_maps = all(has_samples(piece) and piece.dim() > 2 and piece.numel() > 0 for piece in pieces)
    is_served = are_maps and math.prod(first.shape[2:]) > 1
    if library is None or not is_served or not all(vector is None or is_plain(vector) for vector in vectors):
        return torch.ops.aten.cat.default([*pieces], 1), None
    num_channels = sum(piece.shape[1] for piece in pieces)
    shape = (first.shape[0], num_channels, *first.shape[2:])
    whole = first.new_empty(shape) if is_kept else None
    made = first.new_empty(shape), first.new_empty(num_channels), first.new_empty(num_channels)
    of = _batch_norm(made[0], vectors, made, momentum, eps, is_rectified)
    of.input, of.whole = None, None if whole is None else whole.data_ptr()
    of.pieces = (Piece * len(pieces))(*(Piece(each.data_ptr(), each.stride(0), each.shape[1]) for each in pieces))
    library.memfit_batch_norm(of, num_threads_for(made[0]))
    return whole, made


def renormalised(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    is_rectified: bool,
    in_place: bool = False,
) -> torch.Tensor | None:
    """What batch norm made of the input, by the statistics it saved; None if there is no kernel for it."""
    library = compiled.kernels()
    vectors = (weight, bias, None, None)
    if library is None or not _has_maps(input) or not all(v is None or is_plain(v) for v in (*vectors, mean, invstd)):
        let_go()
        return None
    out = input if in_place else new_empty(input.shape, input.stride(), input)
    run = library.memfit_renormalise_rows if has_channels_last(input) else library.memfit_renormalise
    run(_batch_norm(input, vectors, (out, mean, invstd), 0, 0, is_rectified), num_threads_for(input))
    return out


def _has_maps(input: torch.Tensor) -> bool:
    """True if a kernel can go through it."""
    # Maps of one element each, or of one channel, may be channels last to torch, and are added up in another order.
    has_channels_first = is_plain(input) and input.dim() > 2 and input.stride(1) != 1 and input.numel() > 0
    return has_channels_first or has_channels_last(input)


def _batch_norm(
    input: torch.Tensor,
    vectors: Sequence[torch.Tensor | None],
    made: Sequence[torch.Tensor],
    momentum: float,
    eps: float,
    is_rectified: bool,
) -> BatchNorm:
    num_samples, num_channels = input.shape[:2]
    return BatchNorm(
        input.data_ptr(),
        *(None if vector is None else vector.data_ptr() for vector in vectors),
        *(tensor.data_ptr() for tensor in made),
        momentum,
        eps,
        num_samples,
        num_channels,
        input.numel() // (num_samples * num_channels),
        torch.get_num_threads(),
        is_rectified,
    )


def native_batch_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
    made: Gradients | None = None,
    in_place: bool = False,
) -> Gradients:
    """The gradients of such a batch norm, or those that were made before.

    In place: that of its input may take the place of what came in, which nobody reads any more.
    """
    if made is not None:
        return made
    vectors = weight, save_mean, save_invstd
    run = _kernel_for(grad_out, input, vectors) if train and all(output_mask) else None
    if run is not None:
        return _differentiate(run, grad_out, input, vectors, None, grad_out if in_place else torch.empty_like(input))
    gradients: Gradients = torch.ops.aten.native_batch_norm_backward.default(
        grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
    )
    return gradients


def gate_and_go_on(
    grad: torch.Tensor,
    gate: torch.Tensor,
    threshold: float,
    input: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> tuple[torch.Tensor, Gradients | None]:
    """A ReLU's backward in place, and in the same go that of the batch norm before it, in the same place.

    Its gradients are None where there is no kernel for them: then the gradient is what the ReLU's backward makes of it.
    """
    vectors = weight, mean, invstd
    is_served = threshold == 0 and gate.dtype is grad.dtype and gate.stride() == grad.stride()
    run = _kernel_for(grad, input, vectors) if is_served else None
    if run is None:
        return torch.ops.aten.threshold_backward.grad_input(grad, gate, threshold, grad_input=grad), None
    return grad, _differentiate(run, grad, input, vectors, gate, grad)


def _kernel_for(grad: torch.Tensor, input: torch.Tensor, vectors: Sequence[torch.Tensor | None]) -> Any:
    """The kernel for gradients of that layout; None if there is none."""
    library = compiled.kernels()
    if library is None or not all(vector is not None and is_plain(vector) for vector in vectors):
        return None
    if _are_rows(grad, input):
        return library.memfit_batch_norm_rows_backward
    return library.memfit_batch_norm_backward if _are_maps(grad, input) else None


def _differentiate(
    run: Any,
    grad: torch.Tensor,
    input: torch.Tensor,
    vectors: Sequence[torch.Tensor | None],
    gate: torch.Tensor | None,
    made: torch.Tensor,
) -> Gradients:
    num_samples, num_channels = input.shape[:2]
    grads = made, input.new_empty(num_channels), input.new_empty(num_channels)
    run(
        BatchNormBackward(
            *(None if tensor is None else tensor.data_ptr() for tensor in (grad, input, *vectors, gate, *grads)),
            num_samples,
            num_channels,
            input.numel() // (num_samples * num_channels),
            torch.get_num_threads(),
        ),
        num_threads_for(input),
    )
    return grads


def _are_rows(*maps: torch.Tensor) -> bool:
    """True if a kernel for gradients can go through rows of these side by side."""
    # Of channels that do not fill a vector torch's compiler rounds otherwise.
    is_whole = maps[0].shape[1] % _VECTOR == 0
    return is_whole and all(each.shape == maps[0].shape and has_channels_last(each) for each in maps)


def _are_maps(grad_out: torch.Tensor, input: torch.Tensor) -> bool:
    """True if a kernel for gradients can go through maps of these side by side."""
    # Smaller ones torch adds up otherwise.
    is_large = input.dim() > 2 and input.shape[2:].numel() >= _LEAST_MAP and grad_out.shape == input.shape
    return is_large and all(is_plain(each) and each.stride(1) != 1 for each in (grad_out, input))


def has_channels_last(tensor: torch.Tensor) -> bool:
    """True if it is rows of channels in memory and nothing else, and so many that torch adds them up in parts."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    is_last = tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
    return is_last and tensor.numel() > torch.get_num_threads() * tensor.shape[1]
