"""The kernels as a JAX primitive: types, batching, and how calls split over eight devices.

Most of these tests put plain JAX in place of the one-device launch: what they are about is what surrounds it. The last
ones run the whole path, custom call and software GPU included.
"""

import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import call, indexing, launch, partition, plan, reference, registry, targets
from jax_fa4.errors import InvalidArgument, Unsupported
from jax_fa4.kernels.common import scalar_check
from jax_fa4.operands import Operands
from jax_fa4.spec import Arguments, make_spec

EMULATED = "emulate:sm_90a"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def plain_launch(kernel: launch.KernelCall, *arrays):
    """What `launch.launch` computes, densely in plain JAX (which compiles fast)."""
    lead = arrays[0].shape[:-3]
    flat = [
        x.reshape(-1, *x.shape[len(lead) :]) if b.shape[:1] == ("B",) else x
        for b, x in zip(kernel.inputs, arrays, strict=True)
    ]
    named = dict(zip((b.name for b in kernel.inputs), flat, strict=True))
    extra = {
        prefix: tuple(named.pop(name) for name in list(named) if name.startswith(prefix))
        for prefix in ("mask_operands", "score_operands")
    }
    late = {name: named.pop(name) for name in ("lse", "delta", "do") if name in named}
    operands = Operands(**named, **extra)
    if kernel.pass_ == "forward":
        results = list(reference.forward(kernel.spec, operands))
    else:
        gradients = reference.backward(kernel.spec, operands, **late)
        results = [gradients.dq, gradients.dk, gradients.dv]
    shaped = zip(results, kernel.outputs, strict=True)
    return [x.astype(b.dtype).reshape(*lead, *x.shape[1:]) for x, b in shaped]


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(partition, "launch", plain_launch)
    monkeypatch.setattr(call, "launch", plain_launch)


