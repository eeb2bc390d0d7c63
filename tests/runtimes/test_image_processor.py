"""smelt's pixels are those of transformers' image processors."""

import json

import numpy as np
import pytest
from PIL import Image

from smelt.core.errors import InputError
from smelt.runtimes.images import (
    JOINT_PROCESSOR_FILE,
    PROCESSOR_FILE,
    default_processor_config,
    read_processor,
)
from tests.support.expected_errors import raises_code
from tests.support.models import images

pytestmark = pytest.mark.quick

KINDS = {
    "vit": ("ViTImageProcessor", {"size": {"height": 20, "width": 24}}),
    "vit, bicubic": ("ViTImageProcessor", {"size": {"height": 9, "width": 9}, "resample": 3}),
    "vit, cropped": ("ViTImageProcessor", {"do_center_crop": True, "crop_size": {"height": 40, "width": 12},
                                           "do_resize": False, "do_normalize": False}),
    "convnext": ("ConvNextImageProcessor", {"size": {"shortest_edge": 16}, "crop_pct": 0.875}),
    "convnext, large": ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
    "bit": ("BitImageProcessor", {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16},
                                  "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}),
    "siglip": ("SiglipImageProcessor", {"size": {"height": 20, "width": 24}}),
    "mobilenet": ("MobileNetV2ImageProcessor",
                  {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}),
    "efficientnet": ("EfficientNetImageProcessor", {"size": {"height": 16, "width": 16}, "resample": 0,
                                                    "image_std": [0.47, 0.48, 0.49]}),
    "efficientnet, offset": ("EfficientNetImageProcessor", {"size": {"height": 16, "width": 16},
        "rescale_factor": 1 / 127.5, "rescale_offset": True, "include_top": False}),
    "efficientnet, only the second division": ("EfficientNetImageProcessor",
        {"size": {"height": 16, "width": 16}, "do_normalize": False}),
}  # fmt: skip
SIZES = [(33, 20), (20, 33), (16, 16), (7, 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_transformers(kind, tmp_path):
    import transformers

    name, settings = KINDS[kind]
    reference = getattr(transformers, f"{name}Pil")(**settings)
    reference.save_pretrained(tmp_path)
    processor = read_processor(tmp_path)
    for number, size in enumerate(SIZES):
        image = images.make_image(number, size)
        expected = reference(image, return_tensors="np")["pixel_values"][0]
        pixels = processor(image)
        assert pixels.dtype == np.float32
        assert pixels.shape == expected.shape
        assert processor.shape in (None, pixels.shape[1:])
        assert np.abs(pixels - expected).max() < 1e-5


def test_settings_of_images_are_read_from_file_of_images_and_texts(tmp_path):
    settings = default_processor_config(16)
    (tmp_path / JOINT_PROCESSOR_FILE).write_text(json.dumps({"image_processor": settings}))
    assert read_processor(tmp_path).shape == (16, 16)
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(default_processor_config(8)))
    assert read_processor(tmp_path).shape == (8, 8)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_other_color_modes_are_converted_to_rgb(mode, tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(default_processor_config(16)))
    processor, image = read_processor(tmp_path), images.make_image(1, mode=mode)
    assert np.array_equal(processor(image), processor(image.convert("RGB")))


def test_photos_are_rotated_by_their_exif_orientation(tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(default_processor_config(16)))
    processor, image = read_processor(tmp_path), images.make_image(1, (20, 10))
    rotated = image.transpose(Image.Transpose.ROTATE_90)
    rotated.getexif()[0x0112] = 6
    assert np.array_equal(processor(rotated), processor(image))


UNSUPPORTED = "unsupported-preprocessing"


def test_older_config_files_are_accepted(tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(
        json.dumps({"feature_extractor_type": "ViTFeatureExtractor", "size": 12})
    )
    assert read_processor(tmp_path).shape == (12, 12)
    convnext = {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 224, "crop_pct": 0.875}
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(convnext))
    processor = read_processor(tmp_path)
    assert (processor.edge, processor.shape) == (256, (224, 224))


@pytest.mark.parametrize(("change", "code"), [
    ({"image_processor_type": "DetrImageProcessor"}, UNSUPPORTED),
    ({"size": {"longest_edge": 3}}, "wrong-value"), ({"size": {"height": 0, "width": 4}}, "wrong-value"),
    ({"image_std": [0, 1, 1]}, "wrong-value"), ({"resample": "cubic"}, "wrong-value"),
    ({"rescale_factor": -1}, "wrong-value"), ({"do_pad": True}, UNSUPPORTED),
])  # fmt: skip
def test_unsupported_options_are_refused_by_name(change, code, tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(default_processor_config(16) | change))
    with raises_code(code, InputError) as caught:
        read_processor(tmp_path)
    assert caught.value.setting == next(iter(change))


def test_missing_file_is_reported(tmp_path):
    with raises_code("missing-file", InputError) as caught:
        read_processor(tmp_path)
    assert PROCESSOR_FILE in str(caught.value)
