"""Image files are read within limits; whatever is wrong with one becomes one line that says what to do."""

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from foredraft import ForedraftError
from foredraft.image_files import FORMATS, ImageLimits, decode_data_url, import_pillow, read_image
from tests.support.tiny_vision import make_image

LIMITS = ImageLimits()


def encode_file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    read = read_image(encode_file(make_image(), kind), LIMITS)
    assert (read.mode, read.size) == ("RGB", (40, 30))


def test_paths_bytes_and_images_are_the_same(tmp_path: Path) -> None:
    image = make_image()
    (tmp_path / "a.png").write_bytes(encode_file(image))
    sources = [image, encode_file(image), tmp_path / "a.png", str(tmp_path / "a.png"), image.convert("RGBA")]
    assert len({read_image(source, LIMITS).tobytes() for source in sources}) == 1


def test_an_image_is_turned_as_its_metadata_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    assert read_image(encode_file(make_image(), "JPEG", exif=exif), LIMITS).size == (30, 40)


def test_an_image_of_pillow_is_read_as_its_file_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode_file(make_image(), "JPEG", exif=exif)
    assert read_image(Image.open(io.BytesIO(data)), LIMITS).tobytes() == read_image(data, LIMITS).tobytes()
    with pytest.raises(ForedraftError, match="cannot be read"):
        read_image(Image.open(io.BytesIO(data[:-200])), LIMITS)


def test_sixteen_bits_keep_their_brightness() -> None:
    """Fault: Pillow makes every value above 255 white."""
    values = b"".join(value.to_bytes(2, "little") for value in (0, 256, 32768, 65535))
    read = read_image(encode_file(Image.frombytes("I;16", (4, 1), values)), LIMITS)
    assert read.tobytes() == bytes([0, 0, 0, 1, 1, 1, 128, 128, 128, 255, 255, 255])


def test_a_palette_with_transparency_has_its_colours() -> None:
    image = make_image().convert("P")
    data = encode_file(image, transparency=bytes(range(256)))
    assert read_image(data, LIMITS).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_of_colours_is_read(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert read_image(encode_file(make_image().convert(mode), kind), LIMITS).mode == "RGB"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "none of the formats"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "none of the formats|cannot be read"),
        (encode_file(make_image())[:-40], "cannot be read"),
        (encode_file(make_image(), "TIFF"), "none of the formats"),
        (Path("/missing/file.png"), "/missing/file.png cannot be read"),
        (3, "an image is a path"),
        ("http://example.com/cat.png", "not fetched"),
        (bytes(101), "101 bytes and at most 100"),
        (encode_file(Image.new("1", (30, 20))), "30 x 20 pixels and at most 500"),
        (Image.new("1", (30, 20)), "30 x 20 pixels and at most 500"),
    ],
)
def test_other_images_are_refused(source: object, message: str) -> None:
    small = 0 < len(source) < 120 if isinstance(source, bytes) else isinstance(source, Image.Image)
    limits = ImageLimits(max_bytes=100, max_pixels=500) if small else LIMITS
    with pytest.raises(ForedraftError, match=message) as caught:
        read_image(source, limits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [(2, 401), (401, 2)])
def test_a_thin_image_is_refused(size: tuple[int, int]) -> None:
    """Fault: a processor that scales the short side up needed gigabytes for a file of some hundred bytes."""
    with pytest.raises(ForedraftError, match="200 times the other; crop it"):
        read_image(encode_file(Image.new("1", size)), LIMITS)
    assert read_image(encode_file(Image.new("1", (2, 400))), LIMITS).size == (2, 400)


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(bytes(1 << 20))
    with pytest.raises(ForedraftError, match="at most 100"):
        read_image(tmp_path / "a.png", ImageLimits(max_bytes=100))


@pytest.mark.parametrize(
    "url", ["http://x/a.png", "data:text/plain;base64,AA==", "data:image/png,AA", "data:image/png"]
)
def test_only_data_urls_of_images_are_decoded(url: str) -> None:
    assert decode_data_url("data:image/png;base64,AAEC") == bytes([0, 1, 2])
    with pytest.raises(ForedraftError, match="not fetched"):
        decode_data_url(url)


@pytest.mark.parametrize("url", ["data:image/png;base64,AA\nEC\r\n", "DATA:image/PNG;name=a.png;BASE64,AAEC"])
def test_data_urls_may_have_line_breaks_and_parameters(url: str) -> None:
    assert decode_data_url(url) == bytes([0, 1, 2])


def test_a_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ForedraftError, match=r"foredraft\[images\]"):
        import_pillow()
