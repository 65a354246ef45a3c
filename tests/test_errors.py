"""Bad input: an error before anything runs that names argument, value, allowed values and remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import masks
from jax_fa4.errors import InvalidArgument, Unsupported
from jax_fa4.spec import AttentionSpec

B, S, T, H, K, D = 2, 5, 6, 4, 2, 8
Q, KV = np.zeros((B, S, H, D), np.float32), np.zeros((B, T, K, D), np.float32)
TABLE = jnp.arange(float(H))


@jax.jit
def plus_table(score, h):
    return score + TABLE[h]


BAD = {
    "rank": (dict(q=Q[0]), r"q: received shape \[5, 4, 8\]; allowed: rank 4.*x\[None\]"),
    "not an array": (dict(q=[1.0]), "q: received list; allowed: an array"),
    "type of an array": (dict(k=jax.ShapeDtypeStruct(KV.shape, KV.dtype)), "k: received ShapeDtypeStruct; allowed: "),
    "integers": (dict(q=Q.astype(np.int32)), "q: received dtype int32; allowed: bfloat16, float16, float32, float64"),
    "dtypes": (dict(k=KV.astype(np.float16)), "q, k, v: received dtypes float32, float16, float32.*same dtype"),
    "batch": (dict(k=KV[:1]), r"k: received shape \[1, 6, 2, 8\]; allowed: the batch of q, 2"),
    "head dims": (dict(k=KV[..., :4]), "k: .*allowed: the head dim of q, 8"),
    "kv lengths": (dict(v=KV[:, :3]), "v: .*allowed: the sequence length of k, 6"),
    "kv heads": (dict(v=KV[:, :, :1]), "v: .*allowed: the number of heads of k, 2"),
    "head counts": (dict(q=Q[:, :, :3]), "q: received 3 heads with 2 KV heads; allowed: a multiple"),
    "no kv heads": (dict(k=KV[:, :, :0], v=KV[:, :, :0]), "q: received 4 heads with 0 KV heads"),
    "D = 0": (dict(q=Q[..., :0], k=KV[..., :0]), "q: .*allowed: a head dim of at least 1"),
    "E = 0": (dict(v=KV[..., :0]), "v: .*allowed: a head dim of at least 1"),
    "zero scale": (dict(scale=0.0), "scale: received 0.0; allowed: a positive finite number.*default"),
    "negative scale": (dict(scale=-1.0), "scale: received -1.0"),
    "nan scale": (dict(scale=float("nan")), "scale: received nan"),
    "scale beyond float32": (dict(scale=1e39), r"scale: received 1e\+39; allowed: .* \(of float32\)"),
    "huge scale": (dict(scale=10**400), "scale: received 1000"),
    "infinite scale": (dict(scale=np.float16(np.inf)), r"scale: received np.float16\(inf\)"),
    "infinite softcap": (dict(softcap=float("inf")), "softcap: received inf"),
    "zero softcap": (dict(softcap=0), "softcap: received 0; allowed: a positive finite number"),
    "softcap array": (dict(softcap=TABLE), r"softcap: received float32\[4\]; allowed: a positive finite number"),
    "boolean softcap": (dict(softcap=True), "softcap: received True"),
    "negative window": (dict(window=(-1, 0)), r"window \(left\): received -1; allowed: None, an integer of at least 0"),
    "negative right": (dict(window=(None, -2)), r"window \(right\): received -2.*None for an unbounded side"),
    "window": (dict(window=3), "window: received 3; allowed: None or a pair"),
    "fractional window": (dict(window=(1.5, 0)), r"window \(left\): received 1.5"),
    "negative mask": (dict(mask=masks.Window(-3, 0)), r"window \(left\): received -3"),
    "run-time mask": (dict(mask=masks.Window(masks.RUNTIME, 0)), "mask: received Window.*traced bounds as window="),
    "array in a mask": (dict(mask=masks.Window(jnp.int32(3), 0)), "mask: received Window.*traced bounds as window="),
    "mask type": (dict(mask=3), "mask: received 3; allowed: a mask of"),
    "mask class": (dict(mask=masks.Causal), "mask: received <class 'jax_fa4.masks.Causal'>; allowed: a mask of"),
    "mask array": (dict(mask=np.ones((S, T), bool)), r"mask: received shape \[5, 6\]; allowed: shape \[2 or 1, 4 or 1"),
    "mask dtype": (dict(mask=np.ones((B, 1, S, T), np.float32)), "mask: received dtype float32; allowed: bool"),
    "bare segments": (dict(mask=masks.Segments()), "mask: received Segments.*Pass q_segment_ids"),
    "one side": (dict(q_segment_ids=np.zeros((B, S), int)), "kv_segment_ids: received None, with q_segment_ids given"),
    "other side": (dict(kv_segment_ids=np.zeros((B, T), int)), "q_segment_ids: received None"),
    "segment shape": (dict(q_segment_ids=np.zeros((B, T), int), kv_segment_ids=np.zeros((B, T), int)),
                      r"q_segment_ids: received shape \[2, 6\]; allowed: shape \[2, 5\]"),
    "segment dtype": (dict(q_segment_ids=np.zeros((B, S)), kv_segment_ids=np.zeros((B, T), int)),
                      "q_segment_ids: received dtype float.*allowed: an integer dtype"),
    "length rank": (dict(kv_lengths=np.zeros((B, 1), int)),
                    r"kv_lengths: received shape \[2, 1\]; allowed: shape \[2\]"),
    "length scalar": (dict(q_lengths=3), r"q_lengths: received shape \[\]"),
    "length dtype": (dict(q_lengths=np.zeros(B)), "q_lengths: received dtype float"),
    "sinks": (dict(sinks=np.zeros(K, np.float32)), r"sinks: received shape \[2\]; allowed: shape \[4\]"),
    "integer sinks": (dict(sinks=np.zeros(H, int)), "sinks: received dtype int.*floating"),
    "bias": (dict(bias=np.zeros((B, H, S, 1), np.float32)), r"bias: received shape \[2, 4, 5, 1\]; allowed: shape"),
    "bias rank": (dict(bias=np.zeros((S, T), np.float32)), r"bias: received shape \[5, 6\]"),
    "positions": (dict(q_position=3), "q_position: received 3; allowed: a pair"),
    "position shape": (dict(kv_position=(np.zeros(3, int), 1)), r"kv_position \(offset\): .*one per example \[2\]"),
    "no offset": (dict(q_position=(None, 1)), r"q_position \(offset\): received NoneType; allowed: integers, a scalar"),
    "strides": (dict(q_position=(0, np.array([1, -1]))), r"q_position \(stride\): received int64\[2\]; allowed: at le"),
    "stride": (dict(kv_position=(0, 0)), r"kv_position \(stride\): received 0; allowed: at least 1"),
    "causal": (dict(causal=1), "causal: received 1; allowed: True or False"),
    "return_lse": (dict(return_lse="yes"), "return_lse: received 'yes'"),
    "deterministic": (dict(deterministic=None), "deterministic: received None"),
    "backend": (dict(backend="cudnn"), "backend: received 'cudnn'; allowed: 'auto', 'cuda', 'xla', 'emulate:sm_90a'"),
    "backend type": (dict(backend=None), "backend: received None"),
    "score mod": (dict(score_mods=[3]), "score_mods: received 3; allowed: functions"),
    "no score mod": (dict(score_mods=None), "score_mods: received None; allowed: functions.*out for none"),
    "operands": (dict(mask=masks.MaskFn(lambda b, h, q, k, n: q > n, TABLE)),
                 r"mask \(operands\): received ArrayImpl; allowed: a tuple of arrays.*\(array,\)"),
    "operand": (dict(score_mods=jax_fa4.ScoreFn(lambda s, b, h, q, k, n: s, (TABLE, None))),
                r"score_mods \(operands\): received tuple of ArrayImpl, NoneType; allowed: a tuple of arrays"),
    "score arity": (dict(score_mods=lambda s: s), "score_mods: .*failed when called with scalars: TypeError"),
    "score dtype": (dict(score_mods=lambda s, b, h, q, k: s > 0),
                    r"score_mods: .*returns bool\[\]; allowed: one scalar"),
    "score shape": (dict(score_mods=lambda s, b, h, q, k: jnp.ones(3) * s), r"score_mods: .*returns float32\[3\]"),
    "score indexing": (dict(score_mods=lambda s, b, h, q, k: s[0]), "score_mods: .*for one score"),
    "branching": (dict(mask=lambda b, h, q, k: bool(q > k)), "mask: .*jnp.where instead of `if`"),
    "mask result": (dict(mask=lambda b, h, q, k: q - k),
                    r"mask: .*returns int32\[\]; allowed: one scalar of dtype bool"),
    "captured array": (dict(score_mods=lambda s, b, h, q, k: s * TABLE[h]),
                       r"score_mods: .*captures an array \(float32\[4\]\).*ScoreFn\(f, operands="),
    "captured under jit": (dict(score_mods=lambda s, b, h, q, k: plus_table(s, h)),
                           r"score_mods: .*captures an array \(float32\[4\]\)"),
    "captured in a mask": (dict(mask=lambda b, h, q, k: TABLE[h] > q), r"mask: .*MaskFn\(f, operands="),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, message = BAD[name]
    arguments = {"q": Q, "k": KV, "v": KV, "backend": "xla", **changed}
    with pytest.raises(InvalidArgument, match=f"(?s){message}") as caught:
        jax_fa4.attention(**arguments)
    assert str(caught.value).endswith(".") and "; allowed: " in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic", "scale", "softcap"])
def test_traced_flags(name):
    with pytest.raises(InvalidArgument, match=f"{name}: received a traced array; allowed: .*known when .*is traced"):
        jax.jit(lambda x: jax_fa4.attention(Q, KV, KV, backend="xla", **{name: x}))(True)


@pytest.mark.parametrize("stride", [-1, np.int32(0), jnp.array([1, 0])])
def test_strides_that_are_known_under_jit(stride):
    with pytest.raises(InvalidArgument, match=r"q_position \(stride\): .*at least 1"):
        jax.jit(lambda q: jax_fa4.attention(q, KV, KV, q_position=(0, stride)))(Q)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_captured_tracers(transform):
    def f(slopes):
        return jax_fa4.attention(Q, KV, KV, score_mods=lambda s, b, h, q, k: s * slopes, backend="xla").sum()

    with pytest.raises(InvalidArgument, match=r"captures an array .*ScoreFn\(f, operands="):
        transform(f)(jnp.ones(2) if transform is jax.vmap else 1.0)


def test_a_backend_asked_for_by_name_never_falls_back():
    bias = np.zeros((1, 1, S, T), np.float32)
    with pytest.raises(Unsupported, match=r"(?s)backend 'cuda' cannot run this call: .*bias.*AttentionSpec\(.*'xla'"):
        jax_fa4.attention(*(x.astype(jnp.bfloat16) for x in (Q, KV, KV)), bias=bias, backend="cuda")


def test_unsupported_carries_its_reason():
    assert Unsupported("too wide").reason == "too wide"
    assert isinstance(Unsupported("x"), NotImplementedError)


def test_specs_are_readable_and_hashable():
    spec = AttentionSpec("bfloat16", 128, 64, 4, 0.5, masks.canonical(masks.Causal() & masks.Window(3, None)))
    assert eval(repr(spec), {**vars(masks), "AttentionSpec": AttentionSpec}) == spec
    assert len({spec, AttentionSpec(**vars(spec))}) == 1
