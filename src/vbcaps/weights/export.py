"""``export(model, path)`` writes a network for other programs: as ONNX, or as PyTorch's exported program.

The file takes images and gives probabilities, so that no code of vbcaps is needed to use it. It is compared with the
network before it is written. Axes: n image, c channel, y x pixel.
"""

import copy
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vbcaps
from vbcaps.data import View
from vbcaps.routing import VBRouting
from vbcaps.training.files import RunError, write
from vbcaps.weights.find import FOLDER
from vbcaps.weights.inputs import frame_of, side_of
from vbcaps.weights.model import Model, load
from vbcaps.weights.preprocess import Deployed

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
INPUTS = {"uint8": torch.uint8, "float32": torch.float32}
OPSET = 18  # of ONNX: onnxruntime reads it since 1.14, of 2023
TOLERANCE = 1e-3  # the largest difference of a probability that is written; rounding gives far less
COUNTS = (1, 2, 5)  # how many images at a time are compared
Run = Callable[[Tensor], Tensor]  # from images to probabilities
FACTS = "vbcaps.json"  # the file with `facts` in an exported program of PyTorch


@dataclass(frozen=True)
class Exported:
    """A network that was exported.

    Args:
        path: the file.
        format: ``"onnx"`` or ``"torch-export"``.
        facts: what the file says of itself: ``input``, ``output``, ``recipe``, ``view``, ``temperature`` and others.
        difference: the largest difference between a probability of the file and of the network.
    """

    path: Path
    format: str
    facts: dict[str, Any]
    difference: float


def export(
    model: Model | str | Path,
    path: str | Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    side: int | None = None,
) -> Exported:
    """Write a network with its preprocessing as one file that other programs run: from images to probabilities.

    The file has one input, ``images``, ``n channels side side`` for any n, and one output, ``probabilities``, ``n
    classes``, those of ``model.predict``. Cropping and standardising are inside, resizing is not.
    Names of classes, recipe and what the input must be are in its metadata. It is compared with the network first.

    Args:
        model: a model, or anything that ``vbcaps.load`` takes.
        path: the file, which is replaced in one step. Its folder must exist.
        format: ``"onnx"``, which needs the extra ``onnx``, or ``"torch-export"``, which ``torch.export.load`` reads; by
            default what the suffix of ``path`` says, ``.onnx`` or ``.pt2``.
        dtype: of the input: ``"uint8"``, the default, or ``"float32"`` with values from 0 to 1. A network that was
            trained on images of more than 8 bits has ``"float32"``, with the values of its training images.
        side: height and width of the images; by default the side to which ``predict`` resizes them. A network that
            places images in a frame, as affNIST's, also takes the side of the frame.

    Example:
        >>> import vbcaps
        >>> done = vbcaps.export("fashion_small", "fashion_small.onnx")  # doctest: +SKIP
        >>> done.facts["input"]["shape"]  # doctest: +SKIP
        ['n', 1, 28, 28]
    """
    path = Path(path)
    format = format_of(path, format)
    if dtype not in (None, *INPUTS):
        raise ValueError(f"dtype must be one of {tuple(INPUTS)}, got {dtype!r}")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path}: there is no folder {path.parent}")
    model = model if isinstance(model, Model) else load(model)
    if dtype == "uint8" and model.view.low:
        raise ValueError(
            f"{model.name} was trained on images of more than 8 bits: dtype must be 'float32', got 'uint8'"
        )
    dtype = dtype or ("float32" if model.view.low else "uint8")
    side = checked_side(model, side)
    if format == "onnx":
        check_onnx(model)
    net = copy.deepcopy(model.net).float().cpu()
    deployed = Deployed(net, model.view, model.temperature, side, model.recipe.objects).eval()
    program = program_of(deployed, images_like(dtype, 2, net.in_channels, side, model.view))
    facts = facts_of(model, dtype, side)
    content, run = as_onnx(program, facts) if format == "onnx" else as_program(program, facts)
    difference = compared(deployed, run, dtype, net.in_channels, side)
    if not difference <= TOLERANCE:
        raise RunError(
            f"{path} is not written: its probabilities differ from PyTorch's by up to {difference:.2g}, more than "
            f"{TOLERANCE:g}"
        )
    write(path, content)
    return Exported(path, format, facts, difference)


def format_of(path: Path, format: str | None) -> str:
    """Return the format of a file, from its suffix where none is asked for."""
    by_suffix = {suffix: name for name, suffix in FORMATS.items()}
    if format is None:
        if path.suffix not in by_suffix:
            raise ValueError(f"format must be given for {path}: .onnx means 'onnx', .pt2 means 'torch-export'")
        return by_suffix[path.suffix]
    if format not in FORMATS:
        raise ValueError(f"format must be one of {tuple(FORMATS)}, got {format!r}")
    if by_suffix.get(path.suffix, format) != format:
        raise ValueError(f"format={format!r} writes {FORMATS[format]} files, got the path {path}")
    return format


def checked_side(model: Model, side: int | None) -> int:
    """Return the side of the images that the file takes."""
    usual, frame = side_of(model.recipe), frame_of(model.view)
    allowed = [usual] if frame is None else [usual, frame]
    if side is not None and side not in allowed:
        raise ValueError(f"side must be {' or '.join(map(str, allowed))} for {model.name}, got {side}")
    return side or usual


