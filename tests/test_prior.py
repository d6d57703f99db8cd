"""Priors: honoured as given, learned through maps that keep them legal, and refused when they are not legal."""

import pytest
import torch

from vbcaps import Prior
from vbcaps.routing import vb_routing

PRECISIONS = pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
LEGAL = [1e-6, 1e-3, 0.5, 1.0, 30.0, 1e3, 1e6]


def above(precision, dim):
    """nu0 must exceed this."""
    return 0 if precision == "gamma" else dim - 1


def random_spd(dim, seed=0, low=0.5, high=2.0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(dim, dim, generator=gen, dtype=torch.float64)).Q
    A = Q * torch.linspace(low, high, dim, dtype=torch.float64) @ Q.mT
    return (0.5 * (A + A.mT)).to(dtype)


# --- values -----------------------------------------------------------------------------------------------------


@PRECISIONS
@pytest.mark.parametrize("dim", [1, 4, 16])
def test_defaults_are_the_papers(precision, dim):
    p = Prior(dim=dim, precision=precision)()
    identity = torch.eye(dim) if precision == "full" else torch.ones(dim)
    for value, expected in zip(p, (1.0, torch.zeros(dim), 1.0, identity, dim + 1.0), strict=True):
        torch.testing.assert_close(value, torch.as_tensor(expected), rtol=0, atol=0)


@PRECISIONS
@DTYPES
@pytest.mark.parametrize("value", LEGAL)
def test_fixed_values_are_honoured_exactly(precision, dtype, value):
    x = torch.tensor(value, dtype=dtype)
    nu0 = above(precision, 4) + x
    prior = Prior(value, -value, value, value, nu0, dim=4, precision=precision, dtype=dtype)
    p = prior()
    assert p.alpha0 == x
    assert (p.m0 == -x).all()
    assert p.m0.shape == (4,)
    assert p.kappa0 == x
    assert p.nu0 == nu0
    inv_Psi0 = p.inv_Psi0 if precision != "full" else p.inv_Psi0.diagonal()
    torch.testing.assert_close(inv_Psi0, (1 / x).expand(4), rtol=torch.finfo(dtype).eps, atol=0)
    assert all(v.dtype == dtype for v in p)
    assert not list(prior.parameters())


@DTYPES
@pytest.mark.parametrize("given", [5, 5.0, torch.tensor(5)])
def test_whole_numbers_become_floating_point(dtype, given):
    assert Prior(given, dtype=dtype)().alpha0 == torch.tensor(5.0, dtype=dtype)


@pytest.mark.parametrize("learn", [(), "Psi0"])
def test_a_full_Psi0_is_kept_as_its_inverse(learn):
    Psi0 = torch.stack([random_spd(5, seed, 0.01, 100.0) for seed in range(3)])
    p = Prior(Psi0=Psi0, dim=5, precision="full", learn=learn, dtype=torch.float64)()
    torch.testing.assert_close(p.inv_Psi0 @ Psi0, torch.eye(5, dtype=torch.float64).expand(3, 5, 5), rtol=0, atol=1e-9)


@pytest.mark.parametrize("learn", [(), "all"])
@pytest.mark.parametrize(
    ("precision", "Psi0"),
    [("gamma", (3, 4)), ("wishart", (3, 4)), ("full", (3, 4, 4)), ("gamma", (4,)), ("full", (4,))],
)
def test_values_per_type_keep_their_shapes(precision, Psi0, learn):
    gen = torch.Generator().manual_seed(0)

    def some(*shape):
        return 1 + torch.rand(*shape, generator=gen)

    given = torch.diag_embed(some(3, 4)) if Psi0 == (3, 4, 4) else some(*Psi0)
    alpha0, m0, kappa0, nu0 = some(3), some(3, 4), some(3), 4 + some(3)
    prior = Prior(alpha0, m0, kappa0, given, nu0, dim=4, precision=precision, learn=learn)
    per_type = len(Psi0) > 1
    inv_Psi0 = torch.diag_embed(1 / given) if precision == "full" and not per_type else 1 / given
    inv_Psi0 = torch.linalg.inv(given) if given.ndim == 3 else inv_Psi0
    for value, expected in zip(prior(), (alpha0, m0, kappa0, inv_Psi0, nu0), strict=True):
        torch.testing.assert_close(value, expected)
    names = {"alpha0", "m0", "kappa0", "nu0"} | ({"Psi0"} if per_type else set())
    assert prior.types() == dict.fromkeys(names, 3)


def test_a_prior_for_any_number_of_types_names_none():
    assert Prior(dim=4, precision="full").types() == {}


# --- learning ---------------------------------------------------------------------------------------------------


