"""Capsules on a backbone: a head for any feature map, and a network of a backbone and this head.

Axes: n image, c channel or type of capsule, h w row and column, j class, p p pose matrix.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vbcaps.inference import evaluating
from vbcaps.layers import Capsules, ClassCaps, ConvCaps, LayerTrace, PrimaryCaps, check_counts, check_routable
from vbcaps.models import NetworkTrace

LAYOUTS = ("nchw", "nhwc")


class CapsHead(nn.Module):
    """Classify a feature map of any size by capsules.

    A 1x1 convolution makes primary capsules; a padded `ConvCaps` for each further entry of ``caps`` and one `ClassCaps`
    follow. Routing takes time in proportion to the positions of the map, so larger maps than ``largest_map`` are pooled
    first.

    Args:
        in_channels: channels of the feature map.
        num_classes: how many classes there are.
        caps: types of the primary capsules, then of each `ConvCaps`; ``(16,)`` routes from the primary capsules to the
            classes at once.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``.
        routing_options: keywords for the routing of each capsule layer, as ``dict(iters=2)``.
        largest_map: rows and columns that capsules take at most. A larger map is averaged down to this length of its
            longer side, in its proportions; None takes every map as it is.
        kernel_size: of each `ConvCaps`, an odd number.
        stride: of the first `ConvCaps`; the others have 1.
        logit_scale: learn a factor on the class logits, see `ClassCaps`.
        norm_logit: normalise the class logits by BatchNorm; those of the other layers always are.
        options: ``pose_size``, ``init``, ``gain``, ``noise``, ``norm_pose`` and ``backend`` of `ConvCaps`.

    Shape:
        - Input: features ``n in_channels h w``, any h and w.
        - Output: `Capsules` of the classes: logits and activations ``n num_classes``, poses ``n num_classes p p``, the
          posterior with the axes ``n j``.

    Example:
        >>> head = CapsHead(in_channels=512, num_classes=10, caps=(16, 16))
        >>> out = head(torch.randn(2, 512, 7, 7))  # what a ResNet makes of 224 pixels
        >>> out.logits.shape, out.posterior.m.shape
        (torch.Size([2, 10]), torch.Size([2, 10, 16]))
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        caps: Sequence[int] = (16, 16),
        *,
        routing: str = "vb",
        routing_options: Mapping[str, Any] | None = None,
        largest_map: int | None = 14,
        kernel_size: int = 3,
        stride: int = 2,
        logit_scale: bool = True,
        norm_logit: bool = True,
        **options: Any,
    ):
        super().__init__()
        if not isinstance(caps, tuple | list) or len(caps) < 1:
            raise ValueError(f"caps must be numbers of capsule types, as (16, 16), got {caps!r}")
        check_counts(**{f"caps[{k}]": types for k, types in enumerate(caps)}, kernel_size=kernel_size, stride=stride)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        if largest_map is not None:
            check_counts(largest_map=largest_map)
        self.in_channels, self.num_classes, self.largest_map = in_channels, num_classes, largest_map
        self.caps = tuple(caps)
        of_primary = {name: options[name] for name in ("pose_size", "norm_pose", "backend") if name in options}
        routed: dict[str, Any] = dict(routing=routing, routing_options=routing_options) | options
        self.primary_caps = PrimaryCaps(in_channels, caps[0], **of_primary)
        self.conv_caps = nn.ModuleList(
            ConvCaps(few, many, kernel_size, stride if k == 0 else 1, kernel_size // 2, **routed)
            for k, (few, many) in enumerate(itertools.pairwise(caps))
        )
        self.class_caps = ClassCaps(caps[-1], num_classes, logit_scale=logit_scale, norm_logit=norm_logit, **routed)

    def forward(self, features: Tensor) -> Capsules:  # n in_channels h w
        return self.class_caps(self.children_of_classes(features))

    def children_of_classes(self, features: Tensor) -> Capsules:
        """Return the map of capsules from which the class capsules are routed."""
        check_routable(self.primary_caps.conv.weight)
        caps = self.primary_caps(self.pool(features))
        for layer in self.conv_caps:
            caps = layer(caps, posterior=False)
        return caps

    def pool(self, features: Tensor) -> Tensor:
        """Average a map down to ``largest_map``, in its proportions; return a smaller map unchanged."""
        if not isinstance(features, Tensor) or features.ndim != 4 or self.largest_map is None:
            return features  # the primary capsules say what is wrong
        size = map_size(features.shape[2], features.shape[3], self.largest_map)
        return features if size == features.shape[2:] else F.adaptive_avg_pool2d(features, size)

    def trace(self, features: Tensor) -> NetworkTrace:
        """Classify a feature map by the readable reference, and keep what every layer did.

        The layers are named ``conv_caps1``, ``conv_caps2`` and so on, and ``class_caps``.

        Example:
            >>> trace = CapsHead(8, 3, caps=(4, 4)).eval().trace(torch.randn(1, 8, 5, 5))
            >>> {name: tuple(layer.votes.shape) for name, layer in trace.layers.items()}
            {'conv_caps1': (1, 9, 36, 4, 16), 'class_caps': (1, 36, 3, 16)}
        """
        caps, layers = self.primary_caps(self.pool(features)), dict[str, LayerTrace]()
        for k, layer in enumerate(self.conv_caps, 1):
            layers[f"conv_caps{k}"] = layer.trace(caps)  # type: ignore[operator]
            caps = layers[f"conv_caps{k}"].parents
        layers["class_caps"] = self.class_caps.trace(caps)
        return NetworkTrace(features, layers, layers["class_caps"].parents)


def map_size(height: int, width: int, largest: int) -> tuple[int, int]:
    """Return the rows and columns of a map whose longer side is brought down to ``largest``.

    >>> map_size(56, 40, 14), map_size(7, 7, 14), map_size(300, 2, 14)
    ((14, 10), (7, 7), (14, 1))
    """
    longer = max(height, width)
    if longer <= largest:
        return height, width
    rows, columns = (max(math.floor(length * largest / longer + 0.5), 1) for length in (height, width))
    return rows, columns


class BackboneCapsNet(nn.Module):
    """A capsule network on any backbone: a module that gives a feature map, or a name of timm's, and a `CapsHead`.

    Args:
        backbone: a module that takes images and gives a feature map, several maps as a list, tuple, NamedTuple or dict;
            or the name of a network of timm's, such as ``"resnet18.a1_in1k"`` (``pip install 'vbcaps[timm]'``).
        num_classes: how many classes there are.
        caps: types of capsule in each layer of the head, see `CapsHead`.
        in_channels: channels of the images.
        feature: which of several maps to take: its place in a list or tuple, or its name in a dict or NamedTuple. By
            default the last of a list or tuple.
        layout: ``"nchw"``, or ``"nhwc"`` for a backbone that gives channels last. timm's networks say it themselves.
        channels: channels of the feature map; by default a run without storage (on the "meta" device) finds them.
        image_size: side of the images of this run; a number or (height, width).
        pretrained: load timm's weights, from its cache or the network.
        backbone_options: further keywords of ``timm.create_model``.
        freeze: leave the backbone as it is: no gradients, and BatchNorm in evaluation mode, see ``freeze``.
        options: of the head, see `CapsHead`.

    Shape:
        - Input: images ``n in_channels height width`` of any size that the backbone takes, prepared as it expects them.
        - Output: `Capsules` of the classes, see `CapsHead`.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 32, 7, stride=8), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2))
        >>> net = BackboneCapsNet(backbone, num_classes=10, freeze=True)
        >>> net(torch.randn(2, 3, 224, 224)).logits.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: nn.Module | str,
        num_classes: int,
        caps: Sequence[int] = (16, 16),
        *,
        in_channels: int = 3,
        feature: int | str | None = None,
        layout: str = "nchw",
        channels: int | None = None,
        image_size: int | tuple[int, int] = 224,
        pretrained: bool = False,
        backbone_options: Mapping[str, Any] | None = None,
        freeze: bool = False,
        **options: Any,
    ):
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        self.in_channels, self.num_classes, self.feature, self.layout = in_channels, num_classes, feature, layout
        if isinstance(backbone, str):
            backbone = timm_backbone(backbone, pretrained, in_channels, backbone_options)
            self.layout = str(getattr(backbone, "output_fmt", layout)).lower().rpartition(".")[2]
            place = -1 if feature is None else feature
            channels = channels or backbone.feature_info.channels()[place]  # type: ignore[union-attr,operator]
        elif not isinstance(backbone, nn.Module):
            raise TypeError(f"backbone must be a torch module or a name of timm's, got {type(backbone).__name__}")
        elif pretrained or backbone_options:
            raise ValueError("pretrained and backbone_options are for a name of timm's, and backbone is a module")
        self.backbone = backbone
        self.head = CapsHead(channels or self.find_channels(image_size), num_classes, caps, **options)
        self.frozen = False
        if freeze:
            self.freeze()

    def forward(self, x: Tensor) -> Capsules:  # n in_channels height width
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Return the feature map that the head reads, ``n channels h w``."""
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[1] != self.in_channels:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"images must have shape (n, {self.in_channels}, height, width), got {got}")
        return self.map_of(self.backbone(x))

    def trace(self, x: Tensor) -> NetworkTrace:
        """Classify images, the capsules by the readable reference, and keep what every layer did.

        Example:
            >>> net = BackboneCapsNet(nn.Conv2d(1, 8, 3, stride=4), 3, caps=(4, 4), in_channels=1).eval()
            >>> list(net.trace(torch.randn(1, 1, 32, 32)).layers)
            ['conv_caps1', 'class_caps']
        """
        return self.head.trace(self.features(x))

    def freeze(self, frozen: bool = True) -> None:
        """Hold the backbone fixed, or with ``frozen=False`` train it from now on.

        A fixed backbone has no gradients and stays in evaluation mode, so its BatchNorm keeps its running statistics.
        """
        self.frozen = frozen
        self.backbone.requires_grad_(not frozen)
        self.backbone.train(self.training and not frozen)

    def train(self, mode: bool = True) -> "BackboneCapsNet":
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def parameter_groups(self, lr: float, backbone_lr: float | None = None) -> list[dict[str, Any]]:
        """Return groups for an optimiser: the head with ``lr``, the backbone with ``backbone_lr``, by default a tenth.

        A frozen backbone has no group.

        Example:
            >>> net = BackboneCapsNet(nn.Conv2d(3, 8, 3, stride=4), num_classes=3)
            >>> optimiser = torch.optim.AdamW(net.parameter_groups(1e-3))
            >>> [group["lr"] for group in optimiser.param_groups]
            [0.001, 0.0001]
        """
        below = [p for p in self.backbone.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [dict(params=list(self.head.parameters()), lr=lr)]
        return [*groups, dict(params=below, lr=lr / 10 if backbone_lr is None else backbone_lr)] if below else groups

    def map_of(self, out: Any) -> Tensor:
        """Return the feature map, channels first, in what the backbone gave."""
        if not isinstance(out, Tensor):
            out = self.chosen(out)
        if not isinstance(out, Tensor) or out.ndim != 4:
            got = f"a tensor {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the backbone must give a feature map (n, channels, h, w), got {got}; take its pooling and classifier "
                "off, or name the map with feature"
            )
        return out if self.layout == "nchw" else out.permute(0, 3, 1, 2)

    def chosen(self, out: Any) -> Any:
        """Return the entry ``feature`` of several maps."""
        by_name = isinstance(self.feature, str)
        if isinstance(out, Mapping):
            if by_name and self.feature in out:
                return out[self.feature]
            raise ValueError(f"feature must name a map of the backbone, one of {list(out)}, got {self.feature!r}")
        if by_name:
            if hasattr(out, str(self.feature)):
                return getattr(out, str(self.feature))
            names = list(getattr(out, "_fields", ())) or f"none in {type(out).__name__}"
            raise ValueError(f"feature must name a map of the backbone, {names}, got {self.feature!r}")
        if not isinstance(out, tuple | list):
            return out
        place = -1 if self.feature is None else int(self.feature)
        if not -len(out) <= place < len(out):
            raise ValueError(f"feature must be below {len(out)}, the number of the backbone's maps, got {place}")
        return out[place]

    def find_channels(self, image_size: int | tuple[int, int]) -> int:
        """Return the channels of the feature map, by a run of the backbone without storage."""
        height, width = image_size if isinstance(image_size, tuple | list) else (image_size, image_size)
        own = {**dict(self.backbone.named_parameters()), **dict(self.backbone.named_buffers())}
        empty = {name: x.to("meta") for name, x in own.items()}
        like = next((x.dtype for x in own.values() if x.is_floating_point()), torch.float32)
        images = torch.empty(1, self.in_channels, height, width, device="meta", dtype=like)
        try:
            with torch.no_grad(), evaluating(self.backbone):
                out = functional_call(self.backbone, empty, (images,))
        except Exception as error:
            raise ValueError(
                f"the channels of the backbone's feature map cannot be found with images {tuple(images.shape)} "
                f"({type(error).__name__}: {error}): give channels, or in_channels and image_size that it takes"
            ) from error
        return self.map_of(out).shape[1]


def timm_backbone(name: str, pretrained: bool, in_channels: int, options: Mapping[str, Any] | None) -> nn.Module:
    """Return a network of timm's that gives its feature maps."""
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"backbone={name!r} needs timm ({error}): pip install 'vbcaps[timm]'") from error
    keywords: dict[str, Any] = dict(features_only=True, pretrained=pretrained, in_chans=in_channels)
    return timm.create_model(name, **keywords | dict(options or {}))