def check_onnx(model: Model) -> None:
    """Raise an error that says what to do if a network cannot become ONNX."""
    if any(isinstance(part, VBRouting) and part.prior.precision == "full" for part in model.modules()):
        raise ValueError(
            f"{model.name} cannot be exported to ONNX: precision='full' needs Cholesky factorisations, which ONNX does "
            "not have; format='torch-export' has them"
        )
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise RunError(f"exporting to ONNX needs {error.name}: pip install 'vbcaps[onnx]'") from error


def facts_of(model: Model, dtype: str, side: int) -> dict[str, Any]:
    """Return what the file says of itself, in words of JSON."""
    channels, classes, frame = model.net.in_channels, list(model.classes), frame_of(model.view)
    colours = {1: "grey", 2: "left and right image of a stereo pair", 3: "red, green, blue"}
    framed = f"; images of {frame} x {frame} need a file with side {frame}" if frame not in (None, side) else ""
    facts = dict(
        vbcaps=vbcaps.__version__,
        network=model.recipe.name if model.file is None or model.file.parent != FOLDER else model.name,
        input=dict(
            name="images",
            shape=["n", channels, side, side],
            dtype=dtype,
            values=values_of(model.view, dtype),
            channels=colours.get(channels, f"{channels} channels"),
            resizing=f"not in the file: resize the shorter side to {side} (bilinear, antialiased), cut out the centre"
            + framed,
            preprocessing="in the file: the crop and the standardisation of `view`",
        ),
        output=dict(name="probabilities", shape=["n", len(classes)], classes=classes),
        classes=classes,
        temperature=model.temperature,
        recipe=model.recipe.to_json(),
        view=dataclasses.asdict(model.view),
        about={} if model.changed() else model.about,
    )
    return json.loads(json.dumps(facts))


def values_of(view: View, dtype: str) -> str:
    """Return the range of the input's values, in words."""
    if view.low:
        return "those of the training images, whose least and greatest are `low` and `high` of `view`"
    return "0 to 255" if dtype == "uint8" else "0 to 1"


def images_like(dtype: str, n: int, channels: int, side: int, view: View) -> Tensor:
    """Return made-up images ``n c y x`` that never change: noise, and patches of light and dark."""
    generator = torch.Generator().manual_seed(n)
    coarse = torch.rand(n, channels, 5, 5, generator=generator)
    patches = F.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    noise = torch.rand(n, channels, side, side, generator=generator)
    share = torch.linspace(0, 0.5, n)[:, None, None, None]
    images = ((1 - share) * patches + share * noise).mul(255).byte()
    if view.low:
        low, high = (torch.tensor(ends)[:, None, None] for ends in (view.low, view.high))
        return low + (high - low) * (images.float() / 255)
    return images if dtype == "uint8" else images.float() / 255


def program_of(deployed: Deployed, images: Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad(), quiet():
        return torch.export.export(deployed, (images,), dynamic_shapes=dict(images={0: torch.export.Dim("n", min=1)}))


def as_program(program: torch.export.ExportedProgram, facts: dict[str, Any]) -> tuple[bytes, Run]:
    """Return the bytes of PyTorch's file, and a function that runs what they hold."""
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file, extra_files={FACTS: json.dumps(facts)})
        content = file.getvalue()
        return content, torch.export.load(io.BytesIO(content)).module()


def as_onnx(program: torch.export.ExportedProgram, facts: dict[str, Any]) -> tuple[bytes, Run]:
    """Return the bytes of an ONNX file, and a function that runs them in onnxruntime."""
    import onnx

    try:
        with quiet():
            made = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=["probabilities"],
                verbose=False,
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise RunError(
            f"PyTorch {torch.__version__} cannot turn this network into ONNX ({str(error).splitlines()[0]}); "
            "format='torch-export' may"
        ) from error
    assert made is not None
    proto = made.model_proto
    axis = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == axis:
                dim.dim_param = "n"
    proto.producer_name, proto.producer_version = "vbcaps", vbcaps.__version__
    onnx.helper.set_model_props(
        proto, {key: one if isinstance(one, str) else json.dumps(one) for key, one in facts.items()}
    )
    onnx.checker.check_model(proto)
    content = proto.SerializeToString()
    return content, onnx_runner(content)


def onnx_runner(file: bytes | str) -> Run:
    """Return a function that runs an exported ONNX file, its bytes or its path, on a CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])


def compared(deployed: Deployed, run: Run, dtype: str, channels: int, side: int) -> float:
    """Return the largest difference between a probability of ``run`` and of the module, over several batch sizes."""
    largest = 0.0
    for n in COUNTS:
        images = images_like(dtype, n, channels, side, deployed.view.view)
        with torch.no_grad():
            found, expected = run(images), deployed(images)
        if found.shape != expected.shape or not bool(found.isfinite().all()):
            return float("inf")
        largest = max(largest, float((found - expected).abs().max()))
    return largest


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what PyTorch's exporters say of themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