def make(batch=4, rows=12, heads=8, kv_heads=4, dim=16, columns=None):
    generator = np.random.default_rng(7)
    shapes = ((batch, rows, heads, dim), *[(batch, columns or rows, kv_heads, dim)] * 2)
    return tuple(jnp.asarray(generator.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def attend(backend=EMULATED, **options):
    return lambda q, k, v: jax_fa4.attention(q, k, v, backend=backend, **{"causal": True, **options})


def dense(**options):
    """What `attend` is to agree with."""

    def function(q, k, v):
        spec, operands = make_spec(Arguments(q, k, v, **{"causal": True, **options}))
        return reference.forward(spec, operands)[0]

    return function


def with_gradients(function):
    """(dq, dk, dv), and o beside them: one program for both passes."""
    weights = jnp.cos(jnp.arange(16.0))

    def loss(*arrays):
        out = function(*arrays)
        return (out.astype(jnp.float32) * weights).sum(), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def assert_same(got, wanted, tolerance=6e-3):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def collectives(compiled) -> dict[str, int]:
    text = compiled.as_text()
    counts = {name: len(re.findall(rf"= .*? {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_batch_and_heads_split_without_communication(plain, kind, kv_heads):
    mesh, arrays = mesh_of(kind), make(kv_heads=kv_heads)
    heads = P("data", None, "model", None)
    kv = heads if kv_heads % 4 == 0 else P("data", None, None, None)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (heads, kv, kv), strict=True)]
        compiled = with_gradients(attend()).lower(*placed).compile()
        grads, out = compiled(*placed)
    # dK and dV of a KV head that several devices read are added over them, both in one collective.
    assert collectives(compiled) == ({} if kv_heads >= 4 else {"all-reduce": 1})
    assert out.sharding.spec == heads and grads[0].sharding.spec == heads
    assert_same((grads, out), with_gradients(dense())(*arrays))


def test_query_heads_of_a_device_that_begin_within_a_group(plain):
    mesh, arrays = mesh_of(AxisType.Auto), make(heads=12, kv_heads=6, batch=1)  # 3 query heads a device, 2 a group
    placed = [jax.device_put(arrays[0], NamedSharding(mesh, P(None, None, "model", None))), *arrays[1:]]
    assert_same(with_gradients(attend())(*placed), with_gradients(dense())(*arrays))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window": (5, jnp.int32(2)), "q_position": (jnp.arange(4), 2)},
        {
            "q_lengths": jnp.array([12, 3, 7, 0]), "kv_lengths": jnp.array([20, 12, 2, 5]),
            "q_segment_ids": jnp.ones((4, 12), int), "kv_segment_ids": jnp.arange(80).reshape(4, 20) % 2,
        },
    ],
    ids=["causal", "positions", "lengths"],
)
def test_a_split_sequence_keeps_its_rows_and_gathers_keys(plain, options):
    mesh, arrays = mesh_of(AxisType.Auto), make(columns=20)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in arrays]
    compiled = with_gradients(attend(**options)).lower(*placed).compile()
    grads, out = compiled(*placed)
    assert out.sharding.is_equivalent_to(placed[0].sharding, out.ndim)
    assert set(collectives(compiled)) <= {"all-gather", "all-reduce"}
    gathered = re.findall(r"= (\S+?)\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
    assert all(shape.split(",")[1] == "20" for _, shape in gathered), gathered  # keys alone
    assert_same((grads, out), with_gradients(dense(**options))(*arrays))


def test_every_operand_splits(plain):
    mesh, (q, k, v) = mesh_of(AxisType.Auto), make(kv_heads=4)
    options = {
        "sinks": jnp.linspace(-1, 1, 8), "q_segment_ids": jnp.arange(48).reshape(4, 12) // 5,
        "kv_segment_ids": jnp.arange(48).reshape(4, 12) // 5, "q_lengths": jnp.array([12, 3, 7, 0]),
        "kv_lengths": jnp.array([12, 12, 2, 5]), "window": (jnp.int32(3), None), "q_position": (jnp.arange(4), 1),
        "kv_position": (0, 1), "softcap": 2.0,
    }
    sharding = NamedSharding(mesh, P("data", None, "model", None))
    compiled = jax.jit(attend(**options)).lower(*[jax.device_put(x, sharding) for x in (q, k, v)]).compile()
    assert collectives(compiled) == {}
    got = compiled(*[jax.device_put(x, sharding) for x in (q, k, v)])
    assert_same(got, dense(**options)(q, k, v))


def by_index(score, b, h, q, k, table):
    return score + table[b] * (h + 1) + 0.01 * (q - k)


def even_heads_see_less(b, h, q, k):
    return (h % 2 == 1) | (k % 3 != b % 3)


def test_user_functions_see_indices_of_the_whole_call(plain, monkeypatch):
    monkeypatch.setattr(plan, "_check", lambda *_: None)
    mesh, arrays = mesh_of(AxisType.Auto), make()
    table = jnp.arange(4)
    options = {"score_mods": jax_fa4.ScoreFn(by_index, (table,)), "mask": even_heads_see_less}
    sharding = NamedSharding(mesh, P("data", None, "model", None))
    placed = [jax.device_put(x, sharding) for x in arrays]
    want = dense(**options)
    assert_same(jax.jit(attend(**options))(*placed), want(*arrays))
    stacked = [jnp.stack([x, x[::-1]]) for x in arrays]
    assert_same(jax.vmap(attend(**options))(*stacked), jax.vmap(want)(*stacked))


@pytest.mark.parametrize("axes, out_axis", [((0, 0, 0), 0), ((1, None, None), 2), ((3, 2, 1), 1)])
def test_vmap(plain, axes, out_axis):
    arrays = [jnp.stack([x, 2 * x, -x], axis or 0) if axis is not None else x
              for x, axis in zip(make(), axes, strict=True)]
    got, wanted = (jax.vmap(with_gradients(f), axes, out_axis)(*arrays) for f in (attend(), dense()))
    assert_same(got, wanted)


def test_vmap_over_an_operand_without_batch(plain):
    q, k, v = make()
    sinks = jnp.linspace(-2, 2, 24).reshape(3, 8)

    def function(backend):
        return lambda s, q: jax_fa4.attention(q, k, v, sinks=s, backend=backend)

    queries = jnp.stack([q, q + 1, q * 2])
    for axes in ((0, None), (0, 0)):
        inputs = (sinks, queries if axes[1] == 0 else q)
        assert_same(jax.vmap(function(EMULATED), axes)(*inputs), jax.vmap(function("xla"), axes)(*inputs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_over_a_split_axis(plain, kind):
    mesh, arrays = mesh_of(kind), make()
    spec = P("data", None, None, "model", None)
    with jax.set_mesh(mesh):
        stacked = [jax.device_put(jnp.stack([x, 2 * x]), NamedSharding(mesh, spec)) for x in arrays]
        mapped = jax.jit(jax.vmap(attend(), spmd_axis_name="data" if kind is AxisType.Auto else None))
        compiled = mapped.lower(*stacked).compile()
        got = compiled(*stacked)
    assert collectives(compiled) == {}
    assert_same(got, jax.vmap(dense())(*[jnp.stack([x, 2 * x]) for x in arrays]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(plain, check_vma):
    mesh, arrays = mesh_of(AxisType.Auto), make(kv_heads=8)
    spec = P("data", None, "model", None)
    mapped = jax.shard_map(
        with_gradients(attend()), mesh=mesh, in_specs=(spec,) * 3, out_specs=((spec,) * 3, spec), check_vma=check_vma
    )
    compiled = jax.jit(mapped).lower(*arrays).compile()
    assert collectives(compiled) == {}
    assert_same(compiled(*arrays), with_gradients(dense())(*arrays))


def test_inside_shard_map_over_one_axis_of_two(plain):
    mesh, arrays = mesh_of(AxisType.Auto), make(kv_heads=8)
    spec = P("data", None, None, None)
    mapped = jax.shard_map(attend(), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"data"})
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in arrays]
    assert_same(jax.jit(mapped)(*placed), dense()(*arrays))


def test_scan_remat_and_nested_jit(plain):
    mesh, arrays = mesh_of(AxisType.Auto), make(kv_heads=8)

    def layers(function):
        layer = jax.checkpoint(
            lambda x, _: (jax.jit(function)(x, x, x), None),
            policy=jax.checkpoint_policies.save_only_these_names(*jax_fa4.CHECKPOINT_NAMES),
        )
        return lambda q: jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32).sum()

    placed = jax.device_put(arrays[0], NamedSharding(mesh, P("data", None, "model", None)))
    compiled = jax.jit(jax.grad(layers(attend())), donate_argnums=0).lower(placed).compile()
    assert collectives(compiled) == {}
    assert_same(compiled(placed), jax.grad(layers(dense()))(arrays[0]), tolerance=2e-2)  # three layers deep


@pytest.mark.parametrize(
    "sizes", [{"rows": 0}, {"batch": 0}, {"heads": 0, "kv_heads": 0}, {"columns": 0, "rows": 3}], ids=str
)
def test_calls_without_scores_need_no_kernel(sizes, monkeypatch):
    monkeypatch.setattr(registry, "register", lambda: pytest.fail("no custom call is needed"))
    columns = sizes.pop("columns", None)
    q, k, v = make(**sizes)
    if columns == 0:
        k, v = k[:, :0], v[:, :0]
    for options in ({}, {"sinks": jnp.arange(q.shape[2], dtype=jnp.float32)}):
        function = lambda backend, o=options: jax_fa4.attention(q, k, v, backend=backend, return_lse=True, **o)  # noqa: E731
        for a, b in zip(function(EMULATED), function("xla"), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_without_jit(plain):
    q, k, v = make()
    with jax.disable_jit():
        got, back = jax.vjp(attend(), q, k, v)
        gradients = back(got)
    want, back = jax.vjp(attend(), q, k, v)
    for x, y in zip((got, *gradients), (want, *back(want)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_types_of_results(plain):
    spec, operands = make_spec(Arguments(*make(), causal=True))
    o, lse = jax.eval_shape(lambda x: call.forward(EMULATED, spec, x), operands)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((4, 12, 8, 16), jnp.bfloat16, (4, 8, 12), jnp.float32)


def test_targets_are_part_of_what_jit_keeps():
    q, seen = jnp.zeros(3), []

    @jax.jit
    def function(q):
        seen.append(targets.architectures())
        return q

    function(q)
    with jax_fa4.targets.target("sm_100a", "sm_90a", "sm_100a"):
        function(q)
        function(q)
    function(q)
    assert seen == [plan.DEFAULT_TARGETS, ("sm_100a", "sm_90a")]
    with pytest.raises(InvalidArgument, match="sm_80"), targets.target("sm_80"):
        pass


def test_a_backend_asked_for_by_name_says_why_it_cannot(monkeypatch):
    q, k, v = make(dim=64)
    with pytest.raises(Unsupported, match=r"lowered for the CPU.*emulate:"):
        jax.jit(attend("cuda"))(q, k, v)
    with pytest.raises(Unsupported, match="float32"):
        attend("emulate:sm_100a")(*[x.astype(jnp.float32) for x in (q, k, v)])

    def loss(table):
        mod = jax_fa4.ScoreFn(lambda s, b, h, q, k, t: s + t[h], (table,))
        return attend("emulate:sm_90a", score_mods=mod)(q, k, v).astype(jnp.float32).sum()

    with pytest.raises(Unsupported, match=r"'emulate:sm_90a' cannot run the backward of this call: .*'auto' or 'xla'"):
        jax.eval_shape(jax.grad(loss), jnp.zeros(q.shape[2]))
    spec, operands = make_spec(Arguments(q, k, v))
    assert "no NVIDIA GPU" in call.why_not("cuda", spec, operands)
    with monkeypatch.context() as patch:
        patch.setattr(call.compiler, "toolchain", lambda: None)
        patch.setattr(call.compiler, "_memory", {})
        patch.setenv("JAX_FA4_CACHE_DIR", "/nowhere")
        assert "no compiler is installed" in call.unsupported("auto", spec, operands)
        patch.setenv("JAX_FA4_LIBRARY", "/nowhere/library.so")
        assert "pip install" in call.unsupported("auto", spec, operands)
    monkeypatch.setattr(targets, "_gpus", lambda: [type("Device", (), {"compute_capability": "8.0"})()])
    assert "sm_80a" in call.unsupported("auto", spec, operands)


def test_a_gpu_without_its_kernels_warns(monkeypatch):
    spec, operands = make_spec(Arguments(*make()))
    monkeypatch.setattr(call.compiler, "available", lambda *_: False)
    monkeypatch.setattr(registry, "library_path", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "in no cache" in call.unsupported("cuda", spec, operands)
    monkeypatch.setattr(targets, "has_gpu", lambda: True)
    with pytest.warns(UserWarning, match="cannot use its kernels on this GPU: its forward kernel for .*sm_90a"):
        call.unsupported("cuda", spec, operands)


def test_shifted_functions_keep_their_meaning():
    function, _ = jax_fa4.scalar.trace("score_mods", by_index, (jnp.arange(9.0),), jnp.float32)
    moved = indexing._shift(function, 5)
    scalar_check.check(moved)  # kernels can compute it
    assert moved.operand_count == 2 and moved.text != function.text
    args, place = (jnp.float32(0.5), 7, 2, 4, 1), jnp.array([4, 10, 3])
    table = jnp.arange(9.0)
    np.testing.assert_allclose(moved(*args, table, place), function(args[0], 7 % 3 + 4, 12, 4, 1, table), rtol=1e-6)


# The whole path: custom call, compiled kernel, software GPU.


@pytest.fixture
def library():
    try:
        return registry.library()
    except OSError as error:
        pytest.skip(str(error))


def test_the_custom_call_refuses_a_damaged_program(library):
    registry.register()

    def broken(**attributes):
        result = jax.ShapeDtypeStruct((2,), jnp.float32)
        return jax.jit(lambda x: jax.ffi.ffi_call(registry.TARGET, result)(x, **attributes))(jnp.zeros(2))

    good = {"key": "a", "kernel": "toy", "archs": "sm_90a", "symbols": "f", "buffer_counts": np.array([2]),
            "shared_bytes": np.array([0]), "dims": np.zeros(10, np.int64), "sm_90a": "AAAA", "ptx": ""}
    for change, words in (
        ({"key": None}, "'key'"),
        ({"key": "b", "sm_90a": None}, "'sm_90a'"),
        ({"key": "c", "sm_90a": "no base64!"}, "base64"),
        ({"key": "d", "dims": np.zeros(3, np.int64)}, "'dims' must have 10 numbers"),
        ({"key": "e", "symbols": ""}, "no complete compiled module"),
        ({"key": "f"}, "was made for CUDA devices and cannot run on the cpu"),
        ({"key": "g", "ptx": "no PTX"}, "software GPU refuses a module for sm_90a"),
    ):
        attributes = {name: x for name, x in (good | change).items() if x is not None}
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(words)):
            broken(**attributes)


def emulates_sm90():
    arrays = make(1, 128, 2, 1, 64)
    return arrays, jax.jit(attend())(*arrays)


def test_emulated_kernel_through_jit(library):
    arrays, out = emulates_sm90()
    assert_same(out, dense()(*arrays))
    assert "custom_call_target=\"jax_fa4\"" in jax.jit(attend()).lower(*arrays).compile().as_text()


def test_emulated_kernel_from_two_threads(library):
    arrays, wanted = emulates_sm90()
    function, results = jax.jit(attend()), []
    threads = [threading.Thread(target=lambda: results.append(np.asarray(function(*arrays)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and all(np.array_equal(x, np.asarray(wanted)) for x in results)


def test_emulated_kernel_reads_operands_of_every_kind(library):
    arrays, generator = make(1, 64, 2, 2, 64), np.random.default_rng(0)

    def keep(b, h, q, k, flags, table, limit, shifts, periods):
        near = q + shifts[h] < k * periods[1]  # a place that the program says: a slice
        return flags[b, k] | ((table[q] == table[k]) & (k < limit)) | near

    operands = (generator.random((1, 64)) > 0.5, generator.integers(0, 3, 64, np.uint8), np.int32(40),
                np.array([[-3, 120], [5, -100]], np.int8)[:, 0], np.array([0, 1, 2], np.uint16))
    options = {"mask": jax_fa4.MaskFn(keep, tuple(map(jnp.asarray, operands)))}
    assert_same(attend(**options)(*arrays), dense(**options)(*arrays))


def test_emulated_kernel_split_over_devices(library):
    arrays = make(2, 128, 4, 2, 64)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for spec in (P("data", None, "model"), P("data", "model")):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        assert_same(jax.jit(attend())(*placed), dense()(*arrays))
