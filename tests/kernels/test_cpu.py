"""The C++ kernels against the reference: outputs, every gradient, bits, threads, and what happens without a compiler.

Where there are neither built kernels nor a compiler only the tests of that remain.
"""

import ctypes
import math
import os
from contextlib import nullcontext, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.harness import (
    EPS,
    F32,
    F64,
    HARD,
    ROUTINGS,
    assert_backend_equals_reference,
    assert_hard_input_is_finite_and_within_budget,
    assert_layer_equals_reference,
    assert_operators_pass_opcheck,
    assert_same_bits,
    make_routing,
    problem,
    routed,
    routed_here,
)
from kernels.training import assert_training_drifts_no_further_than_rounding, stripes
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vbcaps import CapsNet, Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.kernels import backend_for, dynamic, em, route, vb
from vbcaps.kernels.backend import Votes, backend_named
from vbcaps.kernels.cpu import build, calls, launch, library
from vbcaps.losses import activation_nll_loss
from vbcaps.routing import VBRouting
from vbcaps.routing.fields import conv_fields

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
needs_kernels = pytest.mark.skipif(
    build.find_compiler() is None and not library.file_of("baseline").exists(),
    reason="needs built kernels or a compiler",
)


@pytest.fixture(autouse=True)
def _alone():
    """One thread."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def layers(draw):
    """Any kernel and stride, children that no field sees, one to 64 types of children and parents."""
    kernel, stride = draw(st.tuples(*[st.integers(1, 5)] * 2)), draw(st.tuples(*[st.integers(1, 3)] * 2))
    fields, over = draw(st.tuples(*[st.integers(1, 3)] * 2)), draw(st.tuples(*[st.integers(0, 1)] * 2))
    size = tuple(k + s * (f - 1) + o for k, s, f, o in zip(kernel, stride, fields, over, strict=True))
    types = draw(st.sampled_from((1, 2, 3, 5, 16, 64)).filter(lambda k: k * math.prod(size) <= 128))
    batch = draw(st.sampled_from((1, 2, 4, 5, 17)))
    parents = draw(st.sampled_from((1, 2, 3, 5, 16, 64)).filter(lambda k: k * types * math.prod(size) * batch <= 20000))
    layer = dict(size=size, types=types, kernel=kernel, stride=stride, batch=batch, parents=parents)
    return layer | dict(whole=draw(st.booleans()), seed=draw(st.integers(0, 999)))


# --- outputs and gradients --------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("case", ROUTINGS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(layer=layers(), iters=st.integers(1, 4))
def test_outputs_and_gradients_are_within_the_error_budget(case, layer, iters):
    assert_backend_equals_reference(problem(make_routing(case, layer["parents"], iters, layer["seed"]), **layer), "cpu")


@needs_kernels
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "vb-wishart-paper-typed"])
@pytest.mark.parametrize("iters", [1, 3])
def test_gradients_through_the_last_iteration_are_within_the_error_budget(case, iters):
    routing = make_routing(case, 3, iters)
    routing.through = "last"
    assert_backend_equals_reference(problem(routing), "cpu")


@needs_kernels
@pytest.mark.parametrize("case", ["vb-gamma-released-fixed", "em-default", "dynamic"])
@pytest.mark.parametrize("batch", [1, 32])
def test_the_papers_first_layer_is_within_the_error_budget(case, batch):
    """{64, 16, 16, ..}, on a smaller map."""
    sizes = dict(size=(7, 7), types=16, stride=(2, 2), parents=16, batch=batch)
    assert_backend_equals_reference(problem(make_routing(case, 16), **sizes), "cpu")


@needs_kernels
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda **o: ConvCaps(3, 2, (2, 3), (1, 2), (1, 0), **o), (2, 3, 5, 3)),
        (lambda **o: ConvCaps(2, 5, 3, 2, 2, **o), (1, 4, 4, 2)),
        (lambda **o: ClassCaps(3, 5, **o), (5, 2, 2, 3)),
        (lambda **o: ClassCaps(2, 1, **o), (1, 3, 1, 2)),
    ],
    ids=["conv", "padded", "class", "one class"],
)
def test_layers_are_within_the_error_budget(layer, shape, routing):
    assert_layer_equals_reference(layer(routing=routing), torch.rand(shape), torch.randn(*shape, 4, 4), "cpu")


@needs_kernels
@pytest.mark.parametrize("variant", [*build.variants(), "O1"])
def test_every_instruction_set_is_within_the_error_budget(variant, monkeypatch, tmp_path):
    """Vectors of 16 numbers, of 8 and of 4; and one more opinion of the same compiler."""
    if variant == "O1":
        use_fresh_build(monkeypatch, tmp_path, MACHINES=(("-march=native", "-O1"),))
    elif variant not in library.supported():
        pytest.skip(f"this machine has no {variant}")
    else:
        use(monkeypatch, variant)
        assert library.library().lanes() == {"avx512": 16, "avx2": 8, "baseline": 4}[variant]
    for case, batch in (
        ("vb-gamma-released-fixed", 1),
        ("vb-wishart-paper-shared", 7),
        ("em-default", 4),
        ("dynamic", 5),
    ):
        conv = problem(make_routing(case, 5), size=(4, 5), types=3, parents=5, batch=batch)
        assert_backend_equals_reference(conv, "cpu")
        whole = problem(make_routing(case, 2), size=(3, 3), parents=2, batch=batch, whole=True)
        assert_backend_equals_reference(whole, "cpu")


@needs_kernels
def test_priors_may_be_of_another_type_and_order():
    m0, Psi0 = torch.randn(16, 3, dtype=F64).T, 0.5 + torch.rand(16, 3, dtype=F64).T
    p = problem(VBRouting(3, iters=2, prior=Prior(m0=m0, Psi0=Psi0, learn="all", dtype=F64)))
    logit, means, _ = route(p.routing, p.a, p.pose, p.W, p.fields, backend="cpu")
    p.routing.float()
    for x, y in zip((logit, means), route(p.routing, p.a, p.pose, p.W, p.fields, backend="cpu")[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("case", ["vb-gamma-released-fixed", "vb-wishart-paper-typed", "em-default", "dynamic"])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_package_gives_the_bits_of_kernels_that_are_compiled_for_this_machine(case, batch, monkeypatch):
    """Where both use the same instruction set, which is the best that a package has."""
    native, best = build.build_here("native"), library.supported()[0]
    try:
        packaged = library.shipped(best)
    except build.NoLibraryError:  # in a checkout whose kernels were changed since they were built
        packaged = build.build_here(best)
    assert native.lanes() == packaged.lanes()
    p, found = problem(make_routing(case, 5), types=3, parents=5, batch=batch), []
    for loaded in (native, packaged):
        monkeypatch.setattr(library, "_library", lambda loaded=loaded: loaded)
        found.append(routed(p, "cpu"))
    assert_same_bits(*found)


@needs_kernels
@pytest.mark.parametrize("batch", [2, 19])  # vectors of types, and of images
def test_any_terms_go_into_the_gradients_of_votes(batch):
    """Every kind of term, as a caller puts it, where VB and EM write their own."""
    p, T = problem(make_routing("dynamic", 5), size=(4, 5), types=3, kernel=(2, 3), parents=5, batch=batch), 3
    values = [torch.randn(len(p.fields.child), 5, batch, 4, 4) for _ in range(4 * T - 1)]

    def gradients(name):
        run = backend_named(name)
        index = (p.fields.child, p.fields.parents, p.fields.seen, p.fields.types)
        v = Votes(p.a.T.contiguous(), run.lay_poses(p.pose), p.W, None, *index, name)
        C, N, L, _, J = v.sizes

        def laid(x):
            run.as_poses(made := run.new_poses(v.a, L, J, N)).copy_(x)
            return made

        r, dz, terms = run.new_slots(v, T - 1), run.new_slots(v, T - 1), run.new_terms(v, T)
        for k, slots in enumerate([*r, *dz]):
            run.scores(v, laid(values[k]), laid(values[k + 1].abs()), torch.zeros(L, J, N), slots)
        for k, value in enumerate(values):
            run.put_term(terms, k, laid(value), T)
        if name == "cpu":
            terms[..., -launch.vectors(v)[-1] :] = 0  # a number, which is not asked for here
        dpose, dW = run.grad_votes(v, terms, r, dz, T, None, torch.zeros(C, N))
        return run.as_poses(dpose), dW

    for found, expected in zip(gradients("cpu"), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_kernels
def test_votes_are_forgotten_after_a_call_and_after_an_error():
    p = problem(make_routing("dynamic", 3), batch=1)
    run = backend_named("cpu")
    index = (p.fields.child, p.fields.parents, p.fields.seen, p.fields.types)
    v, other = (Votes(p.a.T.contiguous(), run.lay_poses(p.pose), k * p.W, None, *index, "cpu") for k in (1, 2))
    with suppress(KeyError), calls.prepared(v):
        assert calls._votes(v) is calls._votes(v)
        assert other.W.data_ptr() == calls._votes(other).W
        with calls.prepared(other):
            assert calls._votes(other) is calls._votes(other)
        assert calls._votes(v) is calls._votes(v)
        raise KeyError
    assert calls._PRESENT.votes is calls._PRESENT.structure is None


# --- bits, threads, hard inputs ---------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("case", ["vb-gamma-released-fixed", "em-default", "dynamic"])
@pytest.mark.parametrize("batch", [1, 33])
def test_runs_with_any_number_of_threads_give_the_same_bits(case, batch):
    """Enough work that two threads are woken: 4 fields of 576 children."""
    p = problem(make_routing(case, 17), types=64, parents=17, batch=batch)
    first = routed(p, "cpu")
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(routed_here(p, "cpu"), first)


@needs_kernels
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "vb-wishart-paper-typed", "em-default", "dynamic"])
def test_hard_inputs_are_finite_and_within_the_error_budget(case, hard):
    p = HARD[hard](problem(make_routing(case, 3), batch=3))
    assert_hard_input_is_finite_and_within_budget(p, "cpu")


@needs_kernels
@pytest.mark.parametrize("case", ["vb-gamma-released-fixed", "em-default", "dynamic"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_image_that_is_not_finite_spoils_no_other(case, value):
    p = problem(make_routing(case, 3), batch=6)
    sound = routed(p, "cpu")
    p.pose[2, 5] = value
    spoilt = routed(p, "cpu")
    others = torch.tensor([0, 1, 3, 4, 5])
    assert spoilt["logit"][2].isnan().any()
    for name in ("logit", "m", "r", "da", "dpose"):
        assert torch.equal(spoilt[name][others], sound[name][others]), name


@needs_kernels
@pytest.mark.parametrize("x", [torch.linspace(-87, 0, 100001), torch.logspace(-37, 37, 100001)], ids=["exp", "log"])
def test_exponentials_and_logarithms_are_within_two_units_of_the_last_place(x):
    y = torch.empty_like(x)
    getattr(library.library(), "exp_of" if x[0] < 0 else "log_of")(
        *(map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr()))), ctypes.c_int64(len(x))
    )
    exact = x.double().exp() if x[0] < 0 else x.double().log()
    unit = torch.nextafter(exact.abs().float(), torch.tensor(torch.inf)).double() - exact.abs().float().double()
    assert ((y.double() - exact).abs() / unit).max() < 2


# --- operators, networks, training ------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("case", ["vb-gamma-paper-typed", "em-default", "dynamic"])
def test_operators_pass_opcheck(case, monkeypatch):
    p = problem(make_routing(case, 2, iters=2), size=(2, 2), parents=2, whole=True)
    assert_operators_pass_opcheck(p, "cpu", monkeypatch)


@needs_kernels
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_auto_takes_the_kernels_compiled_or_not(routing, monkeypatch):
    calls = []
    run = launch.Cpu.moments
    monkeypatch.setattr(launch.Cpu, "moments", lambda *args: calls.append(0) or run(*args))
    layer = ConvCaps(2, 3, 2, routing=routing, routing_options=dict(iters=2))
    a, pose = torch.rand(3, 3, 3, 2), torch.randn(3, 3, 3, 2, 4, 4)
    expected = layer(Capsules(a, pose))
    assert len(calls) == 2
    torch._dynamo.reset()
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(Capsules(a, pose))
    assert len(calls) == 4
    torch.testing.assert_close(out.logits, expected.logits)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(Capsules(a, pose))
    assert len(calls) == 6
    assert out.logits.dtype == F32


@needs_kernels
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_a_training_of_20_steps_follows_the_reference(routing):
    """So small a network amplifies rounding fast, in the reference too.

    The stated drift: up to each step, at most four times what it is between references whose first weights differ in
    the last bit. And two trainings by the kernels have the same losses to the bit.
    """
    random = torch.Generator().manual_seed(3)
    x, label = torch.randn(24, 2, 20, 20, generator=random), torch.arange(24) % 3
    for k in range(3):
        x[label == k, :, 6 * k : 6 * k + 6] += 1

    def train(backend, nudge=None):
        torch.manual_seed(5)
        net = CapsNet((8, 4, 4, 4), 2, 3, 20, routing, logit_scale=False, backend=backend)
        if nudge is not None:
            torch.manual_seed(nudge)
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(1 + EPS * torch.randint(-1, 2, p.shape))
        optimiser = torch.optim.Adam(net.parameters(), 3e-3, eps=1e-3)
        losses = []
        for _ in range(20):
            loss = activation_nll_loss(net(x).activations, label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    kernel, reference = train("cpu"), train("reference")
    drift = torch.stack([(train("reference", nudge) - reference).abs() for nudge in range(4)]).amax(0).cummax(0).values
    assert reference[-1] < reference[0] - 0.1
    assert ((kernel - reference).abs() <= 4 * drift + 1e-5).all()
    assert (kernel - reference)[0].abs() < 1e-5
    assert torch.equal(train("cpu"), kernel)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_200_steps_of_training_have_the_losses_of_the_reference(routing):
    net = CapsNet((8, 4, 4, 4), num_classes=4, image_size=20, routing=routing, logit_scale=True)
    batches = stripes(200, batch=16, size=20)
    assert_training_drifts_no_further_than_rounding(net, "cpu", batches, lr=1e-3)


@needs_kernels
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_only_what_is_watched_goes_through_the_dispatcher(routing, monkeypatch):
    layer = ConvCaps(2, 3, 2, routing=routing).eval()
    caps = Capsules(torch.rand(3, 3, 3, 2), torch.randn(3, 3, 3, 2, 4, 4))
    expected = layer(caps)

    def refuse(*_):
        raise AssertionError("dispatched")

    for op in (vb.vb_route, em.em_route, dynamic.dynamic_route):
        monkeypatch.setattr(op, "operator", refuse)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = layer(caps)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.poses, expected.poses)
    torch.testing.assert_close(layer(caps).logits, expected.logits, rtol=0, atol=0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    with Watch(), pytest.raises(AssertionError, match="dispatched"):
        layer(caps)


@needs_kernels
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_other_kinds_of_tensor_go_through_the_dispatcher(mode):
    layer = ConvCaps(2, 3, 2)
    a, pose = torch.rand(3, 3, 3, 2), torch.randn(3, 3, 3, 2, 4, 4)
    expected = layer(Capsules(a, pose))
    with mode():
        found = layer(Capsules(TwoTensor(a, a), TwoTensor(pose, pose)))
    assert torch.equal(found.poses.a, expected.poses)


# --- without a compiler, and with a broken library --------------------------------------------------------------


def use(monkeypatch, variant):
    """Load another library; that of this process comes back by itself."""
    monkeypatch.setenv("VBCAPS_CPU", variant)
    monkeypatch.setattr(library, "_library", library.functools.cache(library._library.__wrapped__))


def use_fresh_build(monkeypatch, folder, **changes):
    """Compile for this machine into another folder, whatever was built before."""
    monkeypatch.setenv("VBCAPS_CACHE", str(folder))
    for name, value in changes.items():
        monkeypatch.setattr(build, name, value)
    use(monkeypatch, "native")


@pytest.mark.parametrize(
    ("find", "why"),
    [
        (lambda: None, "there is no C\\+\\+ compiler"),
        (lambda: ["false"], "false failed"),
        (lambda: ["/no/c++"], "failed"),
    ],
    ids=["none", "failing", "missing"],
)
def test_without_a_compiler_auto_is_the_reference_and_cpu_an_error(find, why, monkeypatch, tmp_path):
    use_fresh_build(monkeypatch, tmp_path, find_compiler=find)
    a, pose = torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)
    layer = ConvCaps(2, 3, 2).eval()
    assert launch.why_no_library()
    found = layer(Capsules(a, pose))
    layer.backend = "reference"
    assert torch.equal(found.logits, layer(Capsules(a, pose)).logits)
    layer.backend = "cpu"
    with pytest.raises(ValueError, match=f"backend='cpu' could not be built: .*{why}"):
        layer(Capsules(a, pose))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_library(monkeypatch, tmp_path):
    """Quick to build: one function, in a folder of its own."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int lanes() { return 11; }\n')
    folder = tmp_path / "cache"
    use_fresh_build(monkeypatch, folder, SOURCES=(str(source),), HEADERS=())
    return folder / "kernels", source


