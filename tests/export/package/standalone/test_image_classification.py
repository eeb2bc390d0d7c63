"""What infer.py makes of an image is what smelt makes of it."""

import io
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smelt.export.package.standalone import image_files
from smelt.export.package.standalone.image_files import preprocess_image
from smelt.runtimes.images import load_pixels as pixels_in_smelt
from smelt.runtimes.images import parse_processor
from tests.support.models import images

SIDES = {"height": 24, "width": 20}
PROCESSORS = {
    "both sides": {"image_processor_type": "ViTImageProcessor", "size": SIDES},
    "shorter side, crop": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16}},
    "a crop that is larger": {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 12},
        "crop_size": {"height": 31, "width": 18},
    },
    "nothing": {
        "image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": False,
        "do_normalize": False,
    },
}  # fmt: skip


def saved(image, kind, **more):
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    return stream.getvalue()


def turned(way):
    exif = Image.Exif()
    exif[0x0112] = way
    return saved(images.make_image(3, size=(21, 34)), "JPEG", exif=exif)


GRAY = Image.fromarray((np.arange(600, dtype=np.uint16) * 100).reshape(20, 30))
FILES = {
    "wide": saved(images.make_image(0, size=(50, 20)), "PNG"),
    "gray": saved(images.make_image(1, size=(20, 33), mode="L"), "BMP"),
    "16 bits": saved(GRAY, "PNG"),
    "transparent": saved(images.make_image(2, size=(22, 30), mode="RGBA"), "WEBP"),
    "palette": saved(images.make_image(4, size=(30, 30)).convert("P"), "GIF"),
    **{f"turned {way}": turned(way) for way in range(10)},
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("file", FILES)
def test_pixels_equal_smelt_preprocessing(kind, file, tmp_path):
    processor = parse_processor(PROCESSORS[kind], Path("preprocessor_config.json"))
    (tmp_path / "a").write_bytes(FILES[file])
    expected = pixels_in_smelt(str(tmp_path / "a"), processor, "row 1")
    for source in (FILES[file], tmp_path / "a"):
        pixels = preprocess_image(source, asdict(processor))
        assert pixels.dtype == np.float32
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("data", [
    b"", b"no image", FILES["wide"][:60], saved(Image.new("F", (3, 3)), "TIFF"),
    saved(images.make_image(0), "PCX"), b"%!PS-Adobe-3.0 EPSF-3.0\n",
])  # fmt: skip
def test_invalid_image_raises_value_error(data, tmp_path):
    processor = asdict(parse_processor(PROCESSORS["both sides"], Path("p.json")))
    (tmp_path / "a").write_bytes(data)
    for source in (data, tmp_path / "a", tmp_path / "none"):
        with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
            preprocess_image(source, processor)


@pytest.mark.parametrize("limit", ["MAX_FILE_BYTES", "MAX_PIXELS"])
def test_oversized_images_are_rejected_before_decoding(limit, monkeypatch):
    monkeypatch.setattr(image_files, limit, 80)
    monkeypatch.setattr(image_files, "upright_rgb", lambda image: pytest.fail("it is decoded"))
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        preprocess_image(FILES["wide"], asdict(parse_processor(PROCESSORS["both sides"], Path("p.json"))))
