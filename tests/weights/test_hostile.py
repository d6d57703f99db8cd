"""Weights files that somebody damaged or made to harm: each is refused by name, and nothing large is allocated."""

import json
import os
import re
import time
from dataclasses import replace

import planted
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vbcaps
from vbcaps.training.files import RunError
from vbcaps.training.loop import fit
from vbcaps.training.recipe import Recipe
from vbcaps.weights.file import pack_weights, read_weights
from vbcaps.weights.tensors import pack_tensors, unpack_tensors


@pytest.fixture(scope="module")
def parts():
    """Return the tensors and the header of a weights file with a density, as bytes."""
    recipe = tiny.recipe()
    torch.manual_seed(0)
    net, f = recipe.net(1, 3), 3
    density = vbcaps.uncertainty.Density(
        torch.full((3,), 1 / 3).log(), torch.zeros(3, f), torch.eye(f)[None], torch.zeros(f), torch.ones(f)
    )
    about = dict(temperature=1.5, familiar=dict(images="some", quantiles=dict(energy=[0.0, 1.0])))
    view = vbcaps.data.View(crop=20, standardise="dataset", mean=(0.2,), std=(0.3,))
    return pack_weights(net, recipe, tiny.CLASSES, view, about, dict(logits=density))


class NothingLarge(TorchDispatchMode):
    """Fails where a tensor of more than a million numbers is made in memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta and made.untyped_storage().nbytes() > 4e6:
            raise AssertionError(f"{func} made {tuple(made.shape)}")
        return made


def refused(path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    began = time.process_time()
    with NothingLarge(), pytest.raises(RunError, match=message) as caught:
        vbcaps.load(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - began < 5
    assert "\x1b" not in str(caught.value)


def nested(levels: int) -> list:
    inner: list = []
    for _ in range(levels):
        inner = [inner]
    return inner


ESCAPE = "\x1b]0;owned\x07"
HEADERS = {
    "recipe is a list": (dict(recipe=[]), "a recipe must have fields, got \\[\\]"),
    "recipe is null": (dict(recipe=None), "a recipe must have fields, got None"),
    "a name that a terminal obeys": (dict(recipe=dict(name=ESCAPE)), "name must have no control characters"),
    "many filters": (dict(recipe=dict(arch=[10**6, 2, 2, 2])), r"of another network: stem\.conv1"),
    "many types": (dict(recipe=dict(arch=[4, 10**6, 10**6, 10**6])), "of another network: primary_caps"),
    "more than numbers can count": (dict(recipe=dict(arch=[10**18, 2, 2, 2])), "cannot read: .*overflow"),
    "a number of 30 digits": (dict(recipe=dict(arch=[10**30, 2, 2, 2])), "cannot read: "),
    "many channels": (dict(in_channels=10**6), "cannot read: view.mean must have a number for each|of another network"),
    "channels of no number": (dict(in_channels="1"), "cannot read: in_channels must be"),
    "channels that are nested": (dict(in_channels=[[1]]), "cannot read: in_channels must be"),
    "classes are null": (dict(classes=None), "classes must be a list of names, got None"),
    "classes are a word": (dict(classes="abc"), "classes must be a list of names, got 'abc'"),
    "no classes": (dict(classes=[]), "classes must be a list of names"),
    "nested classes": (dict(classes=[["a"], "b", "c"]), r"a class must have a name .*, got \['a'\]"),
    "equal classes": (dict(classes=["a", "b", "a"]), "classes must have different names, got 'a' twice"),
    "classes that a terminal obeys": (dict(classes=["a", "b", ESCAPE]), r"control characters, got '\\x1b\]0;owned"),
    "classes that turn the line": (dict(classes=["a", "b", "\u202eexe"]), "control characters"),
    "half a character": (dict(classes=["a", "b", "\ud800"]), "control characters"),
    "view is null": (dict(view=None), "view must have fields, got None"),
    "a huge crop": (dict(view=dict(crop=10**9)), "view.crop must be 20, the side of the network's input, got 1000"),
    "a crop that is a word": (dict(view=dict(crop="20")), "view.crop must be of type int, got '20'"),
    "a huge frame": (dict(view=dict(pad=10**9)), "view.pad must lie from 0 to 64"),
    "an infinite mean": (dict(view=dict(mean=[float("inf")])), "view.mean must be a finite number, got inf"),
    "a mean of NaN": (dict(view=dict(mean=[float("nan")])), "view.mean must be a finite number, got nan"),
    "a std of 0": (dict(view=dict(std=[0.0])), "std above 0"),
    "three means": (dict(view=dict(mean=[0.1] * 3, std=[0.1] * 3)), "view.mean must have a number for each of 1 chan"),
    "a mean that is a number": (dict(view=dict(mean=0.1)), "view.mean must be a list, got 0.1"),
    "an unknown part of the view": (dict(view=dict(spin=1)), "cannot read: .*spin"),
    "metadata is a list": (dict(metadata=[1]), r"metadata must have fields, got \[1\]"),
    "a temperature of 0": (
        dict(metadata=dict(temperature=0)),
        "temperature must be a finite number from 0.001 to 1000",
    ),
    "a temperature below 0": (dict(metadata=dict(temperature=-1.0)), "temperature must be a finite number"),
    "a temperature of NaN": (dict(metadata=dict(temperature=float("nan"))), "temperature must be a finite number"),
    "a temperature of a word": (dict(metadata=dict(temperature="hot")), "temperature must be .*, got 'hot'"),
    "an error above 1": (dict(metadata=dict(test_error=7)), "test_error must be a finite number from 0 to 1, got 7"),
    "an epoch of a list": (dict(metadata=dict(epoch=[])), "epoch must be a finite number"),
    "a commit that a terminal obeys": (dict(metadata=dict(commit=ESCAPE)), "words without control characters"),
    "a beginning without a name": (dict(metadata=dict(began_with=3)), "began_with must have a field 'weights', got 3"),
    "health without fields": (dict(metadata=dict(health=dict(images=3))), "health must have a field 'routing'"),
    "health that is a number": (dict(metadata=dict(health=3)), "health must have fields, got 3"),
    "health of words": (
        dict(metadata=dict(health=planted.RECORD | dict(most_votes="all"))),
        "health.most_votes must be a finite",
    ),
    "health of NaN": (
        dict(metadata=dict(health=planted.RECORD | dict(tightest=float("nan")))),
        "health.tightest must be a finite",
    ),
    "health without votes": (
        dict(metadata=dict(health=planted.RECORD | dict(votes_by_rank=[]))),
        "a number for each class",
    ),
    "health with a strange layer": (
        dict(metadata=dict(health=planted.RECORD | dict(layers=[3]))),
        "health.layers must have fields, got 3",
    ),
    "health in colour": (
        dict(metadata=dict(health=planted.RECORD | dict(of="\x1b[31m"))),
        "without control characters",
    ),
    "familiar without numbers": (dict(metadata=dict(familiar=dict(quantiles=dict(a=["b"])))), "quantiles of 'a' must"),
    "quantiles of NaN": (dict(metadata=dict(familiar=dict(quantiles=dict(a=[float("nan")] * 2)))), "a quantile of 'a'"),
    "quantiles that fall": (dict(metadata=dict(familiar=dict(quantiles=dict(a=[1, 0])))), "must rise"),
    "5,000 levels": (dict(metadata=nested(5000)), "nested more than 16 levels deep"),
    "500 levels": (dict(metadata=nested(500)), "nested more than 16 levels deep"),
    "no format": (dict(format=None), "has no vbcaps weights, it is another program's"),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_header_that_makes_no_sense(parts, tmp_path, attack):
    tensors, header = unpack_tensors(parts, "it")
    change, message = HEADERS[attack]
    for field, value in change.items():
        header[field] = header[field] | value if isinstance(value, dict) else value
    text = deep_json(header)
    refused(tmp_path / "w.safetensors", packed(tensors, text), message)


def deep_json(header: dict) -> str:
    """Return a header as JSON, also where Python's own writer would nest too deep."""
    levels, inner = 0, header["metadata"]
    while isinstance(inner, list) and inner:
        levels, inner = levels + 1, inner[0]
    if levels < 400:
        return json.dumps(header)
    return json.dumps(header | dict(metadata="HERE")).replace('"HERE"', "[" * levels + "]" * levels)