def again(monkeypatch):
    use_fresh_build(monkeypatch, build.cache_folder())
    return library.library()


@needs_compiler
@pytest.mark.parametrize("broken", [b"", b"not a library", None], ids=["empty", "other", "cut short"])
def test_a_broken_library_is_built_again(broken, small_library, monkeypatch):
    folder, _ = small_library
    assert library.library().lanes() == 11
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # what is mapped must not change
    kept.write_bytes(whole[: len(whole) // 2] if broken is None else broken)
    assert again(monkeypatch).lanes() == 11
    assert build._is_whole(kept)


@needs_compiler
def test_a_kept_library_is_used_until_its_source_changes(small_library, monkeypatch):
    folder, source = small_library
    assert library.library().lanes() == 11
    commands = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: commands.append(command) or run(command))
    assert again(monkeypatch).lanes() == 11
    assert len(commands) == 1  # that asks the compiler about itself
    source.write_text('extern "C" int lanes() { return 12; }\n')
    assert again(monkeypatch).lanes() == 12
    assert len(list(folder.iterdir())) == 2


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs the owners and modes of POSIX")
@pytest.mark.parametrize("open_to_others", ["above", "folder", "folder link", "file", "link", "owner", None])
def test_a_library_that_others_could_write_is_not_loaded(open_to_others, small_library, monkeypatch, tmp_path):
    """Not even if it is whole: a stranger can write a checksum, too. What nobody else could write is loaded."""
    folder, source = small_library
    name = f"{build._key([*build.find_compiler(), *build.FLAGS, *build.MACHINES[0]])}.so"
    source.write_text('extern "C" int lanes() { return 666; }\n')
    assert library.library().lanes() == 666
    (strange,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, strange.stat().st_mode & 0o777) == (0o700, 0o600)
    source.write_text('extern "C" int lanes() { return 11; }\n')
    strange.rename(folder / name)  # of the library that is asked for now
    if open_to_others == "folder":
        folder.chmod(0o770)
    elif open_to_others == "above":
        folder.parent.chmod(0o777)
    elif open_to_others == "folder link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif open_to_others == "file":
        (folder / name).chmod(0o620)
    elif open_to_others == "link":
        (folder / name).rename(tmp_path / "elsewhere.so")
        (folder / name).symlink_to(tmp_path / "elsewhere.so")
    elif open_to_others == "owner":
        uid = os.getuid()
        monkeypatch.setattr("vbcaps.kernels.cpu.build.os.getuid", lambda: uid + 1)
    refused = open_to_others in ("above", "folder", "folder link", "owner")
    with pytest.warns(UserWarning, match="is not yours alone") if refused else nullcontext():
        assert again(monkeypatch).lanes() == (666 if open_to_others is None else 11)


@needs_compiler
def test_a_folder_that_cannot_be_written_to_is_no_obstacle(small_library, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    use_fresh_build(monkeypatch, tmp_path / "file" / "cache")
    assert library.library().lanes() == 11


# --- what the kernels do not cover ------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("options", "dtype", "error", "message"),
    [
        (dict(pose_size=3), F32, ValueError, "4x4 poses"),
        ({}, F64, TypeError, "float32"),
        (dict(routing_options=dict(prior=Prior(precision="full"))), F32, ValueError, "diagonal"),
    ],
    ids=["3x3 poses", "float64", "full precision"],
)
def test_what_is_not_covered_is_an_error_with_cpu_and_the_reference_with_auto(options, dtype, error, message):
    layer = ConvCaps(2, 3, 2, **options, backend="cpu").to(dtype)
    p = layer.pose_size
    a, pose = torch.rand(2, 3, 3, 2, dtype=dtype), torch.randn(2, 3, 3, 2, p, p, dtype=dtype)
    with pytest.raises(error, match=message):
        layer(Capsules(a, pose))
    layer.backend = "auto"
    assert layer(Capsules(a, pose)).logits.isfinite().all()


def test_the_wrong_device_is_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer, a, pose = ConvCaps(2, 3, 2, backend="triton"), torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)
    with pytest.raises(ValueError, match="backend='triton' needs a CUDA device, got cpu"):
        layer(Capsules(a, pose))
    fields = conv_fields(3, 3, 2, (2, 2), (1, 1), a.device)
    with pytest.raises(ValueError, match="backend='cpu' needs tensors on the CPU, got meta"):
        backend_for("cpu", layer.routing, a.to("meta").flatten(1), pose.flatten(1, 3), torch.empty(8, 3, 4, 4), fields)
