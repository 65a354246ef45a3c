"""Who gives a CTA its next work: its place in the grid, or the hardware's cluster launch control.

Under the latter the grid has a CTA (or pair of them) for each piece of work. Those that run ask, before they are done,
for one that has not begun: it is then cancelled, and its work is theirs. A warp of its own asks, all roles of all CTAs
that share their products read the answer. The same warp finds the key blocks of a work by segment ids (`groups`).
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from jax_fa4.kernels.sm100.context import Context, arrive_leader
from jax_fa4.kernels.sm100.groups import announce


def grid(plan, count: Int32, sm_count: Int32) -> Int32:
    """CTAs to launch for so much work."""
    if plan.scheduler == "static":
        count = cutlass.min(count, cutlass.max(sm_count // plan.cta_group, Int32(1)))
    return count * plan.cta_group


def first(context: Context) -> Int32:
    """The number of the CTA's first work."""
    return cute.arch.block_idx()[0] // context.plan.cta_group


@cute.jit
def following(context: Context, number, done):
    """The number of the work after `number`, which was the `done`-th one (from 0), and done + 1; for a whole warp.

    A number beyond the last work's ends the CTA.
    """
    plan, fetch = context.plan, context.barriers.work
    if cutlass.const_expr(plan.scheduler == "static"):
        number += cute.arch.grid_dim()[0] // plan.cta_group
    else:
        fetch.sync_object_full.wait(0, done % 2)
        cta, _, _, given = cute.arch.clc_response(context.shared.response)
        number = context.work.count
        if given != 0:  # the last answer is not answered: the leader may be gone by then
            number = cta // plan.cta_group
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive_leader(context, fetch.sync_object_empty, 0)
    return number, done + 1


@cute.jit
def run(context: Context):
    """The scheduler role: one warp finds the key blocks of a work by ids, and asks for the next work meanwhile.

    Under cluster launch control the leading CTA's asks, for all that share its products.
    """
    plan, fetch, groups = context.plan, context.barriers.work, context.groups
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    number, done, written = first(context), Int32(0), Int32(0)
    while number < context.work.count:
        if cutlass.const_expr(groups is not None):
            written = announce(groups, *context.work.id_blocks(context.work.at(number)), written)
        if cutlass.const_expr(plan.scheduler == "clc"):
            if context.rank == 0:
                fetch.producer_acquire(state)
                with cute.arch.elect_one():
                    cute.arch.issue_clc_query(
                        fetch.producer_get_barrier(state), context.shared.response, multicast=plan.cta_group > 1
                    )
        state.advance()
        number, done = following(context, number, done)