def packed(tensors: dict, text: str) -> bytes:
    """Return a safetensors file with any text as its header."""
    plain = pack_tensors(tensors, {})
    length = int.from_bytes(plain[:8], "little")
    listed = json.loads(plain[8 : 8 + length]) | dict(__metadata__=dict(vbcaps=text))
    begin = json.dumps(listed).encode()
    return len(begin).to_bytes(8, "little") + begin + plain[8 + length :]


@pytest.mark.parametrize("text", ["null", "3", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_metadata_that_is_no_header(parts, tmp_path, text):
    tensors, _ = unpack_tensors(parts, "it")
    refused(tmp_path / "w.safetensors", packed(tensors, text), "is damaged or no safetensors file: ")


def test_the_outer_header(parts, tmp_path):
    path = tmp_path / "w.safetensors"
    for begin, message in (
        (b"[" * 100_000, "nested more than 16 levels"),
        (b"null", "has no fields, but is 'null'"),
        (b'{"__metadata__": []}', "no safetensors file"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}', "'a' has no dtype and shape"),
        (b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', "'a' has no dtype and shape"),
        (b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', "no safetensors file"),
        (b'{"\\u001b[31m": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "control characters"),
        (
            b'{"a": {"dtype": "F32", "shape": [2, 9223372036854775807], "data_offsets": [0, 4]}}',
            "'a' has 4 bytes, which",
        ),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": 4}}', "'a' has no place in the file"),
        (b"\xff\xfe", "no safetensors file"),
    ):
        refused(path, len(begin).to_bytes(8, "little") + begin + bytes(4), message)
    refused(path, (2**60).to_bytes(8, "little") + b"{}", "does not begin with the length of a header")


def test_a_file_that_is_longer_than_its_network_is_not_read_whole(parts, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(parts)
    os.truncate(path, 2**36)  # a hole of 64 GiB
    with pytest.raises(RunError, match="damaged or no safetensors file"):
        read_weights(path)


def test_what_is_no_file_is_not_read(tmp_path):
    with pytest.raises(RunError, match="cannot read the weights /dev/zero: it is no file"):
        read_weights(type(tmp_path)("/dev/zero"))


def first(tensors: dict, ending: str) -> str:
    return next(name for name in tensors if name.endswith(ending))


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("conv1.0.weight", lambda x: x.index_fill(0, torch.tensor(0), float("nan")), "conv1.0.weight has NaN or infin"),
        ("conv1.0.weight", lambda x: x * float("inf"), "conv1.0.weight has NaN or infinity"),
        ("running_var", lambda x: x - 2, "running_var has -1, but must be at least 0"),
        ("running_mean", lambda x: x + float("inf"), "running_mean has NaN or infinity"),
        ("num_batches_tracked", lambda x: x - 5, "num_batches_tracked has -5, but must be at least 0"),
        ("kappa0_fixed", lambda x: -x, "kappa0_fixed has -1, but must be above 0"),
        ("conv1.0.weight", lambda x: x.to(torch.int8), "has numbers of I8, it must be of F32 or F64 or F16 or BF16"),
        ("conv1.0.weight", lambda x: x > 0, "has numbers of BOOL, it must be of F32"),
        ("conv1.0.weight", lambda x: x.to(torch.complex64), "has numbers of C64, it must be of F32"),
        ("conv1.0.weight", lambda x: x.to(torch.float8_e4m3fn), "has numbers of F8_E4M3, it must be of F32"),
        ("num_batches_tracked", lambda x: x.float(), "has numbers of F32, it must be of I64"),
        ("logits.log_share", lambda x: x + 3, "a density logits that makes no sense"),
        ("logits.spread", lambda x: -x, "a density logits that makes no sense"),
        ("logits.whiten", lambda x: x * 0, "a density logits that makes no sense"),
        ("logits.whiten", lambda x: x.double() * float("nan"), "whiten has NaN"),
        ("logits.whiten", lambda x: torch.zeros(1, 10), r"whiten must have floats of .*, got \(1, 10\) of F32"),
        ("logits.mean", lambda x: x.to(torch.int8), r"mean must have floats of .*, got \(3, 3\) of I8"),
    ],
)
def test_tensors_that_make_no_sense(parts, tmp_path, ending, change, message):
    tensors, header = unpack_tensors(parts, "it")
    name = first(tensors, ending)
    tensors[name] = change(tensors[name])
    refused(tmp_path / "w.safetensors", pack_tensors(tensors, header), message)


def test_densities_of_unknown_features_and_fields(parts, tmp_path):
    tensors, header = unpack_tensors(parts, "it")
    path = tmp_path / "w.safetensors"
    refused(path, pack_tensors(tensors | {"density.logits.more": torch.ones(1)}, header), "are not known: logits.more")
    refused(path, pack_tensors(tensors | {"density.ears.mean": torch.ones(1)}, header), "has no features ears")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read(parts, tmp_path, dtype):
    tensors, header = unpack_tensors(parts, "it")
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack_tensors({k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors.items()}, header))
    assert {x.dtype for x in vbcaps.load(path).parameters()} == {torch.float32}


def test_names_that_could_not_be_read_again_are_refused_before_training(tmp_path):
    data = replace(tiny.dataset(), classes=("a", "b", ESCAPE))
    with pytest.raises(ValueError, match=re.escape(r"control characters, got '\x1b]0;owned\x07'")):
        fit(tiny.recipe(), tmp_path / "run", data=data, device="cpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="data must have no control characters"):
        Recipe(data=f"images/{ESCAPE}")


@pytest.fixture
def quickly():
    """Hold a test to a second of work: what took the square of a header's length took many."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 1.5


def header_of(content: bytes, **tensors: object) -> bytes:
    """Return a file with further tensors in its header."""
    length = int.from_bytes(content[:8], "little")
    head = json.dumps(json.loads(content[8 : 8 + length]) | tensors).encode()
    return len(head).to_bytes(8, "little") + head + content[8 + length :]


def test_a_name_that_comes_twice_among_forty_thousand(quickly, tmp_path):
    head = ("{" + "".join(f'"k{k}":1,' for k in range(40_000)) + '"k39999":1}').encode()
    refused(tmp_path / "w.safetensors", len(head).to_bytes(8, "little") + head, "its header has 'k39999' twice")


def test_a_class_that_comes_twice_among_many(quickly, parts, tmp_path):
    tensors, header = unpack_tensors(parts, "it")
    many = pack_tensors(tensors, header | dict(classes=[*(f"c{k}" for k in range(40_000)), "c39999"]))
    refused(tmp_path / "w.safetensors", many, "classes must have different names, got 'c39999' twice")


@pytest.mark.parametrize("shape", [[10**300] * 5000, [1] * 17, [2**63]])
def test_a_shape_of_very_many_or_very_long_axes(quickly, parts, tmp_path, shape):
    content = header_of(parts, x=dict(dtype="F32", shape=shape, data_offsets=[0, 4]))
    refused(tmp_path / "w.safetensors", content, "'x' has no dtype and shape of at most 16 axes")


def test_long_words_are_not_compared_with_short_ones(quickly, parts, tmp_path):
    tensors, header = unpack_tensors(parts, "it")
    recipe = header["recipe"] | {"routing" * 100_000: 1}
    refused(tmp_path / "w.safetensors", pack_tensors(tensors, header | dict(recipe=recipe)), "a recipe has no field")
    with pytest.raises(vbcaps.data.DataError, match="is neither a dataset nor a folder"):
        vbcaps.data.load_dataset("mnist" * 200_000)
