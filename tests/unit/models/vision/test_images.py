"""Images at a location, as a model sees them."""

import transformers.image_utils
from PIL import Image

from cosmos_core.models.vision.images import load_image

ORIENTATION = 0x0112


def test_a_photograph_is_upright_as_transformers_reads_it(subtests, tmp_path):
    for number, orientation in enumerate([None, 1, 3, 6]):
        with subtests.test(orientation=orientation):
            folder = tmp_path / str(number)
            folder.mkdir()
            photograph = Image.linear_gradient("L").resize((12, 8))
            exif = Image.Exif()
            if orientation is not None:
                exif[ORIENTATION] = orientation
            path = folder / "photograph.png"
            photograph.save(path, exif=exif)
            found = load_image(str(path))
            assert found.size == ((8, 12) if orientation == 6 else (12, 8))
            assert found.tobytes() == transformers.image_utils.load_image(str(path)).tobytes()
