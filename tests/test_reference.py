"""The oracle and the same-precision reference, against closed forms and loops over single scores."""

import math

import numpy as np

from jax_fa4 import accuracy, cases, reference
from jax_fa4.spec import Arguments, make_spec


def by_loops(a, keep):
    """o and lse by loops in Python floats, softcap 5, sinks and bias included where given."""
    q, k, v = (np.asarray(a[name], np.float64) for name in ("q", "k", "v"))
    (B, S, H, D), (T, K, E) = q.shape, v.shape[1:]
    o, lse = np.zeros((B, S, H, E)), np.full((B, H, S), -np.inf)
    for b, h, i in np.ndindex(B, H, S):
        g = h // (H // K)
        weights = {j: 5 * math.tanh(q[b, i, h] @ k[b, j, g] / math.sqrt(D) / 5) + float(a["bias"][b, h, i, j])
                   for j in range(T) if keep(b, i, j)}
        total = sum(math.exp(s) for s in weights.values()) + math.exp(float(a["sinks"][h]))
        lse[b, h, i] = math.log(total)
        o[b, i, h] = sum((math.exp(s) / total * v[b, j, g] for j, s in weights.items()), np.zeros(E))
    return o, lse


def test_oracle_equals_loops():
    shape = cases.Shape(B=2, S=5, T=7, H=4, K=2, D=8, E=6)
    a = cases.Case("", ("causal", "softcap", "bias", "sinks", "kv_lengths"), shape, "float32").make()
    a["kv_lengths"] = np.array([7, 4])
    spec, operands = make_spec(Arguments(**a))
    got = reference.oracle(spec, operands)
    o, lse = by_loops(a, lambda b, i, j: j < (7, 4)[b] and j <= i + (7, 4)[b] - 5)
    np.testing.assert_allclose(got["o"], o, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-12)


def test_oracle_gradients_by_finite_differences():
    shape = cases.Shape(B=1, S=3, T=4, H=2, K=1, D=2, E=3)
    a = cases.Case("", ("softcap", "bias", "alibi", "sinks"), shape, "float32").make()
    spec, operands = make_spec(Arguments(**a))
    do, dlse = reference.cotangents(operands)
    exact = reference.oracle(spec, operands, (do, dlse))

    def value(**changed):
        import dataclasses

        got = reference.oracle(spec, dataclasses.replace(operands, **changed))
        return (got["o"] * do).sum() + (got["lse"] * dlse).sum()

    for name in ("q", "k", "v", "bias", "sinks"):
        array = np.asarray(getattr(operands, name), np.float64)
        for index in [*np.ndindex(array.shape)][:: max(1, array.size // 5)]:
            step = np.zeros_like(array)
            step[index] = 1e-5
            slope = (value(**{name: array + step}) - value(**{name: array - step})) / 2e-5
            np.testing.assert_allclose(exact["d" + name][index], slope, rtol=1e-6, atol=1e-8)
    slopes = np.asarray(operands.score_operands[0], np.float64)
    step = np.array([1e-5, 0])
    slope = (value(score_operands=(slopes + step,)) - value(score_operands=(slopes - step,))) / 2e-5
    np.testing.assert_allclose(exact["dscore_operands_0"][0], slope, rtol=1e-6)


def test_same_precision_is_near_the_oracle_and_rounds():
    for dtype, low, high in (("bfloat16", 1e-4, 4e-3), ("float16", 1e-5, 1e-3), ("float32", 1e-9, 1e-6)):
        a = cases.Case("", ("causal",), cases.Shape(S=64, T=64), dtype).make()
        spec, operands = make_spec(Arguments(**a))
        ct = reference.cotangents(operands)
        exact, same = reference.oracle(spec, operands, ct), reference.same_precision(spec, operands, ct)
        for name in ("o", "dq", "dk", "dv"):
            relative, _ = accuracy.errors(same[name], exact[name])
            assert low < relative < high, (dtype, name, relative)


def test_draws_move_roundings_and_leave_their_size():
    a = cases.Case("", ("causal", "sinks"), cases.Shape(S=64, T=64)).make()
    spec, operands = make_spec(Arguments(**a))
    ct = reference.cotangents(operands)
    exact = reference.oracle(spec, operands, ct)
    drawn = [reference.same_precision(spec, operands, ct, draw) for draw in range(4)]
    for name in ("o", "dq", "dk", "dv"):  # of many values
        first, *others = (accuracy.errors(results[name], exact[name])[0] for results in drawn)
        np.testing.assert_allclose(others, np.mean(others), rtol=0.05)
        assert 0.9 * first < np.mean(others) < 1.3 * first  # more for o: a row's largest P is 1 in draw 0, hence exact
    of_one_sink = [results["dsinks"][0] - exact["dsinks"][0] for results in drawn]
    assert len(set(of_one_sink)) == 4 and np.std(of_one_sink) > 0.2 * np.abs(of_one_sink).max()


def test_the_rule_refuses_wrong_results():
    a = cases.Case("", ("causal", "no_keys"), cases.Shape(S=8, T=8, D=8, E=8), "float32").make()
    a["kv_lengths"] = np.array([8, 0])
    spec, operands = make_spec(Arguments(**a))
    right = reference.same_precision(spec, operands)
    assert all(row.ok for row in accuracy.judge(right, spec, operands))
    assert np.isneginf(right["lse"][1]).all() and not right["o"][1].any()

    def rejected(name, change):
        wrong = {name: x.copy() for name, x in right.items()}
        change(wrong[name])
        return not next(r for r in accuracy.judge(wrong, spec, operands) if r.name == name).ok

    assert rejected("o", lambda x: x.__imul__(1.001))
    assert rejected("o", lambda x: x.__setitem__((0, 3, 1, 2), x[0, 3, 1, 2] + 1e-3))
    assert rejected("lse", lambda x: x.__setitem__((1, 0, 0), -1e30))
    assert rejected("o", lambda x: x.__setitem__((1, 0, 0, 0), np.nan))


def test_user_functions_are_evaluated_in_float64():
    x = np.full((1, 1, 1, 1), 1.0, np.float32)
    spec, operands = make_spec(Arguments(x, x, x, score_mods=[lambda s, b, h, q, k: s / 3]))
    assert reference.oracle(spec, operands)["lse"][0, 0, 0] == np.float64(1) / 3
    assert np.float32(1) / np.float32(3) != np.float64(1) / 3
