"""Pictures of the explorer: changes of an image, and uploads of every bad kind."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.explore.pictures import (
    CHANGES,
    MOST_BYTES,
    Refused,
    as_png,
    changed,
    from_png,
    read_changes,
    read_upload,
)
from vbcaps.uncertainty.damage import damage

REST = read_changes({})


def image(channels: int = 1, side: int = 28) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (1, channels, side, side), dtype=torch.uint8, generator=generator)


def test_nothing_changes_at_rest():
    assert torch.equal(changed(image(), REST), image())


def test_an_image_is_shifted_in_percent_of_its_side():
    x = image()
    assert torch.equal(changed(x, REST | dict(right=25.0))[..., 7:], x[..., :-7])
    assert torch.equal(changed(x, REST | dict(down=-25.0))[..., :-7, :], x[..., 7:, :])


@pytest.mark.parametrize("degrees", [30.0, 90.0, -120.0])
def test_an_image_is_turned_like_damaged_ones(degrees):
    assert torch.equal(changed(image(3), REST | dict(rotate=degrees)), damage(image(3), "rotate", degrees % 360))


def test_a_turned_image_is_shifted_along_the_sides_of_the_frame():
    turned = changed(image(), REST | dict(rotate=90.0))
    both = changed(image(), REST | dict(rotate=90.0, right=25.0))
    assert torch.equal(both[..., 7:], turned[..., :-7])


def test_an_image_is_enlarged_about_its_middle():
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    x[..., 11:17, 11:17] = 255
    large = changed(x, REST | dict(scale=2.0))
    assert int((large > 127).sum()) == pytest.approx(4 * 36, abs=8)
    assert torch.equal(large, large.flip(2))
    assert int((changed(x, REST | dict(scale=0.5)) > 127).sum()) == pytest.approx(9, abs=5)


@pytest.mark.parametrize("kind", ["blur", "noise", "occlude"])
def test_other_changes_are_those_of_damage(kind):
    assert torch.equal(changed(image(), REST | {kind: 0.5}), damage(image(), kind, 0.5))


@pytest.mark.parametrize(
    "given",
    [None, [], {"rotate": "a"}, {"rotate": True}, {"rotate": 181}, {"scale": 0}, {"noise": float("nan")}, {"turn": 1}],
)
def test_other_changes_are_refused_by_name(given):
    with pytest.raises(Refused, match=r"changes must|must be a number|there is no change"):
        read_changes(given)


def test_sliders_begin_at_rest_within_their_range():
    for change in CHANGES.values():
        assert change.least <= change.rest <= change.most


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_pixels_are_the_same_after_the_way_through_a_link(channels):
    x = image(channels)
    assert torch.equal(from_png(as_png(x[0]), 28, channels), x)


@pytest.mark.parametrize("text", [None, 5, "", "no base64!", "aGVsbG8=", as_png(image(1, 20)[0]), as_png(image(3)[0])])
def test_a_damaged_link_is_refused(text):
    with pytest.raises(Refused, match="pixels"):
        from_png(text, 28, 1)


def test_a_link_with_a_huge_picture_is_refused_before_it_is_decoded():
    with pytest.raises(Refused, match=r"28 x 28|no PNG"):
        from_png(base64.b64encode(huge_header(20000, 20000)).decode(), 28, 1)


# --- uploads ---------------------------------------------------------------------------------------------------------


def file_of(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def noise(side: int = 200) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side), dtype=np.uint8))


def grey(side: int = 40) -> Image.Image:
    return Image.fromarray((np.arange(side * side, dtype=np.int64).reshape(side, side) % 256).astype(np.uint8))


def huge_header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and holds next to none of them."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A small PNG whose compressed comment unpacks to 70 MB."""
    content = file_of(grey())
    body = b"zTXt" + b"Comment\x00\x00" + zlib.compress(bytes(70 * 2**20))
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return content[:33] + chunk + content[33:]


BAD = {
    "empty": (b"", "empty"),
    "50 MB": (bytes(50 * 2**20), "50 MB"),
    "truncated": (file_of(noise())[:-2000], "damaged, cut short"),
    "truncated JPEG": (file_of(noise(), "JPEG")[:-2000], "damaged, cut short"),
    "text": (b"this is no picture", "no picture"),
    "script": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "no picture"),
    "animated": (file_of(grey(), "GIF", save_all=True, append_images=[grey().rotate(90)]), "animated"),
    "pages": (file_of(grey(), "TIFF", save_all=True, append_images=[grey()]), "pages"),
    "1x1": (file_of(grey(1)), "1 x 1 pixels"),
    "30000x30000": (huge_header(30000, 30000), "too large|30000 x 30000"),
    "2 billion wide": (huge_header(2**31 - 1, 4), "too large|pixels"),
    "text bomb": (text_bomb(), "damaged"),
    "32 bits": (file_of(Image.fromarray(np.ones((30, 30), np.float32)), "TIFF"), "32 bits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_is_refused_in_words(name):
    content, words = BAD[name]
    with pytest.raises(Refused, match=words):
        read_upload(content, 28, 1)


def test_the_limit_on_bytes_comes_first():
    with pytest.raises(Refused) as refused:
        read_upload(bytes(MOST_BYTES + 1), 28, 1)
    assert refused.value.status == 413


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(
    "picture",
    [
        grey(),
        grey().convert("P"),
        grey().convert("CMYK"),
        grey().convert("RGBA"),
        grey().convert("1"),
        Image.fromarray(np.full((30, 50), 40000, np.uint16)),
    ],
    ids=lambda picture: picture.mode,
)
def test_usual_pictures_of_every_mode_are_read(picture, channels):
    kind = "TIFF" if picture.mode == "CMYK" else "PNG"
    found = read_upload(file_of(picture, kind), 28, channels)
    assert found.shape == (1, channels, 28, 28)
    if picture.mode == "I;16":
        assert int(found.min()) == int(found.max()) == 40000 // 257


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    assert int(read_upload(file_of(clear), 28, 1).min()) == 255


def test_two_cameras_see_the_same_picture():
    found = read_upload(file_of(grey()), 28, 2)
    assert torch.equal(found[:, 0], found[:, 1])