@PRECISIONS
@DTYPES
@pytest.mark.parametrize("value", LEGAL)
def test_learned_values_start_where_they_were_given(precision, dtype, value):
    rtol = 4e-6 if dtype == torch.float32 else 1e-12
    nu0 = above(precision, 4) + value
    given = (value, -value, value, value, nu0)
    p = Prior(*given, dim=4, precision=precision, learn="all", dtype=dtype)()
    identity = torch.eye(4, dtype=dtype) if precision == "full" else torch.ones(4, dtype=dtype)
    expected = (value, -value * torch.ones(4, dtype=dtype), value, identity / value, nu0)
    for got, want in zip(p, expected, strict=True):
        torch.testing.assert_close(got, torch.as_tensor(want, dtype=dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("learn", "names"),
    [
        ((), set()),
        ("nu0", {"nu0"}),
        (["m0", "Psi0"], {"m0", "Psi0"}),
        ("all", {"alpha0", "m0", "kappa0", "Psi0", "nu0"}),
    ],
)
@PRECISIONS
def test_only_what_is_named_is_learned(precision, learn, names):
    prior = Prior(dim=3, precision=precision, learn=learn)
    assert {name.removesuffix("_raw") for name, _ in prior.named_parameters()} == names
    total = sum(value.sum() for value in prior())
    assert total.requires_grad == bool(names)
    if names:
        total.backward()
        assert all(p.grad.abs().max() > 0 for p in prior.parameters())


@PRECISIONS
@pytest.mark.parametrize("dim", [4, 16, 25])
@pytest.mark.parametrize("direction", [1, -1])
def test_learned_values_stay_legal_after_huge_steps(precision, dim, direction):
    prior = Prior(dim=dim, precision=precision, learn="all")
    optimiser = torch.optim.SGD(prior.parameters(), lr=1e3)
    for _ in range(3):
        optimiser.zero_grad()
        (direction * sum(value.sum() for value in prior())).backward()
        optimiser.step()
    p = prior()
    moved = zip(p, Prior(dim=dim, precision=precision)(), strict=True)
    assert all((new - old).abs().max() > 0.4 for new, old in moved)
    assert all(value.isfinite().all() for value in p)
    assert p.alpha0 > 0
    assert p.kappa0 > 0
    assert p.nu0 > above(precision, dim)
    if precision != "full":
        assert (p.inv_Psi0 > 0).all()
    logit, q = vb_routing(torch.rand(1, 1, 5), torch.randn(1, 1, 5, 2, dim), torch.arange(5)[None], prior)
    assert logit.isfinite().all()
    assert all(value.isfinite().all() for value in (*q[:-2], *q.prior))


def test_a_state_dict_carries_the_values():
    old = Prior(2.0, 0.5, 3.0, random_spd(4, dtype=torch.float32), 9.0, dim=4, precision="full", learn=("m0", "Psi0"))
    new = Prior(dim=4, precision="full", learn=("m0", "Psi0"))
    new.load_state_dict(old.state_dict())
    for x, y in zip(old(), new(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


# --- errors -----------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
ROTATION = torch.tensor([[0.8, -0.6], [0.6, 0.8]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[({name: bad}, f"{name} must be") for name in ("alpha0", "kappa0") for bad in (0, -1.0, NAN, INF, 1e-8, 1e8)],
        *[({name: torch.tensor([1.0, bad])}, f"{name} must be") for name in ("alpha0", "kappa0") for bad in (0.0, NAN)],
        *[({name: torch.ones(2, 2)}, f"{name} must be a number or one") for name in ("alpha0", "kappa0", "nu0")],
        *[({"nu0": bad}, "nu0 must be positive") for bad in (0, -1.0, NAN, INF)],
        *[
            ({"nu0": bad, "precision": precision}, "nu0 must be above dim - 1 = 1 for precision")
            for precision in ("wishart", "full")
            for bad in (0.5, 1.0, torch.tensor([3.0, 1.0]), NAN)
        ],
        ({"nu0": 15.0, "dim": 16, "precision": "full"}, "nu0 must be above dim - 1 = 15"),
        ({"nu0": 24.0, "dim": 25, "precision": "wishart"}, "nu0 must be above dim - 1 = 24"),
        *[({"m0": bad}, "m0 must be finite") for bad in (NAN, INF, 1e8, torch.tensor([0.0, NAN]))],
        *[({"m0": torch.zeros(*shape)}, "m0 must be a number") for shape in ((3,), (2, 3), (1, 2, 2))],
        *[({"Psi0": bad}, "Psi0 must be positive") for bad in (0, -1.0, NAN, INF, 1e-8, torch.tensor([1.0, 0.0]))],
        *[({"Psi0": torch.ones(*shape)}, "Psi0 must be a number") for shape in ((3,), (2, 3), (1, 2, 2))],
        *[
            ({"Psi0": torch.ones(*shape), "precision": "full"}, "Psi0 must be a number")
            for shape in ((3,), (3, 2), (3, 3), (1, 2, 2, 2))
        ],
        *[
            ({"Psi0": bad, "precision": "full"}, "Psi0 must be a symmetric")
            for bad in (NAN, ROTATION, torch.tensor([[1.0, NAN], [NAN, 1.0]]))
        ],
        *[
            ({"Psi0": bad, "precision": "full"}, "Psi0 must be positive definite")
            for bad in (
                0.0,
                -1.0,
                1e-8,
                torch.ones(2, 2),
                torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
                torch.tensor([1.0, 0.0]),
            )
        ],
        ({"precision": "diagonal"}, "precision must be one of .* got 'diagonal'"),
        ({"learn": "alpha"}, r"learn must name some of .* got \['alpha'\]"),
        ({"learn": ("m0", "beta_a")}, r"learn must name some of .* got \['beta_a'\]"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
    ],
)
def test_a_prior_that_is_not_legal_raises_an_error_that_names_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        Prior(**({"dim": 2} | arguments))


def test_a_Psi0_that_float32_cannot_hold_is_refused_and_float64_holds_it():
    refused = 0
    for seed in range(40):
        Psi0 = random_spd(4, seed, 1e-4, 1e4)
        exact = Prior(Psi0=Psi0, dim=4, precision="full", dtype=torch.float64)().inv_Psi0
        assert torch.linalg.eigvalsh(exact)[0].item() == pytest.approx(1e-4, rel=1e-6)
        try:
            rounded = Prior(Psi0=Psi0, dim=4, precision="full")().inv_Psi0
        except ValueError as error:
            assert "Psi0" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert torch.linalg.eigvalsh(rounded.double()).min() > 0
    assert 0 < refused < 40
