"""What a step costs on a device nobody has at hand: a roofline over its data sheet.

    time = launch + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))

An op that makes only views runs no kernel and costs nothing. Convolutions have two prices (vDNN's p and m): that of the
fastest algorithm with its workspace, and that of the one that needs none.

[Note: the workspace of the fastest algorithm]
Which algorithm cuDNN finds fastest is not published, so we model one: FFT over 32 x 32 tiles, for kernels of 3 to 32 a
side with stride 1. Its workspace follows from its definition (Convolution.tile_bytes). All other convolutions run as
precomputed GEMM, whose workspace is small; we say none. So does half precision on tensor cores. Under this model the
baseline of VGG-16 at batch 256 comes to 27.3 GB; vDNN reports 28 (tests/test_roofline.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from memfit.capture.step import Op, Step
from memfit.collector import collector_paused
from memfit.cost.convolutions import Convolution, convolution_of
from memfit.cost.costs import CodecRate, Costs, Link, OpCost, picoseconds, priced_calls
from memfit.cost.densities import assumed_densities
from memfit.cost.devices import Device
from memfit.cost.flops import Work, arithmetic_of
from memfit.cost.signature import signature
from memfit.cost.traffic import runs_no_kernel, traffic_bytes
from memfit.errors import BadOption

FASTEST = "fastest"
NONE = "none"
WORKSPACES = (FASTEST, NONE)


@collector_paused()
def roofline(step: Step, device: Device, *, workspace: str = FASTEST, also: Sequence[Step] = ()) -> Costs:
    """Price every op of the step on the device; `workspace` says which algorithm convolutions use.

    `also` are other forms of the step (capture/rewrites/tight.py) whose ops are to be in the list too.
    """
    if workspace not in WORKSPACES:
        raise BadOption(f"workspace={workspace!r}: unknown. Convolutions have: {', '.join(WORKSPACES)}")
    offered = WORKSPACES if workspace == FASTEST else (workspace,)
    prices: dict[str, OpCost] = {}
    algorithms: dict[str, dict[str, OpCost]] = {}
    convolutions: list[Convolution] = []
    for form, op in ((each, op) for each in (step, *also) for op in priced_calls(each)):
        if (key := signature(form, op)) in prices:
            continue
        prices[key] = _price(form, op, device, workspace)
        if (convolution := convolution_of(form, op)) is not None:
            convolutions.append(convolution)
            algorithms[key] = {choice: _price(form, op, device, choice) for choice in offered}
    return Costs(
        device=device.name,
        by_signature=prices,
        links=host_links(device),
        default_codec=CodecRate(device.stream_bytes_per_s, device.stream_bytes_per_s, device.launch_s, of_traffic=True),
        memory_bytes=device.memory_bytes,
        source=f"roofline of {device.name}{f', {device.title}' if device.title else ''}, figures: {device.file}",
        notes=(*_notes(device, workspace, convolutions), *_notes_on_kernels(step)),
        algorithms=algorithms,
        densities=assumed_densities(step),
    )


def convolution_choices(step: Step, device: Device) -> dict[int, Mapping[str, OpCost]]:
    """For each convolution, by its place among the ops, what it costs by either algorithm."""
    return roofline(step, device).choices(step)


def host_links(device: Device) -> Mapping[str, Link]:
    """The way to the host's memory: one channel out, another back."""
    return {
        "host": Link("host", "d2h", "h2d", device.send_bytes_per_s, device.fetch_bytes_per_s, device.latency_s),
    }


def _price(step: Step, op: Op, device: Device, workspace: str) -> OpCost:
    if runs_no_kernel(step, op):
        return OpCost(0, is_estimated=True)
    move_s = traffic_bytes(step, op) / device.stream_bytes_per_s
    compute_s = 0.0
    workspace_bytes = 0
    if (arithmetic := arithmetic_of(step, op)) is not None:
        peak = device.peak_flops_per_s(arithmetic.dtype)
        compute_s = arithmetic.flops / (peak * _efficiency(device, arithmetic.work, workspace))
    if workspace == FASTEST and (convolution := convolution_of(step, op)) is not None:
        workspace_bytes = _workspace_bytes(convolution, device)
    return OpCost(picoseconds(device.launch_s + max(compute_s, move_s)), workspace_bytes, is_estimated=True)


def _efficiency(device: Device, work: Work, workspace: str) -> float:
    if work is Work.MATMUL:
        return device.matmul_efficiency
    if work is Work.ATTENTION:
        return device.attention_efficiency
    return device.convolution_efficiency if workspace == FASTEST else device.plain_convolution_efficiency


def _workspace_bytes(convolution: Convolution, device: Device) -> int:
    """Bytes the fastest algorithm takes. See [Note: the workspace of the fastest algorithm]."""
    half = convolution.dtype in (torch.float16, torch.bfloat16)
    if half and device.peak_flops_per_s(convolution.dtype) > device.flops_per_s:
        return 0
    return convolution.tile_bytes


def _notes_on_kernels(step: Step) -> Iterator[str]:
    """What the step would be on the device itself, as far as it differs from the step that was captured."""
    yield "the step is that of CPU tensors: where CUDA has other kernels, it saves other tensors"
    if any(op.target.startswith("aten._softmax.") for op in step.ops[: step.num_forward]):
        yield "attention is softmax and matrix products here; CUDA's fused kernels would keep far less of it"


def _notes(device: Device, workspace: str, convolutions: list[Convolution]) -> Iterator[str]:
    """What a reader should know of the prices."""
    yield f"a roofline, not a measurement: every op {device.launch_s * 1e6:g} us and then its arithmetic or its bytes"
    if convolutions:
        largest_bytes = max(_workspace_bytes(convolution, device) for convolution in convolutions)
        takes = f"workspace up to {largest_bytes / 1e9:.2f} GB (tiled FFT model)" if largest_bytes else "no workspace"
        fast, plain = (
            f"{device.convolution_efficiency:.2f} of peak",
            f"{device.plain_convolution_efficiency:.2f} of peak",
        )
        if workspace == FASTEST:
            yield f"convolutions: fastest algorithm, {fast}, {takes}; without workspace {plain}"
        else:
            yield f"convolutions: without workspace, {plain}; fastest algorithm {fast}, {takes}"
    in_float32 = any(convolution.dtype == torch.float32 for convolution in convolutions)
    if in_float32 and (device.tf32_flops_per_s or 0) > device.flops_per_s:
        yield "convolutions are priced in full float32; torch lets cuDNN use TF32 for them here, which is faster"
    send, fetch = device.send_bytes_per_s / 1e9, device.fetch_bytes_per_s / 1e9
    yield f"host link: {send:g} GB/s out, {fetch:g} GB/s back; source: {device.sources.get('link', 'none')}"
    yield f"memory: {device.memory_bytes / 2**30:.4g} GiB in all; what driver and CUDA context take is not taken off"
