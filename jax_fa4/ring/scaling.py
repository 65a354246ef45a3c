"""A small model of a ring's time per step: where it stops hiding its transfers.

Assumptions, all inputs of `Machine`: a device runs attention at a fixed rate, whatever the shape; a transfer takes
latency + bytes / bandwidth, and overlaps the attention of the same step fully; all devices of a step wait for the
busiest; merging and launch cost a fixed time a step. Backward does 2.5 times forward's work and moves K and V in the
input dtype and dK and dV in float32. It predicts the ring alone, not the rest of a model.
"""

import dataclasses

from ..layout import get_layout


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the model takes as given.

    Attributes:
      forward_tflops, backward_tflops: attention's rate on one device, TFLOP/s of scores that the mask keeps.
      link_gb_per_s: bandwidth of the slowest link of the ring, one way, GB/s.
      latency_us: of a transfer, microseconds.
      step_us: fixed cost of a ring step (launches and merge), microseconds.
    """

    forward_tflops: float
    backward_tflops: float
    link_gb_per_s: float
    latency_us: float = 10.0
    step_us: float = 20.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention layer over the whole sequence."""

    tokens: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    causal: bool = True
    layout: str = "zigzag"
    bytes_per_element: int = 2


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Times in milliseconds; `hidden` is the share of transfer time that runs beside attention."""

    forward_ms: float
    backward_ms: float
    compute_per_step_ms: float
    transfer_per_step_ms: float
    hidden: float
    efficiency: float


def work_share(layout: str, devices: int, rows: int, causal: bool) -> list[list[float]]:
    """Scores that each device computes at each shift, as a fraction of its rows x rows block: [device][shift]."""
    kind = get_layout(layout)
    run = rows // kind.chunks
    table = []
    for device in range(devices):
        line = []
        for shift in range(devices):
            owner = (device - shift) % devices
            count = 0
            for a in range(kind.chunks):
                for b in range(kind.chunks):
                    q_offset, stride = kind.affine(device, a, devices, rows)
                    kv_offset, _ = kind.affine(owner, b, devices, rows)
                    count += _pairs(run, (q_offset - kv_offset) // stride) if causal else run * run
            line.append(count / rows**2)
        table.append(line)
    return table


def _pairs(run: int, ahead: int) -> int:
    """Pairs (a, b) in [0, run)^2 with b <= a + ahead."""
    if ahead >= run - 1:
        return run * run
    if ahead >= 0:
        return run * run - (run - 1 - ahead) * (run - ahead) // 2
    reach = max(run + ahead, 0)
    return reach * (reach + 1) // 2


def predict(machine: Machine, work: Workload, devices: int) -> Prediction:
    """Time of one layer's forward and backward over a ring of `devices`."""
    rows = work.tokens // devices
    shares = work_share(work.layout, devices, rows, work.causal)
    busiest = [max(line[shift] for line in shares) for shift in range(devices)]
    flops = 4 * work.heads * rows * rows * work.head_dim
    block = 2 * work.kv_heads * rows * work.head_dim
    forward = _sweep(machine, busiest, flops / (machine.forward_tflops * 1e12), block * work.bytes_per_element)
    backward = _sweep(
        machine, busiest, 2.5 * flops / (machine.backward_tflops * 1e12), block * (work.bytes_per_element + 4)
    )
    total_share = sum(map(sum, shares))
    ideal = total_share * flops / devices * (1 / machine.forward_tflops + 2.5 / machine.backward_tflops) / 1e12
    time, transfer, exposed = (forward[i] + backward[i] for i in range(3))
    steps = max(devices - 1, 1)
    return Prediction(
        forward_ms=forward[0] * 1e3,
        backward_ms=backward[0] * 1e3,
        compute_per_step_ms=(time - exposed) / (2 * devices) * 1e3,
        transfer_per_step_ms=transfer / (2 * steps) * 1e3,
        hidden=1 - exposed / transfer if transfer else 1.0,
        efficiency=ideal / time,
    )


def _sweep(machine: Machine, busiest: list[float], block_s: float, block_bytes: float) -> tuple[float, float, float]:
    """(time, transfer time, exposed transfer time) of one pass, in seconds."""
    send = machine.latency_us * 1e-6 + block_bytes / (machine.link_gb_per_s * 1e9)
    time = transfer = exposed = 0.0
    for shift, share in enumerate(busiest):
        compute = share * block_s + machine.step_us * 1e-6
        moving = send if shift < len(busiest) - 1 else 0.0
        time += max(compute, moving)
        transfer += moving
        exposed += max(moving - compute, 0.0)
    return time, transfer, exposed
