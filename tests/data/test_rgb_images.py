"""Images are turned as their EXIF says, grays of 16 bits keep their shades, other depths are refused."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from smelt.core.errors import InputError
from smelt.data.images import upright_rgb
from tests.support.expected_errors import raises_code
from tests.support.models import images

SHADES = np.arange(0, 65536, 257 * 17, dtype=np.uint16).reshape(4, 4)  # white is 65535


def reopened(image, kind, **settings):
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return Image.open(stream)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 10))
def test_exif_orientation_equals_pillow(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = images.make_image(3, (16, 8))
    upright = upright_rgb(reopened(image, kind, exif=exif))
    expected = ImageOps.exif_transpose(reopened(image, kind, exif=exif))
    assert np.array_equal(upright, expected)
    assert upright.size == ((8, 16) if orientation in range(5, 9) else (16, 8))


def test_damaged_exif_is_ignored():
    image = images.make_image(3)
    assert np.array_equal(upright_rgb(reopened(image, "PNG", exif=b"Exif\0\0no exif")), image)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grayscale_16_bit_is_scaled_to_8_bit(kind):
    pixels = np.asarray(upright_rgb(reopened(Image.fromarray(SHADES), kind)))
    assert np.array_equal(pixels, np.repeat((SHADES // 256)[..., None], 3, axis=-1))
    assert pixels.max() == 255


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_images_with_32_bits_are_rejected_with_row(kind, tmp_path):
    path = images.write_rows(tmp_path / "train.jsonl", 2)
    Image.fromarray(SHADES.astype(kind)).save(tmp_path / "train-images" / "1.png.tif")
    path.write_text(path.read_text().replace("1.png", "1.png.tif"))
    with raises_code("unsupported-image-mode", InputError) as excinfo:
        images.read_rows(path)
    assert all(part in str(excinfo.value) for part in ("train.jsonl:2:", "1.png.tif"))
